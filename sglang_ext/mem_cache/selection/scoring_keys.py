"""Keys for scoring, exact or quantized to 8 or 4 bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_ext.core import SCORE_BITS
from sglang_ext.mem_cache.compressed.layouts.block_layout import PARAMETER, Grid, Quantized, pack_codes, unpack_codes
from sglang_ext.mem_cache.compressors.quantizer import quantize_evenly, whole

if TYPE_CHECKING:
    from sglang_ext.layers.kernels.quantized_keys import QuantizedKeyTensors

EXACT = SCORE_BITS[0]
"""Bits of unchanged keys."""
# Channels of a token and head that share a scale and a zero point, if the number divides the head dimension.
GROUP = 32
# Numbers of keys that are quantized together, on a CPU.
CODED_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class KeySpec:
    """Shape and format of keys, in :data:`SCORE_BITS`; exact keys have ``dtype``. With ``rows``, exact keys and values are stored, too."""

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
        """Bytes per token over all layers, including scales and zero points."""
        heads, exact = self.layers * self.kv_heads, self.dim * self.dtype.itemsize
        if self.bits == EXACT:
            return heads * (2 if self.rows else 1) * exact
        scored = self.dim * self.bits // 8 + 2 * PARAMETER.itemsize * self.dim // self.group
        return heads * (scored + (2 * exact if self.rows else 0))

    def empty(self, tokens: int, device: torch.device) -> torch.Tensor:
        """Memory for exact keys, or values, of ``tokens`` tokens: [layers, tokens, kv_heads, dim]. On a CPU it is taken as it is written."""
        return torch.empty(self.layers, tokens, self.kv_heads, self.dim, dtype=self.dtype, device=device)


class QuantizedKeys:
    """Keys as asymmetric integers by token, head and group of channels, for layers/kernels/quantized_keys.py.

    The codes of a token and head are stored group after group. An 8-bit code is one byte. With 4 bits, a byte has two channels of a
    group: in the lower bits one of the first half, in the upper bits the one with the same index in the second half.

    Attributes:
        codes: int8 [layers, tokens, kv_heads, bytes]. 8-bit codes are shifted to begin at -128.
        words: int32 [layers, tokens, kv_heads, groups]. The lower half of a word is the group's scale, the upper half its zero point, both
            float16.
    """

    def __init__(self, sizes: KeySpec, tokens: int, device: torch.device = torch.device("cpu")):
        self.sizes = sizes
        # XOR mask between a byte of codes and the stored byte.
        self._mask = 128 if sizes.bits == 8 else 0
        of_all = sizes.layers, tokens, sizes.kv_heads
        self.codes = torch.empty(*of_all, sizes.dim * sizes.bits // 8, dtype=torch.int8, device=device)
        self.words = torch.empty(*of_all, sizes.dim // sizes.group, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of the codes, scales and zero points."""
        return self.codes.nbytes + self.words.nbytes

    def clear(self, tokens: int) -> None:
        """Set the first ``tokens`` places to zero."""
        self.codes[:, :tokens].zero_()
        self.words[:, :tokens].zero_()

    def write(self, places: torch.Tensor, keys: torch.Tensor) -> None:
        """Quantize keys, [layers, tokens, kv_heads, dim], and store them in ``places``, int64 [tokens]."""
        codes, words = self._coded(keys)
        self.codes.index_copy_(1, places, codes)
        self.words.index_copy_(1, places, words)

    @property
    def of_kernels(self) -> "QuantizedKeyTensors":
        """The tensors in the form that the selection kernels take."""
        from sglang_ext.layers.kernels.quantized_keys import QuantizedKeyTensors

        return QuantizedKeyTensors(self.codes, self.words, self.sizes.group)

    def read(self, layer: int, places: torch.Tensor) -> torch.Tensor:
        """Dequantize a layer's keys in ``places``, int64 [tokens]: float32 [tokens, kv_heads, dim]."""
        bits, group = self.sizes.bits, self.sizes.group
        bytes_, words = (part[layer].index_select(0, places) for part in (self.codes, self.words))
        packed = (bytes_.view(torch.uint8) ^ self._mask).unflatten(-1, (-1, group * bits // 8))
        scale, zero = words.view(PARAMETER).float().unflatten(-1, (-1, 2)).unbind(-1)
        return whole(Quantized(unpack_codes(packed, bits).flatten(-2)[None], scale[None], zero[None]), Grid(1, group), None)[0]

    def _coded(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize keys, [layers, tokens, kv_heads, dim], into :attr:`codes` and :attr:`words`."""
        bits, group = self.sizes.bits, self.sizes.group
        # The quantizer expects heads, blocks and tokens. All dimensions are treated alike here.
        found = quantize_evenly(keys.float(), Grid(1, group), bits)
        packed = pack_codes(found.codes.unflatten(-1, (-1, group)), bits).flatten(-2) ^ self._mask
        words = torch.stack([found.scale, found.zero], -1).to(PARAMETER).view(torch.int32)
        return packed.view(torch.int8), words.squeeze(-1)


class KeyQuantizer:
    """Quantizes keys in buffers of layers, [slots, kv_heads, dim] each, with equal shapes, into ``held``. They must not move in memory."""

    def __init__(self, keys: Sequence[torch.Tensor], held: QuantizedKeys):
        self._keys, self._held = tuple(keys), held
        self._table = torch.tensor([each.data_ptr() for each in keys], device=keys[0].device)

    def quantize(self, slots: torch.Tensor, ahead: int = 0) -> None:
        """Quantize the keys in ``slots``, int64 [tokens], of all layers, into ``slots + ahead``. Does not wait for the device."""
        if not len(slots):
            return
        if slots.is_cuda:
            from sglang_ext.layers.kernels.quantized_keys import quantize_keys

            quantize_keys(self._table, self._keys[0], slots, self._held.codes, self._held.words, self._held.sizes.group, ahead)
            return
        # All layers together: threads synchronize after each operation.
        for some in slots.split(max(1, CODED_AT_ONCE // (len(self._keys) * self._keys[0][0].numel()))):
            self._held.write(some + ahead, torch.stack([each.index_select(0, some) for each in self._keys]))
