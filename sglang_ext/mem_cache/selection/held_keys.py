"""Keys that are held for scoring: as they are, or in 8 or 4 bits, of which scoring makes numbers again; and K and V that are sent back."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property

import torch

from sglang_ext.mem_cache.compressed.formats.packed_layout import PARAMETER, Grid, Quantized, pack_codes, unpack_codes
from sglang_ext.mem_cache.compressors.contracts.quantizer import whole
from sglang_ext.mem_cache.compressors.plain_int import PlainInt

EXACT = 16
SCORE_BITS = (EXACT, 8, 4)
"""Of ``--kv-score-bits``: as they are, or so many."""
# Channels of a token and head that share a scale and a zero point, where they divide the head.
GROUP = 32


@dataclass(frozen=True)
class KeySizes:
    """Of keys.

    Attributes:
        layers, kv_heads, dim: of the model's attention.
        dtype: of exact keys.
        bits: of :data:`SCORE_BITS`.
        rows: whether exact keys and values are held, too.
    """

    layers: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    bits: int = EXACT
    rows: bool = False

    @property
    def group(self) -> int:
        """Channels that share a scale."""
        return GROUP if self.dim % GROUP == 0 else self.dim

    @property
    def token_bytes(self) -> int:
        """Of a token over all layers, scales and zero points among them."""
        heads, exact = self.layers * self.kv_heads, self.dim * self.dtype.itemsize
        if self.bits == EXACT:
            return heads * (2 if self.rows else 1) * exact
        scored = self.dim * self.bits // 8 + 2 * PARAMETER.itemsize * self.dim // self.group
        return heads * (scored + (2 * exact if self.rows else 0))


class HeldKeys(ABC):
    """So many tokens' keys in all layers; memory is taken as they are written."""

    @abstractmethod
    def write(self, start: int, keys: torch.Tensor) -> None:
        """Hold keys of tokens from place ``start`` on: [layers, tokens, kv_heads, dim]."""

    @abstractmethod
    def read(self, layer: int, places: torch.Tensor) -> torch.Tensor:
        """What is held of a layer in places, int64 [tokens]: [tokens, kv_heads, dim]."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes, once all are written."""


class ExactKeys(HeldKeys):
    """As they are.

    Args:
        sizes: of keys.
        tokens: how many.
        device: where they lie; on a GPU all memory is taken at once.
    """

    def __init__(self, sizes: KeySizes, tokens: int, device: torch.device = torch.device("cpu")):
        self._keys = torch.empty(sizes.layers, tokens, sizes.kv_heads, sizes.dim, dtype=sizes.dtype, device=device)

    def of_layers(self) -> tuple[torch.Tensor, ...]:
        """All that is held, of each layer: [tokens, kv_heads, dim]."""
        return self._keys.unbind()

    def between(self, start: int, end: int) -> torch.Tensor:
        """What is held in places from ``start`` to before ``end``: a view, [layers, tokens, kv_heads, dim]."""
        return self._keys[:, start:end]

    def write(self, start: int, keys: torch.Tensor) -> None:
        """As :meth:`HeldKeys.write`."""
        self._keys[:, start : start + keys.shape[1]] = keys

    def read(self, layer: int, places: torch.Tensor) -> torch.Tensor:
        """As :meth:`HeldKeys.read`."""
        return self._keys[layer].index_select(0, places)

    def rows(self, layer: int, places: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        """What is held of a layer in places and heads, int64 [rows] each: [rows, dim]."""
        return self._keys[layer, places, heads]

    @property
    def nbytes(self) -> int:
        """As :attr:`HeldKeys.nbytes`."""
        return self._keys.nbytes


class CodedKeys(HeldKeys):
    """As asymmetric integers by token, head and group of channels (compressors/plain_int.py)."""

    def __init__(self, sizes: KeySizes, tokens: int):
        self._sizes = sizes
        of_all = sizes.layers, tokens, sizes.kv_heads
        self._codes = torch.empty(*of_all, sizes.dim * sizes.bits // 8, dtype=torch.uint8)
        self._scale, self._zero = (torch.empty(*of_all, sizes.dim // sizes.group, dtype=PARAMETER) for _ in "sz")

    @cached_property
    def _grid(self) -> Grid:
        return Grid(1, self._sizes.group)

    def write(self, start: int, keys: torch.Tensor) -> None:
        """As :meth:`HeldKeys.write`."""
        places = slice(start, start + keys.shape[1])
        # Of a quantizer heads, blocks and tokens; all are alike here.
        found = PlainInt(bits=self._sizes.bits).quantize(keys.float(), self._grid)
        self._codes[:, places] = pack_codes(found.codes, self._sizes.bits)
        self._scale[:, places], self._zero[:, places] = found.scale, found.zero

    def read(self, layer: int, places: torch.Tensor) -> torch.Tensor:
        """As :meth:`HeldKeys.read`; float32."""
        codes, scale, zero = (part[layer].index_select(0, places) for part in (self._codes, self._scale, self._zero))
        block = Quantized(unpack_codes(codes, self._sizes.bits)[None], scale[None].float(), zero[None].float())
        return whole(block, self._grid, None)[0]

    @property
    def nbytes(self) -> int:
        """As :attr:`HeldKeys.nbytes`."""
        return self._codes.nbytes + self._scale.nbytes + self._zero.nbytes


def held_keys(sizes: KeySizes, tokens: int, device: torch.device = torch.device("cpu")) -> HeldKeys:
    """Room for so many tokens; in few bits on a CPU alone."""
    return ExactKeys(sizes, tokens, device) if sizes.bits == EXACT else CodedKeys(sizes, tokens)


class HeldRows:
    """Exact keys and values of so many tokens in all layers; memory is taken as they are written.

    Args:
        sizes: of keys; of values the same.
        tokens: how many.
        keys: those that are scored, where they are exact; else there are others beside them.
        device: where they lie.

    Attributes:
        values: of all.
    """

    def __init__(self, sizes: KeySizes, tokens: int, keys: HeldKeys, device: torch.device = torch.device("cpu")):
        self._keys = keys if isinstance(keys, ExactKeys) else ExactKeys(sizes, tokens, device)
        self.values = ExactKeys(sizes, tokens, device)
        self._scored = keys

    def write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold those of tokens from place ``start`` on, [layers, tokens, kv_heads, dim] each; scored keys were written."""
        if self._keys is not self._scored:
            self._keys.write(start, keys)
        self.values.write(start, values)

    def read(self, layer: int, places: torch.Tensor, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer in places and heads, int64 [rows] each: [rows, dim] each."""
        return self._keys.rows(layer, places, heads), self.values.rows(layer, places, heads)
