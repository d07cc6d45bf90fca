"""Two servers' ends, connected, that are closed after each test."""

from types import SimpleNamespace

import pytest
from link_helpers import QUICK
from sglang.srt.disaggregation.common import conn
from transfer_helpers import ADDRESS, ROW, DecodeManager, PrefillManager, WatchedPool, make_pool

from sglang_ext.managers.kv_transfer.progressive.receiver import ProgressiveReceiver
from sglang_ext.managers.kv_transfer.progressive.sender import ProgressiveSender


class Servers:
    """A prefill and a decode server of one rank each, of which only the transfer is there."""

    def __init__(self, folder, reference="exact", prefill_reference=None, gbps=None, dtype=None, pools=None, **of_peers):
        kinds = {} if dtype is None else {"dtype": dtype}
        source, target = pools or (make_pool(seed=seed, kind=WatchedPool, **kinds) for seed in (1, 2))
        self.prefill = PrefillManager(prefill_reference or reference, source, QUICK, gbps, **of_peers)
        self.decode = DecodeManager(reference, target, QUICK, f"ipc://{folder}/links/rank0")
        self.prefill.decode, self.decode.prefill = self.decode, self.prefill
        # Told of rooms whose requests begin on their anchors, where they do.
        self.begin = None
        # Of the prompt's newest queries: what reads them at the prefill side, and where row ROW of the decode side keeps them.
        self.read = self.traveling = None
        # Of prompts that travel as codes: how the prefill side packs them, and where they go at the decode side.
        self.packs = self.coded = None

    def sender(self, room, prompt):
        made = ProgressiveSender(self.prefill, ADDRESS, room, [0], 0)
        made.set_prompt(prompt, None, self.packs, self.read)
        return made

    def receiver(self, room, prompt, refused=None):
        made = ProgressiveReceiver(self.decode, ADDRESS, room)
        made.set_prompt(prompt, refused)
        if self.traveling is not None:
            made.expect_queries(self.traveling, lambda: ROW)
        if self.coded is not None:
            coded = self.coded
            made.expect_quantized(lambda: coded)
        if self.begin is not None:
            made.enable_early_decoding(self.begin, lambda req: None)
        made.init(0)
        return made

    def close(self):
        self.prefill.close()
        self.decode.close()


@pytest.fixture
def servers(tmp_path, monkeypatch):
    """Makes them."""
    alone = SimpleNamespace(dp_size=1, enable_dsa_cache_layer_split=False)
    monkeypatch.setattr(conn, "get_parallel", lambda: alone)
    made = []

    def make(*arguments, **named):
        made.append(Servers(tmp_path, *arguments, **named))
        return made[-1]

    yield make
    for each in made:
        each.close()
