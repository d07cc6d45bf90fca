"""What an inference rank and a cache rank say to each other: msgspec structs in MessagePack, tagged, with bounds on each field.

A message is one ZMQ frame. Queries, keys, values and chosen tokens lie in shared memory (shared_memory.py); a message about them comes
after they are written, which makes it the barrier. All that a cache rank says names its epoch: the number of the process, and of the
memory, among those that one inference rank has begun.
"""

from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

VERSION = 8
MAX_MESSAGE_BYTES = 1 << 20
# Tokens of a block of keys, and of values: the unit in which they travel, are held, and are shared.
BLOCK = 64
MAX_LANES, MAX_LAYERS, MOST_BLOCKS, MAX_PLACES = 1 << 12, 1 << 12, 1 << 22, 1 << 12
# Queries by which tokens are chosen, at most.
MOST_WINDOW = 64
# Blocks that one message names.
MAX_BLOCKS_PER_LEASE = 1 << 14
# Characters of the reason of a refusal.
MAX_REASON_CHARS = 2048

# Of a word of 64 bits in an arena those of a number, which a server that runs for years does not use up; the others are the epoch's.
NUMBER_BITS = 40

Epoch = Annotated[int, Meta(ge=1, lt=1 << (63 - NUMBER_BITS))]
Lane = Annotated[int, Meta(ge=0, lt=MAX_LANES)]
LayerIndex = Annotated[int, Meta(ge=0, lt=MAX_LAYERS)]
LayerCount = Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
Block = Annotated[int, Meta(ge=0, lt=MOST_BLOCKS)]
Sequence = Annotated[int, Meta(ge=1, lt=1 << 62)]
Position = Annotated[int, Meta(ge=0, le=1 << 31)]
Size = Annotated[int, Meta(ge=1, le=1 << 16)]
Written = Annotated[int, Meta(ge=0, lt=1 << NUMBER_BITS)]


class ProtocolError(ValueError):
    """Bytes that are no message of this version."""


class RankMessage(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What all messages are."""


class BufferShape(RankMessage):
    """Sizes of what lies in shared memory, of one rank.

    Attributes:
        layers, query_heads, kv_heads, dim: of the inference rank's attention.
        dtype: of its queries and keys, as PyTorch names it.
        window: newest queries by which tokens are chosen.
        lanes: requests at once.
        most: tokens that a KV head is led to, at most.
        places: blocks of keys that may be under way.
        rows: whether values travel, too, and K and V of chosen tokens travel back.
        fresh: of these, tokens of a layer and KV head that an answer brings at most, in an arena; 0 where there is none, or no rows travel.
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


class RotaryParameters(RankMessage):
    """The model's rotary embedding: frequencies of the pairs, radians a token, and whether entries of a pair are neighbours."""

    frequencies: Annotated[tuple[float, ...], Meta(max_length=1 << 12)]
    interleaved: bool


class Attach(RankMessage, tag="attach"):
    """The first message to a cache rank: what it serves.

    Attributes:
        version, epoch: of this protocol; of the process.
        shape: of the shared memory.
        blocks: of keys that it holds at most.
        scaling: factor on query-key products, by layer.
        predictor: that says by which query tokens are chosen (mem_cache/selection/predictors.py).
        sinks, recent: first and newest tokens that are chosen in any case.
        turning: the rotary embedding.
        bits: in which it holds the keys that it scores; 16: as they are.
        arena: CUDA IPC handle of the memory of the inference rank's GPU that both map (on_gpu/exchange_buffer.py); empty where there is none.
        apart: whether that GPU is another one than the cache rank's, which may wait there then.
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

    def with_epoch(self, epoch: int) -> "Attach":
        """The same for another process."""
        return msgspec.structs.replace(self, epoch=epoch)


class Lease(RankMessage, tag="lease"):
    """The request in a lane has these blocks, in the order of its tokens, from its block ``first`` on; 0 begins a request."""

    lane: Lane
    first: Block
    blocks: Annotated[tuple[Block, ...], Meta(max_length=MAX_BLOCKS_PER_LEASE)]


class KeyPiece(RankMessage):
    """Keys of ``tokens`` tokens of a block, its token ``offset`` and those after it, in ``place`` of shared memory; with
    :attr:`BufferShape.rows` their values, too."""

    block: Block
    offset: Annotated[int, Meta(ge=0, lt=BLOCK)]
    tokens: Annotated[int, Meta(ge=1, le=BLOCK)]
    place: Annotated[int, Meta(ge=0, lt=MAX_PLACES)]


class StagedTokens(NamedTuple):
    """Tokens of one place of shared memory as they are written or read: the place, how many, and where the first of them comes from, or goes."""

    place: int
    tokens: int
    first: int


class Append(RankMessage, tag="append"):
    """Keys lie in shared memory; in an arena once so much is written there as ``number`` says (on_gpu/exchange_buffer.py)."""

    pieces: Annotated[tuple[KeyPiece, ...], Meta(min_length=1, max_length=MAX_PLACES)]
    number: Written = 0


class SelectionRequest(RankMessage, tag="ask"):
    """A step of a request left queries of layers ``first`` to ``first + count``: choose its tokens for the next.

    With :attr:`BufferShape.rows` the positions whose rows the copy holds lie beside the queries: the rank answers with the rows of what it chose
    beyond these. So it need not know which of its answers were taken: one that came late, or never was looked at, is in no later base.
    Such a rank has one question of a pack at a time, and writes to a place when that is asked for alone. In an arena (on_gpu/exchange_buffer.py) a
    question that was not answered in time is followed by the next, and no answer but the newest question's is taken.

    Attributes:
        lane: of the request.
        first, count: the pack of layers.
        sequence: of the lane, ascending; its parity says where queries lie and answers are expected.
        covered: tokens, from the first on, among which are chosen ``keep`` for each KV head.
        positions: of the queries, ascending.
        ahead: for which token after the newest of these is chosen.
        number: how much is written in an arena once its queries are there.
        together: questions that are put to an arena with it, of that number, this one among them.
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


class Free(RankMessage, tag="free"):
    """The request in a lane is gone."""

    lane: Lane


class RankPing(RankMessage, tag="ping"):
    """Answer at once."""

    number: Sequence


class Attached(RankMessage, tag="attached"):
    """The rank is ready; ``layer_seconds``: choosing among :data:`~.rank.PROBED` tokens takes so long a layer."""

    epoch: Epoch
    layer_seconds: Annotated[float, Meta(ge=0)]


class AttachRefused(RankMessage, tag="refused"):
    """The rank cannot serve what it was told, and ends."""

    epoch: Epoch
    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARS)]


