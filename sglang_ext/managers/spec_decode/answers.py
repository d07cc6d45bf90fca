"""What the requests of a round are answered: tokens, how many of them count, and what they were taken from."""

from dataclasses import dataclass

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput

from sglang_ext.device import to_device
from sglang_ext.managers.sampling import Sampled


@dataclass(frozen=True)
class Answers:
    """Tokens of requests that answer together.

    Attributes:
        tokens: int64 [requests, width].
        accepted: int64 [requests], how many of the tokens count, from the first on.
        sampled: what the tokens were taken from, ``width`` rows a request.
    """

    tokens: torch.Tensor
    accepted: torch.Tensor
    sampled: Sampled

    @classmethod
    def of_steps(cls, steps: list[tuple[LogitsProcessorOutput, Sampled]], requests: list[int]) -> "Answers":
        """What steps gave some ``requests``, by their places, one token after another."""
        found = [sampled for _, sampled in steps]
        where = to_device(requests, found[0].tokens.device)
        tokens = torch.stack([sampled.tokens for sampled in found], dim=1)[where]
        sampled = Sampled(tokens.flatten(), None, [], [])
        if found[0].logprobs is not None:
            sampled.logprobs = torch.stack([each.logprobs for each in found], dim=1)[where].flatten()
            sampled.top = [each.top[i] for i in requests for each in found]
            sampled.chosen = [each.chosen[i] for i in requests for each in found]
        return cls(tokens, tokens.new_full((len(requests),), len(steps)), sampled)

    @property
    def width(self) -> int:
        """Tokens of each request, whether they count or not."""
        return self.tokens.shape[1]


@dataclass(frozen=True)
class Part:
    """Some requests of a batch, and their answers.

    Attributes:
        requests: their places in the batch.
        answers: of these requests, in this order.
    """

    requests: list[int]
    answers: Answers


def together(parts: list[Part], lengths: torch.Tensor, logprobs: bool) -> Answers:
    """The answers of a whole batch; requests that are in no part have none.

    Args:
        parts: no request is in two.
        lengths: int64 [requests], of the whole batch; the answers lie on its device.
        logprobs: whether what was sampled holds log-probabilities, which are kept then.
    """
    if len(parts) == 1 and parts[0].requests == list(range(len(lengths))):
        return parts[0].answers
    count, width = len(lengths), max([1, *(part.answers.width for part in parts)])
    tokens, accepted = lengths.new_zeros(count, width), lengths.new_zeros(count)
    for part in parts:
        where = to_device(part.requests, tokens.device)
        tokens[where, : part.answers.width] = part.answers.tokens
        accepted[where] = part.answers.accepted
    sampled = Sampled(tokens.flatten(), None, [], [])
    if logprobs:
        _put_logprobs(sampled, parts, width)
    return Answers(tokens, accepted, sampled)


def _put_logprobs(sampled: Sampled, parts: list[Part], width: int) -> None:
    """Give ``sampled`` the log-probabilities of all parts; those of requests without an answer are not read."""
    rows = len(sampled.tokens)
    sampled.logprobs = torch.zeros(rows)
    sampled.top, sampled.chosen = ([(torch.empty(0), [])] * rows for _ in range(2))
    for part in parts:
        theirs, each = part.answers.sampled, part.answers.width
        sampled.logprobs = sampled.logprobs.to(theirs.logprobs.device)
        for k, i in enumerate(part.requests):
            mine, there = slice(i * width, i * width + each), slice(k * each, (k + 1) * each)
            sampled.logprobs[mine] = theirs.logprobs[there]
            sampled.top[mine] = theirs.top[there]
            sampled.chosen[mine] = theirs.chosen[there]
