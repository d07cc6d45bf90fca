"""Penalties along drafts: counts of each request's output tokens, and of tokens that are not part of the output yet.

Under its overlapped loop, SGLang counts the tokens that are processed when a step is prepared, which depends on prefills of other requests.
Here, a row of logits counts the tokens that stock SGLang would have counted there, if the request ran alone. Under the overlapped loop these
are the prompt's last token, and the output without its newest token; otherwise the whole output. So penalized drafts are verified like other
drafts, and neither other requests nor a retraction changes an output token.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from sglang_ext.core import RequestState
from sglang_ext.device import to_device
from sglang_ext.managers.spec_decode.planner import RoundPlan
from sglang_ext.managers.spec_decode.round_result import OutputTokens, PendingDrafts

# Rows of logits that are penalized at once. Their counts and the intermediate results take memory, too.
ROWS = 64


@dataclass(frozen=True)
class Penalty:
    """Penalties of a request, as in SGLang's ``SamplingParams``. ``weights``: frequency, presence and repetition penalty."""

    weights: tuple[float, float, float]
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, req: Req) -> "Penalty | None":
        """The penalties of a request; None if it asks for none."""
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
    """Penalties of some requests, on the device.

    ``weights``: float32 [requests, 5]: the three weights; the addend of a token in :attr:`Penalties.counts`; and 1 if that addend is the
    frequency penalty, else 0. ``stops``: stop token ids of each request, int64; None without ``min_new_tokens``.
    """

    penalties: list[Penalty]
    weights: torch.Tensor
    stops: list[torch.Tensor | None]

    @classmethod
    def of(cls, penalties: list[Penalty], device: torch.device, vocabulary: int) -> "PenaltyBatch":
        """Move penalties to the device, without stop token ids beyond the model's ``vocabulary``."""
        weights = [(*penalty.weights, penalty.weights[0] or 1.0, float(penalty.weights[0] != 0)) for penalty in penalties]
        stops = [
            to_device([token for token in penalty.stop_token_ids if token < vocabulary], device) if penalty.min_new_tokens else None
            for penalty in penalties
        ]
        return cls(penalties, to_device(weights, device, torch.float32), stops)

    @property
    def addends(self) -> torch.Tensor:
        """Addend of a counted token, float32 [requests, 1]."""
        return self.weights[:, 3:4]

    def part(self, places: list[int], where: torch.Tensor) -> "PenaltyBatch":
        """The penalties at some positions. ``where``: the same positions, int64 on the device."""
        penalties, stops = ([values[place] for place in places] for values in (self.penalties, self.stops))
        return PenaltyBatch(penalties, self.weights[where], stops)

    def apply(self, rows: torch.Tensor, counts: torch.Tensor, begun: list[int]) -> None:
        """Penalize ``rows`` of logits in place, float [requests, rows, vocabulary]; those of a request follow one another in its output.

        ``counts``: float32, of the same shape, as :attr:`Penalties.counts`. ``begun``: output tokens of each request before its first row.
        """
        for part in _at_once(len(rows), rows.shape[1]):
            _penalize(rows[part], counts[part], self.weights[part, :, None, None], self.penalties[part])
        for row, penalty, stops, count in zip(rows, self.penalties, self.stops, begun):
            if count < penalty.min_new_tokens:
                # Minus infinity stays so under any later factor.
                row[: penalty.min_new_tokens - count].index_fill_(1, stops, float("-inf"))


class RoundPenalties:
    """Penalties of a round, for the requests at some positions in the batch.

    ``counts``: float32 [places, vocabulary], as :attr:`Penalties.counts`; :meth:`count_output` changes them. ``places``: int64 [requests],
    their rows of ``counts``. ``overlapped``: whether counts lag behind the outputs by one token.
    """

    def __init__(self, counts: torch.Tensor, places: torch.Tensor, penalties: dict[int, Penalty], batch: ScheduleBatch, plan: RoundPlan):
        self.counts = counts
        self.places = places
        self.requests = list(penalties)
        self.penalties = PenaltyBatch.of(list(penalties.values()), counts.device, counts.shape[1])
        self.overlapped = batch.enable_overlap
        self.num_output = [plan.lengths[i] + 1 - len(batch.reqs[i].origin_input_ids) for i in penalties]
        self.num_pending = [plan.num_pending[i] for i in penalties]
        self._where = to_device(self.requests, counts.device)
        self._step_counts = counts

    def begin_steps(self, bonus_tokens: torch.Tensor, pending_drafts: PendingDrafts, rows: torch.Tensor) -> None:
        """Begin the steps of a round. ``bonus_tokens`` and ``rows``: int64 [batch], last output token and row of each request."""
        self._step_counts = self.counts[self.places]
        if any(self.num_pending):
            # The last of them is the input of the first step, and is counted there.
            before = torch.cat([bonus_tokens[self._where, None], pending_drafts.first(rows[self._where], max(self.num_pending))], 1)
            valid = _mask_of_first(before, to_device(self.num_pending, before.device))
            self._step_counts.scatter_add_(1, before, valid * self.penalties.addends)

    def penalize_step(self, index: int, tokens: torch.Tensor, logits: torch.Tensor) -> None:
        """Penalize the logits of each step in turn, float [batch, vocabulary], in place. ``tokens``: int64 [batch], input of the step."""
        tokens = tokens[self._where, None]
        if not self.overlapped:
            self._step_counts.scatter_add_(1, tokens, self.penalties.addends)
        rows = logits[self._where, None]
        self.penalties.apply(rows, self._step_counts[:, None], [sum(before) + index for before in zip(self.num_output, self.num_pending)])
        logits[self._where] = rows[:, 0]
        if self.overlapped:
            self._step_counts.scatter_add_(1, tokens, self.penalties.addends)

    def penalize_verify(self, requests: list[int], tokens: torch.Tensor, logits: torch.Tensor) -> None:
        """Penalize logits of a verification in place. ``tokens``: int64 [requests, width], the last output token of each, and its drafts."""
        # Logits: float [requests * at least width, vocabulary]. Rows beyond the width are ignored.
        width = tokens.shape[1]
        by_request = logits.view(len(requests), -1, logits.shape[-1])[:, :width]
        verified = {i: k for k, i in enumerate(requests)}
        pairs = [(verified[i], place) for place, i in enumerate(self.requests) if i in verified]
        # A row counts the tokens before its own input. It also counts its input, if counts do not lag.
        before = torch.ones(width, width, dtype=self.counts.dtype, device=tokens.device).tril(-1 if self.overlapped else 0)
        for part in _at_once(len(pairs), width):
            places = [place for _, place in pairs[part]]
            where, own = to_device([k for k, _ in pairs[part]], tokens.device), to_device(places, tokens.device)
            rows, penalties = by_request[where], self.penalties.part(places, own)
            counts = self.counts[self.places[own], None].repeat(1, width, 1)
            counts.scatter_add_(2, tokens[where, None].expand(-1, width, -1), before * penalties.addends[:, None])
            penalties.apply(rows, counts, [self.num_output[place] for place in places])
            by_request[where] = rows

    def count_output(self, bonus_tokens: torch.Tensor, output_tokens: OutputTokens) -> None:
        """Count the ``bonus_tokens``, int64 [batch], and the output tokens except the last of each request."""
        tokens = torch.cat([bonus_tokens[:, None], output_tokens.tokens[:, :-1]], 1)[self._where]
        accepted = _mask_of_first(tokens, output_tokens.num_output[self._where])
        # Add one token after another, as stock SGLang does: a sum of several would round differently.
        where = self.places[:, None] * self.counts.shape[1] + tokens
        self.counts.view(-1).scatter_add_(0, where.flatten(), (accepted * self.penalties.addends).flatten())


