"""What a round of verified decoding costs: bytes that are read and loaded over bandwidths."""

import math
from dataclasses import dataclass

import numpy as np

MAX_DRAFTS = 256
"""Default of the longest draft before a verification, in tokens."""


class CostError(ValueError):
    """Costs that no machine has; the message says which and what to pass."""


@dataclass(frozen=True)
class Costs:
    """What a machine and a load of equal requests cost.

    Attributes:
        weights: bytes that each forward reads (M).
        context: bytes of full KV of a request.
        bandwidth: at which the device reads, bytes per second.
        link: bytes per second from the host.
        memory: bytes of the device for KV: full, copies, and what is being loaded.
        budget: share of the context that a copy keeps (c).
        drafts: of each request in a round (y).
        turnaround: seconds of a round beside its forwards.
        token_seconds: of computing a verified token, beside reading.
        recent: bytes of the context that are the newest tokens: they stay on the device and in each copy.
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
        """Bytes of full KV that a request without it on the device loads to verify."""
        return self.context - self.recent

    @property
    def copy(self) -> float:
        """Bytes that a request reads in a draft step, and holds where its full KV is not on the device."""
        return self.budget * self.loaded + self.recent

    @property
    def resident(self) -> float:
        """Bytes that a request holds whose full KV is on the device."""
        return self.context + self.budget * self.loaded

    @property
    def load_seconds(self) -> float:
        """Of the link for a load."""
        return self.loaded / self.link


def draft_seconds(costs: Costs, requests: float) -> float:
    """A draft step of so many requests."""
    return (costs.weights + requests * costs.copy) / costs.bandwidth


def verify_seconds(costs: Costs, requests: float, tokens: float = 0.0) -> float:
    """A verification of so many requests; below 1, the mean over rounds of which some have none.

    Args:
        tokens: that are verified, of all requests.
    """
    read = np.minimum(requests, 1) * costs.weights + requests * costs.context
    return read / costs.bandwidth + tokens * costs.token_seconds


def round_seconds(costs: Costs, requests: float, resident: float, reloaded: float, tokens: float = 0.0) -> float:
    """A round in which ``requests`` draft and ``resident`` + ``reloaded`` of them verify ``tokens`` tokens (7)."""
    drafting = costs.drafts * draft_seconds(costs, requests)
    return drafting + verify_seconds(costs, resident + reloaded, tokens) + costs.turnaround
