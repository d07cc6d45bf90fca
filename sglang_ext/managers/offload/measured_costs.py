"""What rounds cost, from what they were seen to take.

A draft's time tells how fast the device reads: weights and copies, launches among it. What a round takes beside its drafts
and beside reading full KV at that speed is computing the verified tokens, and a turnaround: the host's part.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from sglang_ext.managers.offload.costs import Costs

# Seconds per byte are no shorter than this share of what a draft's time tells.
LEAST_SHARE = 1e-3


class Draft(NamedTuple):
    """A draft step.

    Attributes:
        requests: in it.
        seconds: that it took.
    """

    requests: int
    seconds: float


class Rest(NamedTuple):
    """A round without its drafts.

    Attributes:
        requests: that verified.
        tokens: that were verified.
        seconds: that it took.
    """

    requests: int
    tokens: int
    seconds: float


def measured(
    draft: Draft,
    rests: Sequence[Rest],
    *,
    weights: float,
    context: float,
    link: float,
    memory: float,
    budget: float,
    drafts: int,
) -> Costs:
    """Costs that explain the times best (least squares, nothing below 0).

    Where launches last longer than reading, as with small models, a verification takes less than reading at the speed of a draft:
    then it tells the speed, and weights stand for what each forward takes whatever it reads.

    Args:
        draft: as of now.
        rests: of some rounds, of which one at least has a verification.
        weights: bytes of the model.
        context: bytes of full KV of a request; the others as of :class:`~sglang_ext.managers.offload.costs.Costs`.

    Raises:
        CostError: a time is not above 0.
    """
    known = Costs(weights, context, 1.0, link, memory, budget, drafts)
    copies = draft.requests * known.copy
    verifying = np.array([rest.requests > 0 for rest in rests])
    # Beside what a forward takes that reads as much as a draft does.
    seconds = np.array([rest.seconds for rest in rests]) - verifying * draft.seconds
    read = np.array([rest.requests * context for rest in rests]) - verifying * copies
    tokens = np.array([rest.tokens for rest in rests], dtype=float)
    per_byte = longest = draft.seconds / (weights + copies)
    if (seconds - longest * read).sum() < 0:
        _, seen = _fit(read / context, seconds)
        per_byte = min(longest, max(seen / context, LEAST_SHARE * longest))
    turnaround, per_token = _fit(tokens, seconds - per_byte * read)
    bandwidth = 1 / per_byte if per_byte else 0.0
    each = max(0.0, draft.seconds * bandwidth - copies)
    return replace(known, weights=each, bandwidth=bandwidth, turnaround=turnaround, token_seconds=per_token)


def _fit(amounts: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """A constant and a factor of ``amounts``, neither below 0, that sum up to ``seconds`` best."""
    found, _ = nnls(np.stack([np.ones_like(amounts), amounts], axis=1), seconds)
    return float(found[0]), float(found[1])
