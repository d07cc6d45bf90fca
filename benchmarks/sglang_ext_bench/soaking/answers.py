"""Answers of a soak: read out of JSON, and checked against stock's."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_ext.tools import CommandError
from sglang_ext_bench.comparing.compare import first_difference
from sglang_ext_bench.soaking import tool_calls
from sglang_ext_bench.soaking.traffic import Request

LOGPROB_TOLERANCE = 0.01
"""Far above what float32 rounds, far below the difference of another token or position."""
LOST_LOGPROB = "the first log-probability is lost"
"""What stock SGLang's overlapped loop does to a request that is retracted before its first token was looked at."""
EMPTY_CHUNK = "a chunk without new tokens"
"""What it streams for a request that was just retracted."""

ASKED_ROWS = {"top_logprobs_num": "output_top_logprobs", "token_ids_logprob": "output_token_ids_logprobs"}
"""What asks for further log-probabilities, and SGLang's names for them."""

Row = tuple[float | None, ...]
"""Log-probabilities at one position; None where SGLang sends none."""


class AnswerError(CommandError):
    """An answer is wrong; the message says how."""


class DiffersFromStock(AnswerError):
    """An answer's tokens or log-probabilities are others than stock's; all else about it is right."""


@dataclass(frozen=True)
class Sample:
    """One answer. ``finish`` is the type of the finish reason, ``logprobs`` None if not asked for.

    The counters are SGLang's ``num_retractions`` and the ``kv_*`` fields of ``meta_info``.

    Attributes:
        rows: further log-probabilities by SGLang's name for them: of the prompt, of the best tokens, of given ones.
        oddities: what stock does too in the overlapped loop: :data:`LOST_LOGPROB`, whose place in ``logprobs``
            and ``rows`` is empty then, or :data:`EMPTY_CHUNK`.
        text: Detokenized answer. None if the server sent none.
        message: Message of a chat completion, as canonical JSON. Such a sample has no token ids.
    """

    ids: tuple[int, ...]
    finish: str
    logprobs: Row | None = None
    retractions: int = 0
    drafts: int = 0
    accepted: int = 0
    fallback: str | None = None
    rows: Mapping[str, tuple[Row, ...]] = field(default_factory=dict)
    oddities: frozenset[str] = frozenset()
    text: str | None = None
    message: str | None = None

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
    sample = Sample(
        ids=tuple(payload["output_ids"]),
        finish=meta["finish_reason"]["type"],
        retractions=int(meta.get("num_retractions", 0)),
        drafts=int(meta.get("kv_drafts", 0)),
        accepted=int(meta.get("kv_accepted", 0)),
        fallback=meta.get("kv_fallback"),
        text=payload.get("text"),
    )
    if sample.aborted or meta.get("output_token_logprobs") is None:
        return sample
    return _with_logprobs(sample, meta)


def _with_logprobs(sample: Sample, meta: Mapping[str, Any]) -> Sample:
    # SGLang sends the first token's log-probabilities even if no token was asked for.
    count = None if sample.ids else 0
    rows = meta["output_token_logprobs"][:count]
    tokens = tuple(row[1] for row in rows)
    lost = sample.retractions > 0 and len(sample.ids) > 0 and tokens == sample.ids[1:]
    if tokens != sample.ids and not lost:
        raise AnswerError(f"log-probabilities of {list(tokens)} for the tokens {list(sample.ids)}")
    more: dict[str, tuple[Row, ...]] = {}
    for name in ("output_top_logprobs", "output_token_ids_logprobs"):
        if meta.get(name) is None:
            continue
        found = meta[name][:count]
        if len(found) != len(tokens):
            raise AnswerError(f"{name} at {len(found)} positions for {len(tokens)} tokens")
        more[name] = (((),) if lost else ()) + tuple(_values(each) for each in found)
    if meta.get("input_token_logprobs"):
        more["input_token_logprobs"] = tuple(_values([each]) for each in meta["input_token_logprobs"])
    return replace(
        sample,
        logprobs=((None,) if lost else ()) + _values(rows),
        rows=more,
        oddities=frozenset([LOST_LOGPROB] if lost else []),
    )


