"""Sparse attention: methods that select the tokens of each step on the model's own GPU or CPU. For cache ranks see cache_rank/feature.py."""

from sglang.srt.model_executor.cuda_graph_config import Backend

from sglang_ext.config import selection_options
from sglang_ext.managers.feature import Feature, Worker
from sglang_ext.managers.memory_plan import MemoryPlanner
from sglang_ext.mem_cache.compressed.async_selector import StreamSelector
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressors.step_selectors import Spade
from sglang_ext.mem_cache.selection.on_gpu import GpuSelector, planned_bytes


class SparseAttention(Feature):
    """Selects tokens on a second stream of the model's GPU (spade), and plans memory for selections."""

    def planned_bytes(self, planner: MemoryPlanner, requests: int, tokens: int, rings: int) -> dict[str, int]:
        """Workspaces of selections of tokens, and of pages."""
        if not planner.on_gpu:
            return {}
        return {"selection_workspaces": self._token_selection_bytes(planner, rings) + self._page_selection_bytes(planner, requests)}

    def _token_selection_bytes(self, planner: MemoryPlanner, rings: int) -> int:
        """Bytes of selections of tokens, as in on_gpu.py, for contexts as long as a row of the token table."""
        model, selecting = planner.model, [m.compressor for m in planner.served.methods if isinstance(m.compressor, Spade)]
        if not selecting:
            return 0
        sizes = planner.row_tokens, model.query_heads, model.kv_heads, model.head_dim, model.number_bytes, selecting[0].predictor
        # One when a request is compressed; and one on a second stream for all requests with rings, unless cache ranks select.
        at_once = [1] if self.args.kv_cache_ranks else [1, rings]
        return sum(planned_bytes(model.layers * count, *sizes) for count in at_once)

    def _page_selection_bytes(self, planner: MemoryPlanner, requests: int) -> int:
        """Bytes of selections of pages, as in quest_pages.py, in rows of the token table; the layers of a step share them."""
        paging = planner.paging
        if paging is None:
            return 0
        from sglang_ext.layers.kernels.quest_pages import scratch_bytes

        decode = self.args.cuda_graph_config.decode
        # SGLang's graphs of steps share one workspace, if there are any. Larger batches run in another one.
        at_once = [requests] if decode.backend == Backend.DISABLED else [requests, min(requests, max(decode.bs))]
        return sum(scratch_bytes(count, planner.model.kv_heads, planner.row_tokens, paging.page) for count in at_once)

    def selector(self, worker: Worker, method: CompressionMethod) -> StreamSelector | None:
        """Create the asynchronous selector of spade on a GPU. On a CPU, and with quest, steps or rounds select themselves."""
        if not worker.buffers.on_gpu or not isinstance(method.compressor, Spade):
            return None
        table, query_heads = worker.req_to_token_pool.req_to_token, worker.memory.model.query_heads
        selector = GpuSelector(method.compressor.predictor, worker.buffers, query_heads, worker.methods.rotary)
        intervals = selection_options.selection_intervals(self.args)
        return StreamSelector(method, table, selector, worker.queries, intervals)
