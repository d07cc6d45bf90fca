"""Acceptance that a benchmark asks for, in place of what verification finds.

Throughput depends on how many drafts are accepted, and weights without training accept none. With
``SGLANG_EXT_SIMULATE_ACCEPTANCE=0.99`` each draft is accepted with that probability, as long as those before
it were; a request may ask for another one with ``"custom_params": {"kv_acceptance": 0.95}``. Drafting, the
verification over full KV, and the roll-back of what is rejected stay real; the output is of no use.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_EXT_SIMULATE_ACCEPTANCE"
PARAMETER = "kv_acceptance"


@dataclass(frozen=True)
class Simulation:
    """Forced acceptance.

    Attributes:
        probability: that a draft is accepted when all before it were, from 0 to 1, of requests that do not say.
        noise: where its randomness comes from; equal on all ranks.
    """

    probability: float
    noise: torch.Generator

    @classmethod
    def from_environment(cls, device: torch.device, schedule: str) -> "Simulation | None":
        """What :data:`VARIABLE` asks for; None when it is not set.

        Args:
            device: where acceptance is decided.
            schedule: ``--kv-schedule``.

        Raises:
            ValueError: it is not a number from 0 to 1, or the schedule is not lockstep.
        """
        value = os.environ.get(VARIABLE)
        if value is None:
            return None
        if schedule != "lockstep":
            raise ValueError(f"{VARIABLE} is set, and --kv-schedule is {schedule}; use --kv-schedule lockstep, or unset it")
        probability = _probability(value)
        if probability is None:
            raise ValueError(
                f"{VARIABLE} is {value!r}; it is a probability for benchmarks: pass a number from 0 to 1, or unset it"
            )
        logger.warning("sglang-ext: %s=%s, answers are of no use", VARIABLE, value)
        return cls(probability, torch.Generator(device).manual_seed(0))

    def probabilities(self, reqs: Sequence["Req"]) -> list[float]:
        """What each request asks for; :attr:`probability` where that is nothing, or no number from 0 to 1."""
        asked = [_probability((req.sampling_params.custom_params or {}).get(PARAMETER)) for req in reqs]
        return [self.probability if value is None else value for value in asked]

    def accept(
        self, answers: torch.Tensor, drafted: torch.Tensor, probabilities: torch.Tensor
    ) -> torch.Tensor:
        """Drafts accepted of each request: int64 [requests].

        Args:
            probabilities: float [requests].
            answers: int64 [requests, at least 1 + drafts], overwritten with the accepted drafts, so that
                the output and the KV agree.
            drafted: int64 [requests, drafts].
        """
        noise = torch.rand(drafted.shape, generator=self.noise, device=drafted.device)
        lucky = noise < probabilities[:, None]
        kept = lucky.long().cumprod(1)
        answers[:, : drafted.shape[1]] = torch.where(kept.bool(), drafted, answers[:, : drafted.shape[1]])
        return kept.sum(1)


def _probability(value: object) -> float | None:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if 0 <= number <= 1 else None
