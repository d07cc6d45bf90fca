"""Sends a prompt to a server, parses the response of SGLang's ``/generate``, and reads values of the ``/metrics`` page."""

from sglang_ext_bench.server import RequestClient, describe_error
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any



@dataclass(frozen=True)
class SamplingSettings:
    """Sampling parameters of a request.

    Attributes:
        temperature: 0 is greedy.
        seed: Sampling seed, which only a server with ``--enable-deterministic-inference`` uses. None for no seed.
        ignore_eos: The response has all requested tokens. Otherwise it may end earlier.
        kv_compressor: Method that the request asks for. None for the server's first method.
    """

    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = True
    kv_compressor: str | None = None

    def as_json(self, new_tokens: int) -> dict[str, Any]:
        """Return ``sampling_params`` of a request for ``new_tokens`` output tokens."""
        params: dict[str, Any] = {
            "temperature": self.temperature,
            "max_new_tokens": new_tokens,
            "ignore_eos": self.ignore_eos,
        }
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        if self.kv_compressor is not None:
            params["custom_params"] = {"kv_compressor": self.kv_compressor}
        return params


@dataclass(frozen=True)
class VerifyStats:
    """Counters of verified decoding for one request (``kv_*`` fields of ``meta_info``).

    Attributes:
        verifies: Verifications.
        drafts: Draft tokens that were verified.
        accepted: Accepted draft tokens.
        accept_length: Mean output tokens of a verification.
        accepted_histogram: Verifications by the number of accepted draft tokens: 0, 1, 2 and so on.
        offered_histogram: Verifications by the number of draft tokens. None if the server does not report it.
    """

    verifies: int
    drafts: int
    accepted: int
    accept_length: float
    accepted_histogram: tuple[int, ...]
    offered_histogram: tuple[int, ...] | None = None


TopLogprobs = tuple[tuple[int, float], ...]
"""The best (token id, log-probability) pairs at one output position, best first."""


@dataclass(frozen=True)
class Generation:
    """The response to one request.

    Attributes:
        output_ids: Output tokens.
        top_logprobs: The best log-probabilities of each output token. None if the request did not ask for them.
        verify: Counters of verified decoding. None if the server sent none.
        fallback: Reason why the full KV served the request. None if it did not.
        error: Error of a failed request. All other fields except ``seconds`` are empty then.
        seconds: Time from the request to the complete response.
        text: Output text without the tokens that ended it.
    """

    output_ids: tuple[int, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] | None = None
    verify: VerifyStats | None = None
    fallback: str | None = None
    error: str | None = None
    seconds: float = 0.0
    text: str = ""

    def margin(self, index: int) -> float | None:
        """Top-2 margin at output token ``index``: the difference of the two best log-probabilities. None if it is unknown.

        At temperature 0 it is equal to the difference of the two best logits.
        """
        if self.top_logprobs is None or index >= len(self.top_logprobs):
            return None
        row = self.top_logprobs[index]
        return row[0][1] - row[1][1] if len(row) > 1 else None


def generate(
    client: RequestClient,
    input_ids: tuple[int, ...],
    sampling: SamplingSettings,
    new_tokens: int,
    top_logprobs: int = 0,
) -> Generation:
    """Send one prompt and wait for the response. A failed request is returned as ``Generation.error``.

    Args:
        client: Client of the server.
        input_ids: Token ids of the prompt.
        sampling: Sampling parameters.
        new_tokens: Output tokens.
        top_logprobs: Number of best log-probabilities to return for each output token.
    """
    body: dict[str, Any] = {
        "input_ids": list(input_ids),
        "sampling_params": sampling.as_json(new_tokens),
    }
    if top_logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": top_logprobs}
    started = time.monotonic()
    try:
        payload = client.post("generate", body)
    except (OSError, ValueError) as error:
        return Generation(error=describe_error(error), seconds=time.monotonic() - started)
    return parse_response(payload, time.monotonic() - started)


def parse_response(payload: Mapping[str, Any], seconds: float = 0.0) -> Generation:
    """Parse a response of ``/generate``. An aborted or malformed response becomes ``Generation.error``."""
    if not isinstance(payload, Mapping):
        return Generation(error=f"no JSON object in the response: {payload!r}", seconds=seconds)
    meta = payload.get("meta_info", {})
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        return Generation(error=f"aborted: {reason.get('message')}", seconds=seconds)
    if "output_ids" not in payload:
        return Generation(error=f"no output_ids in the response: {payload}", seconds=seconds)
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


def parse_verify(meta: Mapping[str, Any]) -> VerifyStats | None:
    """Parse the counters of ``meta_info``. Returns None if the server sent none."""
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
    """Parse ``output_top_logprobs`` of ``meta_info``: for each token entries of (log-probability, token id, text)."""
    if rows is None:
        return None
    return tuple(tuple((int(entry[1]), float(entry[0])) for entry in row or ()) for row in rows)


def readings(page: str, name: str) -> list[tuple[str, float]]:
    """The labels, as written, and the value of each series of metric ``name`` on a server's ``/metrics`` page."""
    found = re.findall(rf"^{re.escape(name)}\{{([^}}]*)\}} (\S+)$", page, re.MULTILINE)
    return [(labels, float(value)) for labels, value in found]


def total(page: str, name: str) -> float:
    """The sum of all series of metric ``name`` on a server's ``/metrics`` page. 0 if there are none."""
    return sum(value for _, value in readings(page, name))
