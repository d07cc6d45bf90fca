"""Messages between an inference rank and a cache rank: tagged msgspec structs in MessagePack, with bounds on each field.

A message is one ZMQ frame. Queries, keys, values and selected tokens are stored in the exchange buffer (:class:`ExchangeLayout`), whose
words say what is written. Each message of a cache rank names its epoch. The epoch numbers the processes that one inference rank starts for a
cache rank.
"""

import math
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple

import torch
from msgspec import Meta

from sglang_ext.managers.kv_transfer.wire import Message, make_decoder

VERSION = 9
MAX_MESSAGE_BYTES = 1 << 20
# Tokens in a block of keys, and of values. Blocks are the unit of transfer, storage and sharing.
BLOCK = 64
MAX_LANES, MAX_LAYERS, MOST_BLOCKS, MAX_PLACES = 1 << 12, 1 << 12, 1 << 22, 1 << 12
# Maximum queries of one selection request.
MOST_WINDOW = 64
# Maximum blocks in one message.
MAX_BLOCKS_PER_LEASE = 1 << 14
# Maximum characters of a refusal's reason.
MAX_REASON_CHARS = 2048

# Bits of the number in a 64-bit word of the exchange buffer; enough for a server that runs for years. The other bits hold the epoch.
NUMBER_BITS = 40
# Equal to those of layers/kernels/exchange_kernels.py, which is not imported on a CPU.
LANE_WORDS, DONE, CHOSEN, QUESTION_NUMBERS = 8, 2, 4, 3
# Granularity of CUDA allocations, so that the IPC handle covers no other allocation.
GRAIN = 2 << 20

Epoch = Annotated[int, Meta(ge=1, lt=1 << (63 - NUMBER_BITS))]
Lane = Annotated[int, Meta(ge=0, lt=MAX_LANES)]
LayerIndex = Annotated[int, Meta(ge=0, lt=MAX_LAYERS)]
LayerCount = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
Block = Annotated[int, Meta(ge=0, lt=MOST_BLOCKS)]
Sequence = Annotated[int, Meta(ge=1, lt=1 << 62)]
Position = Annotated[int, Meta(ge=0, le=1 << 31)]
Size = Annotated[int, Meta(ge=1, le=1 << 16)]
Written = Annotated[int, Meta(ge=0, lt=1 << NUMBER_BITS)]


def epoch_word(epoch: int, number: int) -> int:
    """Return the word of a number in a process's epoch."""
    return (epoch << NUMBER_BITS) + number


class BufferShape(Message):
    """Sizes of the memory that the inference rank shares with one cache rank.

    Attributes:
        layers, query_heads, kv_heads, dim: Attention sizes of the inference rank.
        dtype: dtype of queries and keys, as PyTorch names it.
        window: Newest queries that a selection uses.
        lanes: Maximum concurrent requests.
        most: Maximum selected tokens of a KV head.
        places: Staging slots, each for one block of keys in transfer.
        rows: Values are transferred too, and K and V of selected tokens are sent back.
        fresh: With ``rows``: maximum rows of a layer and KV head in one reply. Otherwise 0.
        packs: Packs of layers that a lane can have, each with its own words and selection requests: 1, or one for each layer.
    """

    layers: LayerCount
    query_heads: Size
    kv_heads: Size
    dim: Size
    dtype: Annotated[str, Meta(pattern="^(float32|float16|bfloat16)$")]
    window: Annotated[int, Meta(ge=1, le=MOST_WINDOW)]
    lanes: Annotated[int, Meta(ge=1, le=MAX_LANES)]
    most: Annotated[int, Meta(ge=1, le=1 << 24)]
    places: Annotated[int, Meta(ge=1, le=MAX_PLACES)]
    rows: bool = False
    fresh: Annotated[int, Meta(ge=0, le=1 << 24)] = 0
    packs: LayerCount = 1

    def entry(self, lane: int, first: int) -> int:
        """Return the index of the words of a lane's pack that begins at layer ``first``."""
        return lane * self.packs + first

    def numbers(self, entry: int, count: int) -> tuple[int, slice]:
        """Return the lane of a pack, and where its first ``count`` numbers are in the lane's ``chosen`` or ``records``."""
        lane, first = divmod(entry, self.packs)
        begin = first * self.kv_heads * self.most
        return lane, slice(begin, begin + count)

    def pairs(self, entry: int, layers: int) -> tuple[int, slice]:
        """Return the lane of a pack of ``layers`` layers, and the indices of its pairs of layer and KV head."""
        lane, first = divmod(entry, self.packs)
        return lane, slice(first * self.kv_heads, (first + layers) * self.kv_heads)


class BufferRegion(NamedTuple):
    """A region of the exchange buffer: its first byte, sizes and dtype."""

    begin: int
    sizes: tuple[int, ...]
    dtype: torch.dtype


