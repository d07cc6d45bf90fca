"""Memory of a rank's transfers: its KV pool and auxiliary records, at the addresses that SGLang passes, and host memory for pages."""

import ctypes
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt.disaggregation.base.conn import KVArgs

from sglang_ext.device import SideStream
from sglang_ext.layers.kernels.lynx.layout import PageTensors
from sglang_ext.layers.kernels.kv_copies import gather_rows, has_whole_words, scatter_rows
from sglang_ext.managers.kv_transfer.wire import LayerRange, LinkError

logger = logging.getLogger(__name__)

# numpy asks the kernel for huge pages, which need large contiguous memory.
BLOCK = 1 << 26
# Alignment of pieces, in bytes.
ALIGNED = 64
# Blocks that are kept when none of their pieces is used, since memory that was written before needs no page faults. On a CPU: as many as a
# peer encodes ahead (decode_peers.py). For a GPU: more if rooms need them, since a receiver holds anchors until their residuals arrive.
KEPT, KEPT_PINNED = 16, 128
# For a GPU: if fewer blocks are unused, a thread pins more, so that the caller of ``take`` does not wait for the kernel.
AHEAD = 4


class HostBlocks:
    """Cuts blocks of host memory into pieces. Any thread may call it. A block is reused or freed once none of its pieces is used.

    For a GPU, blocks are pinned, so that its copy engines can access them. A thread pins more before they are needed, up to ``KEPT_PINNED``.
    Further blocks are not kept, and are copied slower. Pieces of one lane share blocks, so that long-lived pieces do not hold blocks of
    short-lived ones.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Memory that copies to the device may still read, and the events after which they do not.
        self._pending_copies: deque[tuple[torch.cuda.Event, memoryview]] = deque()
        self._lock = threading.Lock()
        self._kept: list[np.ndarray] = [_pinned(device) for _ in range(KEPT)] if device.type == "cuda" else []
        self._pinning, self._expected = False, 0
        self._most_kept = KEPT_PINNED if device.type == "cuda" else KEPT
        # By lane, the unused rest of its current block.
        self._rest: dict[int, np.ndarray] = {}

    def expect(self, size: int) -> None:
        """For a GPU: pin this many bytes in a background thread, up to ``KEPT_PINNED`` blocks. A link is faster than the kernel pins."""
        with self._lock:
            self._expected = min(size // BLOCK, self._most_kept)
            self._pin_ahead()

    def take(self, size: int, lane: int = 0) -> np.ndarray:
        """Return uint8 [size] of uninitialized memory for the caller alone. Pieces of one ``lane`` become free at about the same time."""
        with self._lock:
            rest = self._rest.pop(lane, None)
            if rest is None or size > len(rest):
                rest = None
                rest = self._block(size)[:]
                self._pin_ahead()
            taken, self._rest[lane] = rest[:size], rest[-(-size // ALIGNED) * ALIGNED :]
        return taken

    def take_unshared(self, size: int) -> np.ndarray:
        """Return uint8 [size] for data that is kept until other parts of its room arrive. On a CPU, it shares no block."""
        return self.take(size) if self._device.type == "cuda" else np.empty(size, np.uint8)

    def _block(self, size: int) -> np.ndarray:
        """Return an unused block, or a new one."""
        for place in range(len(self._kept)):
            if len(self._kept[place]) >= size and self._is_unused(place):
                return self._kept[place]
        # A block that is being pinned counts as kept.
        keep = len(self._kept) + self._pinning < self._most_kept and size <= BLOCK
        block = _pinned(self._device) if keep and self._device.type == "cuda" else np.empty(max(size, BLOCK), np.uint8)
        if keep:
            self._kept.append(block)
        return block

    def _is_unused(self, place: int) -> bool:
        # Pieces are views that hold a reference to their block. The list and this call hold one each.
        return sys.getrefcount(self._kept[place]) == 2

    def _pin_ahead(self) -> None:
        if self._device.type == "cuda" and not self._pinning and self._lacks_pinned():
            self._pinning = True
            threading.Thread(target=self._pin, name="kv-blocks", daemon=True).start()

    def _lacks_pinned(self) -> bool:
        kept = len(self._kept)
        return kept < self._expected or kept < self._most_kept and sum(map(self._is_unused, range(kept))) < AHEAD

    def _pin(self) -> None:
        while self._pinning:
            block = _pinned(self._device)
            with self._lock:
                self._kept.append(block)
                del block
                self._pinning = self._lacks_pinned()

    def to_device(self, content: memoryview) -> torch.Tensor:
        """Return the bytes of a page on the device, uint8 [bytes]; on a CPU the same memory, if it is writable. Does not wait for a GPU."""
        found = torch.frombuffer(bytearray(content) if content.readonly else content, dtype=torch.uint8)
        if self._device.type != "cuda":
            return found
        there = found.to(self._device, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        with self._lock:
            self._pending_copies.append((event, content))
            while self._pending_copies and self._pending_copies[0][0].query():
                self._pending_copies.popleft()
        return there


def _pinned(device: torch.device) -> np.ndarray:
    """Allocate a block that the GPU's copy engines can access; an ordinary one if the system allows no more pinned memory."""
    try:
        # A new thread uses the first GPU, which need not be this rank's.
        with torch.cuda.device(device):
            return torch.empty(BLOCK, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError as error:
        logger.warning("pinning %d bytes of host memory for links failed: %s; copies are slower: raise ulimit -l", BLOCK, error)
        return np.empty(BLOCK, np.uint8)


@dataclass(frozen=True)
class PoolBuffers:
    """The KV pool of one rank: ``heads`` KV heads of ``key_dim`` and ``value_dim`` elements. In SGLang's ``args`` keys come before values."""

    args: KVArgs
    dtype: torch.dtype
    heads: int
    key_dim: int
    value_dim: int
    device: torch.device
    _parts: dict[tuple[int, int], PageTensors] = field(default_factory=dict, init=False, repr=False, compare=False)
    # Streams of threads of links, and of the scheduler's thread where it must not wait for a forward. Their kernels are small, and would
    # otherwise wait behind each large kernel of the model.
    _link_stream: SideStream = field(init=False, repr=False, compare=False)
    _side_stream: SideStream = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("_link_stream", "_side_stream"):
            object.__setattr__(self, name, SideStream(self.device, first=True))
        with self._side_stream.after(None):
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

    @cached_property
    def layer_range(self) -> LayerRange:
        """All layers of the pool, which each part of a room holds."""
        return LayerRange(0, self.layers)

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

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The keys, then the values, of all layers."""
        return self.keys + self.values

    def parts(self, those: slice) -> PageTensors:
        """Return some of :attr:`tensors` with equal shapes. They are built once and cached."""
        key = those.start, those.stop
        if key not in self._parts:
            parts = PageTensors.from_tensors(self.tensors[those])
            if self._by_kernel(parts.tensors[0]) and parts.table is not None:
                # The thread that builds the table waits for it, because threads of links and the scheduler's thread read it on their own
                # streams.
                self.synchronize()
            self._parts[key] = parts
        return self._parts[key]

    def gather(self, slots: torch.Tensor) -> Iterator[torch.Tensor]:
        """Copy the keys, then the values, of tokens: [layers, tokens, heads * dim] each. Does not wait for a GPU."""
        for parts in self._halves():
            like = parts.tensors[0]
            out = torch.empty(len(parts.tensors), len(slots), like.shape[1], dtype=like.dtype, device=like.device)
            if self._by_kernel(like):
                gather_rows(parts.table, like, slots, out)
            else:
                for tensor, rows in zip(parts.tensors, out, strict=True):
                    torch.index_select(tensor, 0, slots, out=rows)
            yield out

    def scatter(self, slots: torch.Tensor, halves: Sequence[torch.Tensor]) -> None:
        """Write tokens in the form that :meth:`gather` yields."""
        for parts, rows in zip(self._halves(), halves, strict=True):
            if self._by_kernel(parts.tensors[0]):
                scatter_rows(parts.table, parts.tensors[0], slots, rows)
            else:
                for tensor, part in zip(parts.tensors, rows, strict=True):
                    tensor[slots] = part

    def _halves(self) -> tuple[PageTensors, PageTensors]:
        return self.parts(slice(0, self.layers)), self.parts(slice(self.layers, 2 * self.layers))

    def _by_kernel(self, like: torch.Tensor) -> bool:
        return self.device.type == "cuda" and has_whole_words(like)

    def use_stream(self) -> AbstractContextManager[object]:
        """Context in which threads of links use this pool: on its device, and on one stream with priority over the model's."""
        return self._link_stream.after(None)

    def on_side_stream(self, after: "torch.cuda.Event") -> AbstractContextManager[object]:
        """Context in which the scheduler uses a GPU stream that waits for ``after``, and for no forward."""
        return self._side_stream.after(after)

    @cached_property
    def blocks(self) -> HostBlocks:
        """Host memory for the pool's pages."""
        return HostBlocks(self.device)

    def synchronize(self) -> None:
        """Wait until all threads can read what this thread wrote, on the device or in host memory."""
        self.reached()()

    def reached(self) -> Callable[[], None]:
        """Return a function that waits, in any thread, until all threads can read what this thread has written so far."""
        if self.device.type != "cuda":
            return lambda: None
        return torch.cuda.current_stream(self.device).record_event().synchronize

    def copy_to_host(self, parts: Iterable[torch.Tensor], size: int) -> Callable[[], memoryview]:
        """Start to copy contiguous tensors of ``size`` bytes in all to host memory. Return a function that waits, in any thread."""
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
        with self.use_stream():
            self.reached()()

    def _buffer(self, index: int, dim: int) -> torch.Tensor:
        """Wrap memory that SGLang owns, which must outlive the tensor: [slots, heads * dim]."""
        address, size = self.args.kv_data_ptrs[index], self.args.kv_data_lens[index]
        if self.device.type == "cuda":
            interface = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}
            found = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=self.device)
        else:
            found = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
        return found.view(self.dtype).view(-1, self.heads * dim)


@dataclass(frozen=True)
class AuxRecords:
    """Other data of a request that the decode side needs, such as its first token: a row in each of SGLang's buffers in host memory."""

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
        """Write a request's rows. Raise ``LinkError`` if the record has another size."""
        if len(record) != sum(self.sizes):
            raise LinkError(f"an auxiliary record has {len(record)} bytes; here it has {sum(self.sizes)}: start both servers alike")
        begin = 0
        for address, size in zip(self.args.aux_data_ptrs, self.sizes, strict=True):
            ctypes.memmove(address + index * size, bytes(record[begin : begin + size]), size)
            begin += size
