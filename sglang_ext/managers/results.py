"""From sampled tokens to SGLang's batch result, and which requests the scheduler shall look at."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_ext.core import Step
from sglang_ext.layers.attention.views import BetweenSteps
from sglang_ext.managers.grammar import ends_after
from sglang_ext.managers.round_result import RoundResult
from sglang_ext.managers.sampling import Sampled

if TYPE_CHECKING:
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
    from sglang.srt.managers.schedule_batch import ScheduleBatch


@dataclass(frozen=True)
class Accepted:
    """A step's answers.

    Attributes:
        first: index of the step's first row in the forward.
        tokens: answers in order: accepted drafts, then the verifier's own token; none for a draft.
    """

    first: int
    tokens: list[int]


def accept(
    step: Step, first: int, sampled: list[int], grammar: "BaseGrammarObject | None" = None
) -> Accepted:
    """The longest prefix of the drafts that the full KV would have given, and its next token.

    Where the last draft ends the request's grammar, no token follows it. Also writes the step's
    outcome into its request's state.
    """
    state = step.state
    answers = sampled[first : first + len(step.tokens)]
    if not step.emits:
        state.drafts.append(answers[0])
        state.closed = grammar is not None and ends_after(grammar, state.drafts)
        return Accepted(first, [])
    drafts = step.tokens[1:]
    agreed = 0
    while agreed < len(drafts) and drafts[agreed] == answers[agreed]:
        agreed += 1
    if drafts:
        state.count_verify(len(drafts), agreed)
    ends_grammar = state.closed and agreed == len(drafts)
    tokens = answers[: agreed if ends_grammar else agreed + 1]
    state.bonus, state.drafts, state.closed = tokens[-1], [], False
    return Accepted(first, tokens)


def batch_result(
    batch: "ScheduleBatch",
    outcomes: list[Accepted],
    sampled: Sampled,
    forward: LogitsProcessorOutput,
    stride: int,
) -> GenerationBatchResult:
    """SGLang's result: ``stride`` places for each request, of which the accepted ones are filled."""
    tokens = torch.zeros((len(outcomes), stride), dtype=torch.int64)
    counts = torch.tensor([len(outcome.tokens) for outcome in outcomes], dtype=torch.int64)
    for i, outcome in enumerate(outcomes):
        tokens[i, : counts[i]] = torch.tensor(outcome.tokens, dtype=torch.int64)
    output = LogitsProcessorOutput(next_token_logits=None)
    if batch.return_logprob:
        rows = [row for outcome in outcomes for row in _padded(outcome, stride)]
        sampled.fill_logprobs(output, rows, stride)
    if forward.hidden_states is not None:
        output.hidden_states = _pad_rows(forward.hidden_states, outcomes, stride)
    device = batch.seq_lens.device
    return GenerationBatchResult(
        logits_output=output,
        next_token_ids=tokens.flatten(),
        accept_lens=counts,
        new_seq_lens=batch.seq_lens + counts.to(device),
        next_draft_input=BetweenSteps(tokens[:, 0].to(device)),
        speculative_num_draft_tokens=stride,
        can_run_cuda_graph=False,
    )


def _padded(outcome: Accepted, stride: int) -> list[int]:
    """``stride`` row indices: those of the accepted tokens, then the first again."""
    rows = list(range(outcome.first, outcome.first + len(outcome.tokens)))
    return rows + [outcome.first] * (stride - len(rows))


def _pad_rows(values: torch.Tensor, outcomes: list[Accepted], stride: int) -> torch.Tensor:
    return values[[row for outcome in outcomes for row in _padded(outcome, stride)]]


def process_emitted(original: Callable, processor, batch: "ScheduleBatch", result) -> None:
    """Hook around ``process_batch_result_decode``: leave out requests that only drafted.

    They have no new token: nothing to append, to check for a stop, to stream or to count.
    """
    if result.accept_lens is None:
        return original(processor, batch, result)
    if result.copy_done is not None:
        result.copy_done.synchronize()
    if isinstance(result, RoundResult) and result.requests is not None:
        batch = _subset(batch, result.requests)
    processor.model_worker.account(batch, result)
    _end_aborted(processor, batch, result)
    emitting = [i for i, count in enumerate(result.accept_lens.tolist()) if count > 0]
    if not emitting:
        return None
    if len(emitting) < len(batch.reqs):
        batch, result = _subset(batch, emitting), _result_subset(result, emitting)
    return _advance_grammars_last(original, processor, batch, result)


def _end_aborted(processor, batch: "ScheduleBatch", result) -> None:
    """Finish requests that were aborted while their drafts gather: their next answer may be long in coming."""
    ended = []
    for i, (req, count) in enumerate(zip(batch.reqs, result.accept_lens.tolist())):
        if count == 0 and req.to_finish and not req.finished() and not req.is_retracted:
            req.update_finish_state(0)
            processor._handle_finish_state_updated_req(req, batch, result, i, result.logits_output)
            ended.append(req)
    if ended:
        processor.output_streamer.stream_output(ended, batch.return_logprob)


def _advance_grammars_last(original: Callable, processor, batch: "ScheduleBatch", result) -> None:
    """Process, then advance grammars, as SGLang does for batches without speculation.

    For speculative batches it advances them before it looks for the end, and so ends a request with
    ``ignore_eos`` where its grammar ends.
    """
    stride = result.speculative_num_draft_tokens
    tokens = result.next_token_ids.view(-1, stride).tolist()
    tokens = [row[:count] for row, count in zip(tokens, result.accept_lens.tolist())]
    result.grammar_advanced, result.grammar_retained_tokens = True, tokens
    open_grammars = [
        (req, row)
        for req, row in zip(batch.reqs, tokens)
        # Tokens of a retracted request are dropped, and decoded again.
        if req.grammar is not None and not req.finished() and not req.is_retracted
    ]
    original(processor, batch, result)
    for req, row in open_grammars:
        processor._accept_grammar_tokens(req, row)
        req.grammar.finished = req.finished()


def _subset(batch: "ScheduleBatch", indices: list[int]) -> "ScheduleBatch":
    part = copy.copy(batch)
    part.reqs = [batch.reqs[i] for i in indices]
    part.return_logprob = any(req.return_logprob for req in part.reqs)
    return part


def _result_subset(result: GenerationBatchResult, indices: list[int]) -> GenerationBatchResult:
    part, stride = copy.copy(result), result.speculative_num_draft_tokens
    part.accept_lens = result.accept_lens[indices]
    part.next_token_ids = result.next_token_ids.view(-1, stride)[indices].flatten()
    output = part.logits_output = copy.copy(result.logits_output)
    if output.next_token_logprobs is not None:
        output.next_token_logprobs = output.next_token_logprobs[indices]
    places = [i * stride + j for i in indices for j in range(stride)]
    for name in (
        "next_token_top_logprobs_val",
        "next_token_top_logprobs_idx",
        "next_token_token_ids_logprobs_val",
        "next_token_token_ids_logprobs_idx",
    ):
        values = getattr(output, name)
        if values is not None:
            setattr(output, name, [values[place] for place in places])
    if output.hidden_states is not None:
        output.hidden_states = output.hidden_states[places]
    return part
