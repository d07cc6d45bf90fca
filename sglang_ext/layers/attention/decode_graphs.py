"""Attention by layout of the compressed KV, and CUDA graphs of steps over it (decode_backend.py): one token per request.

SGLang's own graphs cannot read these layouts.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from torch import Tensor

from sglang_ext.layers import forward
from sglang_ext.layers.attention.decode_backend import CompressedDecode
from sglang_ext.layers.attention.packed import PackedDecode, packed_attention
from sglang_ext.layers.attention.per_head import PagesDecode, PointerDecode, RaggedHeadsDecode, SentRowsDecode, pointer_attention, ragged_attention
from sglang_ext.layers.attention.verify_graphs import dummy_batch
from sglang_ext.mem_cache.compressed.layouts.base import ExchangedRowLayout, KVLayout
from sglang_ext.mem_cache.compressed.layouts.pointers import PagePointerLayout, PointerLayout
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import QuantizedLayout
from sglang_ext.mem_cache.compressed.layouts.ragged_heads import RaggedHeadLayout

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, PPProxyTensors
    from sglang.srt.model_executor.model_runner import ModelRunner


class LayoutReader(NamedTuple):
    """Attention over rows that begin with compressed KV of one layout.

    ``attend``: causal attention of a request's newest tokens over its row, in PyTorch, with the arguments of ``ragged_attention`` (per_head.py).
    None if rows are read as plain tokens. ``decode``: the backend for one token per request.
    """

    attend: Callable[[KVLayout, int, int, Tensor, Tensor, Tensor, Tensor, float | None], Tensor] | None
    decode: type[CompressedDecode]


def _packed(
    rows: QuantizedLayout, row: int, packed: int, queries: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scaling: float
) -> Tensor:
    return packed_attention(rows.layout, queries, keys, values, slots, packed, scaling)


LAYOUT_READERS: dict[type[KVLayout], LayoutReader] = {
    QuantizedLayout: LayoutReader(_packed, PackedDecode),
    RaggedHeadLayout: LayoutReader(ragged_attention, RaggedHeadsDecode),
    PointerLayout: LayoutReader(pointer_attention, PointerDecode),
    PagePointerLayout: LayoutReader(pointer_attention, PagesDecode),
    ExchangedRowLayout: LayoutReader(None, SentRowsDecode),
}
"""All layouts except plain tokens, which any attention reads."""


logger = logging.getLogger(__name__)


class CompressedDecodeGraphs(DecodeCudaGraphRunner):
    """SGLang's graph runner, for one token per request over rows that may begin with compressed KV that SGLang's attention cannot read."""

    def execute(self, forward_batch: "ForwardBatch", pp_proxy_tensors: "PPProxyTensors | None" = None) -> LogitsProcessorOutput:
        """Replay. Resets SGLang's mark of the last read of the token table, because these graphs read the table while they run."""
        output = super().execute(forward_batch, pp_proxy_tensors)
        self.model_runner.war_fastpath_read_done_event = None
        return output

    def warm_up(self) -> None:
        """Replay each graph once, as :meth:`VerifyGraphRunner.warm_up`."""
        for requests in self.capture_bs:
            self.execute(forward.decode_batch(*dummy_batch(requests, 1, self.model_runner.device)))


def create_attention(model_runner: "ModelRunner", layout: KVLayout) -> forward.AttentionOverride:
    """Create the attention over compressed KV on a GPU; with graphs for SGLang's list of batch sizes, if SGLang captured its own.

    ``model_runner`` is the target's, while SGLang treats it as one of plain decoding (verify_graphs.py). ``layout``: one of
    :data:`LAYOUT_READERS`. Raises OptionError if the kernel does not support the model's heads.
    """
    backend = LAYOUT_READERS[type(layout)].decode(model_runner, layout)
    if model_runner.decode_cuda_graph_runner is None:
        backend.compile_kernels()
        return forward.AttentionOverride(backend)
    logger.info("sglang-ext: capturing steps over %s", backend.compressed_kv_name)
    model_runner.graph_shared_output = GraphSharedOutput.create_for_model_runner(model_runner)
    graphs = CompressedDecodeGraphs(model_runner, attn_backend=backend)
    graphs.warm_up()
    return forward.AttentionOverride(backend, graphs)
