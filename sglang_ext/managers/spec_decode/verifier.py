"""The verification of a round: one forward over full KV, and of each request the drafts that it would have given.

The forward replays the narrowest captured graph that holds the drafts (verify_graphs.py), where there is one. It leaves its
queries to compressors that score by them.
"""

from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_ext.device import to_device
from sglang_ext.layers import forward
from sglang_ext.managers.simulation import Simulation
from sglang_ext.managers.spec_decode.grammar import LONGEST_WALK, Walk
from sglang_ext.managers.spec_decode.result import Answers, GatheredDrafts, Part
from sglang_ext.managers.spec_decode.round import Round
from sglang_ext.managers.spec_decode.steps import Steps
from sglang_ext.mem_cache.compressed.query_window import Recorded

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_ext.layers.attention.verify_graphs import VerifyGraphSet
    from sglang_ext.managers.worker import KVWorker


class Verifier:
    """Verifies drafts for a worker's rounds.

    Attributes:
        worker: whose queries these are.
        steps: the forwards without a graph, and how they are sampled.
        graphs: captured verifications, None where CUDA graphs are off.
        simulation: forced acceptance, None outside benchmarks.
    """

    def __init__(self, worker: "KVWorker", steps: Steps, graphs: "VerifyGraphSet | None", simulation: Simulation | None):
        self.worker = worker
        self.steps = steps
        self.graphs = graphs
        self.simulation = simulation

    def verify(
        self, batch: "ScheduleBatch", round_: Round, requests: list[int], newest: torch.Tensor, gathered: GatheredDrafts
    ) -> Part:
        """Of some requests the drafts that full KV would have given, and the next token.

        Args:
            batch: of all requests.
            round_: what they did.
            requests: by their places in the batch.
            newest: int64 [all requests, steps], what the round's steps gave.
            gathered: the drafts of those that have some of earlier rounds, this round's among them.
        """
        offered = [round_.offered(i) for i in requests]
        whole = len(requests) == len(batch.reqs)
        where = slice(None) if whole else to_device(requests, newest.device)
        part = batch if whole else forward.of_requests(batch, requests, where)
        # Of each, those count that it has.
        with_earlier = any(round_.gathered[i] for i in requests)
        drafts = gathered.of(part.req_pool_indices, max(offered)) if with_earlier else newest[where]
        tokens = torch.cat([batch.spec_info.bonus_tokens[where, None], drafts], 1)
        lengths = [round_.lengths[i] for i in requests]
        # The host waits for the drafts here, where a request has a grammar.
        walks = _walks(part.reqs, requests, drafts, offered)
        output, positions = self._forward(part, [round_.states[i].row for i in requests], lengths, tokens)
        width = len(positions) // len(requests)
        sampled = self.steps.verifying(batch, round_, requests, width, walks).draw(output.next_token_logits, positions)
        answers = sampled.tokens.view(len(requests), width)
        # After a draft that a grammar refuses, or that ends it, rows are not masked; after the output's last token KV has no slots.
        most = [min(count, walks[i].answers - 1) if i in walks else count for i, count in zip(requests, offered)]
        most = [min(count, max(0, round_.left[i] - 1)) for i, count in zip(requests, most)]
        accepted = self._agreed(part, answers, drafts, most) + 1
        return Part(requests, Answers(answers, accepted, sampled))

    def _forward(
        self, batch: "ScheduleBatch", rows: list[int], lengths: list[int], tokens: torch.Tensor
    ) -> tuple[LogitsProcessorOutput, torch.Tensor]:
        """Forward ``tokens``, int64 [requests, width], after what each request has, over full KV.

        Returns:
            What the model gives, and the position of each token, int64 [requests * at least width].
        """
        width, count = tokens.shape[1], len(tokens)
        graphs = None if self.graphs is None else self.graphs.fit(count, width)
        if graphs is not None and width < graphs.width:
            # Graphs have few widths: what is beyond the drafts is computed and not looked at.
            tokens = torch.cat([tokens, tokens.new_zeros(count, graphs.width - width)], 1)
            width = graphs.width
        inputs = forward.Inputs(
            tokens=tokens.flatten(),
            positions=(batch.seq_lens[:, None] + torch.arange(width, device=tokens.device)).flatten(),
            slots=self.steps.slots(batch, width, batch.seq_lens).flatten(),
            rows=batch.req_pool_indices,
            lengths=batch.seq_lens + width,
            lengths_cpu=torch.tensor(lengths) + width,
            counts=[width] * count,
        )
        recorded = tuple(Recorded(row, k * width, (k + 1) * width, length) for k, (row, length) in enumerate(zip(rows, lengths)))
        if graphs is not None:
            self.worker.queries.aim(recorded)
            return graphs.verify(batch, inputs), inputs.positions
        with self.worker.queries.recording(recorded):
            return self.steps.forward(batch, inputs), inputs.positions

    def _agreed(self, batch: "ScheduleBatch", answers: torch.Tensor, drafts: torch.Tensor, most: list[int]) -> torch.Tensor:
        """Drafts of each request that are the answers at their places, up to the first that is not: int64 [requests].

        Of each, its first ``most`` count.
        """
        width, device = drafts.shape[1], drafts.device
        if self.simulation is None:
            same = answers[:, :width] == drafts
        else:
            same = self.simulation.draw(drafts, to_device(self.simulation.probabilities(batch.reqs), device, torch.float32))
        if min(most) < width:
            same &= torch.arange(width, device=device) < to_device(most, device)[:, None]
        agreed = same.long().cumprod(1)
        if self.simulation is not None:
            # So that the output and the KV agree.
            answers[:, :width] = torch.where(agreed.bool(), drafts, answers[:, :width])
        return agreed.sum(1)


def _walks(reqs: list, requests: list[int], drafts: torch.Tensor, offered: list[int]) -> dict[int, Walk]:
    """The grammars of those that have one, by place in the whole batch, along their drafts."""
    rows = [k for k, req in enumerate(reqs) if req.grammar is not None]
    if not rows:
        return {}
    known = drafts[to_device(rows, drafts.device), :LONGEST_WALK].tolist()
    return {requests[k]: Walk(reqs[k].grammar, tokens[: offered[k]]) for k, tokens in zip(rows, known)}
