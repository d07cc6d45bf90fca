"""Simulated acceptance for benchmarks: draft tokens are accepted at random instead of by comparison with the full KV.

Throughput depends on the acceptance rate, and a model with random weights accepts no drafts. With ``--kv-bench-acceptance 0.99`` each
draft is accepted with that probability if the ones before it were. A request may ask for another probability with
``"custom_params": {"kv_acceptance": 0.95}``. Drafting, the verification over full KV and the roll-back of rejected drafts stay real.
The output is useless, and its ``meta_info`` marks it (hooks/frontend.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_ext.config.request_params import request_acceptance

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass(frozen=True)
class SimulatedAcceptance:
    """Decides at random which drafts are accepted.

    Attributes:
        probability: Probability, from 0 to 1, that a draft is accepted if the ones before it were, for requests that ask for no other.
        noise: Source of the randomness; equal on all ranks.
    """

    probability: float
    noise: torch.Generator

    @classmethod
    def of(cls, probability: float | None, device: torch.device) -> "SimulatedAcceptance | None":
        """What ``--kv-bench-acceptance`` asks for, on ``device``; None if drafts are really verified."""
        return None if probability is None else cls(probability, torch.Generator(device).manual_seed(0))

    def probabilities(self, reqs: Sequence["Req"]) -> list[float]:
        """The probability that each request asks for; :attr:`probability` if it asks for none."""
        # The frontend refuses values that are no probability.
        return [request_acceptance(self.probability, req.sampling_params.custom_params) for req in reqs]

    def draw(self, drafts: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        """Whether each of ``drafts``, [requests, drafts], is accepted if the ones before it are: bool of the same shape.

        ``probabilities``: float [requests].
        """
        noise = torch.rand(drafts.shape, generator=self.noise, device=drafts.device)
        return noise < probabilities[:, None]
