"""The newest queries of a prompt, sent after a room's auxiliary record. Compression methods select tokens by them, and no cache holds them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch
from msgspec import Meta, Struct

from sglang_ext.managers.kv_transfer.wire import LinkError
from sglang_ext.mem_cache.compressed.queries import QueryWindows

# Bytes of the header that describes the queries.
_MOST_HEADER = 64
# Returns a request's queries as bytes, at most as many as its argument.
QueryReader = Callable[[int], bytes]


class _Shape(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Shape of queries [layers, tokens, heads, dim]; ``end``: the position after the newest token."""

    layers: Annotated[int, Meta(ge=1, le=4096)]
    heads: Annotated[int, Meta(ge=1, le=1 << 16)]
    dim: Annotated[int, Meta(ge=1, le=1 << 16)]
    dtype: Annotated[str, Meta(max_length=16)]
    end: Annotated[int, Meta(ge=0, le=1 << 31)]


@dataclass(frozen=True)
class PromptQueries:
    """Converts queries of one rank's requests to bytes and back.

    Attributes:
        windows: Stores the queries.
        shape: Layers, heads and channels of the rank's queries.
    """

    windows: QueryWindows
    shape: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's queries."""
        layers, heads, dim = self.shape
        return layers * heads * dim * self.dtype.itemsize

    @property
    def most_bytes(self) -> int:
        """Maximum bytes of a request's queries; 0 if no method selects by queries."""
        return _MOST_HEADER + self.windows.window * self.token_bytes if self.windows.window else 0

    def read(self, row: int, end: int, most: int) -> bytes:
        """Return the newest queries of a prompt of ``end`` tokens in at most ``most`` bytes; empty if the newest ones are not stored."""
        count = min(self.windows.window, (most - _MOST_HEADER) // self.token_bytes)
        found = self.windows.get(row, end, count) if count > 0 else None
        if found is None:
            return b""
        queries, positions = found
        positions = positions.tolist()
        if positions != list(range(end - len(positions), end)):
            return b""
        header = msgspec.msgpack.encode(_Shape(*self.shape, self._dtype_name, end))
        header = (bytes([len(header)]) + header).ljust(_MOST_HEADER, b"\0")
        return header + queries.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()

    def write(self, row: int, data: bytes) -> None:
        """Store received queries, as :meth:`parse` accepts them, for the request in ``row``. Does nothing without data."""
        if not data or not self.most_bytes:
            return
        shape = self.parse(data)
        layers, heads, dim = self.shape
        queries = torch.frombuffer(bytearray(data[_MOST_HEADER:]), dtype=self.dtype).view(layers, -1, heads, dim)
        self.windows.insert(row, shape.end, queries)

    def parse(self, data: bytes) -> _Shape:
        """Decode the header of queries. Raise ``LinkError`` if they are of another model or dtype."""
        try:
            shape = msgspec.msgpack.decode(data[1 : 1 + data[0]], type=_Shape)
        except msgspec.MsgspecError as error:
            raise LinkError(f"the prompt's queries are not of this version: {error}; install the same version on both sides") from error
        theirs, ours = (shape.layers, shape.heads, shape.dim, shape.dtype), (*self.shape, self._dtype_name)
        if theirs != ours:
            raise LinkError(
                f"the prompt's queries are {theirs} at the sender and {ours} at the receiver; give both servers the same --dtype"
            )
        size = len(data) - _MOST_HEADER
        if size % self.token_bytes or size > self.windows.window * self.token_bytes:
            raise LinkError(
                f"the prompt's queries have {size} bytes; expected are {self.token_bytes} per token, of {self.windows.window} at most"
            )
        return shape

    @property
    def _dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")
