"""The verify pass of a round: one forward over full KV, and of each request the drafts that it would have given.

The forward replays the narrowest captured graph that holds the drafts (verify_graphs.py), where there is one. It leaves its
queries to compressors that score by them.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_ext.device import to_device
from sglang_ext.managers import forward
from sglang_ext.managers.answers import Answers
from sglang_ext.managers.round_plan import Round
from sglang_ext.managers.sampling import Sampled, Sampling
from sglang_ext.managers.simulation import Simulation
from sglang_ext.managers.steps import Drafted, Steps, agreeing
from sglang_ext.mem_cache.query_window import Recorded

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_ext.layers.attention.verify_graphs import VerifyGraphSet
    from sglang_ext.managers.worker import KVWorker


class VerifyPass:
    """Verifies drafts for a worker's rounds.

    Attributes:
        worker: whose views and queries these are.
        steps: the forwards without a graph, and how they are sampled.
        graphs: captured verifications, None where CUDA graphs are off.
        simulation: forced acceptance, None outside benchmarks.
    """

    def __init__(
        self, worker: "KVWorker", steps: Steps, graphs: "VerifyGraphSet | None", simulation: Simulation | None
    ):
        self.worker = worker
        self.steps = steps
        self.graphs = graphs
        self.simulation = simulation

    def forward(
        self,
        batch: "ScheduleBatch",
        round_: Round,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        sampling: Callable[[int], Sampling] | None = None,
    ) -> tuple[LogitsProcessorOutput, Sampled]:
        """Forward ``tokens``, int64 [requests, 1 + drafts], over full KV and sample after each.

        ``slots``, of the same shape, say where their KV is written. ``sampling`` says how, for so many tokens of each
        request; None: as the batch does.
        """
        width, count = tokens.shape[1], len(tokens)
        graphs = None if self.graphs is None else self.graphs.fit(count, width)
        if graphs is not None and width < graphs.width:
            # Graphs have few widths: what is beyond the drafts is computed and not looked at.
            spare = graphs.width - width
            tokens = torch.cat([tokens, tokens.new_zeros(count, spare)], 1)
            slots, width = self.steps.slots(batch, graphs.width), graphs.width
        inputs = _inputs(batch, round_, tokens, slots)
        rows = tuple(
            Recorded(state.row, i * width, (i + 1) * width, length)
            for i, (state, length) in enumerate(zip(round_.states, round_.lengths))
        )
        if graphs is not None:
            self.worker.queries.aim(rows)
            output = graphs.verify(batch, inputs)
        else:
            with self.worker.queries.recording(rows):
                output = self.steps.forward(batch, inputs)
        ready = sampling(width) if sampling else self.steps.sampling(batch, round_, width, batch.return_logprob)
        return output, ready.draw(output.next_token_logits, inputs.positions)

    def accept(self, batch: "ScheduleBatch", drafted: Drafted, sampled: Sampled) -> Answers:
        """Of each request the agreeing drafts, and the next token."""
        tokens = sampled.tokens.view(len(drafted.tokens), -1)
        if self.simulation is None:
            agreed = agreeing(tokens, drafted.tokens)
        else:
            asked = to_device(self.simulation.probabilities(batch.reqs), tokens.device, torch.float32)
            agreed = self.simulation.accept(tokens, drafted.tokens, asked)
        if drafted.offered is not None:
            agreed = torch.minimum(agreed, drafted.offered)
        return Answers(tokens, agreed + 1, sampled)


def _inputs(batch: "ScheduleBatch", round_: Round, tokens: torch.Tensor, slots: torch.Tensor) -> forward.Inputs:
    """Tokens int64 [requests, width] after what each request has, over full KV."""
    width, device = tokens.shape[1], tokens.device
    return forward.Inputs(
        tokens=tokens.flatten(),
        positions=(batch.seq_lens[:, None] + torch.arange(width, device=device)).flatten(),
        slots=slots.flatten(),
        rows=batch.req_pool_indices,
        lengths=batch.seq_lens + width,
        lengths_cpu=torch.tensor(round_.lengths) + width,
        counts=[width] * len(tokens),
    )
