"""A store that is late, for one rank or for all, costs requests little time."""

import threading
import time

from test_stored_prefixes import OTHER, PROMPT, worlds  # noqa: F401

from sglang_ext.mem_cache.prefix_cache import stored_prefixes


def test_a_lookup_that_hangs_delays_one_request(worlds, monkeypatch):  # noqa: F811
    first, second = worlds(), worlds()
    first.serve(PROMPT)
    first.written()
    monkeypatch.setattr(stored_prefixes, "LOOKUP_SECONDS", 0.05)
    gate, count_run = threading.Event(), second.backend.count_run
    second.backend.count_run = lambda names: gate.wait(10) and count_run(names)
    assert second.serve(OTHER) == 0
    second.ask(PROMPT)
    assert second.cache.check_prefetch_progress("a request"), "the store is not asked again"
    gate.set()
    second.stored._late.result(10)
    assert second.serve(PROMPT) == 40
