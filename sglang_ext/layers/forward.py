"""Forwards of the target model over rows of the token table: their inputs, and their attention.

SGLang's forward mode for several tokens per request is ``TARGET_VERIFY``: attention reads the token table, and the logits of every
token are kept. A speculative input gives the attention backends the true lengths.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType, SpeculativeAlgorithm

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.memory_pool import KVCache
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner


@dataclass(frozen=True)
class AttentionOverride:
    """Attention that replaces the model's own in a forward.

    ``graphs``: captured forwards of one token per request with this backend; None to run without graphs.
    """

    backend: AttentionBackend
    graphs: "DecodeCudaGraphRunner | None" = None


@dataclass(frozen=True)
class AttentionOverrides:
    """Selects the attention of a forward; None means the model's own.

    Attributes:
        verifier: Attention of several tokens per request.
        compressed: Attention of one token per request, over rows that may begin with packed blocks, ragged heads or pointers.
    """

    verifier: AttentionOverride | None = None
    compressed: AttentionOverride | None = None

    def select(self, counts: list[int], on_full_kv: bool) -> AttentionOverride | None:
        """The attention of a forward with these token counts per request. ``on_full_kv``: no request reads compressed KV."""
        if max(counts) > 1:
            return self.verifier
        return None if on_full_kv else self.compressed


@dataclass(frozen=True)
class ForwardInputs:
    """Inputs of one forward, request by request, on the device if not stated otherwise.

    Attributes:
        tokens, positions, slots: int64 [total], input tokens, their absolute positions, and slots for their KV.
        rows: int64 [batch], rows of the token table that attention reads.
        lengths, lengths_cpu: int64 [batch], tokens that each request's last query attends to; the same on the host.
        counts: Input tokens of each request.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    lengths: torch.Tensor
    lengths_cpu: torch.Tensor
    counts: list[int]


def run(
    model_runner: "ModelRunner", batch: "ScheduleBatch", inputs: ForwardInputs, attention: AttentionOverride | None = None
) -> LogitsProcessorOutput:
    """Run a forward. Returns the logits of each token: float [total, vocabulary]. ``attention``: None for the model's own."""
    with use_attention(model_runner, attention):
        return model_runner.forward(build_forward_batch(model_runner, batch, inputs)).logits_output


@contextmanager
def use_attention(model_runner: "ModelRunner", attention: AttentionOverride | None) -> Iterator[None]:
    """Let the model use ``attention`` and its graphs inside this context; None for the model's own."""
    own = AttentionOverride(model_runner.attn_backend, model_runner.decode_cuda_graph_runner)
    used = attention or own
    model_runner.attn_backend, model_runner.decode_cuda_graph_runner = used.backend, used.graphs
    try:
        yield
    finally:
        model_runner.attn_backend, model_runner.decode_cuda_graph_runner = own.backend, own.graphs


def build_forward_batch(model_runner: "ModelRunner", batch: "ScheduleBatch", inputs: ForwardInputs) -> ForwardBatch:
    """SGLang's forward batch: a plain decode if each request has one token, otherwise a ragged verification."""
    forward = decode_batch(batch, inputs)
    counts = inputs.counts
    if max(counts) > 1:
        query_lengths = torch.tensor(counts, dtype=torch.int64).to(inputs.tokens.device, non_blocking=True)
        forward.forward_mode = ForwardMode.TARGET_VERIFY
        forward.spec_info = RaggedVerifyInput(forward.seq_lens, query_lengths, counts)
        forward.spec_info.capture_hidden_mode = forward.capture_hidden_mode
        forward.extend_seq_lens = query_lengths
        forward.extend_prefix_lens = forward.seq_lens - query_lengths
        forward.extend_seq_lens_cpu = counts
        forward.extend_prefix_lens_cpu = (inputs.lengths_cpu - torch.tensor(counts)).tolist()
        forward.extend_num_tokens = len(inputs.tokens)
        forward.extend_start_loc = query_lengths.cumsum(0) - query_lengths
    if model_runner.server_args.enable_lora:
        prepare_lora(model_runner, forward, counts)
    return forward


