"""Layouts in which a warp holds a row's exact tokens, 32 at a time."""

from dataclasses import dataclass

from triton.experimental.gluon import language as gl

from sglang_ext.layers.kernels.gluon.fragments import layout, spans


@dataclass(frozen=True)
class ExactFragments:
    """Constants of a kernel over heads of one size.

    Attributes:
        dim: channels of keys, and of values: 64 or 128.
        group: queries that share a KV head, at most 16.
    """

    dim: int
    group: int

    @property
    def columns(self) -> int:
        """Of B: the queries, filled up."""
        return 8 if self.group <= 8 else 16

    @property
    def exact_keys(self) -> gl.DistributedLinearLayout:
        """Of 32 exact keys as they lie, [tokens, channels]."""
        dim = self.dim
        return layout([32, dim], [1, 2, 4, *spans(32, dim), 8 * dim, 16 * dim], [8, 16, dim, 2 * dim, 4 * dim])

    def _exact_values(self, neighbours: int) -> gl.DistributedLinearLayout:
        dim = self.dim
        inside = spans(1, dim // 8)
        registers = [*inside[:neighbours], dim, *inside[neighbours:], 8 * dim, 16 * dim]
        return layout([32, dim], registers, [2 * dim, 4 * dim, dim // 8, dim // 4, dim // 2])

    @property
    def exact_values(self) -> gl.DistributedLinearLayout:
        """Of 32 exact values as they lie, [tokens, channels]."""
        return self._exact_values(len(spans(1, self.dim // 8)))

    @property
    def exact_paired(self) -> gl.DistributedLinearLayout:
        """The same, but two channels of a token are followed by those of the token beside it in a fragment."""
        return self._exact_values(1)
