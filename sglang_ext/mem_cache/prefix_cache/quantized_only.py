"""Mode lossy: full KV is given back as soon as copies hold all of it as codes, and made of them again where a prompt needs it.

Nothing is verified there, so that full KV which is packed serves two ends alone: prompts that begin alike attend to it, and a method
that chooses tokens would choose again. Where a copy packs all tokens, the prefix tree gets its blocks as segments, and the nodes that
segments tile (segments.py:tiling) give up their device slots although requests lock them: their only form is *codes alone*. What copies
leave as it is stays as full KV: the first tokens, the newest ones, and what does not fill a block. So do a request's generated tokens,
which are nobody else's, until its copy packs them; the prompt's last ones, which share a block with them, go then, too.

A prompt that begins with such nodes gets slots for them, before the next forward filled with what the codes mean: the road of full KV
that comes from the host (``TieredRadixCache.init_load_back``). Once it has a copy, which reads the same segments, they are given back
again. Tokens that were computed after such a beginning attended to codes, as all decoding here does. Where prompts attend to codes
anyway, they read them as they are, and full KV goes as they are computed (quantized_prompts.py): then it is made of codes for nobody.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import gcd, lcm
from typing import TYPE_CHECKING

import torch

from sglang_ext.core import CompressedKV
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.prefix_cache.freed_full_kv import FreedFullKV, SlotDemand
from sglang_ext.mem_cache.prefix_cache.nodes import TieredNode, path
from sglang_ext.mem_cache.prefix_cache.quantized_prompts import QuantizedPrompts
from sglang_ext.mem_cache.prefix_cache.recompute import RecomputeSource
from sglang_ext.mem_cache.prefix_cache.residency import CompressedRequest, CompressedRequests
from sglang_ext.mem_cache.prefix_cache.segments import SegmentBlocks, Segment

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod

# Tokens before a copy takes up new ones, from which on room is kept for that: two rounds, and one whose outcome is not known yet.
NEAR = 12


@dataclass(frozen=True)
class PendingRestore:
    """Full KV that is made of codes before the next forward.

    Attributes:
        blocks: int64, slots of packed blocks, which stay as they are until then.
        first: of their tokens the first that is wanted.
        targets: int64 [tokens], slots that get them.
    """

    blocks: torch.Tensor
    first: int
    targets: torch.Tensor


@dataclass
class QuantizedOnlyKV(FreedFullKV):
    """What of the full KV of one scheduler process, whose prefix tree has no host tier, was given back.

    Attributes:
        packing: how blocks lie in slots.
        method_of: what makes the copies of a request that waits; None where it gets none.
        recomputes: whether who is retracted is computed again here, as all that this process computed is; else by another server, of those
            of which :meth:`set_recompute_source` was told, and others keep their full KV.
        prompts: that attend to codes; None where they attend to full KV.
        holders: running requests whose copies hold all tokens that they cover.
        restored_tokens: whose full KV was made of codes, so far.
    """

    packing: Packing
    method_of: "Callable[[Req], CompressionMethod | None]"
    recomputes: bool = True
    prompts: QuantizedPrompts | None = None
    holders: CompressedRequests = field(default_factory=CompressedRequests)
    restored_tokens: int = 0
    # What decodes, as its last round began.
    _decoding: dict[int, tuple[TieredNode, int]] = field(default_factory=dict)
    _shared: dict[int, tuple[TieredNode, int]] = field(default_factory=dict)
    _elsewhere: dict[int, RecomputeSource] = field(default_factory=dict)
    _pending: list[PendingRestore] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tree.segments.blocks = SegmentBlocks(self.packing.block_tokens, self.packing.block_slots, self._parted)

    def _parted(self, first: Segment, rest: Segment) -> None:
        self.copies.on_segment_split(first, rest)
        if self.prompts is not None:
            self.prompts.on_segment_split(first, rest)

    def update(self, running: dict[int, tuple[TieredNode, int]]) -> None:
        """A round begins: give back full KV that copies hold.

        Args:
            running: requests that have copies, by row: the end of their path, whose tokens the tree took over, and the tokens that
                the copy covers.
        """
        self._decoding = dict(running)
        if self.prompts is not None:
            self.prompts.decode(running)
        self._update()
        for row in running:
            if (holder := self.holders.get(row)) is not None:
                # Generated tokens are behind what the tree has of a request.
                self._give_back_own(row, holder.node.end, holder.covered)

    def admitted(self, req: "Req") -> None:
        """As :meth:`FreedFullKV.admitted`."""
        if self.prompts is not None:
            self.prompts.hold(req)

    def begin_prompts(self, prompts: "Iterable[tuple[Req, int, int]]") -> None:
        """Tokens of prompts are about to be computed: give back full KV of those before, where prompts attend to codes.

        Args:
            prompts: as of :meth:`QuantizedPrompts.begin`.
        """
        if self.prompts is not None:
            for req, matched, known in prompts:
                self.prompts.begin(req, matched, known)
            self._update()

    def stored(self, row: int) -> torch.Tensor | None:
        """Slots of blocks that a prompt attends to as they lie in the pool: as of :meth:`QuantizedPrompts.codes`; None for none."""
        return None if self.prompts is None else self.prompts.codes(row)

    def is_lost(self, row: int) -> bool:
        """Whether a request lacks full KV and got no copy, so that it must be computed again."""
        return self.prompts is not None and self.prompts.is_lost(row)

    def _update(self) -> None:
        """Give back what the tree has of requests that have copies."""
        running = self._decoding if self.prompts is None else {**self._decoding, **self.prompts.computed}
        whole = {row: where for row, where in running.items() if self.can_lack_full_kv(row)}
        for row, where in whole.items():
            if not self.tree.disable and self._shared.get(row) != where:
                self._shared[row] = where
                self._share(row, *where)
        self.holders.update(whole)
        for node, holders in self.holders.by_node.items():
            # A prompt's last tokens, that are in a block with the first generated ones, are in no segment.
            if node.value is not None and (node.codes or not node.children) and self._may_go(node, holders):
                self._give_back(node, holders)

    def begin(self, row: int, tokens: int) -> None:
        """A request begins in ``row`` whose copy another server packs: of its first ``tokens`` tokens it gets no full KV."""
        self._own[row] = range(0, tokens)

    def set_recompute_source(self, row: int, sent: RecomputeSource) -> None:
        """The request in ``row`` may lack full KV: ``sent`` lets another server compute it once more."""
        self._elsewhere[row] = sent

    def arrival(self, row: int) -> RecomputeSource | None:
        """What computes a request once more that lacks full KV; None where it has all of it, or that is done here."""
        return self._elsewhere.get(row) if row in self._own else None

    def _recomputable(self, row: int) -> bool:
        return self.recomputes or row in self._elsewhere

    def _share(self, row: int, node: TieredNode, covered: int) -> None:
        """Let the tree own the blocks of a request's copy that stand for its prompt, and nodes end where segments do.

        Nothing is moved: the draft row leads to the same slots.
        """
        view, segments = self.copies.get(row), self.tree.segments
        if view.own_packed:
            start, own = view.shared_len, Segment(view.shared_len, covered, view.own[view.sinks :])
            tokens = segments.boundary(own, min(covered, node.end)) - start
            if tokens > 0:
                packed = self.packing.packed_slots(tokens)
                slots = view.detach_blocks(tokens, packed)
                made = Segment(start, start + tokens, slots, tokens=tokens, packed=packed, method=self.copies.method(row).name)
                view.segments.append(made)
                self.tree.nodes.attach(node, made)
                segments.use(made)
        for segment in [segment for segment in view.segments if segment.node is not None]:
            self._fit(segment, node)

    def _fit(self, segment: Segment, last: TieredNode) -> None:
        """Let nodes on the path to ``last`` end where ``segment`` does, and part it where it would reach over one that it could tile."""
        nodes, segments = self.tree.nodes, self.tree.segments
        for node in path(last):
            if node.end <= segment.start or node.value is None:
                continue
            if segment.end <= node.start:
                return
            if node.start < segment.start:
                nodes.split(node, segment.start - node.start)
            if segment.end < node.end:
                nodes.split(node, segment.end - node.start)
            elif (cut := segments.boundary(segment, node.end)) < segment.end and cut > max(segment.start, node.start):
                segments.part(segment, cut, node)
                if cut < node.end:
                    nodes.split(node, cut - node.start)

    def _may_go(self, node: TieredNode, holders: list[CompressedRequest]) -> bool:
        """Whether nobody reads a node's device slots: all that lock it read their copies in its place."""
        return node.lock_ref == len(holders) and all(node.end <= holder.covered for holder in holders)

    def _give_back(self, node: TieredNode, holders: list[CompressedRequest]) -> None:
        self.tree.nodes.free_value(node)
        for holder in holders:
            # To SGLang's padding page.
            self.copies.token_table[holder.row, node.start : node.end] = 0

    def full_kv_start(self, row: int, protected: int) -> int:
        """The first position from which on a request's row leads to its own full KV."""
        return self.own_start(row, protected) if self.holders.get(row) is not None else 0

    def forget(self, row: int) -> None:
        """As :meth:`FreedFullKV.forget`."""
        super().forget(row)
        self.holders.forget(row)
        if self.prompts is not None:
            self.prompts.forget(row)
        self._decoding.pop(row, None)
        self._shared.pop(row, None)
        self._elsewhere.pop(row, None)

    def clear(self) -> None:
        """As :meth:`FreedFullKV.clear`."""
        super().clear()
        self.holders.clear()
        if self.prompts is not None:
            self.prompts.clear()
        for kept in (self._decoding, self._shared, self._elsewhere, self._pending):
            kept.clear()

    @property
    def tokens(self) -> int:
        """Tokens that are held as codes alone: of the tree, and of running requests."""
        return sum(len(node.key) for node in self.tree.nodes.quantized_only) + self.own_tokens

    def restore(self, nodes: Sequence[TieredNode], allocate: Callable[[int], torch.Tensor | None]) -> bool:
        """Give nodes that are codes alone device slots, which are filled before the next forward (:meth:`write`).

        Args:
            nodes: of one locked path.
            allocate: so many slots, int64, for which others are evicted; None where they are not to be had.

        Returns:
            False where slots lack, or prompts attend to codes: who cannot read them computes anew. Then nothing was done.
        """
        if self.prompts is not None:
            return False
        segments = {segment: None for node in nodes for segment in node.codes}
        for segment in segments:
            # Or they would be evicted for what is made of them.
            self.tree.segments.use(segment)
        slots = allocate(sum(len(node.key) for node in nodes))
        for segment in segments:
            self.tree.segments.release(segment)
        if slots is None:
            return False
        for node, part in zip(nodes, slots.split([len(node.key) for node in nodes])):
            self.tree.nodes.set_value(node, part)
            for segment in node.codes:
                begin, end = max(node.start, segment.start), min(node.end, segment.end)
                wanted = part[begin - node.start : end - node.start]
                self._pending.append(PendingRestore(segment.slots[: segment.packed], begin - segment.start, wanted))
        self.restored_tokens += len(slots)
        return True

    def write(self) -> None:
        """Make what was asked for since the last one, before the next one, in its stream: who got slots that were freed writes later."""
        for each in self._pending:
            self.packing.restore(self.copies.buffers, each.blocks, each.first, each.targets)
        self._pending.clear()

    def can_lack_full_kv(self, row: int) -> bool:
        """Whether the request in ``row`` may lack full KV, so that it cannot do without its copy."""
        view = self.copies.get(row)
        return view is not None and view.has_all_tokens and self._recomputable(row)

    def whole(self, tokens: int) -> int:
        """Of a context's first ``tokens`` tokens, those before the last place where segments may be parted; all where none is there."""
        size, page = self.packing.block_tokens, self.tree.page_size
        blocks = lcm(page // gcd(size, page), page // gcd(self.packing.block_slots, page))
        if self.prompts is not None:
            # What chunks fill becomes segments before the next one is computed, which end in a page of their own.
            blocks = self.packing.unit // size
        begin = self.packing.sinks
        return begin + (tokens - begin) // (blocks * size) * blocks * size if tokens > begin else tokens

    def slot_demand(self, req: "Req", more: int, share: float = 1.0) -> SlotDemand:
        """What a request that runs or waits will need of the pool beside its prompt's full KV.

        Args:
            more: tokens that its answer has yet at most.
            share: of these, those that are expected.
        """
        method, tokens = self.method_of(req), len(req.origin_input_ids) + len(req.output_ids)
        view = None if req.req_pool_idx is None else self.copies.get(req.req_pool_idx)
        if method is None or (view is None and tokens < method.shortest):
            return SlotDemand(growth=share * more)
        # One whose prompt is computed has a copy of its beginning at most.
        if view is None or (self.prompts is not None and req.req_pool_idx in self.prompts.computed):
            return self._room_of_prompt(req, method, view, tokens, more, share * more)
        left = view.refresh_after - (tokens - method.recent)
        taken, growth = self._grows(method, tokens - view.covered, left, more, share * more)
        copy = taken if left <= NEAR else 0
        leaves = self._leaves(req, method.sinks, view.covered) if self.can_lack_full_kv(req.req_pool_idx) else {}
        return SlotDemand(copy, leaves=leaves, growth=growth - copy)

    def _room_of_prompt(
        self, req: "Req", method: "CompressionMethod", view: CompressedKV | None, tokens: int, more: int, expected: float
    ) -> SlotDemand:
        """As :meth:`slot_demand`, of a request that gets a copy of all its ``tokens``, or of those after its ``view``, when they are computed."""
        sinks, reach = method.sinks, tokens - method.recent
        covered = method.covered(reach)
        segments = self._known(req, method, covered) if view is None else []
        known = segments[-1].end if segments else sinks if view is None else view.covered
        copy = sinks * (view is None) + method.packing.held_slots(method.kept(covered - known))
        reads = tuple(segment for segment in segments if not segment.users)
        _, growth = self._grows(method, tokens - covered, method.due(reach) - reach, more, expected)
        if not method.packs_all:
            return SlotDemand(copy, growth=growth, reads=reads)
        back = max(0, covered - max(sinks, req.cache_protected_len))
        return SlotDemand(copy, back, self._leaves(req, sinks, covered), growth, reads)

    def _grows(self, method: "CompressionMethod", exact: int, left: int, more: int, expected: float) -> tuple[int, float]:
        """Slots for what a copy takes up next, beside full KV that goes back then; and all that the answer takes, those among them.

        Args:
            exact: tokens that it does not cover yet.
            left: tokens before it takes up new ones.
            more, expected: tokens that the answer has yet, at most and likely.
        """
        if not method.packs_all:
            return 0, expected
        # Of an answer that ends before, nothing is packed.
        taken = method.packing.held_slots(method.pack_after) if left <= max(more, NEAR) else 0
        return taken, max(method.share * expected, taken) + min(more, max(0, method.max_exact_tail - exact))

    def peak_slots(self, req: "Req", rest: int) -> int:
        """Slots that full KV of the last ``rest`` tokens of a prompt takes at most beside what it has, while they are computed."""
        return rest if self.prompts is None else self.prompts.peak_slots(req, rest)

    def reads(self, req: "Req | None", best: TieredNode) -> bool:
        """Whether a prompt reads all that is codes alone on the path to ``best`` as it is, so that it needs no slots for it."""
        return self.prompts is not None and self.prompts.reads(req, best)

    def _known(self, req: "Req", method: "CompressionMethod", covered: int) -> list[Segment]:
        """Segments of the tree with which the copy of a waiting request is to begin."""
        matched = 0 if req.req_pool_idx is not None else len(req.prefix_indices) + req.host_hit_length
        if not matched:
            return []
        return self.tree.nodes.segments_to(req.best_match_node, min(matched, covered), method.name, method.sinks)

    def _leaves(self, req: "Req", sinks: int, covered: int) -> dict[TieredNode, int]:
        """Of a request's path the nodes with full KV that its copy over ``covered`` tokens stands for, and how many slots of them go."""
        found: dict[TieredNode, int] = {}
        for node in path(req.last_node):
            if node.value is None:
                continue
            # Where paths part no segment reaches over.
            parts = len(node.children) > (node is not req.last_node)
            end = min(self.whole(node.end) if parts else node.end, covered)
            found[node] = max(0, end - max(node.start, sinks))
        return found
