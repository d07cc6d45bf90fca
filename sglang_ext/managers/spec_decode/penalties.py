"""Penalties along drafts: what each request has counted of its output, and of tokens that are not part of it yet.

SGLang counts one token of each request a step, and under its overlapped loop what was processed when a step is prepared, which a
prefill that joins changes. Here counts lie on the device, one row a request. A row of logits is penalized by what stock SGLang has
counted there where the request is alone: under the overlapped loop the last token of the prompt and all of the output but its newest
token, else all of the output. So drafts are verified as any others are, and neither company nor a retraction changes an answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_ext.core import RequestState
from sglang_ext.device import to_device

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_ext.managers.spec_decode.round_result import OutputTokens, PendingDrafts
    from sglang_ext.managers.spec_decode.planner import RoundPlan

# Rows of logits that are penalized at once: beside them lie their counts, and what is computed of both.
ROWS = 64


@dataclass(frozen=True)
class Penalty:
    """What a request asks for, as SGLang's ``SamplingParams`` say it.

    Attributes:
        weights: of frequency, presence and repetition; the last multiplies.
        min_new_tokens: tokens of the output before any of ``stop_token_ids`` may come.
        stop_token_ids: token ids that would end the output.
    """

    weights: tuple[float, float, float]
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, req: "Req") -> "Penalty | None":
        """That of a request; None where it asks for none."""
        params = req.sampling_params
        weights = params.frequency_penalty, params.presence_penalty, params.repetition_penalty
        if weights == (0.0, 0.0, 1.0) and not params.min_new_tokens:
            return None
        stops = set(params.stop_token_ids or ())
        if req.tokenizer is not None:
            stops |= {req.tokenizer.eos_token_id, *(req.tokenizer.additional_stop_token_ids or ())} - {None}
        return cls(weights, params.min_new_tokens, tuple(sorted(stops)))


@dataclass(frozen=True)
class PenaltyBatch:
    """The penalties of some requests.

    Attributes:
        penalties: of each.
        weights: float32 [requests, 5], theirs; then what a token adds to :attr:`Penalties.counts`, and 1 where that is for its
            frequency, else 0.
        stops: int64, of each that has a least length, else None.
    """

    penalties: list[Penalty]
    weights: torch.Tensor
    stops: list[torch.Tensor | None]

    @classmethod
    def of(cls, penalties: list[Penalty], device: torch.device, vocabulary: int) -> "PenaltyBatch":
        """On the device; no stop of a tokenizer's is beyond the model's ``vocabulary``."""
        weights = [(*penalty.weights, penalty.weights[0] or 1.0, float(penalty.weights[0] != 0)) for penalty in penalties]
        stops = [
            to_device([token for token in penalty.stop_token_ids if token < vocabulary], device) if penalty.min_new_tokens else None
            for penalty in penalties
        ]
        return cls(penalties, to_device(weights, device, torch.float32), stops)

    @property
    def addends(self) -> torch.Tensor:
        """What each time a token is counted adds: float32 [requests, 1]."""
        return self.weights[:, 3:4]

    def part(self, places: list[int], where: torch.Tensor) -> "PenaltyBatch":
        """Those at some places; ``where``: the same, int64 on the device."""
        penalties, stops = ([values[place] for place in places] for values in (self.penalties, self.stops))
        return PenaltyBatch(penalties, self.weights[where], stops)

    def apply(self, rows: torch.Tensor, counts: torch.Tensor, begun: list[int]) -> None:
        """Penalize logits in place, :data:`ROWS` at once; what adds comes before what multiplies, as in SGLang's overlapped loop.

        Args:
            rows: float [requests, rows, vocabulary], one after another of each request's output.
            counts: float32, of the same shape, as :attr:`Penalties.counts`.
            begun: tokens of each request's output before its first row's.
        """
        for part in _at_once(len(rows), rows.shape[1]):
            self._apply(rows[part], counts[part], self.weights[part, :, None, None], self.penalties[part])
        for row, penalty, stops, count in zip(rows, self.penalties, self.stops, begun):
            if count < penalty.min_new_tokens:
                # Whatever it is multiplied by, it stays so.
                row[: penalty.min_new_tokens - count].index_fill_(1, stops, float("-inf"))

    @staticmethod
    def _apply(rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor, penalties: list[Penalty]) -> None:
        frequency, presence, repetition = (any(penalty.weights[k] != (k == 2) for penalty in penalties) for k in range(3))
        seen = counts != 0
        if frequency or presence:
            added = counts * -weights[:, 4]
            if presence:
                added -= seen * weights[:, 1]
            rows += added
        if repetition:
            scale = torch.where(seen, weights[:, 2], 1.0)
            rows.copy_(torch.where(rows < 0, rows * scale, rows / scale))


class RoundPenalties:
    """What is done to a round's logits for its requests that have penalties: nothing, where none has."""

    def begin_steps(self, newest: torch.Tensor, gathered: "PendingDrafts", rows: torch.Tensor) -> None:
        """Steps begin, behind the drafts of earlier rounds.

        Args:
            newest: int64 [batch], of each request's output.
            gathered: the drafts.
            rows: int64 [batch], whose they are.
        """

    def penalize_step(self, index: int, tokens: torch.Tensor, logits: torch.Tensor) -> None:
        """Penalize the logits of a step in place.

        Args:
            index: of the step, each in turn.
            tokens: int64 [batch], its input.
            logits: float [batch, vocabulary].
        """

    def penalize_verify(self, requests: list[int], tokens: torch.Tensor, logits: torch.Tensor) -> None:
        """Penalize in place the logits of a verification, those of each row by the drafts before it.

        Args:
            requests: that are verified, by their places in the batch.
            tokens: int64 [requests, width], the newest of each, and its drafts.
            logits: float [requests * at least width, vocabulary]; what is beyond the width nobody looks at.
        """

    def count_output(self, newest: torch.Tensor, answers: "OutputTokens") -> None:
        """Count what became part of outputs: all before each one's newest token.

        Args:
            newest: int64 [batch], of each request's output before the round.
            answers: of the whole batch.
        """


