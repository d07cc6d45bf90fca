"""Whether a compressor's scores are what the interface says: its dtype and shape, of which nothing waits for the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ScoresError(Exception):
    """Scores by which nothing can be chosen; says whose, what they are and what they must be."""


def check_scores(compressor: str, scores: object, shape: tuple[int, ...], device: torch.device) -> None:
    """Refuse what is no float32 tensor of this shape, which ends in [kv_heads, tokens], on this device.

    Raises:
        ScoresError: it is none.
    """
    if isinstance(scores, torch.Tensor) and scores.dtype == torch.float32 and scores.shape == shape and scores.device == device:
        return
    found = f"{scores.dtype} {list(scores.shape)} on {scores.device}" if isinstance(scores, torch.Tensor) else type(scores).__name__
    dimensions = ", ".join(("layers", "kv_heads", "tokens")[-len(shape) :])
    raise ScoresError(
        f"compressor {compressor!r} scored a context with {found}; scores are torch.float32 {list(shape)} [{dimensions}] on {device}: "
        "correct its `scores` or `scores_all` (docs/guides/adding-a-compressor.md)"
    )


@contextmanager
def reported(compressor: str) -> Iterator[None]:
    """Let what a user's own method raises cost its copies, not the server.

    Raises:
        ScoresError: names the method and what it raised.
    """
    try:
        yield
    except (ScoresError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ScoresError(
            f"compressor {compressor!r} raised {type(error).__name__}: {error}: correct its class (docs/guides/adding-a-compressor.md)"
        ) from error
