"""What SGLang's scheduler gets of a round: the answers, and from which tokens and lengths the next one goes on."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_ext.layers.attention.views import BetweenSteps
from sglang_ext.managers.spec_decode.answers import Answers
from sglang_ext.managers.spec_decode.round import Round

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass
class RoundResult(GenerationBatchResult):
    """SGLang's result, with the round that it is of.

    Attributes:
        round: what the requests did.
        requests: places in SGLang's batch of the requests that it is of; None where these are all (running_part.py).
    """

    round: Round | None = None
    requests: list[int] | None = None

    @classmethod
    def of_nobody(cls, like: torch.Tensor) -> "RoundResult":
        """The result of a round without requests, on the device of ``like``."""
        nothing = like.new_empty(0, dtype=torch.int64)
        return cls(
            logits_output=LogitsProcessorOutput(next_token_logits=None),
            next_token_ids=nothing,
            accept_lens=nothing,
            new_seq_lens=nothing,
            next_draft_input=BetweenSteps(nothing),
            speculative_num_draft_tokens=1,
            can_run_cuda_graph=False,
            round=Round.of_nobody(),
        )

    @classmethod
    def of(
        cls,
        model_runner: "ModelRunner",
        batch: "ScheduleBatch",
        round_: Round,
        answers: Answers,
        lengths: torch.Tensor,
        newest: torch.Tensor,
        hidden_states: torch.Tensor | None,
    ) -> "RoundResult":
        """The result of a round that gave ``answers``.

        Args:
            model_runner: that ran it.
            batch: whose requests these are.
            round_: what they did.
            answers: of all of them.
            lengths: int64 [requests], of each after the round.
            newest: int64 [requests], the token of each that the next round begins with.
            hidden_states: of the answers, where some request asks for them.
        """
        shown = LogitsProcessorOutput(next_token_logits=None)
        if batch.return_logprob:
            answers.sampled.fill_logprobs(shown, list(range(answers.tokens.numel())), stride=answers.width)
        shown.hidden_states = hidden_states
        return cls(
            logits_output=shown,
            next_token_ids=answers.tokens.flatten(),
            accept_lens=answers.accepted,
            new_seq_lens=lengths,
            next_draft_input=BetweenSteps(newest),
            speculative_num_draft_tokens=answers.width,
            can_run_cuda_graph=model_runner.decode_cuda_graph_runner is not None,
            round=round_,
        )
