"""Results of a round: output tokens, merged for a batch, as SGLang's result; what SGLang relays to the next round; pending drafts."""

from dataclasses import dataclass, field

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.model_runner import ModelRunner

from sglang_ext.device import to_device
from sglang_ext.managers.spec_decode.planner import RoundPlan
from sglang_ext.managers.spec_decode.round_timer import RoundMarks
from sglang_ext.managers.spec_decode.sampling import SampledTokens


@dataclass(frozen=True)
class OutputTokens:
    """Output tokens of the requests at some positions in a batch: int64 [requests, width], of which the first ``num_output`` count."""

    requests: list[int]
    tokens: torch.Tensor
    num_output: torch.Tensor
    sampled: SampledTokens

    @classmethod
    def from_steps(cls, plan: RoundPlan, steps: list[tuple[LogitsProcessorOutput, SampledTokens]], tokens: torch.Tensor) -> "OutputTokens":
        """Output tokens of the requests that decode on the full KV, from all steps of a round, and their tokens, int64 [requests, steps]."""
        requests, found = plan.full_kv_reqs, [sampled for _, sampled in steps]
        counts = [plan.num_output_tokens(i) for i in requests]
        where = slice(None) if len(requests) == len(tokens) else to_device(requests, tokens.device)
        tokens = tokens[where]
        sampled = SampledTokens(tokens.flatten())
        if found[0].logprobs is not None:
            sampled.logprobs = torch.stack([each.logprobs for each in found], dim=1)[where].flatten()
            sampled.top_logprobs = [each.top_logprobs[i] for i in requests for each in found]
            sampled.requested_logprobs = [each.requested_logprobs[i] for i in requests for each in found]
        if min(counts) == len(steps):
            return cls(requests, tokens, tokens.new_full((len(requests),), len(steps)), sampled)
        return cls(requests, tokens, to_device(counts, tokens.device), sampled)

    @property
    def width(self) -> int:
        """Tokens of each request, whether they count or not."""
        return self.tokens.shape[1]


def merge_outputs(parts: list[OutputTokens], lengths: torch.Tensor, logprobs: bool) -> OutputTokens:
    """Merge the output tokens of a batch of these ``lengths``, int64 [requests]. Requests in no part have none."""
    if len(parts) == 1 and parts[0].requests == list(range(len(lengths))):
        return parts[0]
    count, width = len(lengths), max([1, *(part.width for part in parts)])
    tokens, num_output = lengths.new_zeros(count, width), lengths.new_zeros(count)
    for part in parts:
        where = to_device(part.requests, tokens.device)
        tokens[where, : part.width] = part.tokens
        num_output[where] = part.num_output
    sampled = SampledTokens(tokens.flatten())
    if logprobs:
        _put_logprobs(sampled, parts, width)
    return OutputTokens(list(range(count)), tokens, num_output, sampled)


def _put_logprobs(sampled: SampledTokens, parts: list[OutputTokens], width: int) -> None:
    """Copy the log-probabilities of all parts to ``sampled``. Those of requests without an output token are not read."""
    rows = len(sampled.tokens)
    sampled.logprobs = torch.zeros(rows, device=sampled.tokens.device)
    sampled.top_logprobs, sampled.requested_logprobs = ([(torch.empty(0), [])] * rows for _ in range(2))
    for part in parts:
        theirs, each = part.sampled, part.width
        for k, i in enumerate(part.requests):
            mine, there = slice(i * width, i * width + each), slice(k * each, (k + 1) * each)
            sampled.logprobs[mine] = theirs.logprobs[there]
            sampled.top_logprobs[mine] = theirs.top_logprobs[there]
            sampled.requested_logprobs[mine] = theirs.requested_logprobs[there]