def _penalize(rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor, penalties: list[Penalty]) -> None:
    """Penalize ``rows`` in place. Additive penalties come before the factor, as in SGLang's overlapped loop."""
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


def _at_once(requests: int, width: int) -> Iterator[slice]:
    """Split ``requests`` with ``width`` rows each into slices of :data:`ROWS` rows, or of one request."""
    step = max(1, ROWS // width)
    return (slice(at, at + step) for at in range(0, requests, step))


def _mask_of_first(tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """1 for the first ``counts``, int64 [requests], of each request's ``tokens``, else 0: float32, of the shape of ``tokens``."""
    return (torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]).float()


class Penalties:
    """Token counts of the running requests with penalties: ``counts``, float32 [places, vocabulary], on the device.

    Each time a token is counted, the frequency penalty is added, or 1 if there is none.
    """

    def __init__(self, device: torch.device):
        self.counts = self._none = torch.zeros(0, 0, device=device)
        self._places: dict[int, tuple[RequestState, int]] = {}

    def forget(self, row: int) -> None:
        """Drop the counts of the request in ``row``, if it has a penalty."""
        if self._places.pop(row, None) is not None and not self._places:
            self.counts = self._none

    def penalize_prefill(self, batch: ScheduleBatch, logits: torch.Tensor) -> None:
        """Penalize the logits after prompts, and outputs of retracted requests, in place: float [requests, vocabulary]."""
        for i, req in enumerate(batch.reqs):
            penalty = Penalty.of(req)
            if penalty is None:
                continue
            output = req.output_ids
            before = _counted(req, len(output) - batch.enable_overlap, batch.enable_overlap) if output else []
            penalties = PenaltyBatch.of([penalty], logits.device, logits.shape[1])
            counts = _add(torch.zeros_like(logits[i], dtype=torch.float32), before, penalties)
            penalties.apply(logits[i : i + 1, None], counts[None, None], [len(output)])

    def for_round(self, batch: ScheduleBatch, plan: RoundPlan) -> RoundPenalties | None:
        """The penalties of a round, for the requests that have any; None if no request has one."""
        penalties = {i: penalty for i, penalty in enumerate(map(Penalty.of, batch.reqs)) if penalty is not None}
        if not penalties:
            return None
        places = [self._place(batch, i, plan, penalty) for i, penalty in penalties.items()]
        return RoundPenalties(self.counts, to_device(places, self.counts.device), penalties, batch, plan)

    def _place(self, batch: ScheduleBatch, i: int, plan: RoundPlan, penalty: Penalty) -> int:
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
        # First round of the request: the tokens before its newest one are in its output, because SGLang prefilled it.
        before = _counted(req, plan.lengths[i] - len(req.origin_input_ids), batch.enable_overlap)
        _add(self.counts[place].zero_(), before, PenaltyBatch.of([penalty], self.counts.device, self.counts.shape[1]))
        self._places[state.row] = state, place
        return place


def _counted(req: Req, outputs: int, overlapped: bool) -> list[int]:
    """The first ``outputs`` tokens of an output. Under the overlapped loop, the last token of the prompt comes first."""
    return [*req.origin_input_ids[-1:], *req.output_ids[:outputs]] if overlapped else list(req.output_ids[:outputs])


def _add(counts: torch.Tensor, tokens: list[int], penalties: PenaltyBatch) -> torch.Tensor:
    """Count ``tokens`` in ``counts``, float32 [vocabulary], in place. ``penalties``: penalties of one request."""
    where = to_device(tokens, counts.device)
    return counts.scatter_add_(0, where, penalties.addends[0].expand(len(where)))
