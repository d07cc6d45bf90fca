"""Floating-point operations of one decoded token (AsyncSpade, appendix B, equations 6 to 11)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_ext.config.model_folder import kv_shape


@dataclass(frozen=True)
class ModelShape:
    """What the equations read of a dense model.

    Attributes:
        layers: ``l``.
        hidden: ``H``, size of hidden states.
        heads: ``q``, of queries.
        kv_heads: ``kv``.
        dim: ``h``, of a head.
        inner: ``i``, of the gated feed-forward network.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "ModelShape":
        """From the values of a ``config.json``."""
        kv_heads, dim = kv_shape(config)
        sizes = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
        return cls(*sizes, kv_heads, dim, config["intermediate_size"])

    @property
    def parameters(self) -> int:
        """Of all linear layers of the decoder, whatever is attended to (equation 6)."""
        projections = 4 * self.hidden * self.heads * self.dim + 4 * self.kv_heads * self.dim * self.hidden
        return self.layers * (projections + 6 * self.hidden * self.inner)

    def attention(self, tokens: int) -> int:
        """Of attention over so many tokens in all layers (equations 7 and 10)."""
        return self.layers * 4 * self.heads * self.dim * tokens

    def scoring(self, scored: float) -> int:
        """Of products of the queries with so many keys, or bounds of pages (the second part of equations 8 and 9)."""
        return int(self.layers * 2 * self.heads * self.dim * scored)


def token_flops(shape: ModelShape, method: str, tokens: int, selected: int, page: int = 16) -> int:
    """Of one token on the path that answers (equation 11).

    Args:
        method: ``full``; ``tova`` and ``true-query``, which score every token on that path; ``quest``, which scores pages; ``spade``, whose
            scoring is another rank's; ``spade-between-steps``, whose is not.
        tokens: ``T``, of the context.
        selected: ``C``, tokens that are attended to.
        page: ``P``, tokens of a page.

    Raises:
        KeyError: no equation is of that method.
    """
    scored = {"full": 0, "tova": tokens, "true-query": tokens, "quest": tokens / page, "spade": 0, "spade-between-steps": tokens}[method]
    return shape.parameters + shape.attention(tokens if method == "full" else selected) + shape.scoring(scored)
