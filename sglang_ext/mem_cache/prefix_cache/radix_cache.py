"""SGLang's radix cache, knowing about compressed slots."""

from collections.abc import Callable

from sglang.srt.mem_cache.radix_cache import RadixCache

from sglang_ext.mem_cache.compressed.compressed_views import CompressedViews


class KVViewsRadixCache(RadixCache):
    """A radix cache whose requests may hold compressed copies beside their full KV.

    The copies come from the same pool: they are reported to SGLang's invariant checker as held
    tokens, and released when the request finishes, is aborted or is retracted.

    Attributes:
        views: the compressed copies, set by the worker once its pool exists.
        on_release: called with a request's row after its copy was released.
        insert_generated: whether generated tokens enter the tree; not in lossy mode, where their
            KV is not that of the full cache.
    """

    views: CompressedViews | None = None
    on_release: Callable[[int], None] | None = None
    insert_generated: bool = True

    def cache_finished_req(self, req, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        """Release the request's compressed copy, then cache its full KV as SGLang does."""
        self._release_copy(req)
        super().cache_finished_req(
            req, is_insert and self.insert_generated, kv_len_to_handle=kv_len_to_handle
        )

    def _release_copy(self, req) -> None:
        if self.views is not None:
            self.views.release(req.req_pool_idx)
            self.on_release(req.req_pool_idx)

    def session_held_tokens(self, active_pool_idxs: set | None = None) -> int:
        """Slots of compressed copies, which neither the tree nor the requests' rows account for."""
        held = self.views.held_tokens if self.views is not None else 0
        return super().session_held_tokens(active_pool_idxs) + held

    def reset(self) -> None:
        """Forget the tree and, with it, all compressed copies."""
        if self.views is not None:
            self.views.forget_all()
        super().reset()
