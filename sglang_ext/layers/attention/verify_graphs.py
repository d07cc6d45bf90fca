"""CUDA graphs of verifications: all requests have the same number of new tokens, over their full KV.

SGLang's own graphs of the target model, with one token per request, serve draft steps and plain decoding.
"""

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_ext.core import SPECULATIVE_ALGORITHM
from sglang_ext.layers import forward
from sglang_ext.layers.forward import EvenVerifyInput

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


class VerifyGraphRunner(DecodeCudaGraphRunner):
    """SGLang's graph runner, for verifications of ``width`` tokens per request."""

    def get_spec_info(self, num_tokens: int) -> EvenVerifyInput:
        """The speculative input of a captured batch."""
        return EvenVerifyInput(self.captured_req_width)

    @property
    def width(self) -> int:
        """Tokens of each request."""
        return self.captured_req_width

    def warm_up(self) -> None:
        """Replay each graph over slot 0, which no request owns."""
        for requests in self.capture_bs:
            self.verify(*dummy_batch(requests, self.width, self.model_runner.device))

    def verify(self, batch: "ScheduleBatch", inputs: forward.ForwardInputs) -> LogitsProcessorOutput:
        """Replay over ``inputs``, with :attr:`width` tokens per request."""
        batch_input = forward.decode_batch(batch, inputs)
        batch_input.forward_mode = ForwardMode.TARGET_VERIFY
        batch_input.spec_info = EvenVerifyInput(self.width)
        batch_input.seq_lens = inputs.lengths - self.width
        batch_input.seq_lens_cpu = inputs.lengths_cpu - self.width
        batch_input.seq_lens_sum = int(batch_input.seq_lens_cpu.sum())
        return self.execute(batch_input)


class VerifyGraphSet:
    """Captured verifications of several widths: fewer tokens read the same KV in less time. ``graphs``: narrow ones first."""

    def __init__(self, graphs: Sequence[VerifyGraphRunner]):
        self.graphs = sorted(graphs, key=lambda graph: graph.width)

    def fit(self, requests: int, width: int) -> VerifyGraphRunner | None:
        """The narrowest runner for ``requests`` requests of ``width`` tokens each; None if they must run without a graph."""
        return next((graph for graph in self.graphs if graph.width >= width and graph.max_bs >= requests), None)

    def warm_up(self) -> None:
        """Replay all graphs once: a first replay takes many times as long as later ones."""
        for graph in self.graphs:
            graph.warm_up()


def dummy_batch(requests: int, width: int, device: torch.device | str) -> tuple[SimpleNamespace, forward.ForwardInputs]:
    """A batch with ``width`` tokens per request in slot 0, and its inputs, to run forwards before requests arrive."""
    nobody = [SimpleNamespace(lora_id=None, rid="")] * requests
    batch = SimpleNamespace(reqs=nobody, spec_algorithm=None, sampling_info=None, return_hidden_states=False)
    zeros = torch.zeros(requests * width, dtype=torch.int64, device=device)
    lengths = torch.full((requests,), 1 + width, dtype=torch.int64)
    inputs = forward.ForwardInputs(
        tokens=zeros,
        positions=zeros,
        slots=zeros,
        rows=zeros[:requests],
        lengths=lengths.to(device),
        lengths_cpu=lengths,
        counts=[width] * requests,
    )
    return batch, inputs


def capture(model_runner: "ModelRunner", width: int, verifier: AttentionBackend | None, most: int | None = None) -> VerifyGraphRunner:
    """Capture forwards of ``width`` tokens per request, for SGLang's list of batch sizes, or for all up to ``most``.

    ``model_runner``: the target's, which captured its own graphs. ``verifier``: attention of the forwards; None for the target's own backend.
    """
    name = "triton" if verifier else model_runner.decode_attention_backend_str
    attention = verifier or _of_backend(model_runner, name, width)
    logger.info("sglang-ext: capturing verifications of %s tokens a request with %s", width, name)
    config = model_runner.server_args.cuda_graph_config.decode
    asked = config.bs
    # While graphs are captured, SGLang treats the runner as one of a speculative algorithm, and captures other batch sizes than in its options.
    model_runner.spec_algorithm = SpeculativeAlgorithm.from_string(SPECULATIVE_ALGORITHM)
    try:
        sizes = get_batch_sizes_to_capture(model_runner, width)[0] if most is None else list(range(1, most + 1))
        config.bs = capturable_sizes(attention, sizes, width)
        reserve_logits_buffer(model_runner, max(get_batch_sizes_to_capture(model_runner, width)[0]) * width)
        return VerifyGraphRunner(model_runner, attn_backend=attention, speculative_num_draft_tokens=width)
    finally:
        config.bs = asked
        forward.use_plain_decoding(model_runner)


def reserve_logits_buffer(model_runner: "ModelRunner", tokens: int) -> None:
    """Let graphs that are captured later use a buffer for the logits of ``tokens`` tokens.

    SGLang's buffer fits the longest drafts for all requests, but only few requests at once have drafts that long
    (options.py:MAX_WIDE_REQUESTS).
    """
    logits_buffer = model_runner.graph_shared_output
    if logits_buffer is None or logits_buffer.max_rows < tokens:
        model_runner.graph_shared_output = GraphSharedOutput(device=model_runner.device, max_rows=tokens)


def capturable_sizes(attention: AttentionBackend, sizes: list[int], width: int) -> list[int]:
    """The batch sizes, ascending, that fit the attention's workspace. Larger batches are verified without a graph."""
    fits_workspace = getattr(attention, "fits_workspace", None)
    found = sizes if fits_workspace is None else [size for size in sizes if fits_workspace(size, width)] or sizes[:1]
    if found != sizes:
        logger.info(
            "sglang-ext: verifications of %s tokens of more than %s requests run without graphs, whose workspace would be larger than "
            "SGLANG_FLASHINFER_WORKSPACE_SIZE",
            width, found[-1],
        )  # fmt: skip
    return found


def _of_backend(model_runner: "ModelRunner", name: str, width: int) -> AttentionBackend:
    """The target's own attention, for verifications of ``width`` tokens per request."""
    if name == "fa3":
        from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

        # It plans on the device, so a round does not need the lengths on the host.
        backend = FlashAttentionBackend(model_runner, fa_impl_ver=3)
        # SGLang has a single number of draft tokens; the graphs here have several widths.
        backend.speculative_num_draft_tokens = width
        # A verification may exceed the end of a context; the token table is wide enough.
        backend.max_context_len += width
        return backend
    from sglang_ext.layers.attention.verify_flashinfer import VerifyFlashInfer

    return VerifyFlashInfer(model_runner, init_new_workspace=model_runner.init_new_workspace)
