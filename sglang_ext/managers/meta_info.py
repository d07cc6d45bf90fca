"""What a response's ``meta_info`` tells about drafting: written in the scheduler, read in the frontend.

SGLang carries a few counters of speculative decoding from the scheduler to the frontend. They are
filled here with ours (:func:`fill`) and read back under their own names (:func:`add_kv_fields`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_ext.core import FALLBACK_REASONS, RequestState

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def fill(req: "Req", state: RequestState) -> None:
    """Put a request's totals into SGLang's counters of speculative decoding."""
    # SGLang adds 1 and the accepted drafts after each verification of its own: set, do not add.
    req.spec_cap_lens_histogram = [
        state.verifies,
        state.offered,
        state.accepted,
        state.fallback,
        *state.histogram,
    ]


def add_kv_fields(
    original: Callable, manager, meta_info: dict[str, Any], recv_obj, i: int
) -> None:
    """Hook around ``_calculate_spec_decoding_metrics``: ``kv_*`` fields of a finished request.

    ``kv_verifies`` verifications, ``kv_drafts`` tokens drafted for them, ``kv_accepted`` of these
    accepted, ``kv_accept_length`` tokens gained per verification (accepted drafts and the verifier's
    own), ``kv_accept_histogram`` (element k: verifications that accepted exactly k drafts),
    ``kv_fallback`` why the request was last served with full KV, None when it drafted.
    """
    record = recv_obj.spec_cap_lens_histogram[i] if recv_obj.spec_cap_lens_histogram else None
    if not record:
        meta_info.update(describe(0, 0, 0, FALLBACK_REASONS.index("none"), []))
        return
    meta_info.update(describe(*record[:4], record[4:]))


def describe(
    verifies: int, offered: int, accepted: int, fallback: int, histogram: list[int]
) -> dict[str, Any]:
    """The fields that users see."""
    return {
        "kv_verifies": verifies,
        "kv_drafts": offered,
        "kv_accepted": accepted,
        "kv_accept_length": (accepted + verifies) / verifies if verifies else 0.0,
        "kv_accept_histogram": list(histogram),
        "kv_fallback": FALLBACK_REASONS[fallback] if fallback else None,
    }
