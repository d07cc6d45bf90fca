"""Prefixes of the tree in a prefix store: what is written to it, and what waiting requests read from it.

*Writing.* When the tree takes the KV of a prompt or an answer, it backs the nodes up to the host. Threads write their pages from there.
*Reading.* A waiting request asks for the pages that follow its match. They arrive in host pages, as a node of the tree, and the request loads
them as any other node on the host. While pages arrive, other requests run.
*Drafting early.* If a drafter is given, the anchors of all pages are read first. The request drafts on them until the pages are restored.

A store page has :attr:`StoredPrefixes.unit` tokens: one host page or several. All ranks call the methods in the same order. What changes
their trees is agreed: whether the store may be used, the pages found, the pages restored, and the writes that have ended.
"""

import time
from array import array
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_hash_str

from sglang_ext.core import TPRanks
from sglang_ext.device import Mark
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.host_tier.host_pool import runs
from sglang_ext.mem_cache.host_tier.tier import PageChecksums
from sglang_ext.mem_cache.host_tier.transfers import LaunchedTransfer, Transfer
from sglang_ext.mem_cache.prefix_cache.host_store import HostStore
from sglang_ext.mem_cache.prefix_cache.nodes import TieredNode, path
from sglang_ext.mem_cache.prefix_store.objects import ObjectFormat, StoredPage
from sglang_ext.mem_cache.prefix_store.store import READERS, PageRun, PrefixStore

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

MAX_HELD_SHARE = 0.5
"""Share of the host pages that may wait to be written. Further pages are not written."""
MAX_KNOWN_PAGES = 1 << 20
"""Newest pages of which the server remembers that they are in the store."""
LOOKUP_SECONDS, FETCH_SECONDS = 1.0, 30.0
"""Longest wait for the lookup, and for all pages of a request."""
GRACE_SECONDS, GRACE_SHARE = 0.05, 0.05
"""Before this time, and this share of the time that computing would take, a fetch is not judged by its progress."""
SPIN_SECONDS = 0.001
"""If a request is asked for again so soon, the scheduler has no other work. Then it waits so long, because it would keep the interpreter from
the reading threads."""
RECENT_RATES = 16
"""Newest prefills whose fastest rate counts. Beside other requests a prefill takes longer."""


class EarlyDrafter(Protocol):
    """Drafts for requests that wait for their full KV. All ranks call the methods in the same order."""

    @property
    def held_slots(self) -> int:
        """Device slots that :meth:`free_all` would free."""
        ...

    def can_draft(self, req: "Req", end: int) -> bool:
        """Whether a request may draft, whose first ``end`` tokens come from the store."""
        ...

    def start(self, req: "Req", begin: int, host_pages: torch.Tensor, since: float) -> None:
        """Load anchors from ``host_pages``, int64 [pages], for the tokens from ``begin`` on. Afterwards the pages may be overwritten.

        ``since``: when the request arrived, in seconds of ``time.monotonic``.
        """
        ...

    def step(self, rid: str) -> bool:
        """Run one forward of a request that drafts. Returns False if there is nothing to run."""
        ...

    def finish(self, rid: str) -> None:
        """Free the request's slots, and keep its drafts for its first round."""
        ...

    def abort(self, rid: str) -> None:
        """Free the request's slots, and forget its drafts."""
        ...

    def free_all(self) -> None:
        """Free all slots, because others need them."""
        ...


@dataclass
class Fetch:
    """The pages that a waiting request asks the store for.

    Attributes:
        tokens: Token ids of the prompt up to the end of the last page.
        begin: Tokens that the tree had.
        pages: The store pages, from the one that holds token ``begin`` on.
        found: How many of them the store has.
        req: The request.
        since: When the lookup began, and then when reading began, in seconds. Between both the request may wait for other requests, or
            on a prefill server for a decode server.
        host_pages: Host pages for the tokens from ``begin`` on, int64. None before pages are read.
        busy: Ends of transfers that still use these pages for the nodes that had them before.
        run: The pages that are being read: those that all ranks found. None before.
        asked: When the scheduler last asked for the request, in seconds.
    """

    tokens: Sequence[int]
    begin: int
    pages: list[StoredPage]
    found: "Future[int]"
    req: "Req"
    since: float = field(default_factory=lambda: time.monotonic())
    host_pages: torch.Tensor | None = None
    busy: Sequence[Mark] = ()
    run: PageRun | None = None
    asked: float = 0.0

    def wait_if_idle(self) -> None:
        """Wait if the scheduler asks again at once."""
        if time.monotonic() - self.asked < SPIN_SECONDS:
            time.sleep(SPIN_SECONDS)
        self.asked = time.monotonic()


