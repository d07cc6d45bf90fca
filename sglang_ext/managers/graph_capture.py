"""What is captured or compiled when the server starts: graphs of verifications, what attends in those without, SGLang's kernel of slots."""

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache import allocation
from sglang.srt.model_executor.runner.base_cuda_graph_runner import get_batch_sizes_to_capture

from sglang_ext.config import options
from sglang_ext.layers.attention import plan_memory
from sglang_ext.layers.attention.verify_attention import VerifyAttention
from sglang_ext.layers.attention.verify_graphs import VerifyGraphSet, capture, make_room_for_logits
from sglang_ext.mem_cache.compressed.queries import QueryWindows

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_ext.arguments import KVServerArgs

logger = logging.getLogger(__name__)


def capture_verify_graphs(
    args: "KVServerArgs", model_runner: "ModelRunner", queries: QueryWindows, verifier: AttentionBackend | None
) -> VerifyGraphSet | None:
    """Captured verifications of a server that verifies, where SGLang captured graphs of one token a request; else None.

    Args:
        args: the server's.
        model_runner: the target's.
        queries: take the graphs' queries.
        verifier: what attends in verifications that no graph holds; None for the model's own attention.
    """
    if args.kv_mode == "lossy" or model_runner.decode_cuda_graph_runner is None:
        return None
    widths, tokens = options.verify_widths(args), max_captured_tokens(args, model_runner)
    make_room_for_logits(model_runner, tokens)
    own = verifier if model_runner.decode_attention_backend_str == "triton" else None
    with queries.capturing(tokens):
        captured = [capture(model_runner, width, own) for width in widths]
        for width in options.wide_verify_widths(args):
            captured.append(capture(model_runner, width, own, options.MAX_WIDE_REQUESTS))
    return VerifyGraphSet(captured)


def max_captured_tokens(args: "KVServerArgs", model_runner: "ModelRunner") -> int:
    """Tokens of the largest forward that is captured beside SGLang's own: a verification, or a step where nothing is verified."""
    # SGLang rounds the most requests up, where ranks share a batch.
    width = 1 if args.kv_mode == "lossy" else options.verify_widths(args)[-1]
    most = max(get_batch_sizes_to_capture(model_runner, width)[0]) * width
    return most if width == 1 else max(most, options.max_captured_tokens(args, model_runner.req_to_token_pool.size))


def record_step_queries(
    args: "KVServerArgs", model_runner: "ModelRunner", queries: QueryWindows, every: int
) -> AbstractContextManager[None]:
    """Lets graphs of steps over copies, captured inside it, leave their queries, where tokens are chosen by them each ``every`` steps."""
    if not every or model_runner.decode_cuda_graph_runner is None:
        return nullcontext()
    return queries.capturing(max_captured_tokens(args, model_runner), steps=True)


def create_verify_attention(args: "KVServerArgs", model_runner: "ModelRunner") -> VerifyAttention | None:
    """What attends in verifications where no graph is replayed; None for the model's own attention."""
    if args.kv_mode == "lossy":
        return None
    # fa3 takes equal numbers of tokens only.
    in_place = model_runner.decode_attention_backend_str in ("triton", "fa3")
    return VerifyAttention(model_runner) if in_place else None


def unpin_plans(model_runner: "ModelRunner", graphs: VerifyGraphSet | None) -> None:
    """Let rounds be launched further ahead of the device than SGLang's forwards (plan_memory.py)."""
    captured = [graph.attn_backend for graph in graphs.graphs] if graphs else []
    count = sum(plan_memory.unpin(backend) for backend in [model_runner.attn_backend, *captured])
    if count:
        logger.info("sglang-ext: FlashInfer's plans of %s wrappers are not in pinned memory", count)


def compile_slot_kernel(token_table: torch.Tensor, requests: int) -> None:
    """Run once, in each of its forms, SGLang's kernel that writes slots of coming tokens to the token table, with nothing to write.

    Triton compiles it anew for each power of 2 of requests, and for slots that begin at a multiple of 16 bytes or elsewhere, which
    what the allocator hands out does now and then: some 40 ms each, in the middle of a batch's first rounds.

    Args:
        token_table: int32 [rows, width], SGLang's.
        requests: that run at once at most.
    """
    slots = torch.zeros(4, dtype=torch.int64, device=token_table.device)
    for exponent in range((requests - 1).bit_length() + 1):
        rows = torch.zeros(1 << exponent, dtype=torch.int64, device=token_table.device)
        nothing = rows.int()
        for begin in (0, 1):
            allocation.assign_req_to_token_pool_func(rows, token_table, nothing, nothing, slots[begin:], len(rows))
