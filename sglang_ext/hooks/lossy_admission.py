"""How SGLang's scheduler admits prompts where full KV is given back as soon as copies hold it, or cache ranks (freed_full_kv.py).

A prompt needs its full KV while it is computed and packed, and much less afterwards. So there are two bounds, of which SGLang's single
one takes the place. *Now*: the prompts that begin have room for all of their full KV, beside it for their copies, and all requests for the
round in which copies are made. Nothing is decoded meanwhile. *Later*: what stays has room, as answers grow. Full KV that is given back and
growing answers never need the same slots. Prompts that attend to codes keep full KV of two chunks at once, and need none for a beginning
that is codes alone (quantized_prompts.py).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

from sglang_ext.core import PLAIN_STEPS
from sglang_ext.managers.spec_decode.request_states import output_end
from sglang_ext.mem_cache.prefix_cache.nodes import TieredNode, path

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder

    from sglang_ext.mem_cache.prefix_cache.freed_full_kv import FreedFullKV, SlotDemand

# Slots that stay free of each request where copies are made (planner.py), beside those that SGLang takes ahead of it.
HEADROOM = 2 * (PLAIN_STEPS + 1)


def admit_prompt(original: Callable, adder: "PrefillAdder", req: "Req", has_chunked_req: bool, truncation_align_size: int | None):
    """Hook around ``PrefillAdder.add_one_req``: prompts are admitted as they fit while they begin, and as what stays of them fits.

    One that has the pool for itself is admitted as ever.
    """
    codes = getattr(adder.tree_cache, "codes", None)
    if codes is None or not (adder.can_run_list or _running_reqs(adder)):
        found = original(adder, req, has_chunked_req, truncation_align_size)
    else:
        found = _with_offset(adder, _occupied_slots(adder, codes, req), original, adder, req, has_chunked_req, truncation_align_size)
    if codes is not None and adder.can_run_list and adder.can_run_list[-1] is req:
        codes.admitted(req)
    return found


def admit_chunk(original: Callable, adder: "PrefillAdder", req: "Req"):
    """Hook around ``PrefillAdder.add_chunked_req``: a prompt that goes on has the room by which it was admitted."""
    if getattr(adder.tree_cache, "codes", None) is None:
        return original(adder, req)
    return _with_offset(adder, min(adder.rem_total_token_offset, adder.cur_rem_token_offset), original, adder, req)


def _with_offset(adder: "PrefillAdder", offset: float, original: Callable, *args):
    """What ``original`` finds where ``offset`` of the free and evictable slots are taken; what it takes itself is added to SGLang's."""
    before = adder.rem_total_token_offset
    adder.rem_total_token_offset = offset
    found = original(*args)
    adder.rem_total_token_offset += before - offset
    return found


def _occupied_slots(adder: "PrefillAdder", codes: "FreedFullKV", req: "Req") -> float:
    """Slots that others leave to ``req`` not, of those that are free or evictable; less those that SGLang adds for its answer."""
    running, begins = _running_reqs(adder), [*adder.can_run_list, req]
    kept_free = (adder.page_size + HEADROOM) * (len(running) + len(begins))
    rests = [len(each.full_untruncated_fill_ids) - each.extend_range.start for each in adder.can_run_list]
    slot_demands = codes.slot_demands([(each, _remaining_tokens(each)) for each in [*running, *begins]], adder.new_token_ratio)
    reads = {segment for slot_demand in slot_demands for segment in slot_demand.reads}
    held = kept_free + sum(slot_demand.copy for slot_demand in slot_demands) + sum(len(segment.slots) for segment in reads)
    now = held + sum(map(codes.peak_slots, adder.can_run_list, rests)) - _deferred_slots(codes, req)
    now += sum(map(_reserved_slots, running)) + sum(min(_remaining_tokens(each), get_alloc_reserve_per_decode()) for each in begins)
    later = held + sum(rests) + sum(slot_demand.growth - slot_demand.back for slot_demand in slot_demands) - _freed_prefix_slots(slot_demands, req)
    return max(now, later) - _remaining_tokens(req)


def _freed_prefix_slots(slot_demands: list["SlotDemand"], req: "Req") -> int:
    """Slots of the prefix tree that go back as all who lock them leave them, of whom ``req`` does not yet."""
    begins = set() if req.last_node is None else set(path(req.last_node))
    leaving: dict[TieredNode, list[int]] = {}
    for slot_demand in slot_demands:
        for node, slots in slot_demand.leaves.items():
            leaving.setdefault(node, []).append(slots)
    return sum(min(slots) for node, slots in leaving.items() if len(slots) >= node.lock_ref + (node in begins))


def _deferred_slots(codes: "FreedFullKV", req: "Req") -> int:
    """Of the slots that SGLang adds for a waiting prompt's full KV, those that it does not take at once."""
    rest = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
    as_codes = req.host_hit_length if req.host_hit_length and codes.reads(req, req.best_match_node) else 0
    return rest - codes.peak_slots(req, rest - as_codes)


def _running_reqs(adder: "PrefillAdder") -> list["Req"]:
    """The requests that decode: those that are over have given back what they had."""
    batch = adder.running_batch
    return [] if batch is None else [req for req in batch.reqs if not req.finished() and req.req_pool_idx is not None]


def _remaining_tokens(req: "Req") -> int:
    """Tokens that the answer may have yet, as SGLang counts them."""
    return min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)


def _reserved_slots(req: "Req") -> int:
    """Slots that the next round takes ahead of a request that decodes."""
    reached = min(output_end(req), req.kv_committed_len + get_alloc_reserve_per_decode())
    return max(0, reached - req.kv.kv_allocated_len)