class ComputeRate:
    """Tokens per second of the fastest recent prefill, as the prefix tree sees it: from admission until the KV enters the tree."""

    def __init__(self) -> None:
        self._begun: dict[str, float] = {}
        self._rates: deque[float] = deque(maxlen=RECENT_RATES)

    def begin(self, rid: str) -> None:
        """A request may be computed from now on."""
        self._begun[rid] = time.monotonic()

    def end(self, rid: str, tokens: int) -> None:
        """The KV of a request's ``tokens`` is computed."""
        begun = self._begun.pop(rid, None)
        if begun is not None and tokens > 0:
            self._rates.append(tokens / max(1e-6, time.monotonic() - begun))

    def forget(self, rid: str) -> None:
        """A request ended."""
        self._begun.pop(rid, None)

    def seconds(self, tokens: int) -> float | None:
        """Seconds to compute ``tokens``. None before a prefill was measured."""
        return tokens / max(self._rates) if self._rates else None


class StoredPrefixes:
    """The prefix store of one rank's tree.

    Args:
        host: The tree's KV on the host.
        store: The store.
        form: Format of the objects; its page size is the unit.
        drafter: Drafts for waiting requests. None if they do not draft.

    Attributes:
        unit: Tokens of a store page.
        storage_backend: The store's backend.
        hits, misses: Requested store pages that were, and were not, read into the tree.
        skipped_slow: Requests that were computed because the store was predicted to be slower.
        dropped: Store pages that were not written, because too many waited or the store failed.
    """

    def __init__(
        self, host: HostStore, store: PrefixStore, form: ObjectFormat, ranks: TPRanks = TPRanks(), drafter: EarlyDrafter | None = None
    ) -> None:
        self.drafter = drafter
        self.host, self.store, self.form, self.unit, self._ranks = host, store, form, form.page_size, ranks
        self._page_size, self.storage_backend = host.nodes.page_size, store.backend
        self.hits = self.misses = self.skipped_slow = self.dropped = 0
        self.compute = ComputeRate()
        self._fetches: dict[str, Fetch] = {}
        self._loaded: dict[str, int] = {}
        self._known: dict[bytes, None] = {}
        self._writes: deque[tuple[StoredPage, Future[bool], torch.Tensor]] = deque()
        self._held_pages = 0
        # The lookup that was given up last.
        self._late: Future[int] | None = None
        pool = host.tier.pool
        layers = pool.kv.shape[1]
        keys, values = (tuple(pool.kv[kind, layer].flatten(0, 1) for layer in range(layers)) for kind in (0, 1))
        self._checksums = PageChecksums(KVBuffers(tuple(range(layers)), (1.0,) * layers, keys, values), self._page_size)

    def write(self, last: TieredNode) -> None:
        """Back up the path to ``last`` to the host, and write its pages to the store."""
        _, can_write = self._synchronize()
        nodes = path(last)
        if not nodes or nodes[0].key.extra_key is not None or not can_write:
            return
        covered: list[TieredNode] = []
        for node in nodes:
            if node.host_value is None and (not node.on_device or self.host.back_up(node) is None):
                break
            covered.append(node)
        if not covered or covered[-1].end < self.unit:
            return
        tokens = _tokens(covered)
        ends = range(self.unit, len(tokens) + 1, self.unit)
        pages, stores = torch.cat([node.host_value for node in covered]), {node.end: node.store for node in covered}
        for page_hash, end in zip(self._hashes(tokens[: ends[-1]]), ends):
            if page_hash not in self._known:
                begin = end - self.unit
                awaited = [store for node_end, store in stores.items() if node_end > begin]
                self._write_page(StoredPage(self.form, page_hash, begin), pages[begin // self._page_size : end // self._page_size], awaited)

    def _hashes(self, tokens: Sequence[int]) -> list[bytes]:
        """Hash of each store page, as SGLang names HiCache pages of this size: of all tokens up to its end."""
        return [bytes.fromhex(each) for each in get_hash_str(tokens, page_size=self.unit)]

    def _write_page(self, page: StoredPage, host_pages: torch.Tensor, stores: Sequence[Transfer]) -> None:
        if self._held_pages + len(host_pages) > MAX_HELD_SHARE * self.host.tier.pool.pages.count:
            self.dropped += 1
            return
        self._remember(page.page_hash)
        self.host.tier.pool.pages.hold(host_pages)
        self._held_pages += len(host_pages)
        is_ready, is_intact = lambda: all(each.done for each in stores), partial(self._is_intact, host_pages)
        done = self.store.write(page, lambda _: self._memory(host_pages), is_ready, is_intact)
        self._writes.append((page, done, host_pages))

    def _synchronize(self) -> tuple[bool, bool]:
        """Release host pages whose writes have ended on all ranks. Returns whether the store of each rank may be read, and be written."""
        done = [done.result() for _, done, _ in takewhile(lambda write: write[1].done(), self._writes)]
        # While a lookup hangs, another one would only delay its request.
        can_read = self.store.can_read and (self._late is None or self._late.done())
        states = self._ranks.gather((done, can_read, self.store.can_write))
        # A page is in the store if all ranks have written it.
        for written in zip(*(done for done, _, _ in states)):
            page, _, host_pages = self._writes.popleft()
            self.host.tier.pool.pages.release(host_pages)
            self._held_pages -= len(host_pages)
            if not all(written):
                self.dropped += 1
                self._known.pop(page.page_hash, None)
        return all(can_read for _, can_read, _ in states), all(can_write for *_, can_write in states)

    def _note_lookup(self, pages: Sequence[StoredPage], found: int) -> None:
        """Remember the leading ``found`` pages, also those that will not be read. The others will be written."""
        for page in pages[:found]:
            self._remember(page.page_hash)
        for page in pages[found:]:
            self._known.pop(page.page_hash, None)

    def _remember(self, page_hash: bytes) -> None:
        self._known[page_hash] = None
        if len(self._known) > MAX_KNOWN_PAGES:
            del self._known[next(iter(self._known))]

    def _memory(self, host_pages: torch.Tensor) -> torch.Tensor:
        """KV in host pages: [2 * layers, tokens, heads, head_dim]. A view if the pages are consecutive, else a copy."""
        kv, first = self.host.tier.pool.kv, int(host_pages[0])
        part = kv[:, :, first : first + len(host_pages)] if len(runs(host_pages)) == 1 else kv[:, :, host_pages]
        return part.flatten(2, 3).flatten(0, 1)

    def pending_writes(self) -> list["Future[bool]"]:
        """The writes whose host pages are held."""
        return [done for _, done, _ in self._writes]

    def start(self, req: "Req", node: TieredNode, new_tokens: Sequence[int]) -> None:
        """Ask the store for the pages of a waiting request that follow its match, which ends in ``node``.

        Requests with an adapter, a salt or replaced embeddings ask for none: token ids do not name their KV.
        """
        can_read, _ = self._synchronize()
        before, begin = path(node), node.end
        end = (begin + len(new_tokens)) // self.unit * self.unit
        # Of the request, because a match without tokens has no key.
        is_named = req.extra_key is None and req.positional_embed_overrides is None
        if req.rid in self._fetches or not is_named or end <= begin or not can_read:
            return
        tokens = [*_tokens(before), *new_tokens][:end]
        first = begin // self.unit * self.unit
        hashes = self._hashes(tokens)[first // self.unit :]
        pages = [StoredPage(self.form, page_hash, start) for page_hash, start in zip(hashes, range(first, end, self.unit))]
        self._fetches[req.rid] = Fetch(tokens, begin, pages, self.store.count_run([page.name for page in pages]), req)

    def is_done(self, rid: str) -> bool:
        """Whether a request waits for no pages any more. Those that arrived are in the tree then."""
        fetch = self._fetches.get(rid)
        if fetch is None:
            self.compute.begin(rid)
            return True
        if fetch.run is None and not self._begin_reading(fetch):
            fetch.wait_if_idle()
            return False
        if fetch.run is not None:
            now = fetch.run.ended, self._is_too_slow(fetch), fetch.run.has_anchors, fetch.run.lacks_anchors
            states = self._ranks.gather(now)
            if not all(ended for ended, *_ in states) and not any(is_too_slow for _, is_too_slow, *_ in states):
                if any(lacks_anchors for *_, lacks_anchors in states):
                    # No rank drafts, so that residuals may replace anchors.
                    fetch.run.release_anchors()
                if not self._draft(fetch, all(has_anchors for _, _, has_anchors, _ in states)):
                    fetch.wait_if_idle()
                return False
            fetch.run.stop()
            restored = min(self._ranks.gather(fetch.run.restored))
            if self.drafter is not None:
                self.drafter.finish(rid)
            self._loaded[rid] = self._insert(fetch, restored)
            # On some rank this page may be damaged, and deleted.
            for page in fetch.pages[restored : restored + 1]:
                self._known.pop(page.page_hash, None)
        else:
            restored = 0
        self.hits += restored
        self.misses += len(fetch.pages) - restored
        del self._fetches[rid]
        self.compute.begin(rid)
        return True

    def _draft(self, fetch: Fetch, has_anchors: bool) -> bool:
        """Run one forward on anchors, if they are there. Returns whether something was done."""
        if self.drafter is None:
            return False
        if not has_anchors:
            return self.drafter.step(fetch.req.rid)
        self.drafter.start(fetch.req, fetch.begin, fetch.host_pages, fetch.since)
        fetch.run.release_anchors()
        return True

    def pop_loaded(self, rid: str) -> int:
        """Tokens of a request that came from the store. The next call returns 0."""
        return self._loaded.pop(rid, 0)

    def abort(self, rid: str) -> None:
        """Forget a request."""
        fetch = self._fetches.pop(rid, None)
        self._loaded.pop(rid, None)
        self.compute.forget(rid)
        if self.drafter is not None:
            self.drafter.abort(rid)
        if fetch is not None and fetch.run is not None:
            fetch.run.stop()
            self.host.tier.pool.pages.free(fetch.host_pages)

    def clear(self) -> None:
        """Forget all requests, because the tree is cleared, and release pages that wait to be written once they are written."""
        for rid in list(self._fetches):
            self.abort(rid)

    def _begin_reading(self, fetch: Fetch) -> bool:
        """Begin to read the pages that were found on all ranks. Returns False while that is not known."""
        elapsed = time.monotonic() - fetch.since
        states = self._ranks.gather((fetch.found.result() if fetch.found.done() else None, elapsed > LOOKUP_SECONDS))
        if any(found is None for found, _ in states):
            if not states[0][1]:
                return False
            found, self._late = 0, fetch.found
        else:
            found = min(found for found, _ in states)
            self._note_lookup(fetch.pages, found)
        if not found:
            return True
        tokens = fetch.pages[found - 1].start + self.unit - fetch.begin
        if any(self._ranks.gather(self._predicts_loss(found, tokens))):
            self.skipped_slow += 1
            return True
        fetch.host_pages = self.host.allocate(tokens // self._page_size)
        if fetch.host_pages is not None:
            fetch.since, fetch.busy = time.monotonic(), self.host.tier.unfinished(fetch.host_pages)
            drafts = self.drafter is not None and self.drafter.can_draft(fetch.req, fetch.begin + tokens)
            fetch.run = self.store.read(fetch.pages[:found], partial(self._target, fetch), partial(self._finish_page, fetch), drafts)
        return True

    def _predicts_loss(self, pages: int, tokens: int) -> bool:
        """Whether reading would take longer than computing, by measured rates."""
        rate, compute = self.store.rate, self.compute.seconds(tokens)
        return rate is not None and compute is not None and pages * self.form.kv_bytes > compute * rate * min(READERS, pages)

    def _is_too_slow(self, fetch: Fetch) -> bool:
        """Whether the pages that are missing would take longer than computing them, by the progress so far."""
        elapsed, pages, progress = time.monotonic() - fetch.since, len(fetch.run.pages), fetch.run.progress
        if elapsed > FETCH_SECONDS:
            return True
        # The scheduler asks for no request while the batch is full, and then releases no anchors.
        elapsed -= fetch.run.held_seconds
        compute = self.compute.seconds((pages - fetch.run.restored) * self.unit)
        if compute is None or elapsed < GRACE_SECONDS + GRACE_SHARE * compute:
            return False
        return elapsed / max(progress, 0.5) * (pages - progress) > compute

    def _own_pages(self, fetch: Fetch, page: StoredPage) -> torch.Tensor:
        """Host pages of a store page's tokens from ``fetch.begin`` on."""
        begin, end = (max(0, at - fetch.begin) // self._page_size for at in (page.start, page.start + self.unit))
        return fetch.host_pages[begin:end]

    def _fills_host_pages(self, own: torch.Tensor) -> bool:
        """Whether a store page is restored directly to its host pages: they are consecutive and hold all of its tokens."""
        return len(own) == self.unit // self._page_size and len(runs(own)) == 1

    def _target(self, fetch: Fetch, page: StoredPage) -> torch.Tensor:
        """Memory that a store page is restored to, as :meth:`_memory`.

        Called by reading threads. On a GPU, earlier transfers of these host pages may still run, so that it waits for them.
        """
        for transfer_end in fetch.busy:
            transfer_end.wait()
        own, kv = self._own_pages(fetch, page), self.host.tier.pool.kv
        if self._fills_host_pages(own):
            return self._memory(own)
        kinds, layers, _, _, *shape = kv.shape
        return torch.empty(kinds * layers, self.unit, *shape, dtype=kv.dtype)

    @torch.inference_mode()
    def _finish_page(self, fetch: Fetch, page: StoredPage, kv: torch.Tensor) -> None:
        """Copy a restored page to its host pages, if it is not there, and set their checksums."""
        own, pool, size = self._own_pages(fetch, page), self.host.tier.pool, self._page_size
        if not self._fills_host_pages(own):
            tail = kv[:, -len(own) * size :]
            pool.kv[:, :, own] = tail.unflatten(1, (-1, size)).unflatten(0, pool.kv.shape[:2])
        pool.checksums[own] = self._checksums_of(own)

    @torch.inference_mode()
    def _is_intact(self, host_pages: torch.Tensor) -> bool:
        """Whether host pages still have their checksums. Loads compare them, too. A changed page would reach other servers as a valid object."""
        return torch.equal(self._checksums_of(host_pages), self.host.tier.pool.checksums[host_pages])

    def _checksums_of(self, host_pages: torch.Tensor) -> torch.Tensor:
        """Checksums of what host pages hold now: int64 [pages]."""
        return self._checksums.of((host_pages[:, None] * self._page_size + torch.arange(self._page_size)).flatten())

    def _insert(self, fetch: Fetch, restored: int) -> int:
        """Insert the restored pages into the tree, and free the other host pages. Returns the number of inserted tokens."""
        nodes, pool, size = self.host.nodes, self.host.tier.pool, self._page_size
        end = fetch.pages[restored - 1].start + self.unit if restored else fetch.begin
        key = RadixKey(array("q", fetch.tokens[:end]))
        found = nodes.walk(key) if restored else []
        parent = found[-1] if found else nodes.root
        rest = key[parent.end :]
        is_new = parent.end >= fetch.begin and len(rest) and rest.child_key(size) not in parent.children
        first, last = ((at - fetch.begin) // size for at in (parent.end, end)) if is_new else (0, 0)
        used, unused = fetch.host_pages[first:last], torch.cat([fetch.host_pages[:first], fetch.host_pages[last:]])
        if is_new:
            pool.pages.fill(used)
            nodes.add_on_host(parent, rest, used, _ended_store(len(used) * pool.page_bytes, used))
        if len(unused):
            pool.pages.free(unused)
        return len(used) * size


def _tokens(nodes: Sequence[TieredNode]) -> list[int]:
    """Token ids of consecutive nodes of a path."""
    return [token for node in nodes for token in node.key.token_ids]


def _ended_store(size: int, pages: torch.Tensor) -> Transfer:
    """A transfer that has stored to host ``pages``."""
    now, launched = Mark.now(torch.device("cpu")), Future()
    launched.set_result(LaunchedTransfer(now, now, None, size))
    return Transfer(size, pages, launched)
