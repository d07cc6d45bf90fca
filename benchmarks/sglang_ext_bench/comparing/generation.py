"""What one request brought back, read out of the JSON of SGLang's ``/generate``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class VerifyStats:
    """Counters of verified decoding for one request (``kv_*`` fields of ``meta_info``).

    ``accepted_histogram[k]`` is the number of verifies in which exactly k drafts were accepted,
    ``offered_histogram[k]`` that in which exactly k were offered (None: the server does not say).
    """

    verifies: int
    drafts: int
    accepted: int
    accept_length: float
    accepted_histogram: tuple[int, ...]
    offered_histogram: tuple[int, ...] | None = None


TopLogprobs = tuple[tuple[int, float], ...]
"""The best (token id, log-probability) at one output position, best first."""


@dataclass(frozen=True)
class Generation:
    """The answer to one request.

    ``top_logprobs[i]`` belongs to output token i (None: not asked for). ``fallback`` is the
    server's reason to have used the full KV cache. ``text`` is the answer without the tokens that
    ended it. With ``error`` set, nothing else is.
    """

    output_ids: tuple[int, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    verify: VerifyStats | None = None
    fallback: str | None = None
    error: str | None = None
    seconds: float = 0.0
    text: str = ""

    def margin(self, index: int) -> float | None:
        """Top-2 margin at output token ``index``; None where it is unknown.

        This is the distance of the two best log-probabilities, which at temperature 0 equals that
        of the two best logits.
        """
        if self.top_logprobs is None or index >= len(self.top_logprobs):
            return None
        row = self.top_logprobs[index]
        return row[0][1] - row[1][1] if len(row) > 1 else None


def parse_verify(meta: Mapping[str, Any]) -> VerifyStats | None:
    """Counters of ``meta_info``, or None when the server sent none."""
    if meta.get("kv_verifies") is None:
        return None
    offered = meta.get("kv_offer_histogram")
    return VerifyStats(
        verifies=int(meta["kv_verifies"]),
        drafts=int(meta["kv_drafts"]),
        accepted=int(meta["kv_accepted"]),
        accept_length=float(meta["kv_accept_length"]),
        accepted_histogram=tuple(int(count) for count in meta["kv_accept_histogram"]),
        offered_histogram=None if offered is None else tuple(int(count) for count in offered),
    )


def parse_top_logprobs(
    rows: Sequence[Sequence[Sequence[Any]] | None] | None,
) -> tuple[TopLogprobs, ...] | None:
    """``output_top_logprobs`` of ``meta_info``: for each token entries of (logprob, token id, text)."""
    if rows is None:
        return None
    return tuple(tuple((int(entry[1]), float(entry[0])) for entry in row or ()) for row in rows)


def parse_response(payload: Mapping[str, Any], seconds: float = 0.0) -> Generation:
    """Read one answer of ``/generate``; one that SGLang aborted becomes an error."""
    if not isinstance(payload, Mapping):
        return Generation(error=f"no JSON object in the answer: {payload!r}", seconds=seconds)
    meta = payload.get("meta_info", {})
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        return Generation(error=f"aborted: {reason.get('message')}", seconds=seconds)
    if "output_ids" not in payload:
        return Generation(error=f"no output_ids in the answer: {payload}", seconds=seconds)
    try:
        return Generation(
            output_ids=tuple(payload["output_ids"]),
            top_logprobs=parse_top_logprobs(meta.get("output_top_logprobs")),
            verify=parse_verify(meta),
            fallback=meta.get("kv_fallback"),
            seconds=seconds,
            text=payload.get("text", ""),
        )
    except (KeyError, TypeError, ValueError) as error:
        return Generation(error=f"malformed meta_info ({error!r}): {meta}", seconds=seconds)