class PenalizedRound(RoundPenalties):
    """The requests of a round that have penalties.

    Attributes:
        counts: float32 [places, vocabulary], of all requests; :meth:`count_output` changes it.
        places: int64 [requests], theirs in it.
        requests: their places in the batch.
        asked: what they ask for.
        overlapped: whether counts lag behind outputs by a token.
        given: of each, tokens of its output when the round begins.
        gathered: of each, drafts of earlier rounds.
    """

    def __init__(self, counts: torch.Tensor, places: torch.Tensor, asked: dict[int, Penalty], batch: "ScheduleBatch", plan: "RoundPlan"):
        self.counts = counts
        self.places = places
        self.requests = list(asked)
        self.asked = PenaltyBatch.of(list(asked.values()), counts.device, counts.shape[1])
        self.overlapped = batch.enable_overlap
        self.given = [plan.lengths[i] + 1 - len(batch.reqs[i].origin_input_ids) for i in asked]
        self.gathered = [plan.num_pending[i] for i in asked]
        self._where = to_device(self.requests, counts.device)
        self._along = counts

    def begin_steps(self, newest: torch.Tensor, gathered: "PendingDrafts", rows: torch.Tensor) -> None:
        self._along = self.counts[self.places]
        if any(self.gathered):
            # The last of them is the first step's input, and counted there.
            before = torch.cat([newest[self._where, None], gathered.of(rows[self._where], max(self.gathered))], 1)
            valid = _mask_of_first(before, to_device(self.gathered, before.device))
            self._along.scatter_add_(1, before, valid * self.asked.addends)

    def penalize_step(self, index: int, tokens: torch.Tensor, logits: torch.Tensor) -> None:
        tokens = tokens[self._where, None]
        if not self.overlapped:
            self._along.scatter_add_(1, tokens, self.asked.addends)
        rows = logits[self._where, None]
        self.asked.apply(rows, self._along[:, None], [sum(before) + index for before in zip(self.given, self.gathered)])
        logits[self._where] = rows[:, 0]
        if self.overlapped:
            self._along.scatter_add_(1, tokens, self.asked.addends)

    def penalize_verify(self, requests: list[int], tokens: torch.Tensor, logits: torch.Tensor) -> None:
        width = tokens.shape[1]
        by_request = logits.view(len(requests), -1, logits.shape[-1])[:, :width]
        verified = {i: k for k, i in enumerate(requests)}
        some = [(verified[i], place) for place, i in enumerate(self.requests) if i in verified]
        for part in _at_once(len(some), width):
            self._verification(*map(list, zip(*some[part])), tokens, by_request)

    def _verification(self, verified: list[int], places: list[int], tokens: torch.Tensor, by_request: torch.Tensor) -> None:
        """Of some requests, by their places among those that are verified, and among the penalized."""
        where, own = (to_device(each, tokens.device) for each in (verified, places))
        tokens, rows = tokens[where], by_request[where]
        width = tokens.shape[1]
        counts = self.counts[self.places[own], None].repeat(1, width, 1)
        # A row has counted the tokens before its own input, and that, too, where nothing lags.
        before = torch.ones(width, width, dtype=counts.dtype, device=tokens.device).tril(-1 if self.overlapped else 0)
        asked = self.asked.part(places, own)
        counts.scatter_add_(2, tokens[:, None].expand(-1, width, -1), before * asked.addends[:, None])
        asked.apply(rows, counts, [self.given[place] for place in places])
        by_request[where] = rows

    def count_output(self, newest: torch.Tensor, answers: "OutputTokens") -> None:
        tokens = torch.cat([newest[:, None], answers.tokens[:, :-1]], 1)[self._where]
        accepted = _mask_of_first(tokens, answers.accepted[self._where])
        # One after the other, as stock adds them: sums of several at once round otherwise.
        where = self.places[:, None] * self.counts.shape[1] + tokens
        self.counts.view(-1).scatter_add_(0, where.flatten(), (accepted * self.asked.addends).flatten())


