"""Answers of a soak: read out of JSON, and checked against stock's."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_ext.bench import BenchError
from sglang_ext.bench.compare import first_difference
from sglang_ext.bench.traffic import Request

LOGPROB_TOLERANCE = 0.01
"""Far above what float32 rounds, far below the difference of another token or position."""


class AnswerError(BenchError):
    """An answer is wrong; the message says how."""


@dataclass(frozen=True)
class Sample:
    """One answer. ``finish`` is the type of the finish reason, ``logprobs`` None if not asked for.

    The counters are SGLang's ``num_retractions`` and the ``kv_*`` fields of ``meta_info``.
    """

    ids: tuple[int, ...]
    finish: str
    logprobs: tuple[float, ...] | None = None
    retractions: int = 0
    drafts: int = 0
    accepted: int = 0
    fallback: str | None = None

    @property
    def aborted(self) -> bool:
        """Whether SGLang ended it early."""
        return self.finish == "abort"


def read_samples(payload: Any) -> tuple[Sample, ...]:
    """The answers of one request: one, or a list for several samples.

    Raises:
        AnswerError: something is missing, or log-probabilities do not belong to the tokens.
    """
    rows = payload if isinstance(payload, list) else [payload]
    try:
        return tuple(_read_sample(row) for row in rows)
    except (KeyError, TypeError, ValueError) as error:
        raise AnswerError(f"malformed answer ({error!r}): {str(payload)[:500]}") from error


def _read_sample(payload: Mapping[str, Any]) -> Sample:
    meta = payload["meta_info"]
    finish = meta["finish_reason"]["type"]
    ids = tuple(payload["output_ids"])
    rows = meta.get("output_token_logprobs") if finish != "abort" else None
    return Sample(
        ids=ids,
        finish=finish,
        logprobs=None if rows is None else _read_logprobs(ids, rows, meta.get("output_top_logprobs")),
        retractions=int(meta.get("num_retractions", 0)),
        drafts=int(meta.get("kv_drafts", 0)),
        accepted=int(meta.get("kv_accepted", 0)),
        fallback=meta.get("kv_fallback"),
    )


def _read_logprobs(
    ids: tuple[int, ...], rows: Sequence[Sequence[Any]], top: Sequence[Sequence[Any]] | None
) -> tuple[float, ...]:
    if tuple(row[1] for row in rows) != ids:
        raise AnswerError(f"log-probabilities of {[row[1] for row in rows]} for the tokens {list(ids)}")
    if top is not None and len(top) != len(ids):
        raise AnswerError(f"top log-probabilities at {len(top)} positions for {len(ids)} tokens")
    return tuple(float(row[0]) for row in rows)


def last_chunk(chunks: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The whole answer of a stream, whose chunks repeat all tokens so far.

    The end of an aborted one is left out: SGLang sends no tokens there, or the last one again.

    Raises:
        AnswerError: a chunk brings nothing new or takes tokens back, the server reports an error, or
            no chunk says that the answer is finished.
    """
    ids: list[int] = []
    last: Mapping[str, Any] = {}
    finish: str | None = None
    for count, chunk in enumerate(chunks, start=1):
        if "error" in chunk:
            raise AnswerError(f"chunk {count} of the stream is an error: {chunk['error']}")
        last = chunk
        try:
            new, finish = chunk["output_ids"], (chunk["meta_info"]["finish_reason"] or {}).get("type")
        except (KeyError, TypeError) as error:
            raise AnswerError(f"chunk {count} of the stream is malformed ({error!r}): {chunk}") from error
        if finish == "abort":
            return {**chunk, "output_ids": ids}
        if len(new) <= len(ids):
            raise AnswerError(f"chunk {count} of the stream brings nothing new after {len(ids)} tokens")
        if new[: len(ids)] != ids:
            raise AnswerError(f"chunk {count} of the stream changes tokens that were sent: {ids} to {new}")
        ids = list(new)
    if finish is None:
        raise AnswerError(f"the stream ended after {len(ids)} tokens without a finish reason")
    return last


def check(request: Request, samples: Sequence[Sample], expected: Sequence[Sample]) -> None:
    """Compare answers with stock's to the same request for the most tokens of the soak.

    Each must be the beginning of stock's, as long as asked for where stock's is; an aborted one may
    be shorter.

    Raises:
        AnswerError: naming what differs.
    """
    if len(samples) != len(expected):
        raise AnswerError(f"{len(samples)} samples instead of {len(expected)}")
    for sample, reference in zip(samples, expected, strict=True):
        _check_sample(request, sample, reference)


def _check_sample(request: Request, sample: Sample, reference: Sample) -> None:
    if sample.aborted and request.kind != "abort":
        raise AnswerError("aborted by the server")
    index = first_difference(sample.ids, reference.ids[: len(sample.ids)])
    if index is not None:
        start = max(0, index - 2)
        raise AnswerError(
            f"differs from stock at token {index}: from {start} on {list(sample.ids[start : index + 4])}, "
            f"stock {list(reference.ids[start : index + 4])}, aborted: {sample.aborted}"
        )
    length = min(request.tokens, len(reference.ids))
    if len(sample.ids) != length and not sample.aborted:
        raise AnswerError(f"{len(sample.ids)} tokens instead of {length}")
    if sample.aborted or reference.logprobs is None:
        return
    if sample.logprobs is None:
        raise AnswerError("no log-probabilities")
    for index, (found, wanted) in enumerate(zip(sample.logprobs, reference.logprobs, strict=False)):
        if not abs(found - wanted) <= LOGPROB_TOLERANCE:
            raise AnswerError(f"log-probability {found:.4g} instead of {wanted:.4g} at token {index}")
