"""Odd polynomials through a few points: products of a few numbers instead of a table, or of a search in it."""

import torch


def odd_polynomial(places: torch.Tensor, values: torch.Tensor, error: float) -> tuple[float, float, float]:
    """``(a, b, c)`` with ``x * (a + x ** 2 * (b + x ** 2 * c))`` within ``error`` of ``values``; of the lowest degree that is.

    Args:
        places, values: float64 [count]; both symmetrical about 0, else there is none.

    Raises:
        ValueError: none comes so near.
    """
    for count in (1, 2, 3):
        powers = torch.stack([places ** (2 * power + 1) for power in range(count)], -1)
        found = torch.linalg.lstsq(powers, values[:, None], driver="gelsd").solution[:, 0]
        off = float((powers @ found - values).abs().max())
        if off <= error:
            return tuple(found.tolist() + [0.0] * (3 - count))
    raise ValueError(
        f"values {values.tolist()} at {places.tolist()} are {off:.0e} off the nearest odd polynomial of fifth degree; allowed "
        f"are {error:.0e}: give values that are symmetrical about 0, and nearly even"
    )
