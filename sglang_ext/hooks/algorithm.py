"""The speculative algorithm ``KV_VERIFIED``: SGLang's seam for draft and verify."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.overlap_utils import RelayPayload
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_ext.command_line import exit_on_refusal
from sglang_ext.layers.forward import KVDraftInput

if TYPE_CHECKING:
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.server_args import ServerArgs


class KVVerifiedAlgorithm(CustomSpecAlgo):
    """Fills the gaps of SGLang's base class for registered algorithms."""

    def carries_draft_hidden_states(self) -> bool:
        """False: drafts come from the target model itself."""
        return False

    def need_topk(self) -> bool:
        """False: a chain of drafts, no tree."""
        return False

    def has_draft_kv(self) -> bool:
        """False: drafts write the slots that the verification overwrites."""
        return False

    def create_future_map(
        self, device, req_to_token_pool, needs_cpu_seq_lens: bool = True, needs_confidence_relay: bool = False
    ) -> "FutureMap":
        """SGLang's own relay of values between iterations."""
        from sglang.srt.managers.overlap_utils import FutureMap

        return FutureMap(
            device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )

    def build_disagg_draft_input(
        self, batch: "ScheduleBatch", server_args: "ServerArgs", last_tokens_tensor: torch.Tensor, future_map: "FutureMap"
    ) -> KVDraftInput:
        """What a round begins with whose requests were prefilled by another server: their first tokens, int64 [requests].

        The worker sees such requests for the first time in that round, and admits them there (request_states.py).
        """
        for req in batch.reqs:
            if req.grammar is not None:
                # A retracted request comes here again, with a grammar that has seen this token. SGLang tells by this; llguidance's
                # does not set it.
                req.grammar.current_token = req.output_ids[-1]
        between = KVDraftInput(last_tokens_tensor)
        if batch.enable_overlap:
            between.future_indices = batch.req_pool_indices
            future_map.publish(between.future_indices, batch.seq_lens)
            future_map.stash(between.future_indices, RelayPayload.from_draft_input(between))
        return between


@exit_on_refusal
def worker_class(server_args: "ServerArgs") -> type:
    """The worker class, with the hooks it needs applied in this scheduler process."""
    from sglang_ext.hooks import activation as hooking
    from sglang_ext.managers.worker import KVWorker

    hooking.check(server_args.kv_mode, ("scheduler",))
    hooking.activate_scheduler()
    return KVWorker


def get_draft_kv_pool(original: Callable, *, draft_worker, spec_algorithm, server_args) -> object | None:
    """Hook around ``get_draft_kv_pool``: drafts write the target's own slots, there is no other pool."""
    if isinstance(spec_algorithm, KVVerifiedAlgorithm):
        return None
    return original(
        draft_worker=draft_worker, spec_algorithm=spec_algorithm, server_args=server_args
    )
