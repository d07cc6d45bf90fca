"""The cost of a round of verified decoding: bytes read and loaded, divided by bandwidths."""

import math
from dataclasses import dataclass

import numpy as np

MAX_DRAFTS = 256
"""Default of the maximum draft length before a verification, in tokens."""


class CostError(ValueError):
    """Impossible costs. The message names the value and the allowed range."""


@dataclass(frozen=True)
class Costs:
    """Costs of a machine under a load of equal requests.

    Attributes:
        weights: Bytes that each forward reads (M).
        context: Bytes of full KV per request.
        bandwidth: Read bandwidth of the device, bytes per second.
        link: Bandwidth from the host, bytes per second.
        memory: Device memory for full KV, compressed KV and loads in progress, bytes.
        budget: Share of the context that compressed KV keeps (c).
        drafts: Drafts per request and round (y).
        turnaround: Time of a round outside its forwards, seconds.
        token_seconds: Compute time per verified token, in addition to reading, seconds.
        recent: Bytes of the context's newest tokens, which stay on the device and in all compressed KV.
    """

    weights: float
    context: float
    bandwidth: float
    link: float
    memory: float
    budget: float
    drafts: int = 16
    turnaround: float = 0.0
    token_seconds: float = 0.0
    recent: float = 0.0

    def __post_init__(self):
        for name in ("weights", "memory", "turnaround", "token_seconds", "recent"):
            self._check(name, getattr(self, name) >= 0, "0 or above")
        for name in ("context", "bandwidth", "link"):
            self._check(name, getattr(self, name) > 0, "above 0")
        self._check("budget", 0 < self.budget <= 1, "a share above 0 and up to 1")
        self._check("drafts", self.drafts >= 1, "at least 1")
        self._check("recent", self.recent < self.context, f"below the context's {self.context:g}")

    def _check(self, name: str, holds: bool, allowed: str) -> None:
        value = getattr(self, name)
        if not (math.isfinite(value) and holds):
            raise CostError(f"{name} {value!r}: pass a finite number, {allowed}")

    @property
    def loaded(self) -> float:
        """Bytes of full KV that an offloaded request loads to verify."""
        return self.context - self.recent

    @property
    def compressed_bytes(self) -> float:
        """Bytes that a request reads in a draft step. An offloaded request holds as many."""
        return self.budget * self.loaded + self.recent

    @property
    def resident(self) -> float:
        """Bytes that a request holds if its full KV is on the device."""
        return self.context + self.budget * self.loaded

    @property
    def load_seconds(self) -> float:
        """Link time of a load, seconds."""
        return self.loaded / self.link


def draft_seconds(costs: Costs, requests: float) -> float:
    """Seconds of a draft step of ``requests`` requests."""
    return (costs.weights + requests * costs.compressed_bytes) / costs.bandwidth


def verify_seconds(costs: Costs, requests: float, tokens: float = 0.0) -> float:
    """Seconds of a verification of ``requests`` requests. Below 1, the mean over rounds of which some have no verification.

    Args:
        tokens: Verified tokens of all requests.
    """
    read = np.minimum(requests, 1) * costs.weights + requests * costs.context
    return read / costs.bandwidth + tokens * costs.token_seconds


def round_seconds(costs: Costs, requests: float, resident: float, reloaded: float, tokens: float = 0.0) -> float:
    """Seconds of a round with ``requests`` that draft, of which ``resident`` + ``reloaded`` verify ``tokens`` tokens (7)."""
    drafting = costs.drafts * draft_seconds(costs, requests)
    return drafting + verify_seconds(costs, resident + reloaded, tokens) + costs.turnaround
