"""The requests that run: what is known of each from its prefill until it finishes, is aborted or retracted."""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_ext.core import LONG_MEMORY, Acceptance, RequestState
from sglang_ext.managers import meta_info
from sglang_ext.managers.eligibility import fallback_reason
from sglang_ext.managers.served_methods import ServedMethods

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_ext.arguments import KVServerArgs

# SGLang's seed, under --enable-deterministic-inference, for requests that bring none.
STOCK_DEFAULT_SEED = 42


class RequestStates:
    """Draft states of the running requests, by their rows in the token table.

    Attributes:
        args: the server's.
        methods: that requests may ask for.
        typical: acceptance of all requests; a new one is expected to be like them.
    """

    def __init__(self, args: "KVServerArgs", methods: ServedMethods):
        self.args = args
        self.methods = methods
        self.typical = Acceptance(memory=LONG_MEMORY)
        self._states: dict[int, RequestState] = {}
        self._admitted = 0

    def of(self, batch: "ScheduleBatch") -> list[RequestState]:
        """Those of a batch of admitted requests."""
        return [self._states[req.req_pool_idx] for req in batch.reqs]

    def admit(self, req: "Req", matched: int) -> RequestState:
        """That of a request whose prompt (or a chunk of it) is to be computed, after ``matched`` tokens."""
        row = req.req_pool_idx
        old = self._states.get(row)
        if old is not None:
            # An earlier chunk of the same prompt.
            return old
        self._admitted += 1
        state = self._states[row] = RequestState(
            rid=req.rid,
            row=row,
            seed=noise_seed(req, self.args, self._admitted),
            matched=matched,
            prompt=req.origin_input_ids,
            method=self.methods.place(req),
            fallback=fallback_reason(req),
            acceptance=Acceptance.expecting(self.typical.probability),
        )
        meta_info.resume(req, state)
        return state

    def asked_by(self, row: int) -> int:
        """Place among the methods of what the request in ``row`` asked for."""
        return self._states[row].method

    def prompt_of(self, row: int) -> Sequence[int]:
        """Token ids of the prompt of the request in ``row``."""
        return self._states[row].prompt

    def get(self, row: int) -> RequestState | None:
        """That of the request in ``row``; None for a row that is nobody's, or nobody's any more."""
        return self._states.get(row)

    def forget(self, row: int) -> None:
        """The request in ``row`` is gone; no-op where there is none."""
        self._states.pop(row, None)

    def clear(self) -> None:
        """All requests are gone."""
        self._states.clear()


def noise_seed(req: "Req", args: "KVServerArgs", admitted: int) -> int:
    """The request's sampling seed where SGLang honours it, in deterministic mode; else one of its own.

    What is its own is equal on all ranks and different each time: samples of one request (``n``) have the same ``sampling_seed``.
    """
    if args.enable_deterministic_inference:
        asked = req.sampling_params.sampling_seed
        return STOCK_DEFAULT_SEED if asked is None else asked
    name = f"{args.random_seed}/{admitted}/{req.rid}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1