@dataclass
class KVDraftInput:
    """A batch's draft input between iterations.

    SGLang's overlapped scheduler relays ``bonus_tokens`` on the device from one iteration to the next, by row of the token table
    (``future_indices``). The scheduler reads the other fields of any draft input. The worker keeps all further state by request.

    Attributes:
        bonus_tokens: int64 [batch], newest token of each output; its KV is not computed yet.
        future_indices: int64 [batch], rows under which the scheduler relays the tokens; the scheduler sets them.
    """

    bonus_tokens: torch.Tensor
    future_indices: torch.Tensor | None = None
    topk_p: torch.Tensor | None = None
    topk_index: torch.Tensor | None = None
    hidden_states: torch.Tensor | None = None
    dsa_topk_indices: torch.Tensor | None = None
    future_dsa_topk_indices_available: bool = False

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None) -> None:
        """Keep the requests at ``new_indices``."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
        else:
            self.bonus_tokens = self.bonus_tokens[new_indices.to(self.bonus_tokens.device)]

    def merge_batch(self, spec_info: "KVDraftInput") -> None:
        """Append another batch's requests."""
        if self.future_indices is not None:
            self.future_indices = torch.cat([self.future_indices, spec_info.future_indices])
        else:
            self.bonus_tokens = torch.cat([self.bonus_tokens, spec_info.bonus_tokens])


@dataclass
class RoundResult(GenerationBatchResult):
    """SGLang's result, with the plan and the marks of its round.

    ``positions``: those of the requests that ran, in SGLang's batch; None for all. ``finished_early``: positions among the requests that ran
    of those whose output ended before their last token (hooks/rounds.py).
    """

    plan: RoundPlan | None = None
    marks: RoundMarks | None = None
    positions: list[int] | None = None
    finished_early: set[int] = field(default_factory=set)

    @classmethod
    def empty(cls, like: torch.Tensor) -> "RoundResult":
        """The result of a round without requests, on the device of ``like``."""
        nothing = like.new_empty(0, dtype=torch.int64)
        return cls(
            logits_output=LogitsProcessorOutput(next_token_logits=None),
            next_token_ids=nothing,
            accept_lens=nothing,
            new_seq_lens=nothing,
            next_draft_input=KVDraftInput(nothing),
            speculative_num_draft_tokens=1,
            can_run_cuda_graph=False,
            plan=RoundPlan([], 0, [], [], [], [], [], [], []),
        )

    @classmethod
    def from_outputs(
        cls,
        model_runner: ModelRunner,
        batch: ScheduleBatch,
        plan: RoundPlan,
        output_tokens: OutputTokens,
        lengths: torch.Tensor,
        output: LogitsProcessorOutput,
        marks: RoundMarks | None = None,
    ) -> "RoundResult":
        """The result of a round. Requests that only drafted keep their last output token. ``output``: that of the last step."""
        num_output, shown = output_tokens.num_output, LogitsProcessorOutput(next_token_logits=None)
        if batch.return_logprob:
            output_tokens.sampled.fill_logprobs(shown, stride=output_tokens.width)
        if output.hidden_states is not None:
            shown.hidden_states = output.hidden_states.repeat_interleave(output_tokens.width, 0)
        last = output_tokens.tokens.gather(1, (num_output - 1).clamp(min=0)[:, None])[:, 0]
        bonus_tokens = torch.where(num_output > 0, last, batch.spec_info.bonus_tokens)
        return cls(
            logits_output=shown,
            next_token_ids=output_tokens.tokens.flatten(),
            accept_lens=num_output,
            new_seq_lens=lengths,
            next_draft_input=KVDraftInput(bonus_tokens),
            speculative_num_draft_tokens=output_tokens.width,
            can_run_cuda_graph=model_runner.decode_cuda_graph_runner is not None,
            plan=plan,
            marks=marks,
        )


class PendingDrafts:
    """Pending drafts of each row since its last verification: ``tokens``, int64 [rows, longest]. ``RequestState.num_pending`` of them count."""

    def __init__(self, rows: int, longest: int, device: torch.device):
        self.tokens = torch.zeros(rows, longest, dtype=torch.int64, device=device)

    def last_tokens(self, rows: torch.Tensor, counts: torch.Tensor, bonus: torch.Tensor) -> torch.Tensor:
        """The last draft of each of ``rows``, or its ``bonus`` token if it has none; all int64 [requests]."""
        last = self.tokens[rows, (counts - 1).clamp(min=0)]
        return torch.where(counts > 0, last, bonus)

    def put(self, rows: torch.Tensor, counts: torch.Tensor, drafts: torch.Tensor) -> None:
        """Store ``drafts``, int64 [requests, drafts], after the first ``counts`` drafts of each of ``rows``."""
        places = counts[:, None] + torch.arange(drafts.shape[1], device=counts.device)
        self.tokens[rows[:, None], places] = drafts

    def first(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """The first ``count`` drafts of each of ``rows``: int64 [requests, count]."""
        return self.tokens[rows, :count]
