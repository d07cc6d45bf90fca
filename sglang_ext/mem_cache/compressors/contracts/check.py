"""Whether a compressor's scores are what the interface says: its dtype and shape, of which nothing waits for the device."""

import torch


class ScoresError(Exception):
    """Scores by which nothing can be chosen; says whose, what they are and what they must be."""


def check_scores(compressor: str, scores: object, shape: tuple[int, ...]) -> None:
    """Refuse what is no float32 tensor of this shape, which ends in [kv_heads, tokens].

    Raises:
        ScoresError: it is none.
    """
    if isinstance(scores, torch.Tensor) and scores.dtype == torch.float32 and scores.shape == shape:
        return
    found = f"{scores.dtype} {list(scores.shape)}" if isinstance(scores, torch.Tensor) else type(scores).__name__
    dimensions = ", ".join(("layers", "kv_heads", "tokens")[-len(shape) :])
    raise ScoresError(
        f"compressor {compressor!r} scored a context with {found}; scores are torch.float32 {list(shape)} [{dimensions}]: "
        "correct its `scores` or `scores_all` (docs/guides/adding-a-compressor.md)"
    )
