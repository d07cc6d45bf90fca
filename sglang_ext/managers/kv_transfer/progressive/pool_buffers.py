"""A rank's KV pool and its auxiliary records, built from the addresses and lengths that SGLang passes to transfer backends."""

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import torch
from sglang.srt.disaggregation.base.conn import KVArgs

from sglang_ext.layers.kernels.lynx.layout import PageTensors
from sglang_ext.layers.kernels.pages import gather_rows, has_whole_words, scatter_rows
from sglang_ext.managers.kv_transfer.link_settings import LinkError
from sglang_ext.managers.kv_transfer.progressive.host_blocks import HostBlocks
from sglang_ext.managers.kv_transfer.wire import LayerRange

# Priority of streams whose kernels a GPU schedules before those of other streams.
FIRST = -1


class _DeviceMemory:
    """Bytes at an address of a CUDA device, in the form that torch wraps without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}


def wrap_memory(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Wrap memory that SGLang owns as uint8 [size]. The memory must outlive the tensor."""
    if device.type == "cuda":
        return torch.as_tensor(_DeviceMemory(address, size), device=device)
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


@dataclass(frozen=True)
class PoolBuffers:
    """The KV pool of one rank.

    Attributes:
        args: SGLang's arguments. Keys of all layers come before values of all layers.
        dtype: Dtype of an element.
        heads: KV heads on this rank.
        key_dim, value_dim: Elements of a head.
        device: Device of the pool.
    """

    args: KVArgs
    dtype: torch.dtype
    heads: int
    key_dim: int
    value_dim: int
    device: torch.device
    _parts: dict[tuple[int, ...], PageTensors] = field(default_factory=dict, init=False, repr=False, compare=False)
    # Streams of threads of links, and of the scheduler's thread where it must not wait for a forward. Their kernels are small, and would
    # otherwise wait behind each large kernel of the model.
    _stream: "torch.cuda.Stream | None" = field(default=None, init=False, repr=False, compare=False)
    _side_stream: "torch.cuda.Stream | None" = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            for name in ("_stream", "_side_stream"):
                object.__setattr__(self, name, torch.cuda.Stream(self.device, priority=FIRST))
            with torch.cuda.stream(self._side_stream):
                # Allocate now. Otherwise the first chunk would wait for the forward while its memory is allocated.
                torch.empty(1, device=self.device)
        widths = [width // self.args.page_size for width in self.args.kv_item_lens]
        expected = [self.heads * dim * self.dtype.itemsize for dim in (self.key_dim, self.value_dim) for _ in range(self.layers)]
        if not widths or widths != expected:
            raise LinkError(
                f"the pool has {len(widths)} buffers of {sorted(set(widths))} bytes per token; backend progressive transfers keys, then "
                f"values, of {sorted(set(expected))}: use --disaggregation-transfer-backend mooncake for this model"
            )

    @property
    def layers(self) -> int:
        """Number of layers in the pool."""
        return len(self.args.kv_data_ptrs) // 2

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token: keys and values of all layers."""
        return sum(self.args.kv_item_lens) // self.args.page_size

    @cached_property
    def keys(self) -> tuple[torch.Tensor, ...]:
        """Keys of each layer, [slots, heads * key_dim], in the pool's own memory."""
        return tuple(self._buffer(layer, self.key_dim) for layer in range(self.layers))

    @cached_property
    def values(self) -> tuple[torch.Tensor, ...]:
        """Values of each layer, [slots, heads * value_dim], in the pool's own memory."""
        return tuple(self._buffer(self.layers + layer, self.value_dim) for layer in range(self.layers))

    def tensors(self, first: int, count: int) -> list[torch.Tensor]:
        """Return the keys, then the values, of ``count`` layers from ``first``."""
        return [*self.keys[first : first + count], *self.values[first : first + count]]

    def parts(self, layers: LayerRange, those: slice) -> PageTensors:
        """Return some of :meth:`tensors` with equal shapes. They are built once and cached."""
        key = layers.first, layers.count, those.start, those.stop
        if key not in self._parts:
            parts = PageTensors.from_tensors(self.tensors(layers.first, layers.count)[those])
            if self._by_kernel(parts.tensors[0]) and parts.table is not None:
                # The thread that builds the table waits for it, because threads of links and the scheduler's thread read it on their own
                # streams.
                self.synchronize()
            self._parts[key] = parts
        return self._parts[key]

    def gather(self, layers: LayerRange, slots: torch.Tensor) -> Iterator[torch.Tensor]:
        """Copy the keys, then the values, of tokens: [layers, tokens, heads * dim] each. Does not wait for a GPU."""
        for parts in self._halves(layers):
            like = parts.tensors[0]
            out = torch.empty(len(parts.tensors), len(slots), like.shape[1], dtype=like.dtype, device=like.device)
            if self._by_kernel(like):
                gather_rows(parts.table, like, slots, out)
            else:
                for tensor, rows in zip(parts.tensors, out, strict=True):
                    torch.index_select(tensor, 0, slots, out=rows)
            yield out

    def scatter(self, layers: LayerRange, slots: torch.Tensor, halves: Sequence[torch.Tensor]) -> None:
        """Write tokens in the form that :meth:`gather` yields."""
        for parts, rows in zip(self._halves(layers), halves, strict=True):
            if self._by_kernel(parts.tensors[0]):
                scatter_rows(parts.table, parts.tensors[0], slots, rows)
            else:
                for tensor, part in zip(parts.tensors, rows, strict=True):
                    tensor[slots] = part

    def _halves(self, layers: LayerRange) -> Iterator[PageTensors]:
        yield self.parts(layers, slice(0, layers.count))
        yield self.parts(layers, slice(layers.count, 2 * layers.count))

    def _by_kernel(self, like: torch.Tensor) -> bool:
        return self.device.type == "cuda" and has_whole_words(like)

    def use_stream(self) -> AbstractContextManager[object]:
        """Context in which threads of links use this pool: on its device, and on one stream with priority over the model's."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    @contextmanager
    def on_side_stream(self, after: "torch.cuda.Event") -> Iterator[None]:
        """Context in which the scheduler uses a GPU stream that waits for ``after``, and for no forward."""
        self._side_stream.wait_event(after)
        with torch.cuda.stream(self._side_stream):
            yield

    @cached_property
    def blocks(self) -> HostBlocks:
        """Host memory for the pool's pages."""
        return HostBlocks(self.device)

    def synchronize(self) -> None:
        """Wait until all threads can read what this thread wrote, on the device or in host memory."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def reached(self) -> Callable[[], None]:
        """Return a function that waits, in any thread, until all threads can read what this thread has written so far."""
        if self.device.type != "cuda":
            return lambda: None
        return torch.cuda.current_stream(self.device).record_event().synchronize

    def copy_to_host(self, parts: Iterable[torch.Tensor], size: int) -> Callable[[], memoryview]:
        """Start to copy parts to host memory, one after another. Return a function that waits for the copies, in any thread.

        Args:
            parts: Contiguous tensors of any dtype, on this device.
            size: Bytes of all parts.
        """
        content, begin = self.blocks.take(size), 0
        for part in parts:
            torch.from_numpy(content[begin : begin + part.nbytes]).copy_(part.view(torch.uint8).flatten(), non_blocking=True)
            begin += part.nbytes
        reached = self.reached()

        def brought() -> memoryview:
            reached()
            return memoryview(content)

        return brought

    def synchronize_links(self) -> None:
        """Wait until the writes that threads of links have launched so far are complete."""
        if self._stream is not None:
            self._stream.synchronize()

    def _buffer(self, index: int, dim: int) -> torch.Tensor:
        found = wrap_memory(self.args.kv_data_ptrs[index], self.args.kv_data_lens[index], self.device)
        return found.view(self.dtype).view(-1, self.heads * dim)


@dataclass(frozen=True)
class AuxRecords:
    """Other data of a request that the decode side needs, such as its first token: a row in each of SGLang's metadata buffers.

    Attributes:
        args: SGLang's arguments. The buffers are in host memory.
    """

    args: KVArgs

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes per row of each buffer."""
        return tuple(self.args.aux_item_lens)

    def read(self, index: int) -> bytes:
        """Copy a request's rows of all buffers, one after the other."""
        return b"".join(
            ctypes.string_at(address + index * size, size) for address, size in zip(self.args.aux_data_ptrs, self.sizes, strict=True)
        )

    def write(self, index: int, record: memoryview) -> None:
        """Write a request's rows.

        Raises:
            LinkError: The record has another size.
        """
        if len(record) != sum(self.sizes):
            raise LinkError(f"an auxiliary record has {len(record)} bytes; here it has {sum(self.sizes)}: start both servers alike")
        begin = 0
        for address, size in zip(self.args.aux_data_ptrs, self.sizes, strict=True):
            ctypes.memmove(address + index * size, bytes(record[begin : begin + size]), size)
            begin += size