def _values(rows: Sequence[Sequence[Any]] | None) -> Row:
    return tuple(None if row[0] is None else float(row[0]) for row in rows or ())


def read_message(payload: Mapping[str, Any]) -> tuple[Sample, ...]:
    """The answer to a chat completion.

    Raises:
        AnswerError: It is malformed.
    """
    return _read_chat(tool_calls.whole_message, payload)


def read_streamed_message(chunks: Iterable[Mapping[str, Any]]) -> tuple[Sample, ...]:
    """The answer to a streamed chat completion.

    Raises:
        AnswerError: A chunk is malformed or reports an error, or no chunk says that the answer is finished.
    """
    (sample,) = _read_chat(tool_calls.streamed_message, chunks)
    if not sample.finish:
        raise AnswerError(f"the stream ended without a finish reason: {sample.message}")
    return (sample,)


def _read_chat(read: Callable[[Any], tuple[str, str]], answer: Any) -> tuple[Sample, ...]:
    try:
        message, finish = read(answer)
    except (KeyError, IndexError, TypeError) as error:
        raise AnswerError(f"malformed chat completion: {error!r}") from error
    return (Sample((), finish, message=message),)


def read_stream(chunks: Iterable[Mapping[str, Any]]) -> tuple[Sample, ...]:
    """The answers of a stream, by their index where there are several.

    Raises:
        AnswerError: as for :func:`last_chunk` and :func:`read_samples`.
    """
    by_index: dict[int, list[Mapping[str, Any]]] = {}
    for chunk in chunks:
        by_index.setdefault(chunk.get("index", 0), []).append(chunk)
    return tuple(_read_one_stream(by_index[index]) for index in sorted(by_index)) or (_read_one_stream([]),)


def _read_one_stream(chunks: Sequence[Mapping[str, Any]]) -> Sample:
    told: list[Mapping[str, Any]] = []
    for chunk in chunks:
        if not _only_tells_of_a_retraction(chunk, told[-1] if told else {}):
            told.append(chunk)
    (sample,) = read_samples(last_chunk(told))
    return sample if len(told) == len(chunks) else replace(sample, oddities=sample.oddities | {EMPTY_CHUNK})