class ExchangeLayout:
    """Regions of the exchange buffer, which both sides compute from the shape. A pair is one of layer and KV head.

    Attributes:
        heads: int64 [lanes * packs, LANE_WORDS], words of each lane's packs.
        written: int64 [8]; the first counts the writes of the inference rank.
        queries: [lanes, 2, layers, window, query_heads, dim].
        keys: [places, layers, block, kv_heads, dim], staging slots.
        chosen: int32 [lanes, 2, numbers]; a selection is [layers, kv_heads, keep] at the beginning. Empty if rows are sent.
        values: Like ``keys``. This and the following are empty if no values are sent.
        records: int32 [lanes, numbers]; positions that the compressed KV holds, [layers, kv_heads, keep], at the beginning.
        counts: int32 [lanes, pairs], rows of a reply.
        moves: int32 [lanes, pairs, fresh, 2], for each row its target index in the compressed KV, and its token's position.
        row_keys, row_values: [lanes, pairs, fresh, dim].
        size: Total bytes.
    """

    def __init__(self, shape: BufferShape):
        dtype, lanes, pairs = getattr(torch, shape.dtype), shape.lanes, shape.layers * shape.kv_heads
        block = shape.layers, BLOCK, shape.kv_heads, shape.dim
        chosen, places, row_lanes = (0, shape.places, lanes) if shape.rows else (pairs * shape.most, 0, 0)
        self._regions: list[BufferRegion] = []
        self._end = 0
        self.heads = self._add((lanes * shape.packs, LANE_WORDS), torch.int64)
        self.written = self._add((8,), torch.int64)
        self.queries = self._add((lanes, 2, shape.layers, shape.window, shape.query_heads, shape.dim), dtype)
        self.keys = self._add((shape.places, *block), dtype)
        self.chosen = self._add((lanes, 2, chosen), torch.int32)
        self.values = self._add((places, *block), dtype)
        self.records = self._add((row_lanes, pairs * shape.most), torch.int32)
        self.counts = self._add((row_lanes, pairs), torch.int32)
        self.moves = self._add((row_lanes, pairs, shape.fresh, 2), torch.int32)
        self.row_keys = self._add((row_lanes, pairs, shape.fresh, shape.dim), dtype)
        self.row_values = self._add((row_lanes, pairs, shape.fresh, shape.dim), dtype)
        self.size = -(-self._end // GRAIN) * GRAIN

    def _add(self, sizes: tuple[int, ...], dtype: torch.dtype) -> BufferRegion:
        """Append a region, which begins at a multiple of 256 bytes."""
        self._regions.append(BufferRegion(self._end, sizes, dtype))
        self._end += -(-math.prod(sizes) * dtype.itemsize // 256) * 256
        return self._regions[-1]

    def views(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return a view of each region, in order, of ``memory``, uint8 [size]."""
        bounds = ((part, part.begin + math.prod(part.sizes) * part.dtype.itemsize) for part in self._regions)
        return tuple(memory[part.begin : end].view(part.dtype).view(part.sizes) for part, end in bounds)


class RotaryParameters(Message):
    """The model's rotary embedding: frequency of each pair in radians per token, and whether the entries of a pair are adjacent."""

    frequencies: Annotated[tuple[float, ...], Meta(max_length=1 << 12)]
    interleaved: bool


class Attach(Message, tag="attach"):
    """The first message to a cache rank: its configuration.

    Attributes:
        blocks: Maximum blocks of keys that the rank holds.
        scaling: Factor on query-key products, by layer.
        predictor: Name of the predictor of the query that scores tokens (mem_cache/selection/predictors.py).
        sinks, recent: Numbers of first and newest tokens that are always selected.
        bits: Bits of the keys that the rank scores; 16 for the exact keys.
        arena: CUDA IPC handle of the exchange buffer on the inference rank's GPU; empty on a CPU, where the process inherits a descriptor.
        apart: The cache rank's GPU differs from the inference rank's, so kernels of the cache rank may wait on it.
    """

    version: int
    epoch: Epoch
    shape: BufferShape
    blocks: Annotated[int, Meta(ge=1, le=MOST_BLOCKS)]
    scaling: Annotated[tuple[float, ...], Meta(min_length=1, max_length=MAX_LAYERS)]
    predictor: Annotated[str, Meta(max_length=64)]
    sinks: Annotated[int, Meta(ge=0, le=1 << 16)]
    recent: Annotated[int, Meta(ge=0, le=1 << 16)]
    turning: RotaryParameters
    bits: Literal[16, 8, 4] = 16
    arena: Annotated[bytes, Meta(max_length=64)] = b""
    apart: bool = False


class Lease(Message, tag="lease"):
    """Assigns blocks, in token order, to the request in a lane, starting at its block ``first``. 0 begins a request."""

    lane: Lane
    first: Block
    blocks: Annotated[tuple[Block, ...], Meta(max_length=MAX_BLOCKS_PER_LEASE)]


class KeyPiece(Message):
    """Keys of ``tokens`` tokens of a block, starting at its token ``offset``, in staging slot ``place``. With :attr:`BufferShape.rows`
    also their values."""

    block: Block
    offset: Annotated[int, Meta(ge=0, lt=BLOCK)]
    tokens: Annotated[int, Meta(ge=1, le=BLOCK)]
    place: Annotated[int, Meta(ge=0, lt=MAX_PLACES)]


class StagedTokens(NamedTuple):
    """Tokens of one staging slot: the slot, the number of tokens, and the source or target index of the first token."""

    place: int
    tokens: int
    first: int


class Append(Message, tag="append"):
    """Keys are in staging slots. They are complete once the written word reaches ``number``."""

    pieces: Annotated[tuple[KeyPiece, ...], Meta(min_length=1, max_length=MAX_PLACES)]
    number: Written = 0


class SelectionRequest(Message, tag="ask"):
    """Asks for the tokens of a request's next step. A step wrote the queries of layers ``first`` to ``first + count``.

    With :attr:`BufferShape.rows`, the positions whose rows the compressed KV holds are stored with the queries. The rank replies with the
    rows of selected tokens that are not among them. A selection request may follow one of the same pack that was not answered in time.
    Only the reply to the newest one is applied.

    Attributes:
        sequence: Sequence number in the lane's pack, ascending. Its parity selects the slot of the queries and of the reply.
        covered: Selection is among the first ``covered`` tokens.
        keep: Tokens to select for each KV head.
        positions: Positions of the queries, ascending.
        ahead: The selection is for the token this many positions after the newest query.
        number: Value of the exchange buffer's written word once the queries are there.
        together: Selection requests written to the exchange buffer under that number, including this one.
    """

    lane: Lane
    first: LayerIndex
    count: LayerCount
    sequence: Sequence
    covered: Annotated[int, Meta(ge=1, le=1 << 31)]
    keep: Annotated[int, Meta(ge=1, le=1 << 24)]
    positions: Annotated[tuple[Position, ...], Meta(min_length=1, max_length=MOST_WINDOW)]
    ahead: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    number: Written = 0
    together: Annotated[int, Meta(ge=1, le=MAX_LANES)] = 1


class Free(Message, tag="free"):
    """The request in a lane has ended."""

    lane: Lane


class RankPing(Message, tag="ping"):
    """Asks for an immediate heartbeat."""

    number: Sequence


class Attached(Message, tag="attached"):
    """The rank is ready. ``layer_seconds``: time of one layer's selection among :data:`~.selection_server.PROBE_TOKENS` tokens."""

    epoch: Epoch
    layer_seconds: Annotated[float, Meta(ge=0)]


class AttachRefused(Message, tag="refused"):
    """The rank cannot serve this configuration, and ends."""

    epoch: Epoch
    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARS)]


class SelectionReply(Message, tag="answer"):
    """Outcome of a :class:`SelectionRequest`: selected tokens are in the exchange buffer, or a newer selection request replaced it.

    Attributes:
        lane, first, count, sequence: Copied from the selection request.
        chosen: Tokens were selected.
        seconds: Duration of the selection. On a GPU it includes keys that arrived with the request, but not keys that arrived between
            requests.
        at: Completion time, ``time.monotonic`` seconds; both processes share this clock.
        together: Selection requests answered in these seconds, including this one.
    """

    epoch: Epoch
    lane: Lane
    first: LayerIndex
    count: LayerCount
    sequence: Sequence
    chosen: bool
    seconds: Annotated[float, Meta(ge=0)]
    at: Annotated[float, Meta(ge=0)] = 0.0
    together: Annotated[int, Meta(ge=1, le=MAX_LANES)] = 1


class PlacesFreed(Message, tag="taken"):
    """The rank has copied the keys of these staging slots, so the slots are free."""

    epoch: Epoch
    places: Annotated[tuple[Annotated[int, Meta(ge=0, lt=MAX_PLACES)], ...], Meta(min_length=1, max_length=MAX_PLACES)]


class Heartbeat(Message, tag="beat"):
    """Heartbeat of the rank. ``number`` is the number of the ping that it answers; 0 for no ping."""

    epoch: Epoch
    number: Annotated[int, Meta(ge=0, lt=1 << 62)] = 0


ToRank = Attach | Lease | Append | SelectionRequest | Free | RankPing
FromRank = Attached | AttachRefused | SelectionReply | PlacesFreed | Heartbeat

decode_to_rank: Callable[[bytes], ToRank] = make_decoder(ToRank, "message to a cache rank", VERSION, MAX_MESSAGE_BYTES)
decode_from_rank: Callable[[bytes], FromRank] = make_decoder(FromRank, "message of a cache rank", VERSION, MAX_MESSAGE_BYTES)
