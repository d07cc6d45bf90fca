"""Sample one token from each row of logits with SGLang's own sampler.

Draft and verify use the same noise: SGLang's seeded sampler at the same position. The sampled token of
a verify row is therefore the answer, and a draft is right when it equals it: the output has the full
KV's distribution, and is token-identical to stock decoding when the request carries a seed.

SGLang samples a whole batch by one route (all greedy, plain, or sorted for top-k and top-p), which
consume noise differently. Here rows are grouped by the route their own request asks for, so that a
request's output does not depend on its company.
"""

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_ext.device import to_device
from sglang_ext.managers.sampling_rows import Row, route, sampling_batch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass
class Sampled:
    """What was sampled, row by row.

    Attributes:
        tokens: int64 [rows], on the logits' device.
        logprobs: float [rows], log-probability of each sampled token; None unless asked for.
        top: per row, (values, token ids) of the most likely tokens.
        chosen: per row, (values, token ids) of the token ids that the request asked for.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor | None
    top: list[tuple]
    chosen: list[tuple]

    def fill_logprobs(
        self, output: LogitsProcessorOutput, rows: list[int], stride: int | None = None
    ) -> None:
        """Write the log-probabilities of ``rows`` as SGLang expects them.

        ``next_token_logprobs`` gets [requests, stride] in a decode, [requests] in a prefill (None).
        """
        values = self.logprobs[rows]
        output.next_token_logprobs = values if stride is None else values.view(-1, stride)
        output.next_token_top_logprobs_val = [torch.as_tensor(self.top[row][0]) for row in rows]
        output.next_token_top_logprobs_idx = [torch.as_tensor(self.top[row][1]) for row in rows]
        output.next_token_token_ids_logprobs_val = [torch.as_tensor(self.chosen[row][0]) for row in rows]
        output.next_token_token_ids_logprobs_idx = [list(self.chosen[row][1]) for row in rows]


@dataclass(frozen=True)
class Group:
    """Rows that take one way through SGLang's sampler.

    Attributes:
        rows: their indices among all rows.
        places: the same, int64 on the device; None when the group has all rows, in order.
        batch: what SGLang's sampler reads of a batch; positions are set for each draw.
    """

    rows: list[int]
    places: torch.Tensor | None
    batch: SimpleNamespace


@dataclass(frozen=True)
class Sampling:
    """Rows of logits to sample from, made ready once and drawn from any number of times.

    Nothing in a draw waits for the device, unless log-probabilities are asked for.
    """

    model_runner: "ModelRunner"
    groups: tuple[Group, ...]
    count: int
    logprobs: bool

    @classmethod
    def of(
        cls, model_runner: "ModelRunner", batch: "ScheduleBatch", rows: list[Row], logprobs: bool
    ) -> "Sampling":
        """Group ``rows`` by the route of their request.

        Args:
            rows: whose row each is, and which noise it takes.
            logprobs: whether :meth:`draw` computes what the batch's requests ask for.
        """
        routes: dict[tuple, list[int]] = defaultdict(list)
        for index, row in enumerate(rows):
            routes[(route(batch.reqs[row.request]), row.seed is None)].append(index)
        device = batch.seq_lens.device
        groups = []
        for indices in routes.values():
            picked = [rows[i] for i in indices]
            places = None if len(routes) == 1 else to_device(indices, device)
            groups.append(Group(indices, places, sampling_batch(batch, picked, device, logprobs)))
        return cls(model_runner, tuple(groups), len(rows), logprobs)

    def draw(self, logits: torch.Tensor, positions: torch.Tensor) -> Sampled:
        """Sample from each row.

        Args:
            logits: float [rows, vocabulary]; the sampler may overwrite them.
            positions: int64 [rows], absolute positions of the rows' input tokens; they select the noise.
        """
        if len(self.groups) == 1 and not self.logprobs:
            return Sampled(self._draw(self.groups[0], logits, positions)[0], None, [], [])
        empty = (torch.empty(0), [])
        out = Sampled(
            tokens=torch.empty(self.count, dtype=torch.int64, device=logits.device),
            logprobs=torch.empty(self.count, device=logits.device) if self.logprobs else None,
            top=[empty] * self.count,
            chosen=[empty] * self.count,
        )
        for group in self.groups:
            _collect(out, group, *self._draw(group, logits, positions))
        return out

    def _draw(
        self, group: Group, logits: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, LogitsProcessorOutput]:
        """Tokens of a group's rows, int64, and what SGLang's sampler wrote beside them."""
        everything = group.places is None
        group.batch.positions = positions if everything else positions[group.places]
        output = LogitsProcessorOutput(next_token_logits=logits if everything else logits[group.places])
        return self.model_runner.sample(output, group.batch).long(), output


def _collect(out: Sampled, group: Group, tokens: torch.Tensor, output: LogitsProcessorOutput) -> None:
    places = slice(None) if group.places is None else group.places
    out.tokens[places] = tokens
    if out.logprobs is None:
        return
    out.logprobs[places] = output.next_token_logprobs
    for k, row in enumerate(group.rows):
        if output.next_token_top_logprobs_val is not None:
            out.top[row] = (output.next_token_top_logprobs_val[k], output.next_token_top_logprobs_idx[k])
        if output.next_token_token_ids_logprobs_val is not None:
            out.chosen[row] = (
                output.next_token_token_ids_logprobs_val[k],
                output.next_token_token_ids_logprobs_idx[k],
            )
