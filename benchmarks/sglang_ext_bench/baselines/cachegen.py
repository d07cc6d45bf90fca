"""CacheGen's compression (Liu et al., SIGCOMM 2024, section 5) with a Huffman code instead of its arithmetic coder.

The first of every ten tokens is an anchor of 8 bits. The other tokens store the quantized difference to it, coarser in later layers, with a
step for each channel. The symbols of each layer are entropy coded separately: deflate without matches, which is a Huffman code fitted to
the layer's page. CacheGen fits its distributions per channel, in advance.
"""

import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch

from sglang_ext_bench.baselines.quantized_codec import QuantizedCodec
from sglang_ext_bench.baselines.quantizers import Int8Quantizer, as_bytes, to_float16

# Largest symbol of a difference, for the first, second and last third of the layers.
MOST = (15, 11, 7)
TOKENS = 10


@dataclass(frozen=True)
class CacheGenQuantizer:
    """Quantizer whose stream holds: quantized anchors, float16 steps [layers, channels], uint32 sizes of each layer's symbols, and the
    symbols."""

    name = "cachegen"
    spans_page = True

    @cached_property
    def _anchors(self) -> Int8Quantizer:
        return Int8Quantizer()

    @property
    def options(self) -> dict[str, int]:
        """The options that change the bytes."""
        return {"tokens": TOKENS} | {f"most{third}": most for third, most in enumerate(MOST)}

    def most_bytes(self, layers: int, tokens: int, heads: int, dim: int) -> int:
        """Return the maximum bytes of a stream: deflate stores incompressible data in blocks with a header of 5 bytes."""
        symbols = tokens * heads * dim
        return self._plain_bytes(layers, tokens, heads, dim) + layers * (symbols + symbols // 1000 + 64)

    def encode(self, x: torch.Tensor, layers: int) -> torch.Tensor:
        """Encode anchors, steps, sizes and symbols."""
        anchors = self._anchors.encode(x[:, ::TOKENS], layers)
        deltas = self._deltas(x, self._anchors.decode(anchors, (len(x), -(-x.shape[1] // TOKENS), *x.shape[2:]), layers))
        most = self._most(len(x), layers)
        # A page of one token has no differences, so a zero is appended.
        largest = torch.nn.functional.pad(deltas.abs(), (0, 0, 0, 0, 0, 1)).amax(1, keepdim=True)
        steps = to_float16(largest / most)
        codes = (deltas / steps.float()).nan_to_num_(0).round_()
        symbols = torch.minimum(torch.maximum(codes, -most), most).to(torch.int8).cpu().numpy()
        coded = [_deflate(layer.tobytes()) for layer in symbols]
        sizes = np.array([len(each) for each in coded], "<u4")
        tail = torch.frombuffer(bytearray(b"".join([sizes.tobytes(), *coded])), dtype=torch.uint8)
        return torch.cat([anchors, as_bytes(steps), tail.to(x.device)])

    def decode(self, stream: torch.Tensor, shape: tuple[int, int, int, int], layers: int) -> torch.Tensor:
        """Return anchors plus differences."""
        count, tokens, heads, dim = shape
        fixed = self._plain_bytes(*shape)
        if len(stream) < fixed:
            raise ValueError(f"a stream of {len(stream)} bytes; anchors, steps and sizes alone take {fixed}")
        places = count, -(-tokens // TOKENS), heads, dim
        size = self._anchors.most_bytes(*places)
        anchors = self._anchors.decode(stream[:size], places, layers)
        steps = stream[size : fixed - 4 * count].clone().view(torch.float16).float().view(count, 1, heads, dim)
        sizes, rest = stream[fixed - 4 * count : fixed].cpu().numpy().view("<u4").tolist(), stream[fixed:].cpu().numpy().tobytes()
        if sum(sizes) != len(rest):
            raise ValueError(f"symbols of {len(rest)} bytes, where the sizes add up to {sum(sizes)}")
        symbols, begin = [], 0
        for each in sizes:
            symbols.append(_inflate(rest[begin : begin + each], (tokens - places[1]) * heads * dim))
            begin += each
        codes = torch.from_numpy(np.frombuffer(bytearray(b"".join(symbols)), np.int8)).to(stream.device)
        deltas = codes.view(count, tokens - places[1], heads, dim).float() * steps
        x = anchors.repeat_interleave(TOKENS, 1)[:, :tokens]
        x[:, self._others(tokens)] += deltas
        return x

    def _deltas(self, x: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
        """Return the differences of the other tokens to the decoded anchors."""
        near = anchors.repeat_interleave(TOKENS, 1)[:, : x.shape[1]]
        others = self._others(x.shape[1])
        return x[:, others] - near[:, others]

    def _others(self, tokens: int) -> torch.Tensor:
        place = torch.arange(tokens)
        return place[place % TOKENS > 0]

    def _most(self, count: int, layers: int) -> torch.Tensor:
        """Return the largest symbol of each layer, float32 [layers, 1, 1, 1]. All layers are transferred together."""
        return torch.tensor([MOST[len(MOST) * layer // layers] for layer in range(count)]).float().view(-1, 1, 1, 1)

    def _plain_bytes(self, layers: int, tokens: int, heads: int, dim: int) -> int:
        return self._anchors.most_bytes(layers, -(-tokens // TOKENS), heads, dim) + layers * (2 * heads * dim + 4)


@dataclass(frozen=True)
class CacheGenCodec(QuantizedCodec):
    """Differences of tokens, entropy coded, in pages of 64 tokens."""

    quantizer: ClassVar[CacheGenQuantizer] = CacheGenQuantizer()


def _deflate(symbols: bytes) -> bytes:
    packer = zlib.compressobj(1, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
    return packer.compress(symbols) + packer.flush()


def _inflate(data: bytes, size: int) -> bytes:
    """Decode ``size`` symbols. Raises ``ValueError`` if the data holds another number."""
    unpacker = zlib.decompressobj(-15)
    try:
        symbols = unpacker.decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(f"symbols that cannot be decoded: {error}") from error
    if len(symbols) != size or not unpacker.eof or unpacker.unused_data:
        raise ValueError(f"{len(symbols)} symbols or more of {len(data)} bytes, where {size} are expected")
    return symbols
