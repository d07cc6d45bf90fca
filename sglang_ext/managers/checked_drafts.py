"""Drafts that n-grams propose and the compressed views check, before full KV verifies them.

VeriCache's composition with a conventional drafter (``--kv-ngram-tokens N``): one forward over the compressed copies
reads the newest token and N proposed ones (ngram.py). Those that the copy's own answers agree with are drafts, and so
is its next answer: one token at least, as a plain draft step gives, and up to N + 1. The verification over full KV is
the same as ever, so that the output is the same too.
"""

import math
from typing import TYPE_CHECKING

import torch

from sglang_ext.managers import forward
from sglang_ext.managers.ngram import TokenHistory
from sglang_ext.managers.round_plan import Round
from sglang_ext.managers.steps import Drafted, Steps, agreeing

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_ext.layers.attention.verify_graphs import VerifyGraphSet

# Weight of a round's tokens per forward among those before it.
NEW_ROUND = 0.1


class CheckedDrafts:
    """Drafts for a worker's rounds.

    Attributes:
        steps: the forwards.
        history: the tokens so far.
        proposals: tokens proposed in each forward.
        graphs: captured forwards of ``1 + proposals`` tokens a request; None where CUDA graphs are off.
        per_check: tokens that a forward gave a request, of late.
    """

    def __init__(self, steps: Steps, history: TokenHistory, proposals: int, graphs: "VerifyGraphSet | None"):
        self.steps = steps
        self.history = history
        self.proposals = proposals
        self.graphs = graphs
        self.per_check = 1.0

    def checks(self, drafts: int) -> int:
        """Forwards that give so many drafts, if they go as those before."""
        return min(drafts, math.ceil(drafts / self.per_check))

    def observe(self, tokens: int, checks: int) -> None:
        """Take what the forwards of a round gave."""
        if checks:
            self.per_check += NEW_ROUND * (tokens / checks - self.per_check)

    def draft(
        self, batch: "ScheduleBatch", round_: Round, bonus: torch.Tensor, slots: torch.Tensor
    ) -> Drafted:
        """The drafts of a round; the host does not learn how many, so nothing waits for the device.

        Args:
            batch: whose requests these are.
            round_: what they do.
            bonus: int64 [requests], the newest token of each; in the history already.
            slots: int64 [requests, 1 + drafts], where the KV of the newest token and of the drafts is written.
        """
        rows, viewed = self.steps.extend_rows(batch, round_, slots)
        drafts, width = round_.drafts, 1 + self.proposals
        sampling = self.steps.sampling(batch, round_, width, logprobs=False)
        longest = max(round_.lengths) + drafts + width
        count = torch.zeros_like(batch.seq_lens)
        forwards = torch.zeros_like(count)
        newest_tokens, ahead = bonus, torch.arange(width, device=count.device)
        for _ in range(self.checks(drafts)):
            newest = batch.seq_lens + count
            proposed = self.history.propose(batch.req_pool_indices, newest, self.proposals, longest)
            places = count[:, None] + ahead
            within = places.clamp(max=drafts)
            inputs = forward.Inputs(
                tokens=torch.cat([newest_tokens[:, None], proposed], 1).flatten(),
                positions=(batch.seq_lens[:, None] + within).flatten(),
                # What is proposed beyond the last draft is written where nobody reads: SGLang's padding slot.
                slots=torch.where(places <= drafts, slots.gather(1, within), 0).flatten(),
                rows=rows,
                lengths=viewed + count + width,
                lengths_cpu=torch.tensor(round_.viewed) + drafts + width,
                counts=[width] * len(rows),
            )
            logits = self._forward(batch, inputs).next_token_logits
            answers = sampling.draw(logits, inputs.positions).tokens.view(len(rows), width)
            agreed = agreeing(answers, proposed)
            self.history.put(batch.req_pool_indices, newest[:, None] + 1 + ahead, answers)
            missing = count < drafts
            forwards += missing
            newest_tokens = torch.where(missing, answers.gather(1, agreed[:, None])[:, 0], newest_tokens)
            count = torch.where(missing, count + agreed + 1, count).clamp(max=drafts)
        drafted = batch.seq_lens[:, None] + torch.arange(1, drafts + 1, device=count.device)
        return Drafted(self.history.at(batch.req_pool_indices, drafted), count, forwards)

    def _forward(self, batch: "ScheduleBatch", inputs: forward.Inputs):
        graph = None if self.graphs is None else self.graphs.fit(len(inputs.counts), 1 + self.proposals)
        if graph is not None:
            return graph.verify(batch, inputs)
        # Without graphs attention is planned on the host, which must know the lengths.
        exact = inputs.with_host_lengths()
        return self.steps.forward(batch, exact)