def decode_batch(batch: "ScheduleBatch", inputs: ForwardInputs) -> ForwardBatch:
    """A decode batch of the inputs, with one token per request."""
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(inputs.counts),
        input_ids=inputs.tokens,
        req_pool_indices=inputs.rows,
        seq_lens=inputs.lengths,
        out_cache_loc=inputs.slots,
        seq_lens_sum=int(inputs.lengths_cpu.sum()),
        orig_seq_lens=inputs.lengths.to(torch.int32),
        seq_lens_cpu=inputs.lengths_cpu,
        positions=inputs.positions,
        spec_algorithm=batch.spec_algorithm,
        sampling_info=batch.sampling_info,
        capture_hidden_mode=CaptureHiddenMode.FULL if batch.return_hidden_states else CaptureHiddenMode.NULL,
        lora_ids=[req.lora_id for req in batch.reqs],
        rids=[req.rid for req in batch.reqs],
        num_token_non_padded_cpu=len(inputs.tokens),
    )


def select_requests(batch: "ScheduleBatch", requests: list[int], where: torch.Tensor) -> "ScheduleBatch":
    """A batch of the requests at ``requests``, with the fields that a forward reads. ``where``: the same, int64 on the device."""
    part = copy.copy(batch)
    part.reqs = [batch.reqs[i] for i in requests]
    part.seq_lens, part.req_pool_indices = batch.seq_lens[where], batch.req_pool_indices[where]
    return part


def prepare_lora(model_runner: "ModelRunner", forward: ForwardBatch, counts: list[int]) -> None:
    """Fetch the batch's adapters, and set the adapter of each token in SGLang's LoRA layers. ``counts``: tokens of each request.

    SGLang's LoRA backends assume that a verification has equal lengths. They get a decode batch instead, in which each token is a
    request: it allows any lengths, and keeps all logits.
    """
    manager = model_runner.lora_manager
    if not model_runner.server_args.enable_lora_overlap_loading:
        manager.fetch_new_loras(set(forward.lora_ids))
    adapters = [adapter for adapter, count in zip(forward.lora_ids, counts) for _ in range(count)]
    manager.prepare_lora_batch(
        replace(
            forward, forward_mode=ForwardMode.DECODE, batch_size=len(adapters), lora_ids=adapters
        )
    )


