"""Samples one token from each row of logits, with SGLang's own sampler.

Draft and verification use the same noise: SGLang's seeded sampler at the same position. A draft token is accepted if it equals the token
that the verification samples. So the output has the distribution of the full KV, and with a seed the tokens of stock decoding.

SGLang samples a whole batch by one route, and the routes consume noise differently. Here rows are grouped by the route of their own request,
so that the output of a request does not depend on the other requests.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from sglang.srt.layers import sampler
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL

from sglang_ext.core import RETRYABLE, RequestState
from sglang_ext.device import to_device
from sglang_ext.managers.spec_decode.grammar import MAX_WALKED_DRAFTS, DraftGrammar, GrammarWalk
from sglang_ext.managers.spec_decode.planner import RoundPlan
from sglang_ext.managers.spec_decode.request_states import UnprocessedTokens


@dataclass(frozen=True)
class LogitRow:
    """One row of logits to sample from. ``seed``: of the noise that draft and verification share; None for SGLang's own choice."""

    request: int
    seed: int | None
    grammar: DraftGrammar | None = None

    @classmethod
    def from_state(cls, request: int, state: RequestState, walk: GrammarWalk | None = None, index: int = 0) -> "LogitRow":
        """The row after ``index`` drafts of a request. Requests that are never drafted use SGLang's own noise."""
        return cls(request, state.seed if state.fallback in RETRYABLE else None, None if walk is None else walk.row(index))


def grammar_walks(
    unprocessed: UnprocessedTokens, batch: ScheduleBatch, plan: RoundPlan, requests: list[int], drafts: torch.Tensor | None = None
) -> dict[int, GrammarWalk]:
    """The grammars of ``requests`` that have one, to walk along ``drafts``, int64 [requests, drafts]. Waits for these tokens."""
    rows = [k for k, i in enumerate(requests) if batch.reqs[i].grammar is not None]
    if not rows:
        return {}
    known = [[]] * len(rows) if drafts is None else drafts[to_device(rows, drafts.device), :MAX_WALKED_DRAFTS].tolist()
    walks = {}
    for k, tokens in zip(rows, known):
        i = requests[k]
        req = batch.reqs[i]
        walks[i] = GrammarWalk(req.grammar, tokens[: plan.num_draft_tokens(i)], unprocessed.tokens_of(req, plan.lengths[i]))
    return walks


def sampling_route(req: Req) -> str:
    """The route through SGLang's sampler that a request takes if it is alone."""
    params = req.sampling_params
    if params.top_k <= 1:
        return "greedy"
    if params.top_p == 1.0 and params.top_k == TOP_K_ALL and params.min_p <= 0:
        return "plain"
    return "sorted"


def sampling_batch(batch: ScheduleBatch, rows: list[LogitRow], device: torch.device, logprobs: bool) -> SimpleNamespace:
    """What ``ModelRunner.sample`` reads of a forward batch, except positions. All ``rows`` take one route; all or none have a seed."""
    index, grammars = [row.request for row in rows], [row.grammar for row in rows]
    params, is_greedy = [batch.reqs[i].sampling_params for i in index], sampling_route(batch.reqs[index[0]]) == "greedy"
    info = pick_requests(batch.sampling_info, index, device)
    info = dataclasses.replace(
        info,
        is_all_greedy=is_greedy,
        is_any_greedy=is_greedy,
        need_top_p_sampling=any(each.top_p != 1.0 for each in params),
        need_top_k_sampling=any(each.top_k != TOP_K_ALL for each in params),
        need_min_p_sampling=any(each.min_p > 0 for each in params),
        grammars=grammars if any(grammars) else None,
        return_sampling_masks=None,
        sampling_seed=info.sampling_seed if rows[0].seed is None else to_device([row.seed for row in rows], device),
    )
    return SimpleNamespace(
        sampling_info=info,
        return_logprob=logprobs,
        top_logprobs_nums=[batch.top_logprobs_nums[i] for i in index] if logprobs else [0] * len(rows),
        token_ids_logprobs=[batch.token_ids_logprobs[i] for i in index] if logprobs else [None] * len(rows),
        positions=None,
        forward_mode=ForwardMode.DECODE,
        batch_size=len(rows),
        ngram_embedding_info=None,
    )


