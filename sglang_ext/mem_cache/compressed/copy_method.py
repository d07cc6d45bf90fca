"""How one method makes copies: what it keeps, how much of it, and how that lies in slots."""

from dataclasses import dataclass

from sglang_ext.core import MIN_CONTEXT, CompressedView
from sglang_ext.mem_cache.compressed.formats.kv_format import Placement
from sglang_ext.mem_cache.compressors import Compressor, kept_count
from sglang_ext.mem_cache.compressors.contracts.registry import COMPRESSORS


@dataclass(frozen=True)
class CopyMethod:
    """One of the methods that requests of a server may ask for.

    Attributes:
        compressor: chooses what a copy keeps.
        budget: share of the covered tokens that a copy keeps.
        packing: how a copy lies in slots.
        name: as requests ask for it; no two methods of a server have one name.
        packs: name of the method that packs copies; empty for none.
        suffix: what tells it from others with its compressor, at the end of what copies are called.
        sparse_from: tokens of a context, below which no copy is asked for.
    """

    compressor: Compressor
    budget: float
    packing: Placement
    name: str = ""
    packs: str = ""
    suffix: str = ""
    sparse_from: int = MIN_CONTEXT

    @property
    def recent(self) -> int:
        """Newest tokens of a context that copies leave as they are."""
        return self.packing.recent

    @property
    def sinks(self) -> int:
        """First tokens of a context that copies keep as they are, in slots of their own."""
        return self.packing.sinks

    @property
    def unit(self) -> int:
        """Tokens of which copies cover, share and keep whole multiples, after the sinks: those of a page, and of a block."""
        return self.packing.unit

    @property
    def share(self) -> float:
        """Of the slots of full KV, those that a copy takes, about."""
        return self.budget * self.packing.share

    @property
    def least(self) -> int:
        """Tokens that a copy covers at least; of fewer than it may keep, it would leave none out."""
        return max(self.sinks + self.unit, self.compressor.most + 1)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest context that a copy is made of."""
        return max(self.sparse_from, max(MIN_CONTEXT, self.least) + self.recent)

    def covered(self, tokens: int) -> int:
        """Of a context's first ``tokens`` tokens, those that a copy can stand for; 0 where they are too few."""
        return self.sinks + (tokens - self.sinks) // self.unit * self.unit if tokens >= self.least else 0

    def kept(self, tokens: int) -> int:
        """Tokens that a copy keeps of ``tokens`` after the sinks, a multiple of :attr:`unit`."""
        count = kept_count(tokens, self.budget, self.unit) if tokens else 0
        most = -(-self.compressor.most // self.unit) * self.unit
        return min(count, most) if most else count

    def own(self, view: CompressedView, end: int, shared: int) -> int:
        """Tokens that ``view`` keeps of those from ``end`` on, where ``shared`` and its segments stand for those before.

        What is left of the budget, and the newest tokens in any case: they see what nobody has seen before.
        """
        before = shared + sum(segment.tokens for segment in view.segments)
        newest = -(-max(1, self.compressor.window) // self.unit) * self.unit if end > view.sinks else 0
        return min(view.covered - end, max(self.kept(view.covered - view.sinks) - before, newest))

    def called(self, chooser: Compressor) -> str:
        """What a copy is called whose tokens ``chooser`` chose, the compressor or the one that it leaves this context to."""
        # A helper that is in no catalogue chooses for its method.
        name = chooser.name if chooser.name in COMPRESSORS else self.compressor.name
        return "+".join(part for part in (name, self.packs) if part) + self.suffix