class RaggedVerifyInput(SpecInput):
    """Lengths of a forward in which some requests have one new token and others a whole verification.

    Attributes:
        lengths, query_lengths: int64 [batch], tokens that each request's last query attends to, and new tokens.
        counts: ``query_lengths`` on the host.
    """

    def __init__(self, lengths: torch.Tensor, query_lengths: torch.Tensor, counts: list[int]):
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.lengths = lengths
        self.query_lengths = query_lengths
        self.counts = counts
        # Captured graphs have one token per request; SGLang runs wider forwards without graphs.
        self.num_tokens_per_req = max(counts)
        self.capture_hidden_mode = CaptureHiddenMode.NULL

    def new_tokens(self, forward_batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor, list[int], torch.Tensor]:
        """``prefixes``, ``starts`` and ``counts`` of VerifyTokens (kernels/verify_attention.py), and the tokens of its row that each new token
        attends to, int64 [tokens]. A draft row has fewer tokens than the positions in it."""
        prefixes, total = self.lengths - self.query_lengths, sum(self.counts)
        starts = torch.nn.functional.pad(self.query_lengths.cumsum(0), (1, 0))
        # Tokens before a request's new tokens in its row, minus tokens before them in the forward.
        before = torch.repeat_interleave(prefixes - starts[:-1], self.query_lengths, output_size=total)
        lengths = before + torch.arange(1, total + 1, device=before.device)
        return prefixes, starts, self.counts, lengths

    def generate_attn_arg_prefill(
        self,
        req_pool_indices: torch.Tensor,
        paged_kernel_lens: torch.Tensor,
        paged_kernel_lens_sum: int,
        req_to_token: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        """Index pointers for FlashInfer's paged prefill: ragged queries, causal, no mask.

        Returns kv_indices int32 [sum of lengths], kv_indptr int32 [batch + 1], qo_indptr int32 [batch + 1], and None for the custom mask.
        """
        columns = torch.arange(int(self.lengths.max()), device=req_to_token.device)
        table = req_to_token[req_pool_indices.long()[:, None], columns[None, :]]
        kv_indices = table[columns[None, :] < self.lengths[:, None]].to(torch.int32)
        return kv_indices, index_pointers(self.lengths), index_pointers(self.query_lengths), None


class EvenVerifyInput(SpecInput):
    """Lengths of a verification with ``width`` new tokens per request, which CUDA graphs accept.

    As in SGLang's own verifications, the batch's ``seq_lens`` do not count the new tokens.
    """

    # SGLang's backends read these: a chain of drafts, causal, without a mask.
    custom_mask = None
    topk = 1

    def __init__(self, width: int):
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.width = self.draft_token_num = self.num_tokens_per_req = width
        self.capture_hidden_mode = CaptureHiddenMode.NULL

    def new_tokens(self, forward_batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor, list[int], torch.Tensor]:
        """As :meth:`RaggedVerifyInput.new_tokens`. Reads only ``seq_lens``, on the device."""
        prefixes, batch = forward_batch.seq_lens, forward_batch.batch_size
        starts = torch.arange(batch + 1, device=prefixes.device) * self.width
        lengths = prefixes[:, None] + torch.arange(1, self.width + 1, device=prefixes.device)
        return prefixes, starts, [self.width] * batch, lengths.flatten()

    def generate_attn_arg_prefill(
        self,
        req_pool_indices: torch.Tensor,
        paged_kernel_lens: torch.Tensor,
        paged_kernel_lens_sum: int,
        req_to_token: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        """As :meth:`RaggedVerifyInput.generate_attn_arg_prefill`. ``paged_kernel_lens``: [batch], tokens before the new ones."""
        from sglang.kernels.ops.kvcache.kv_indices import create_flashinfer_kv_indices_triton

        batch, device = len(req_pool_indices), req_to_token.device
        lengths = paged_kernel_lens + self.width
        kv_indptr = index_pointers(lengths)
        kv_indices = torch.empty(
            paged_kernel_lens_sum + batch * self.width, dtype=torch.int32, device=device
        )
        create_flashinfer_kv_indices_triton[(batch,)](
            req_to_token, req_pool_indices, lengths, kv_indptr, None, kv_indices, req_to_token.shape[1]
        )
        qo_indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * self.width
        return kv_indices, kv_indptr, qo_indptr, None


def index_pointers(lengths: torch.Tensor) -> torch.Tensor:
    """Running sum of ``lengths`` from 0: int32 [batch + 1]."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def use_plain_decoding(model_runner: "ModelRunner") -> None:
    """Let SGLang treat the target's runner as one of plain decoding, with one token per request."""
    model_runner.spec_algorithm = SpeculativeAlgorithm.NONE


def check_supported(layer: "RadixAttention", options: dict[str, object], where: str, remedy: str) -> None:
    """Check that a layer asks for no attention option except a scale or a cap. ``options``: None for those it does not ask for.

    Raises ValueError, which names the attention, ``where``, and what the user can do instead, ``remedy``.
    """
    wanted = [name for name, value in options.items() if value is not None]
    if wanted or layer.xai_temperature_len > 0:
        raise ValueError(
            f"layer {layer.layer_id} asks for {', '.join(wanted) or 'a temperature by length'}, which {where} lack; {remedy}"
        )


def write_kv(
    pool: "KVCache", layer: "RadixAttention", forward_batch: "ForwardBatch", keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Write the KV of the new tokens, [tokens, kv_heads, dim], to their slots in SGLang's pool."""
    where = KVWriteLoc(forward_batch.out_cache_loc, None)
    pool.set_kv_buffer(layer, where, keys, values, layer.k_scale, layer.v_scale)


def is_attention(module: torch.nn.Module) -> bool:
    """Whether a module is one of SGLang's attention layers."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return isinstance(module, RadixAttention)


def first_attention_layer(model: torch.nn.Module) -> torch.nn.Module:
    """The first of the model's attention layers. All have the same heads."""
    return next(module for module in model.modules() if is_attention(module))


def attention_scaling(model: torch.nn.Module) -> dict[int, float]:
    """Factor on query-key products by layer index, from the model's attention layers."""
    return {module.layer_id: module.scaling for module in model.modules() if is_attention(module)}
