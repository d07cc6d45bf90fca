"""What SGLang's sampler reads of a batch, repeated for each row of logits: a request has several where drafts are verified."""

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_ext.core import RequestState
from sglang_ext.device import to_device
from sglang_ext.managers.spec_decode.copy_policy import CURABLE
from sglang_ext.managers.spec_decode.grammar import GrammarAfter, Walk

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


@dataclass(frozen=True)
class Row:
    """One row of logits to sample from.

    Attributes:
        request: index of its request in the batch.
        seed: seed of the shared noise, None for SGLang's own choice (requests with full KV).
        grammar: masks the row; None where nothing does: drafts are made without.
    """

    request: int
    seed: int | None
    grammar: GrammarAfter | None = None

    @classmethod
    def of(cls, request: int, state: RequestState, grammar: GrammarAfter | None = None) -> "Row":
        """Of a request with this draft state; those never drafted take SGLang's own noise."""
        return cls(request, state.seed if state.fallback in CURABLE else None, grammar)

    @classmethod
    def answer(cls, request: int, state: RequestState, req: "Req") -> "Row":
        """The row after a request's output, without drafts."""
        return cls.of(request, state, Walk(req.grammar).row(0) if req.grammar else None)


def route(req: "Req") -> str:
    """Which way through SGLang's sampler a request takes when it is alone."""
    params = req.sampling_params
    if params.top_k <= 1:
        return "greedy"
    if params.top_p == 1.0 and params.top_k == TOP_K_ALL and params.min_p <= 0:
        return "plain"
    return "sorted"


def sampling_batch(
    batch: "ScheduleBatch", rows: list[Row], device: torch.device, logprobs: bool
) -> SimpleNamespace:
    """What ``ModelRunner.sample`` reads of a forward batch, but for the positions."""
    index = [row.request for row in rows]
    return SimpleNamespace(
        sampling_info=select_rows(batch, rows, device),
        return_logprob=logprobs,
        top_logprobs_nums=[batch.top_logprobs_nums[i] for i in index] if logprobs else [0] * len(rows),
        token_ids_logprobs=[batch.token_ids_logprobs[i] for i in index] if logprobs else [None] * len(rows),
        positions=None,
        forward_mode=ForwardMode.DECODE,
        batch_size=len(rows),
        ngram_embedding_info=None,
    )


def select_rows(batch: "ScheduleBatch", rows: list[Row], device) -> "SamplingBatchInfo":
    """The batch's sampling parameters, repeated for each row.

    The rows of one call take one route, and have all a seed or none.
    """
    reqs = [batch.reqs[row.request] for row in rows]
    kind = route(reqs[0])
    grammars = [row.grammar for row in rows]
    info = pick_requests(batch.sampling_info, [row.request for row in rows], device)
    return dataclasses.replace(
        info,
        is_all_greedy=kind == "greedy",
        is_any_greedy=kind == "greedy",
        need_top_p_sampling=any(req.sampling_params.top_p != 1.0 for req in reqs),
        need_top_k_sampling=any(req.sampling_params.top_k != TOP_K_ALL for req in reqs),
        need_min_p_sampling=any(req.sampling_params.min_p > 0 for req in reqs),
        grammars=grammars if any(grammars) else None,
        return_sampling_masks=None,
        sampling_seed=info.sampling_seed if rows[0].seed is None else to_device([row.seed for row in rows], device),
    )


def pick_requests(info: "SamplingBatchInfo", requests: list[int], device: torch.device) -> "SamplingBatchInfo":
    """What is sampled by, of the requests at these places of the batch; a request may come several times.

    Grammars, and what says of all requests how they are sampled, stay those of the batch.
    """
    index = to_device(requests, device)
    processors = {k: (p, mask[index]) for k, (p, mask) in (info.custom_logit_processor or {}).items()}
    # As in SGLang, a processor is not called for no row; some cannot bear it.
    processors = {k: (p, mask) for k, (p, mask) in processors.items() if mask.any()}
    return dataclasses.replace(
        info,
        temperatures=info.temperatures[index],
        top_ps=info.top_ps[index],
        top_ks=info.top_ks[index],
        min_ps=info.min_ps[index],
        acc_additive_penalties=_pick(info.acc_additive_penalties, index),
        acc_scaling_penalties=_pick(info.acc_scaling_penalties, index),
        logit_bias=_pick(info.logit_bias, index),
        has_custom_logit_processor=bool(processors),
        custom_logit_processor=processors or None,
        custom_params=[info.custom_params[i] for i in requests] if info.custom_params else None,
        sampling_seed=_pick(info.sampling_seed, index),
    )


def _pick(values: torch.Tensor | None, index: torch.Tensor) -> torch.Tensor | None:
    return None if values is None else values[index]