def _only_tells_of_a_retraction(chunk: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Whether a chunk has the tokens of the one before, and one retraction more."""
    meta, earlier = (each.get("meta_info") or {} for each in (chunk, before))
    retracted = meta.get("num_retractions", 0) > earlier.get("num_retractions", 0)
    return retracted and not meta.get("finish_reason") and chunk.get("output_ids") == before.get("output_ids", [])


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
        # The answer to a request for 0 tokens is one empty chunk, which finishes it.
        if len(new) <= len(ids) and not (count == 1 and finish is not None):
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
        AnswerError: naming what is wrong; :class:`DiffersFromStock` where nothing is but what was answered.
    """
    _check_lengths(request, samples, len(expected))
    for sample, reference in zip(samples, expected, strict=True):
        _check_message(sample, reference)
        _check_tokens(request, sample, reference)
        if not sample.aborted:
            _check_logprobs(sample, reference)


def check_form(request: Request, samples: Sequence[Sample]) -> None:
    """Look at answers of an approximate server, whose tokens need not be stock's.

    As many, and as long, as asked for; where they were asked for, with log-probabilities of each token, which are some.

    Raises:
        AnswerError: naming what is wrong.
    """
    _check_lengths(request, samples, request.option.samples)
    for sample in samples:
        if sample.message is not None:
            continue
        if len(sample.ids) > request.tokens or not (sample.ids or sample.aborted or request.tokens == 0):
            raise AnswerError(f"{len(sample.ids)} tokens of {request.tokens}")
        if not sample.aborted and request.option.fields.get("return_logprob"):
            _check_probabilities(request, sample)


def _check_lengths(request: Request, samples: Sequence[Sample], expected: int) -> None:
    if len(samples) != expected:
        raise AnswerError(f"{len(samples)} samples instead of {expected}")
    for sample in samples:
        if sample.aborted and request.kind != "abort":
            raise AnswerError("aborted by the server")
        if not sample.aborted and not request.option.can_end and len(sample.ids) != request.tokens:
            raise AnswerError(f"{len(sample.ids)} tokens instead of {request.tokens}")


def _check_probabilities(request: Request, sample: Sample) -> None:
    """One for each token, of logarithms of numbers between 0 and 1."""
    lost = LOST_LOGPROB in sample.oddities
    asked = [told for field, told in ASKED_ROWS.items() if field in request.option.fields]
    rows = {"log-probabilities": tuple((value,) for value in sample.logprobs or ()), **{name: sample.rows.get(name, ()) for name in asked}}
    for name, found in rows.items():
        if len(found) != len(sample.ids):
            raise AnswerError(f"{name} at {len(found)} positions for {len(sample.ids)} tokens")
        wrong = [value for row in found[lost:] for value in row if value is None or not -math.inf < value <= LOGPROB_TOLERANCE]
        if wrong:
            raise AnswerError(f"{name} of {wrong[0]}, which is no logarithm of a probability")


def _check_tokens(request: Request, sample: Sample, reference: Sample) -> None:
    index = first_difference(sample.ids, reference.ids[: len(sample.ids)])
    if index is not None:
        start = max(0, index - 2)
        raise DiffersFromStock(
            f"differs from stock at token {index}: from {start} on {list(sample.ids[start : index + 4])}, "
            f"stock {list(reference.ids[start : index + 4])}, aborted: {sample.aborted}"
        )
    length = min(request.tokens, len(reference.ids))
    if len(sample.ids) != length and not sample.aborted:
        raise DiffersFromStock(f"{len(sample.ids)} tokens instead of {length}")
    if sample.aborted:
        return
    # SGLang checks the length first: at that length, a stop token or string is not noticed, and stays in the text.
    finish = "length" if len(sample.ids) == request.tokens else reference.finish
    if sample.finish != finish:
        raise DiffersFromStock(f"the finish reason is {sample.finish!r} after {len(sample.ids)} of {request.tokens} tokens, stock's {finish!r}")
    if len(sample.ids) == len(reference.ids) and finish == reference.finish and sample.text != reference.text:
        raise DiffersFromStock(f"the text is {sample.text!r}, stock's {reference.text!r}")


def _check_message(sample: Sample, reference: Sample) -> None:
    if reference.message is None or sample.aborted:
        return
    found, wanted = ((each.message, each.finish) for each in (sample, reference))
    if found != wanted:
        raise DiffersFromStock(f"the message and finish reason are {found}, stock's {wanted}")


def _check_logprobs(sample: Sample, reference: Sample) -> None:
    if reference.logprobs is None:
        return
    if sample.logprobs is None:
        raise AnswerError("no log-probabilities")
    lost = LOST_LOGPROB in sample.oddities
    _compare("log-probability", sample.logprobs[lost:], reference.logprobs[lost:], lost)
    for name, wanted in reference.rows.items():
        found = sample.rows.get(name, ())
        of_prompt = name.startswith("input")
        if len(found) != (len(wanted) if of_prompt else len(sample.ids)):
            raise AnswerError(f"{name} at {len(found)} positions")
        for index, (row, stocks) in enumerate(zip(found, wanted)):
            if index == 0 and lost and not of_prompt:
                continue
            if len(row) != len(stocks):
                raise AnswerError(f"{name}: {len(row)} instead of {len(stocks)} at token {index}")
            _compare(name, row, stocks, index, step=0)


def _compare(name: str, found: Row, wanted: Row, first: int, step: int = 1) -> None:
    for index, (value, stocks) in enumerate(zip(found, wanted)):
        near = value is not None and stocks is not None and abs(value - stocks) <= LOGPROB_TOLERANCE
        if not near and value != stocks:
            raise DiffersFromStock(f"{name} {_told(value)} instead of {_told(stocks)} at token {first + step * index}")


def _told(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