class SelectionReply(RankMessage, tag="answer"):
    """What became of an :class:`SelectionRequest`: tokens lie in shared memory, or a newer one came before it was looked at.

    Attributes:
        epoch: of the process.
        lane, first, count, sequence: as of the question.
        chosen: whether tokens were chosen.
        seconds: that choosing took; beside a GPU with the keys that came with the question, without those that came between questions.
        at: when it was done, seconds of ``time.monotonic``, which both processes share.
        together: questions that were answered in these seconds, this one among them.
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


class PlacesFreed(RankMessage, tag="taken"):
    """Keys in these places of shared memory were copied: the places are free."""

    epoch: Epoch
    places: Annotated[tuple[Annotated[int, Meta(ge=0, lt=MAX_PLACES)], ...], Meta(min_length=1, max_length=MAX_PLACES)]


class Heartbeat(RankMessage, tag="beat"):
    """A sign of life; with what number it was asked for, 0 for nobody."""

    epoch: Epoch
    number: Annotated[int, Meta(ge=0, lt=1 << 62)] = 0


ToRank = Attach | Lease | Append | SelectionRequest | Free | RankPing
FromRank = Attached | AttachRefused | SelectionReply | PlacesFreed | Heartbeat

_encoder = msgspec.msgpack.Encoder()
_to_rank, _from_rank = msgspec.msgpack.Decoder(ToRank), msgspec.msgpack.Decoder(FromRank)


def encode(message: ToRank | FromRank) -> bytes:
    """A message as one frame."""
    return _encoder.encode(message)


def decode_to_rank(frame: bytes) -> ToRank:
    """What an inference rank said.

    Raises:
        ProtocolError: it is no message of this version.
    """
    return _decode(_to_rank, frame)


def decode_from_rank(frame: bytes) -> FromRank:
    """What a cache rank said.

    Raises:
        ProtocolError: it is no message of this version.
    """
    return _decode(_from_rank, frame)


def _decode(decoder: msgspec.msgpack.Decoder, frame: bytes) -> ToRank | FromRank:
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"a message has {len(frame)} bytes, of {MAX_MESSAGE_BYTES} at most")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ProtocolError(str(error)) from error