def _at_once(requests: int, width: int) -> Iterator[slice]:
    """So many requests with ``width`` rows each, in parts of :data:`ROWS` rows, or of one request."""
    step = max(1, ROWS // width)
    return (slice(at, at + step) for at in range(0, requests, step))


def _mask_of_first(tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """1 for the first ``counts``, int64 [requests], of each request's ``tokens``, else 0: float32, of the shape of these."""
    return (torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]).float()


class Penalties:
    """Counts of the running requests that have penalties.

    Attributes:
        counts: float32 [places, vocabulary], of each token the frequency penalty, or where there is none 1, added as often as it was
            counted of the output before its newest token; there for as many requests as have penalties at once.
    """

    def __init__(self, device: torch.device):
        self.counts = self._none = torch.zeros(0, 0, device=device)
        self._places: dict[int, tuple[RequestState, int]] = {}

    def forget(self, row: int) -> None:
        """The request in ``row`` is gone; no-op where it has no penalty."""
        if self._places.pop(row, None) is not None and not self._places:
            self.counts = self._none

    def penalize_prefill(self, batch: "ScheduleBatch", logits: torch.Tensor) -> None:
        """Penalize in place the logits after prompts, float [requests, vocabulary]; of who was retracted, after its output so far."""
        for i, req in enumerate(batch.reqs):
            penalty = Penalty.of(req)
            if penalty is None:
                continue
            output = req.output_ids
            before = self._counted(req, len(output) - batch.enable_overlap, batch.enable_overlap) if output else []
            asked = PenaltyBatch.of([penalty], logits.device, logits.shape[1])
            counts = self._add(torch.zeros_like(logits[i], dtype=torch.float32), before, asked)
            asked.apply(logits[i : i + 1, None], counts[None, None], [len(output)])

    def for_round(self, batch: "ScheduleBatch", plan: "RoundPlan") -> RoundPenalties:
        """What is done to a round's logits for those of its requests that have penalties."""
        asked = {i: penalty for i, penalty in enumerate(map(Penalty.of, batch.reqs)) if penalty is not None}
        if not asked:
            return RoundPenalties()
        places = [self._place(batch, i, plan, penalty) for i, penalty in asked.items()]
        return PenalizedRound(self.counts, to_device(places, self.counts.device), asked, batch, plan)

    def _place(self, batch: "ScheduleBatch", i: int, plan: "RoundPlan", penalty: Penalty) -> int:
        req, state = batch.reqs[i], plan.states[i]
        kept, place = self._places.get(state.row, (None, 0))
        if kept is state:
            return place
        self.forget(state.row)
        taken = {place for _, place in self._places.values()}
        place = next(place for place in range(len(taken) + 1) if place not in taken)
        if place >= len(self.counts):
            more = self.counts.new_zeros(max(1, len(self.counts)), batch.sampling_info.vocab_size)
            self.counts = torch.cat([self.counts, more]) if len(self.counts) else more
        # Its first round: what came before its newest token is in its output since SGLang prefilled it.
        before = self._counted(req, plan.lengths[i] - len(req.origin_input_ids), batch.enable_overlap)
        self._add(self.counts[place].zero_(), before, PenaltyBatch.of([penalty], self.counts.device, self.counts.shape[1]))
        self._places[state.row] = state, place
        return place

    @staticmethod
    def _counted(req: "Req", outputs: int, overlapped: bool) -> list[int]:
        """The first ``outputs`` tokens of an output; under the overlapped loop the prompt's last one, too."""
        return [*req.origin_input_ids[-1:], *req.output_ids[:outputs]] if overlapped else list(req.output_ids[:outputs])

    @staticmethod
    def _add(counts: torch.Tensor, tokens: Sequence[int], asked: PenaltyBatch) -> torch.Tensor:
        """Count ``tokens`` of the one request that ``asked`` in ``counts``, float32 [vocabulary], in place."""
        where = to_device(list(tokens), counts.device)
        return counts.scatter_add_(0, where, asked.addends[0].expand(len(where)))
