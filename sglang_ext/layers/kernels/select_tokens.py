"""Selects the tokens of full KV that each KV head needs for the queries of its query heads, for several requests and layers at once.

The score of a token is the softmax attention of the queries to it, mean over the query heads of its KV head (AsyncSpade, section 4.3).
The first and the newest tokens are always selected. Keys are read once. Three kernels run:

1. Compute the logits, and normalizers of each chunk of the context (selection/exact_logits.py).
2. Mark the tokens with the highest scores (selection/token_marks.py).
3. Write the marked tokens (selection/token_marks.py).

Of equal scores, earlier tokens are selected first.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from sglang_ext.layers.kernels.selection.exact_logits import CHUNK, PITCH, LogitsRequest, compute_exact_logits, logits_dtype
from sglang_ext.layers.kernels.selection.token_marks import UNFUSED, WORD, mark_top_tokens, write_marked_tokens

if TYPE_CHECKING:
    from sglang_ext.layers.kernels.quantized_keys.quantized_logits import QuantizedKeyTensors

# Minimum and maximum scores that a program keeps in registers, a power of two; and scores of a thread.
LEAST_RESIDENT, RESIDENT, OF_THREAD = 1024, 32768, 64
# Tokens whose scores a program stores to memory at once, and tokens that a program writes.
AT_ONCE, WRITTEN = 4096, 8192


@dataclass(frozen=True)
class SelectionContexts:
    """Contexts of the requests among whose tokens the kernels select.

    Attributes:
        token_table: int32 [rows, width]; a row has the slots of a context.
        numbers: int64 [requests, 4]: row of the table, tokens of the context, tokens to select (1 to all), and index of the request's
            first target.
        lengths: Tokens of the contexts, on the host.
        always: Numbers of first and newest tokens that are always selected.
        targets: int64, slots that get pointers, concatenated by request; None to return positions.
    """

    token_table: torch.Tensor
    numbers: torch.Tensor
    lengths: tuple[int, ...]
    always: tuple[int, int]
    targets: torch.Tensor | None = None


def scratch_bytes(longest: int, kv_heads: int, group: int, number_bytes: int) -> int:
    """Scratch bytes of one request's selection in one layer, for a context of ``longest`` tokens; a number of a key has
    ``number_bytes``."""
    pitch = triton.cdiv(longest, PITCH.value) * PITCH.value
    of_token = group * min(4, number_bytes) + 4 * (longest > RESIDENT)
    return kv_heads * (pitch * of_token + pitch // 8 + 8 * group * triton.cdiv(longest, CHUNK))


def kernel_lengths(longest: int) -> tuple[int, ...]:
    """Return one context length up to ``longest`` for each specialization of the kernel, ascending."""
    ends = [*(1 << power for power in range(LEAST_RESIDENT.bit_length() - 1, RESIDENT.bit_length())), RESIDENT + 1]
    return tuple(dict.fromkeys(min(end, longest) for end in ends))


def compile_ahead(like: torch.Tensor, query_heads: int, always: tuple[int, int], longest: int) -> None:
    """Compile the selection kernels for the current device in parallel, before the first context of each length.

    A compilation takes seconds if it is not cached on this machine. A failed compilation is repeated, and raises, at the first use.

    Args:
        like: A key buffer, as in :func:`mark_tokens`.
        query_heads: Query heads of a layer.
        always: See :attr:`SelectionContexts.always`.
        longest: Tokens of the longest context.
    """
    heads, lengths = like.shape[1], kernel_lengths(longest)
    with ThreadPoolExecutor(len(lengths)) as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        for length in lengths:
            scores = None if length <= RESIDENT else torch.int32
            # dtypes instead of tensors; any integers.
            mark_top_tokens.warmup(
                logits_dtype(like.dtype), torch.float32, torch.float32, scores, torch.int32, torch.int64, *(0,) * 5,
                **_form(length, heads, query_heads // heads, always), grid=(1,),
            )  # fmt: skip


def _form(longest: int, heads: int, group: int, always: tuple[int, int]) -> dict[str, Any]:
    """Return the constants of :func:`mark_top_tokens` for a longest context of ``longest`` tokens, as in :func:`kernel_lengths`."""
    # Programs with scores in memory have the same number of threads.
    tokens = min(max(LEAST_RESIDENT, triton.next_power_of_2(longest)), RESIDENT)
    return {
        "SINKS": always[0], "NEWEST": always[1], "HEADS": heads, "GROUP": group, "G": triton.next_power_of_2(group),
        "AT_ONCE": min(tokens, AT_ONCE), "RESIDENT": tokens if longest <= RESIDENT else 0, "CHUNK": CHUNK,
        "num_warps": max(4, tokens // OF_THREAD // 32), **UNFUSED,
    }  # fmt: skip


@dataclass(frozen=True)
class MarkedTokens:
    """Selected tokens of some requests in some layers, marked on the device.

    Attributes:
        contexts: Contexts of all requests.
        tables: int64 [all layers], addresses of the layers' key buffers; and one of these buffers, [slots, kv_heads, head_dim].
        where: First layer, first request, number of requests, and units of PITCH in a row of logits.
        pairs: Pairs of a layer and a request.
        group: Query heads that share a KV head.
        logit_buffers: Logits, and maxima and sums of each chunk.
        marks: One bit per token, 32 to a word.
    """

    contexts: SelectionContexts
    tables: tuple[torch.Tensor, torch.Tensor]
    where: tuple[int, int, int, int]
    pairs: int
    group: int
    logit_buffers: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    marks: torch.Tensor

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        _, first, count, _ = self.where
        return max(self.contexts.lengths[first : first + count])

    def write(self, out: torch.Tensor | None = None) -> None:
        """Launch the kernel that writes the marked tokens: pointers to the contexts' targets, or without targets positions to ``out``.

        ``out``: int32 [layers, requests, kv_heads, most], contiguous. Positions are ascending; each request writes as many as it selects.
        """
        contexts, (key_table, like), heads = self.contexts, self.tables, self.tables[1].shape[1]
        pointing, cells, table, most = contexts.targets is not None, like.view(torch.int32), contexts.token_table, 0
        if not pointing:
            most = out.shape[-1]
        write_marked_tokens[(heads, triton.cdiv(self.longest, WRITTEN), self.pairs)](
            self.marks, key_table, table, contexts.numbers, contexts.targets, out, *self.where, table.stride(0), most, cells.stride(0),
            cells.stride(1), HEADS=heads, PER_SLOT=cells.shape[2] if pointing else 0, TOKENS=WRITTEN, num_warps=8,
        )  # fmt: skip


def mark_tokens(
    queries: torch.Tensor,
    key_table: torch.Tensor,
    like: torch.Tensor,
    scalings: torch.Tensor,
    contexts: SelectionContexts,
    layers: slice,
    requests: slice,
    coded: "QuantizedKeyTensors | None" = None,
) -> MarkedTokens:
    """Select tokens for some requests in some layers, without waiting for the device.

    Args:
        queries: float32 [requests, layers, query_heads, head_dim], of the given requests and layers, one per head; rotary embedding
            applied.
        key_table: int64 [all layers], addresses of the layers' key buffers.
        like: A key buffer, [slots, kv_heads, head_dim]; all have its shape, strides and dtype.
        scalings: float32 [all layers], factors on query-key products.
        contexts: Contexts of all requests.
        layers, requests: The layers and requests to select for.
        coded: The same keys, quantized, read instead of the buffers; None to read the buffers.

    Raises:
        OptionError: No tiles of such heads fit the GPU.
    """
    heads, device = like.shape[1], like.device
    count, group, longest = requests.stop - requests.start, queries.shape[2] // heads, max(contexts.lengths[requests])
    pairs, chunks, table = (layers.stop - layers.start) * count, triton.cdiv(longest, CHUNK), contexts.token_table
    pitches = triton.cdiv(longest, PITCH.value)
    logits = torch.empty(pairs * heads * group, pitches * PITCH.value, dtype=logits_dtype(like.dtype), device=device)
    # Separate tensors: each begins at a multiple of 16 bytes for any number of requests, which the kernels are compiled for.
    tops, masses = (torch.empty(pairs * heads * group, chunks, device=device) for _ in range(2))
    scores = None if longest <= RESIDENT else torch.empty(pairs * heads, pitches * PITCH.value, dtype=torch.int32, device=device)
    marks = torch.empty(pairs * heads, pitches * PITCH.value // WORD.value, dtype=torch.int32, device=device)
    where, left = (layers.start, requests.start, count, pitches), (logits, tops, masses)
    asked = LogitsRequest((scalings, table, contexts.numbers, *left), where, chunks, pairs, table.stride(0))
    if coded is None:
        compute_exact_logits(queries.to(like.dtype), key_table, like, asked)
    else:
        coded.compute_logits(queries, asked)
    form = _form(longest, heads, group, contexts.always)
    mark_top_tokens[(heads, pairs)](*left, scores, marks, contexts.numbers, *where, chunks, **form)
    return MarkedTokens(contexts, (key_table, like), where, pairs, group, left, marks)
