"""The highest scores of each row, in the order of their places: what topk and a sort of its indices give, without sorting.

A row's threshold is found from its highest bits down, two bits a pass: three candidates are compared with all scores at once.
Scores are compared as integers of the same order.
"""

import torch
import triton
import triton.language as tl

# Scores that a program compares at once, and its warps.
BLOCK, WARPS = 4096, 8


@triton.jit
def _ordered(scores, place, inside):
    """Scores as int32 of the same order; the least where there is none."""
    bits = tl.load(scores + place, mask=inside, other=float("-inf")).to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(inside, order, -2147483648)


@triton.jit
def _threshold(scores, tokens, count, BLOCK: tl.constexpr):
    """The greatest number that at least ``count`` scores reach."""
    least = tl.full([], -2147483648, tl.int32)
    for digit in range(16):
        step = tl.full([], 1, tl.int32) << (30 - 2 * digit)
        # Three thresholds of a pass: of the first one, where it is the sign's, the others lie above 0.
        one, two, three = least + step, least + step + step, least + step + step + step
        above1 = tl.zeros([BLOCK], tl.int32)
        above2 = tl.zeros([BLOCK], tl.int32)
        above3 = tl.zeros([BLOCK], tl.int32)
        for start in range(0, tokens, BLOCK):
            place = start + tl.arange(0, BLOCK)
            order = _ordered(scores, place, place < tokens)
            above1 += (order >= one).to(tl.int32)
            above2 += (order >= two).to(tl.int32)
            above3 += (order >= three).to(tl.int32)
        reached = (tl.sum(above1, 0) >= count).to(tl.int32) + (tl.sum(above2, 0) >= count).to(tl.int32)
        least += step * (reached + (tl.sum(above3, 0) >= count).to(tl.int32))
    return least


# Slices of scores begin anywhere: one kernel serves all.
@triton.jit(do_not_specialize=("tokens", "count", "row_stride"), do_not_specialize_on_alignment=("scores",))
def keep_best(scores, best, tokens, count, row_stride, BLOCK: tl.constexpr):
    """Of a row's scores the places of the ``count`` highest; of equal ones the first."""
    row = tl.program_id(0).to(tl.int64)
    scores, best = scores + row * row_stride, best + row * count
    threshold = _threshold(scores, tokens, count, BLOCK)
    higher = tl.zeros([BLOCK], tl.int32)
    for start in range(0, tokens, BLOCK):
        place = start + tl.arange(0, BLOCK)
        higher += (_ordered(scores, place, place < tokens) > threshold).to(tl.int32)
    equal = count - tl.sum(higher, 0)
    kept, met = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for start in range(0, tokens, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < tokens
        order = _ordered(scores, place, inside)
        same = (inside & (order == threshold)).to(tl.int32)
        taken = ((inside & (order > threshold)) | ((same > 0) & (met + tl.cumsum(same, 0) <= equal))).to(tl.int32)
        tl.store(best + kept + tl.cumsum(taken, 0) - 1, place.to(tl.int64), mask=taken > 0)
        kept += tl.sum(taken, 0)
        met += tl.sum(same, 0)


def best_tokens(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Places of the ``count`` highest scores of each row, ascending: int64 [..., count].

    Args:
        scores: float32 [..., tokens], no NaN; leading axes that can be seen as one are not copied.
        count: from 1 to ``tokens``.
    """
    rows = scores.reshape(-1, scores.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    best = torch.empty(len(rows), count, dtype=torch.int64, device=scores.device)
    keep_best[(len(rows),)](rows, best, rows.shape[1], count, rows.stride(0), BLOCK=BLOCK, num_warps=WARPS)
    return best.view(*scores.shape[:-1], count)
