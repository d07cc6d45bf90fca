"""How copies lie in slots of SGLang's pool: the contract of a placement, one method's, and of a format, which all copies of a server
have; both for tokens that stay as they are.

A row of the token table, a draft row, begins with a copy's slots; what those hold the format knows, and a table beside the token
table says how much of it each row begins with. Attention over rows of each format is in layers/attention/copies/.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, Self, TypeVar

import torch

from sglang_ext.core import CompressedKV
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers

if TYPE_CHECKING:
    from sglang_ext.mem_cache.compressors.catalogue import MethodSpec
    from sglang_ext.mem_cache.compressors.contracts.compressor import Compressor, ContextKV, Part


class SlotLayout(Protocol):
    """How the copies of one method lie in slots.

    Attributes:
        recent: newest tokens of a context that copies leave as they are.
        sinks: first tokens of a context that copies keep as they are, in slots of their own.
        unit: tokens of which copies cover, share and keep whole multiples.
        share: slots that they take, of those of the tokens that they keep, about.
        stochastic: whether numbers are rounded by seeds of their tokens (rounding.py).
    """

    recent: int
    sinks: int
    unit: int
    share: float
    stochastic: bool

    def packed_slots(self, tokens: int) -> int:
        """Slots that hold so many tokens otherwise than as they are."""

    def held_slots(self, tokens: int) -> int:
        """Slots that so many tokens take, filled up to whole pages."""

    def write(
        self,
        buffers: KVBuffers,
        kept: torch.Tensor,
        sources: torch.Tensor,
        targets: torch.Tensor,
        seeds: torch.Tensor | None = None,
    ) -> None:
        """Put what each head keeps into slots; on a GPU without waiting for it.

        Args:
            buffers: the pool's.
            kept: int64 [layers, kv_heads, count], tokens counted in ``sources``.
            sources: int64 [tokens], slots of the context.
            targets: int64, the copy's slots.
            seeds: int32 [tokens], by which numbers are rounded where the placement is ``stochastic``; None for none.
        """


@dataclass(frozen=True)
class PlainSlots:
    """Copies that keep tokens as they are, a slot each: the :class:`SlotLayout` of methods that pack none.

    Attributes:
        unit: tokens of a page.
    """

    unit: int
    recent: ClassVar[int] = 0
    sinks: ClassVar[int] = 0
    share: ClassVar[float] = 1.0
    stochastic: ClassVar[bool] = False

    def packed_slots(self, tokens: int) -> int:
        """None hold blocks."""
        return 0

    def held_slots(self, tokens: int) -> int:
        """One for each token."""
        return tokens

    def write(
        self,
        buffers: KVBuffers,
        kept: torch.Tensor,
        sources: torch.Tensor,
        targets: torch.Tensor,
        seeds: torch.Tensor | None = None,
    ) -> None:
        """Copy what each head keeps; arguments as :meth:`SlotLayout.write`'s."""
        buffers.copy_kept(kept, sources, targets)


class KVLayout(ABC):
    """One form of copies, and which rows begin with it; captured graphs read what rows begin with.

    Attributes:
        shareable: whether requests may read one copy of what they begin with.
        points_to_full_kv: whether a copy is of no use once its request's full KV lies in other slots.
        chooses: whether attention of steps chooses where a copy leads, without a look from the host.
    """

    shareable: ClassVar[bool] = True
    points_to_full_kv: ClassVar[bool] = False
    chooses: ClassVar[bool] = False

    def step_chooses(self, row: int, after: int) -> bool:
        """Of a format that :attr:`chooses`: whether attention chooses for a row in the step that is launched next.

        Args:
            row: it begins with such a copy; each step over it is told here once.
            after: tokens after its copy, the step's own among them.
        """
        raise NotImplementedError(f"attention chooses nothing in {type(self).__name__}")

    def slot_layout(self, method: "MethodSpec", plain: PlainSlots) -> SlotLayout:
        """How copies of ``method`` lie; ``plain`` where it keeps tokens as they are."""
        return plain

    def fill(
        self,
        row: int | None,
        slot_layout: SlotLayout,
        chooser: "Compressor",
        context: "ContextKV",
        targets: "dict[Part, torch.Tensor]",
    ) -> None:
        """Let ``chooser`` choose of each part, and write it to its slots.

        Args:
            row: the draft row that is going to begin with them; None for none.
            slot_layout: of the method.
            chooser: says what heads keep.
            context: what it chooses from.
            targets: int64 slots, by part.

        Raises:
            ScoresError: nothing can be chosen by its scores; nothing was written.
        """
        parts = [part for part in targets if part.count]
        for part, kept in zip(parts, chooser.select(context, parts)):
            slot_layout.write(context.buffers, kept, context.slots, targets[part], context.seeds)

    def begins(self, row: int, view: CompressedKV) -> None:
        """Note what ``row`` of the token table, a draft row, begins with: its copy ``view``, which was filled."""

    @abstractmethod
    def on_host(self, rows: torch.Tensor) -> list[int]:
        """How much of it each of ``rows``, int64 [batch], begins with, 0 for none; waits for the device."""

    def check(self, row: int, view: CompressedKV, covered: torch.Tensor, buffers: KVBuffers) -> None:
        """Check what the draft ``row`` says of its copy.

        Args:
            row: of the token table.
            view: the copy.
            covered: int64, slots of full KV of the tokens for which it stands.
            buffers: the pool's.

        Raises:
            IntegrityError: names the row and what it says.
        """


class PlainLayout(KVLayout):
    """Copies hold tokens as they are, which any attention reads."""

    def on_host(self, rows: torch.Tensor) -> list[int]:
        """None begins with anything else."""
        return [0] * len(rows)


class ExchangedRowLayout(PlainLayout):
    """Copies hold in each slot, by layer and KV head, a token's K and V that another process exchanges for others (row_exchange.py)."""

    shareable = False


Form = TypeVar("Form")


@dataclass(frozen=True)
class RowCountLayout(KVLayout, Generic[Form]):
    """Which rows begin with it, and with how much of it.

    Attributes:
        layout: how it lies in slots.
        counts: int32 [rows], how much of it each row begins with; 0 for none. Captured graphs read it.
    """

    layout: Form
    counts: torch.Tensor

    @classmethod
    def for_table(cls, layout: Form, token_table: torch.Tensor) -> Self:
        """None yet, of the rows of a token table."""
        return cls(layout, torch.zeros(len(token_table), dtype=torch.int32, device=token_table.device))

    def on_host(self, rows: torch.Tensor) -> list[int]:
        """Counts of ``rows``, int64 [batch], on the host; waits for the device."""
        return self.counts[rows].tolist()
