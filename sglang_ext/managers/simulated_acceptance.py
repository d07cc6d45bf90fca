"""Acceptance that a benchmark asks for, in place of what verification finds.

Throughput depends on how many drafts are accepted, and weights without training accept none. With
``--kv-bench-acceptance 0.99`` each draft is accepted with that probability, as long as those before
it were; a request may ask for another one with ``"custom_params": {"kv_acceptance": 0.95}``. Drafting, the
verification over full KV, and the roll-back of what is rejected stay real; the output is of no use, and its ``meta_info``
says so (hooks/frontend.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_ext.config.benchmark_options import request_acceptance

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclass(frozen=True)
class SimulatedAcceptance:
    """Forced acceptance.

    Attributes:
        probability: that a draft is accepted when all before it were, from 0 to 1, of requests that do not say.
        noise: where its randomness comes from; equal on all ranks.
    """

    probability: float
    noise: torch.Generator

    @classmethod
    def of(cls, probability: float | None, device: torch.device) -> "SimulatedAcceptance | None":
        """What ``--kv-bench-acceptance`` asks for, decided on ``device``; None where verification decides."""
        return None if probability is None else cls(probability, torch.Generator(device).manual_seed(0))

    def probabilities(self, reqs: Sequence["Req"]) -> list[float]:
        """What each request asks for; :attr:`probability` where that is nothing."""
        # The frontend refuses what is no probability.
        return [request_acceptance(self.probability, req.sampling_params.custom_params) for req in reqs]

    def draw(self, drafts: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        """Whether each of ``drafts``, [requests, drafts], is accepted if those before it are: bool.

        ``probabilities``: float [requests], of each request's drafts.
        """
        noise = torch.rand(drafts.shape, generator=self.noise, device=drafts.device)
        return noise < probabilities[:, None]
