"""Attention backends and graphs at server start: verification graphs, attention over compressed KV, SGLang's slot kernel."""

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache import allocation
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture

from sglang_ext.config import options
from sglang_ext.config.rules import KVServerArgs
from sglang_ext.layers.attention.verify_graphs import VerifyGraphSet, capture, reserve_logits_buffer
from sglang_ext.layers.forward import AttentionOverride
from sglang_ext.mem_cache.compressed.layouts.base import KVLayout, PlainLayout
from sglang_ext.mem_cache.compressed.queries import QueryWindows

if TYPE_CHECKING:
    from sglang_ext.layers.attention.verify_attention import VerifyAttention

logger = logging.getLogger(__name__)

# FlashInfer's name of the plan's memory, in all of its wrappers.
PLAN = "_pin_memory_int_workspace_buffer"


def capture_verify_graphs(
    args: KVServerArgs, model_runner: ModelRunner, queries: QueryWindows, verifier: AttentionBackend | None
) -> VerifyGraphSet | None:
    """Capture verification graphs, which record queries. None if the server does not verify, or SGLang captured no graphs."""
    if args.kv_mode == "lossy" or model_runner.decode_cuda_graph_runner is None:
        return None
    widths, tokens = options.verify_widths(args), max_captured_tokens(args, model_runner)
    reserve_logits_buffer(model_runner, tokens)
    own = verifier if model_runner.decode_attention_backend_str == "triton" else None
    with queries.capturing(tokens):
        captured = [capture(model_runner, width, own) for width in widths]
        captured += [capture(model_runner, width, own, options.MAX_WIDE_REQUESTS) for width in options.wide_verify_widths(args)]
    return VerifyGraphSet(captured)


def max_captured_tokens(args: KVServerArgs, model_runner: ModelRunner) -> int:
    """Tokens of the largest forward that is captured in addition to SGLang's own: a verification, or a step if nothing is verified."""
    # SGLang rounds the number of requests up if ranks share a batch.
    width = 1 if args.kv_mode == "lossy" else options.verify_widths(args)[-1]
    most = max(get_batch_sizes_to_capture(model_runner, width)[0]) * width
    return most if width == 1 else max(most, options.max_verification_tokens(args, model_runner.req_to_token_pool.size))


def create_compressed_attention(
    args: KVServerArgs, model_runner: ModelRunner, queries: QueryWindows, selection_interval: int, layout: KVLayout, on_gpu: bool
) -> AttentionOverride | None:
    """Create the attention over compressed KV that does not consist of plain tokens; None if the model's own attention reads it."""
    if not on_gpu:
        model_runner.attn_backend.layout = layout
        return None
    # Captured graphs record queries of steps if tokens are selected by them.
    records = selection_interval and model_runner.decode_cuda_graph_runner is not None
    with queries.capturing(max_captured_tokens(args, model_runner), steps=True) if records else nullcontext():
        # Rows that cache ranks send are plain tokens, too, but steps over them have a kernel of their own.
        if type(layout) is PlainLayout:
            return None
        from sglang_ext.layers.attention import decode_graphs

        return decode_graphs.create_attention(model_runner, layout)


def create_verify_attention(args: KVServerArgs, model_runner: ModelRunner) -> "VerifyAttention | None":
    """Attention of verifications without a graph; None for the model's own."""
    # fa3 accepts only equal numbers of tokens per request.
    if args.kv_mode == "lossy" or model_runner.decode_attention_backend_str not in ("triton", "fa3"):
        return None
    from sglang_ext.layers.attention.verify_attention import VerifyAttention

    return VerifyAttention(model_runner)


def unpin_plans(model_runner: ModelRunner, graphs: VerifyGraphSet | None) -> None:
    """Move FlashInfer's plans to unpinned memory, so that rounds can be launched further ahead of the device than SGLang's forwards.

    FlashInfer writes the plan of a forward (which block reads which KV) to pinned memory, and the device copies it when it reaches the
    forward. A decode round is many forwards ahead by then, and has overwritten the plan: kernels would read KV that does not exist. From
    unpinned memory, CUDA copies before the call returns (CUDA Runtime API, "API synchronization behavior"). Each graph has a wrapper.
    """
    captured = [graph.attn_backend for graph in graphs.graphs] if graphs else []
    count = sum(map(unpin, [model_runner.attn_backend, *captured]))
    if count:
        logger.info("sglang-ext: FlashInfer's plans of %s wrappers are not in pinned memory", count)


def unpin(backend: AttentionBackend) -> int:
    """Let FlashInfer write the plans of ``backend`` to unpinned memory. Returns the number of changed wrappers."""
    wrappers = list(_planned(backend, set()))
    for wrapper in wrappers:
        setattr(wrapper, PLAN, torch.empty_like(getattr(wrapper, PLAN), pin_memory=False))
    return len(wrappers)


def _planned(value: object, seen: set[int]) -> Iterator[object]:
    """FlashInfer's wrappers in a backend, in its nested backends, and in its lists and dictionaries."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if hasattr(value, PLAN):
        yield value
        return
    inner = ()
    if isinstance(value, AttentionBackend):
        inner = vars(value).values()
    elif isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    for part in inner:
        yield from _planned(part, seen)


def compile_slot_kernel(token_table: torch.Tensor, requests: int) -> None:
    """Compile SGLang's kernel that writes the slots of new tokens to the token table, by running each variant with nothing to write.

    Triton compiles it again for each power of 2 of at most ``requests`` requests, and for slots that do not begin at a multiple of 16 bytes.
    """
    slots = torch.zeros(4, dtype=torch.int64, device=token_table.device)
    for exponent in range((requests - 1).bit_length() + 1):
        rows = torch.zeros(1 << exponent, dtype=torch.int64, device=token_table.device)
        nothing = rows.int()
        for begin in (0, 1):
            allocation.assign_req_to_token_pool_func(rows, token_table, nothing, nothing, slots[begin:], len(rows))
