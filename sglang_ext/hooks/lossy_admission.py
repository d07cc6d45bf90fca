"""Admission of prompts when full KV is freed once compressed KV or cache ranks hold it (freed_full_kv.py).

A prompt needs its full KV while it is computed and packed, and much less afterwards. So two limits replace SGLang's limit. The current
limit: there are slots for the full KV of all starting prompts, for their compressed KV, and for the next round of all requests. That round
creates the compressed KV, and nothing is decoded before it. The later limit: there are slots for the remaining KV of all requests while
their outputs grow. Full KV is freed before outputs need its slots. Prompts that attend to quantized KV hold full KV of two chunks at once,
and need none for a quantized-only prefix (mem_cache/prefix_cache/quantized_prefill_kv.py).
"""

from collections.abc import Callable

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS, PrefillAdder
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

from sglang_ext.core import PLAIN_STEPS
from sglang_ext.managers.spec_decode.request_states import output_end
from sglang_ext.mem_cache.prefix_cache.freed_full_kv import FreedFullKV, SlotDemand
from sglang_ext.mem_cache.prefix_cache.nodes import TieredNode, path

# Slots that must stay free for each request while compressed KV is created (``RoundPlanner.headroom``), in addition to SGLang's reserve.
HEADROOM = 2 * (PLAIN_STEPS + 1)


def admit_prompt(original: Callable, adder: PrefillAdder, req: Req, has_chunked_req: bool, truncation_align_size: int | None):
    """Hook around ``PrefillAdder.add_one_req``: admits prompts that fit both while they start and afterwards."""
    # A prompt that has the pool for itself is admitted as in stock SGLang.
    freed_full_kv = getattr(adder.tree_cache, "freed_full_kv", None)
    if freed_full_kv is None or not (adder.can_run_list or _running_reqs(adder)):
        found = original(adder, req, has_chunked_req, truncation_align_size)
    else:
        found = _with_offset(adder, _occupied_slots(adder, freed_full_kv, req), original, adder, req, has_chunked_req, truncation_align_size)
    if freed_full_kv is not None and adder.can_run_list and adder.can_run_list[-1] is req:
        freed_full_kv.on_admitted(req)
    return found


def admit_chunk(original: Callable, adder: PrefillAdder, req: Req):
    """Hook around ``PrefillAdder.add_chunked_req``: a prompt in progress keeps the slots with which it was admitted."""
    if getattr(adder.tree_cache, "freed_full_kv", None) is None:
        return original(adder, req)
    return _with_offset(adder, min(adder.rem_total_token_offset, adder.cur_rem_token_offset), original, adder, req)


def _with_offset(adder: PrefillAdder, offset: float, original: Callable, *args):
    """Call ``original`` with ``offset`` slots of the free and evictable ones taken. Add the slots that it takes to SGLang's own offset."""
    before = adder.rem_total_token_offset
    adder.rem_total_token_offset = offset
    found = original(*args)
    adder.rem_total_token_offset += before - offset
    return found


def _occupied_slots(adder: PrefillAdder, freed_full_kv: FreedFullKV, req: Req) -> float:
    """Slots that ``req`` may not use, because other requests need them, minus the slots that SGLang counts for its output."""
    running, begins = _running_reqs(adder), [*adder.can_run_list, req]
    kept_free = (adder.page_size + HEADROOM) * (len(running) + len(begins))
    rests = [len(each.full_untruncated_fill_ids) - each.extend_range.start for each in adder.can_run_list]
    slot_demands = freed_full_kv.slot_demands([(each, _remaining_tokens(each)) for each in [*running, *begins]], adder.new_token_ratio)
    reads = {segment for slot_demand in slot_demands for segment in slot_demand.new_segments}
    held = kept_free + sum(slot_demand.compressed_slots for slot_demand in slot_demands) + sum(len(segment.slots) for segment in reads)
    # Slots that SGLang counts for a waiting prompt's full KV but that are not allocated at once.
    rest = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
    as_codes = req.host_hit_length if req.host_hit_length and freed_full_kv.reads_quantized(req, req.best_match_node) else 0
    deferred = rest - freed_full_kv.peak_slots(req, rest - as_codes)
    now = held + sum(map(freed_full_kv.peak_slots, adder.can_run_list, rests)) - deferred
    # Slots that the next round reserves.
    reserve = get_alloc_reserve_per_decode()
    now += sum(max(0, min(output_end(each), each.kv_committed_len + reserve) - each.kv.kv_allocated_len) for each in running)
    now += sum(min(_remaining_tokens(each), reserve) for each in begins)
    growth = sum(slot_demand.growth - slot_demand.own_slots_freed for slot_demand in slot_demands)
    later = held + sum(rests) + growth - _freed_prefix_slots(slot_demands, req)
    return max(now, later) - _remaining_tokens(req)


def _freed_prefix_slots(slot_demands: list[SlotDemand], req: Req) -> int:
    """Slots of the prefix tree that are freed when all requests that lock them no longer need them. ``req`` does not lock them yet."""
    begins = set() if req.last_node is None else set(path(req.last_node))
    leaving: dict[TieredNode, list[int]] = {}
    for slot_demand in slot_demands:
        for node, slots in slot_demand.path_slots_freed.items():
            leaving.setdefault(node, []).append(slots)
    return sum(min(slots) for node, slots in leaving.items() if len(slots) >= node.lock_ref + (node in begins))


def _running_reqs(adder: PrefillAdder) -> list[Req]:
    """The requests that decode. Finished ones have freed their slots."""
    batch = adder.running_batch
    return [] if batch is None else [req for req in batch.reqs if not req.finished() and req.req_pool_idx is not None]


def _remaining_tokens(req: Req) -> int:
    """Tokens that may still be generated, as SGLang counts them."""
    return min(max(req.sampling_params.max_new_tokens - len(req.output_ids), 0), CLIP_MAX_NEW_TOKENS)
