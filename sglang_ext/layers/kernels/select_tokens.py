"""Which tokens of full KV each KV head needs for a query of each of its query heads: several requests and layers at once.

The score of a token is the softmax attention that the queries pay to it, mean over the query heads of its KV head (AsyncSpade,
section 4.3); the first and the newest tokens come before all others. Keys are read once: a first kernel leaves the logits, and what each
chunk of the context needs for their normalizers (selection/exact_logits.py); a second one marks the tokens with the highest scores, and a
third one writes down what is marked (selection/token_marks.py). Of equal scores those of earlier tokens are chosen first.
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

# Scores that a program keeps in registers, a power of two of them, at least and at most, and of these those of a thread.
LEAST_RESIDENT, RESIDENT, OF_THREAD = 1024, 32768, 64
# Tokens whose scores go to memory at once, and those that a program writes down.
AT_ONCE, WRITTEN = 4096, 8192


@dataclass(frozen=True)
class SelectionContexts:
    """Requests among whose tokens is chosen.

    Attributes:
        token_table: int32 [rows, width]; a row leads to the slots of a context.
        numbers: int64 [requests, 4]: row of the table, tokens of the context, of these how many are chosen, at least 1 and at most all,
            and which of the targets are the first of the request.
        lengths: tokens of the contexts, on the host.
        always: first and newest tokens of each, which are chosen before others.
        targets: int64, slots that get pointers, those of a request one after the other; None where positions are wanted.
    """

    token_table: torch.Tensor
    numbers: torch.Tensor
    lengths: tuple[int, ...]
    always: tuple[int, int]
    targets: torch.Tensor | None = None


def scratch_bytes(longest: int, kv_heads: int, group: int, number_bytes: int) -> int:
    """Bytes that a choice of one request in one layer works in, of a context of so many tokens; a number of a key has ``number_bytes``."""
    pitch = triton.cdiv(longest, PITCH.value) * PITCH.value
    of_token = group * min(4, number_bytes) + 4 * (longest > RESIDENT)
    return kv_heads * (pitch * of_token + pitch // 8 + 8 * group * triton.cdiv(longest, CHUNK))


def kernel_lengths(longest: int) -> tuple[int, ...]:
    """Of contexts of up to so many tokens one length for each form in which a kernel is compiled for them, ascending."""
    ends = [*(1 << power for power in range(LEAST_RESIDENT.bit_length() - 1, RESIDENT.bit_length())), RESIDENT + 1]
    return tuple(dict.fromkeys(min(end, longest) for end in ends))


def compile_ahead(like: torch.Tensor, query_heads: int, always: tuple[int, int], longest: int) -> None:
    """Compile for the current device, side by side, what choosing would compile when the first context of some length is met: seconds each,
    where they were never compiled on this machine. What cannot be compiled is left to the first who needs it, and to its error.

    Args:
        like: a key buffer, as :func:`mark_tokens`'s.
        query_heads: of a layer.
        always: as :attr:`SelectionContexts.always`.
        longest: tokens of the longest context.
    """
    heads, lengths = like.shape[1], kernel_lengths(longest)
    with ThreadPoolExecutor(len(lengths)) as threads, triton.AsyncCompileMode(threads, ignore_errors=True):
        for length in lengths:
            scores = None if length <= RESIDENT else torch.int32
            # In the place of tensors the kinds of their numbers; of integers any.
            mark_top_tokens.warmup(
                logits_dtype(like.dtype), torch.float32, torch.float32, scores, torch.int32, torch.int64, *(0,) * 5,
                **_form(length, heads, query_heads // heads, always), grid=(1,),
            )  # fmt: skip


def _form(longest: int, heads: int, group: int, always: tuple[int, int]) -> dict[str, Any]:
    """What :func:`mark_top_tokens` is compiled for, where the longest context has so many tokens: as in :func:`kernel_lengths`."""
    # A program has as many threads where scores lie in memory.
    tokens = min(max(LEAST_RESIDENT, triton.next_power_of_2(longest)), RESIDENT)
    return {
        "SINKS": always[0], "NEWEST": always[1], "HEADS": heads, "GROUP": group, "G": triton.next_power_of_2(group),
        "AT_ONCE": min(tokens, AT_ONCE), "RESIDENT": tokens if longest <= RESIDENT else 0, "CHUNK": CHUNK,
        "num_warps": max(4, tokens // OF_THREAD // 32), **UNFUSED,
    }  # fmt: skip


@dataclass(frozen=True)
class MarkedTokens:
    """Tokens that are chosen for some requests in some layers, marked on the device.

    Attributes:
        contexts: all requests.
        tables: int64 [all layers], addresses of the layers' key buffers, and one of these, [slots, kv_heads, head_dim].
        where: first layer and request, requests, and units of PITCH in a row of logits.
        pairs: of a layer and a request.
        group: query heads that share a KV head.
        logit_buffers: logits, and of each chunk maxima and masses.
        marks: 32 to a word.
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
        """Launch what writes them down: pointers to the contexts' targets, or, where there are none, positions to ``out``, int32 [layers,
        requests, kv_heads, most], of one piece, ascending, of each request as many as it has."""
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
    """Choose for some requests, in some layers, without waiting for the device.

    Args:
        queries: float32 [requests, layers, query_heads, head_dim], one of each head of those that are meant; rotary embedding applied.
        key_table: int64 [all layers], addresses of the layers' key buffers.
        like: a key buffer, [slots, kv_heads, head_dim]; all have its shape, strides and dtype.
        scalings: float32 [all layers], factors on query-key products.
        contexts: all requests.
        layers, requests: which of them are meant.
        coded: the same keys in few bits, which are read in their place; None to read the buffers.

    Raises:
        OptionError: no tiles of such heads fit the GPU.
    """
    heads, device = like.shape[1], like.device
    count, group, longest = requests.stop - requests.start, queries.shape[2] // heads, max(contexts.lengths[requests])
    pairs, chunks, table = (layers.stop - layers.start) * count, triton.cdiv(longest, CHUNK), contexts.token_table
    pitches = triton.cdiv(longest, PITCH.value)
    logits = torch.empty(pairs * heads * group, pitches * PITCH.value, dtype=logits_dtype(like.dtype), device=device)
    # Each of its own, which begins at a multiple of 16 bytes for any number of requests: kernels are compiled for that.
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