def pick_requests(info: SamplingBatchInfo, requests: list[int], device: torch.device) -> SamplingBatchInfo:
    """The sampling parameters of the requests at these positions in the batch. Fields about all requests stay those of the batch."""
    index = to_device(requests, device)

    def pick(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[index]

    processors = {k: (p, mask[index]) for k, (p, mask) in (info.custom_logit_processor or {}).items()}
    # As in SGLang, a processor is not called without rows; some processors fail then.
    processors = {k: (p, mask) for k, (p, mask) in processors.items() if mask.any()}
    return dataclasses.replace(
        info,
        temperatures=info.temperatures[index],
        top_ps=info.top_ps[index],
        top_ks=info.top_ks[index],
        min_ps=info.min_ps[index],
        # Penalties are applied before sampling (penalties.py).
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        logit_bias=pick(info.logit_bias),
        has_custom_logit_processor=bool(processors),
        custom_logit_processor=processors or None,
        custom_params=[info.custom_params[i] for i in requests] if info.custom_params else None,
        sampling_seed=pick(info.sampling_seed),
    )


@dataclass
class SampledTokens:
    """Sampled tokens, int64 [rows], and their log-probabilities, float [rows]; None if not requested.

    For each row, ``top_logprobs`` has (values, token ids) of the most likely tokens, ``requested_logprobs`` of the requested token ids.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor | None = None
    top_logprobs: list[tuple] = field(default_factory=list)
    requested_logprobs: list[tuple] = field(default_factory=list)

    def fill_logprobs(self, output: LogitsProcessorOutput, stride: int | None = None) -> None:
        """Write the log-probabilities to ``output`` as SGLang expects them: [requests, stride], or [rows] in a prefill (``stride`` None)."""
        output.next_token_logprobs = self.logprobs if stride is None else self.logprobs.view(-1, stride)
        output.next_token_top_logprobs_val = [torch.as_tensor(values) for values, _ in self.top_logprobs]
        output.next_token_top_logprobs_idx = [torch.as_tensor(ids) for _, ids in self.top_logprobs]
        output.next_token_token_ids_logprobs_val = [torch.as_tensor(values) for values, _ in self.requested_logprobs]
        output.next_token_token_ids_logprobs_idx = [list(ids) for _, ids in self.requested_logprobs]


@dataclass(frozen=True)
class SamplingGroup:
    """Rows that take the same route. ``places``: the same, int64 on the device; None if the group has all rows, in order."""

    rows: list[int]
    places: torch.Tensor | None
    batch: SimpleNamespace


@dataclass(frozen=True)
class RowSampler:
    """Samples from rows of logits, any number of times. A draw does not wait for the device, unless log-probabilities are requested."""

    model_runner: ModelRunner
    groups: tuple[SamplingGroup, ...]
    logprobs: bool

    @classmethod
    def from_rows(cls, model_runner: ModelRunner, batch: ScheduleBatch, rows: list[LogitRow], logprobs: bool) -> "RowSampler":
        """Group ``rows`` by the route of their request. ``logprobs``: whether to compute the log-probabilities that requests ask for."""
        routes: dict[tuple, list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            routes[(sampling_route(batch.reqs[row.request]), row.seed is None)].append(index)
        device = batch.seq_lens.device
        groups = []
        for indices in routes.values():
            picked = [rows[i] for i in indices]
            places = None if len(routes) == 1 else to_device(indices, device)
            groups.append(SamplingGroup(indices, places, sampling_batch(batch, picked, device, logprobs)))
        return cls(model_runner, tuple(groups), logprobs)

    def draw(self, logits: torch.Tensor, positions: torch.Tensor) -> SampledTokens:
        """Sample from ``logits``, float [rows, vocabulary], and overwrite them. ``positions``, int64 [rows], of the inputs select the noise."""
        if len(self.groups) == 1 and not self.logprobs:
            return SampledTokens(self._draw(self.groups[0], logits, positions)[0])
        count, empty = len(positions), (torch.empty(0), [])
        out = SampledTokens(
            tokens=torch.empty(count, dtype=torch.int64, device=logits.device),
            logprobs=torch.empty(count, device=logits.device) if self.logprobs else None,
            top_logprobs=[empty] * count,
            requested_logprobs=[empty] * count,
        )
        for group in self.groups:
            places = slice(None) if group.places is None else group.places
            out.tokens[places], output = self._draw(group, logits, positions)
            if not self.logprobs:
                continue
            out.logprobs[places] = output.next_token_logprobs
            for k, row in enumerate(group.rows):
                if output.next_token_top_logprobs_val is not None:
                    out.top_logprobs[row] = (output.next_token_top_logprobs_val[k], output.next_token_top_logprobs_idx[k])
                if output.next_token_token_ids_logprobs_val is not None:
                    out.requested_logprobs[row] = (output.next_token_token_ids_logprobs_val[k], output.next_token_token_ids_logprobs_idx[k])
        return out

    def _draw(self, group: SamplingGroup, logits: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, LogitsProcessorOutput]:
        """Tokens of a group's rows, int64, and the output of SGLang's sampler with their log-probabilities."""
        if group.places is not None:
            logits, positions = logits[group.places], positions[group.places]
        group.batch.positions = positions
        output = LogitsProcessorOutput(next_token_logits=logits)
        return self.model_runner.sample(output, group.batch).long(), output


def draw_with_finite_noise(original: Callable, logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Draw with Gumbel noise from a hash, as SGLang's ``multinomial_with_seed``, but never with infinite noise.

    SGLang divides the hash by its largest value. So once in ``2**32 / vocabulary`` tokens the noise is infinite, and draws a token whatever
    its probability. Seeds that a request gave (deterministic mode) draw as in SGLang; generated ones draw none of these tokens.

    ``logprobs``: float [rows, vocabulary]; ``seed``: int64 [rows]; ``positions``: int [rows]; the result: int64 [rows, 1].
    """
    if get_exec().deterministic.enable_deterministic_inference:
        return original(logprobs, seed, positions)
    return _draw_with_finite_noise(logprobs, seed, positions)


@torch.compile(dynamic=True)
def _draw_with_finite_noise(logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    columns = torch.arange(logprobs.shape[1], device=logprobs.device)
    hashed = sampler.murmur_hash32(seed.to(torch.uint64), positions, columns)
    noise = ((hashed.to(torch.float64) + 0.5) * 2.0**-32).log_().neg_().log_().neg_()
    return noise.add_(logprobs).argmax(1, keepdim=True)


class SamplerCache:
    """Keeps at most ``most`` samplers while the same requests run: creating one takes a dozen operations on the device."""

    def __init__(self, model_runner: ModelRunner, most: int = 64):
        self.model_runner = model_runner
        self.most = most
        self._owners: list = []
        self._kept: dict[tuple[tuple[int, ...], int, bool], RowSampler] = {}

    def get(
        self, batch: ScheduleBatch, states: list[RequestState], requests: Sequence[int], width: int, walks: dict[int, GrammarWalk], logprobs: bool
    ) -> RowSampler:
        """The sampler of ``width`` rows of each of the ``requests``, after 0, 1, ... drafts. ``walks``: the grammars that mask rows."""

        def create() -> RowSampler:
            rows = [LogitRow.from_state(i, states[i], walks.get(i), j) for i in requests for j in range(width)]
            return RowSampler.from_rows(self.model_runner, batch, rows, logprobs)

        info = batch.sampling_info
        # Do not keep samplers that are as large as the logits, or depend on the output.
        if info.has_custom_logit_processor or info.logit_bias is not None or any(req.grammar is not None for req in batch.reqs):
            return create()
        # A retracted request returns with another state, and other noise.
        owners = [*batch.reqs, *states]
        if len(owners) != len(self._owners) or any(a is not b for a, b in zip(owners, self._owners)):
            self._owners, self._kept = owners, {}
        key = tuple(requests), width, logprobs
        if key not in self._kept:
            if len(self._kept) >= self.most:
                self._kept.clear()
            self._kept[key] = create()
        return self._kept[key]
