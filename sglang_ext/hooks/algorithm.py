"""The speculative algorithm ``KV_VERIFIED``: SGLang's extension point for draft and verification."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.managers.overlap_utils import FutureMap, RelayPayload
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_ext.command_line import exit_on_refusal
from sglang_ext.hooks import activation as hooking, table

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.server_args import ServerArgs

    from sglang_ext.managers.spec_decode.round_result import KVDraftInput


class KVVerifiedAlgorithm(CustomSpecAlgo):
    """Implements the methods that SGLang's base class for registered algorithms lacks."""

    def carries_draft_hidden_states(self) -> bool:
        """False: drafts come from the target model itself."""
        return False

    def need_topk(self) -> bool:
        """False: drafts form a chain, not a tree."""
        return False

    def has_draft_kv(self) -> bool:
        """False: drafts write slots that the verification overwrites."""
        return False

    def create_future_map(self, device, req_to_token_pool, needs_cpu_seq_lens: bool = True, needs_confidence_relay: bool = False) -> FutureMap:
        """Create SGLang's own relay of values between iterations."""
        return FutureMap(device, self, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay)

    def build_disagg_draft_input(
        self, batch: "ScheduleBatch", server_args: "ServerArgs", last_tokens_tensor: torch.Tensor, future_map: FutureMap
    ) -> "KVDraftInput":
        """Create the input of the first round of requests that another server prefilled: their first tokens, int64 [requests]."""
        from sglang_ext.managers.spec_decode.round_result import KVDraftInput

        for req in batch.reqs:
            if req.grammar is not None:
                # A retracted request comes here again, with a grammar that has seen this token. SGLang recognizes it by this field,
                # which llguidance's grammar does not set.
                req.grammar.current_token = req.output_ids[-1]
        between = KVDraftInput(last_tokens_tensor)
        if batch.enable_overlap:
            between.future_indices = batch.req_pool_indices
            future_map.publish(between.future_indices, batch.seq_lens)
            future_map.stash(between.future_indices, RelayPayload.from_draft_input(between))
        return between


@exit_on_refusal
def worker_class(server_args: "ServerArgs") -> type:
    """Apply the worker's hooks in this scheduler process, and return the worker class."""
    from sglang_ext.managers.worker import KVWorker

    mode = server_args.kv_mode
    hooking.check_hooks(mode, table.SCHEDULER_HOOKS + table.LOSSY_HOOKS + table.PLAIN_CPU_HOOKS + table.PRIVATE_NAMES)
    hooking.activate(table.scheduler_hooks(mode))
    return KVWorker


def get_draft_kv_pool(original: Callable, *, draft_worker, spec_algorithm, server_args) -> object | None:
    """Hook around ``get_draft_kv_pool``: drafts use the target's slots, so there is no draft pool."""
    if isinstance(spec_algorithm, KVVerifiedAlgorithm):
        return None
    return original(draft_worker=draft_worker, spec_algorithm=spec_algorithm, server_args=server_args)
