"""What a response's ``meta_info`` tells about drafting: written in the scheduler, read in the frontend.

SGLang carries a few counters of speculative decoding from the scheduler to the frontend. They are
filled here with ours (:func:`fill`) and read back under their own names (:func:`describe`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang_ext.core import FALLBACK_REASONS, RequestState
from sglang_ext.mem_cache.compressors import catalogue

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

# Numbers before the histograms.
HEAD = 7


def fill(req: "Req", state: RequestState) -> None:
    """Put a request's totals into one of SGLang's per-request lists of integers.

    Layout: verifies, offered, accepted, fallback, compressor (its number in the catalogue; 0 for none), method asked for,
    length of the accept histogram, the accept histogram, the offer histogram.
    """
    req.spec_cap_lens_histogram = [
        state.verifies,
        state.offered,
        state.accepted,
        state.fallback,
        state.compressor,
        state.method,
        len(state.accept_histogram),
        *state.accept_histogram,
        *state.offer_histogram,
    ]


def resume(req: "Req", state: RequestState) -> None:
    """Take up the totals of a retracted request where :func:`fill` left them."""
    record = req.spec_cap_lens_histogram
    if record:
        state.verifies, state.offered, state.accepted = record[:3]
        end = HEAD + record[HEAD - 1]
        state.accept_histogram, state.offer_histogram = record[HEAD:end], record[end:]


def describe(record: list[int], suffixes: Sequence[str] = ("",)) -> dict[str, Any]:
    """The fields that users see, from what :func:`fill` wrote; empty for a request of one token.

    ``suffixes`` are those of the server's methods.
    """
    verifies, offered, accepted, fallback, compressor, method, split = record[:HEAD] or (0,) * HEAD
    return {
        "kv_verifies": verifies,
        "kv_drafts": offered,
        "kv_accepted": accepted,
        "kv_accept_length": (accepted + verifies) / verifies if verifies else 0.0,
        "kv_accept_histogram": list(record[HEAD : HEAD + split]),
        "kv_offer_histogram": list(record[HEAD + split :]),
        "kv_fallback": FALLBACK_REASONS[fallback] if fallback else None,
        "kv_compressor": catalogue.numbered(compressor) + suffixes[method] if compressor else None,
    }
