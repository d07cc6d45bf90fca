"""The answers of a soak: parsed from JSON, and compared with stock's."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_ext.tools import CommandError
from sglang_ext_bench.comparing.compare import first_difference
from sglang_ext_bench.soaking import tool_calls
from sglang_ext_bench.soaking.traffic import SoakRequest

LOGPROB_TOLERANCE = 0.01
"""Largest difference of log-probabilities: far above float32 rounding, far below the difference of another token or position."""
LOST_LOGPROB = "the first log-probability is lost"
"""Known deviation of stock SGLang's overlapped loop, for a request that is retracted before its first token is processed."""
EMPTY_CHUNK = "a chunk without new tokens"
"""Known deviation of stock SGLang's overlapped loop, for a streamed request right after its retraction."""

LOGPROB_FIELDS = {"top_logprobs_num": "output_top_logprobs", "token_ids_logprob": "output_token_ids_logprobs"}
"""Fields of requests for further log-probabilities, and the names of these in ``meta_info``."""

LogprobRow = tuple[float | None, ...]
"""Log-probabilities at one position. None where SGLang sends none."""


ABORTED_WAITING = "Abort in waiting queue"
"""SGLang's message for a request that is aborted in its waiting queue."""


class AnswerError(CommandError):
    """An answer is wrong. The message describes the error."""


class DiffersFromStock(AnswerError):
    """Tokens, text, finish reason or log-probabilities of an answer differ from stock's. Its form is right."""


@dataclass(frozen=True)
class Sample:
    """One answer.

    Attributes:
        ids: Output token ids.
        finish: Type of the finish reason.
        logprobs: Log-probabilities of the output tokens. None if the request did not ask for them.
        retractions: SGLang's ``num_retractions``.
        drafts: Draft tokens (``kv_drafts``).
        accepted: Accepted draft tokens (``kv_accepted``).
        fallback: Why the full KV served the request at its end (``kv_fallback``).
        rows: Further log-probabilities by SGLang's name for them: of the prompt, of the best tokens, of given tokens.
        known_deviations: Deviations that stock has too in the overlapped loop: :data:`LOST_LOGPROB` or :data:`EMPTY_CHUNK`. The first
            position of ``logprobs`` and ``rows`` is empty if it is lost.
        text: Detokenized answer. None if the server sent none.
        message: Message of a chat completion, as canonical JSON. Such a sample has no token ids.
        is_waiting: SGLang aborted the request in its waiting queue.
    """

    ids: tuple[int, ...]
    finish: str
    logprobs: LogprobRow | None = None
    retractions: int = 0
    drafts: int = 0
    accepted: int = 0
    fallback: str | None = None
    rows: Mapping[str, tuple[LogprobRow, ...]] = field(default_factory=dict)
    known_deviations: frozenset[str] = frozenset()
    text: str | None = None
    message: str | None = None
    is_waiting: bool = False

    @property
    def leaves_text(self) -> bool:
        """Whether SGLang's detokenizer may keep the text of an aborted request, so that its id must not be used again.

        A request with tokens that is retracted and then aborted in the waiting queue never gets to the detokenizer again.
        """
        return self.message is not None or (self.is_waiting and bool(self.ids))

    @property
    def is_aborted(self) -> bool:
        """Whether SGLang aborted the request."""
        return self.finish == "abort"


def read_samples(payload: Any) -> tuple[Sample, ...]:
    """Parse the answers of one request: one object, or a list for several samples.

    Raises:
        AnswerError: A field is missing, or the log-probabilities do not belong to the tokens.
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
        is_waiting=meta["finish_reason"].get("message") == ABORTED_WAITING,
    )
    if sample.is_aborted or meta.get("output_token_logprobs") is None:
        return sample
    return _with_logprobs(sample, meta)


def _with_logprobs(sample: Sample, meta: Mapping[str, Any]) -> Sample:
    # SGLang sends the first token's log-probabilities even if the request is for 0 tokens.
    count = None if sample.ids else 0
    rows = meta["output_token_logprobs"][:count]
    tokens = tuple(row[1] for row in rows)
    is_lost = sample.retractions > 0 and len(sample.ids) > 0 and tokens == sample.ids[1:]
    if tokens != sample.ids and not is_lost:
        raise AnswerError(f"log-probabilities of {list(tokens)} for the tokens {list(sample.ids)}")
    more: dict[str, tuple[LogprobRow, ...]] = {}
    for name in LOGPROB_FIELDS.values():
        if meta.get(name) is None:
            continue
        found = meta[name][:count]
        if len(found) != len(tokens):
            raise AnswerError(f"{name} at {len(found)} positions for {len(tokens)} tokens")
        more[name] = (((),) if is_lost else ()) + tuple(_values(each) for each in found)
    if meta.get("input_token_logprobs"):
        more["input_token_logprobs"] = tuple(_values([each]) for each in meta["input_token_logprobs"])
    return replace(
        sample,
        logprobs=((None,) if is_lost else ()) + _values(rows),
        rows=more,
        known_deviations=frozenset([LOST_LOGPROB] if is_lost else []),
    )


def _values(rows: Sequence[Sequence[Any]] | None) -> LogprobRow:
    return tuple(None if row[0] is None else float(row[0]) for row in rows or ())


def read_message(payload: Mapping[str, Any]) -> tuple[Sample, ...]:
    """Parse the answer to a chat completion.

    Raises:
        AnswerError: It is malformed.
    """
    return _read_chat(tool_calls.whole_message, payload)


def read_streamed_message(chunks: Iterable[Mapping[str, Any]]) -> tuple[Sample, ...]:
    """Parse the answer to a streamed chat completion.

    Raises:
        AnswerError: A chunk is malformed or reports an error, or no chunk has a finish reason.
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
    """Parse the answers of a stream, in the order of their ``index``.

    Raises:
        AnswerError: As for :func:`last_chunk` and :func:`read_samples`.
    """
    by_index: dict[int, list[Mapping[str, Any]]] = {}
    for chunk in chunks:
        by_index.setdefault(chunk.get("index", 0), []).append(chunk)
    return tuple(_read_one_stream(by_index[index]) for index in sorted(by_index)) or (_read_one_stream([]),)


def _read_one_stream(chunks: Sequence[Mapping[str, Any]]) -> Sample:
    kept: list[Mapping[str, Any]] = []
    for chunk in chunks:
        if not _only_reports_retraction(chunk, kept[-1] if kept else {}):
            kept.append(chunk)
    (sample,) = read_samples(last_chunk(kept))
    return sample if len(kept) == len(chunks) else replace(sample, known_deviations=sample.known_deviations | {EMPTY_CHUNK})


def _only_reports_retraction(chunk: Mapping[str, Any], previous: Mapping[str, Any]) -> bool:
    """Whether a chunk has the same tokens as the previous one, and one retraction more."""
    meta, earlier = (each.get("meta_info") or {} for each in (chunk, previous))
    is_retracted = meta.get("num_retractions", 0) > earlier.get("num_retractions", 0)
    return is_retracted and not meta.get("finish_reason") and chunk.get("output_ids") == previous.get("output_ids", [])


def last_chunk(chunks: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Check the chunks of a stream and return the last one. Each chunk repeats all tokens so far.

    The last chunk of an aborted stream gets the tokens of the previous one, because SGLang sends none there, or the last one again.

    Raises:
        AnswerError: A chunk has no new token or changes earlier tokens, the server reports an error, or no chunk has a finish reason.
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
        # The answer to a request for 0 tokens is one empty chunk with a finish reason.
        if len(new) <= len(ids) and not (count == 1 and finish is not None):
            raise AnswerError(f"chunk {count} of the stream brings nothing new after {len(ids)} tokens")
        if new[: len(ids)] != ids:
            raise AnswerError(f"chunk {count} of the stream changes tokens that were sent: {ids} to {new}")
        ids = list(new)
    if finish is None:
        raise AnswerError(f"the stream ended after {len(ids)} tokens without a finish reason")
    return last


def check(request: SoakRequest, samples: Sequence[Sample], expected: Sequence[Sample]) -> None:
    """Compare the answers to a request with stock's answers to the same case.

    Stock was asked for at least as many tokens. Each answer must be the beginning of stock's. An aborted answer may be shorter.

    Args:
        request: The request.
        samples: Its answers.
        expected: Stock's answers.

    Raises:
        DiffersFromStock: The answer has the right form, but another content.
        AnswerError: The answer has a wrong form.
    """
    _check_lengths(request, samples, len(expected))
    for sample, reference in zip(samples, expected, strict=True):
        _check_message(sample, reference)
        _check_tokens(request, sample, reference)
        if not sample.is_aborted:
            _check_logprobs(sample, reference)


def check_lossy(request: SoakRequest, samples: Sequence[Sample]) -> None:
    """Check the answers of a lossy server, whose tokens may differ from stock's.

    Their number and lengths must be right. Requested log-probabilities must exist for each token and be logarithms of probabilities.

    Raises:
        AnswerError: An answer has a wrong form.
    """
    _check_lengths(request, samples, request.option.samples)
    for sample in samples:
        if sample.message is not None:
            continue
        if len(sample.ids) > request.tokens or not (sample.ids or sample.is_aborted or request.tokens == 0):
            raise AnswerError(f"{len(sample.ids)} tokens of {request.tokens}")
        if not sample.is_aborted and request.option.fields.get("return_logprob"):
            _check_probabilities(request, sample)


def _check_lengths(request: SoakRequest, samples: Sequence[Sample], expected: int) -> None:
    if len(samples) != expected:
        raise AnswerError(f"{len(samples)} samples instead of {expected}")
    for sample in samples:
        if sample.is_aborted and request.kind != "abort":
            raise AnswerError("aborted by the server")
        if not sample.is_aborted and not request.option.can_end and len(sample.ids) != request.tokens:
            raise AnswerError(f"{len(sample.ids)} tokens instead of {request.tokens}")


def _check_probabilities(request: SoakRequest, sample: Sample) -> None:
    """Check that each token has log-probabilities, which are logarithms of numbers between 0 and 1."""
    is_lost = LOST_LOGPROB in sample.known_deviations
    names = [name for field, name in LOGPROB_FIELDS.items() if field in request.option.fields]
    rows = {"log-probabilities": tuple((value,) for value in sample.logprobs or ()), **{name: sample.rows.get(name, ()) for name in names}}
    for name, found in rows.items():
        if len(found) != len(sample.ids):
            raise AnswerError(f"{name} at {len(found)} positions for {len(sample.ids)} tokens")
        wrong = [value for row in found[is_lost:] for value in row if value is None or not -math.inf < value <= LOGPROB_TOLERANCE]
        if wrong:
            raise AnswerError(f"{name}: {wrong[0]} is not the logarithm of a probability")


def _check_tokens(request: SoakRequest, sample: Sample, reference: Sample) -> None:
    if sample.is_aborted and request.tokens == 0 and sample.ids == (0,):
        # SGLang samples nothing for a request of 0 tokens, and takes token 0. It does not cut the output of an aborted request.
        return
    index = first_difference(sample.ids, reference.ids[: len(sample.ids)])
    if index is not None:
        start = max(0, index - 2)
        raise DiffersFromStock(
            f"differs from stock at token {index}: from {start} on {list(sample.ids[start : index + 4])}, "
            f"stock {list(reference.ids[start : index + 4])}, aborted: {sample.is_aborted}"
        )
    length = min(request.tokens, len(reference.ids))
    if len(sample.ids) != length and not sample.is_aborted:
        raise DiffersFromStock(f"{len(sample.ids)} tokens instead of {length}")
    if sample.is_aborted:
        return
    # SGLang checks the length before stop tokens and stop strings. An answer that reaches its length has the finish reason "length",
    # and its text keeps a stop token at its end. Stock's longer answer has "stop" there and does not keep it.
    finish = "length" if len(sample.ids) == request.tokens else reference.finish
    if sample.finish != finish:
        raise DiffersFromStock(f"the finish reason is {sample.finish!r} after {len(sample.ids)} of {request.tokens} tokens, stock's {finish!r}")
    if len(sample.ids) == len(reference.ids) and finish == reference.finish and sample.text != reference.text:
        raise DiffersFromStock(f"the text is {sample.text!r}, stock's {reference.text!r}")


def _check_message(sample: Sample, reference: Sample) -> None:
    if reference.message is None or sample.is_aborted:
        return
    found, wanted = ((each.message, each.finish) for each in (sample, reference))
    if found != wanted:
        raise DiffersFromStock(f"the message and finish reason are {found}, stock's {wanted}")


def _check_logprobs(sample: Sample, reference: Sample) -> None:
    if reference.logprobs is None:
        return
    if sample.logprobs is None:
        raise AnswerError("no log-probabilities")
    is_lost = LOST_LOGPROB in sample.known_deviations
    _compare("log-probability", sample.logprobs[is_lost:], reference.logprobs[is_lost:], int(is_lost))
    for name, wanted in reference.rows.items():
        found = sample.rows.get(name, ())
        is_of_prompt = name.startswith("input")
        if len(found) != (len(wanted) if is_of_prompt else len(sample.ids)):
            raise AnswerError(f"{name} at {len(found)} positions")
        for index, (row, stocks) in enumerate(zip(found, wanted)):
            if index == 0 and is_lost and not is_of_prompt:
                continue
            if len(row) != len(stocks):
                raise AnswerError(f"{name}: {len(row)} instead of {len(stocks)} at token {index}")
            _compare(name, row, stocks, index, step=0)


def _compare(name: str, found: LogprobRow, wanted: LogprobRow, first: int, step: int = 1) -> None:
    """Compare log-probabilities.

    Args:
        name: Their name, for the message.
        found, wanted: The answer's and stock's.
        first: Position of the first one.
        step: Positions from one to the next. 0: all are at the same position.
    """
    for index, (value, stocks) in enumerate(zip(found, wanted)):
        is_near = value is not None and stocks is not None and abs(value - stocks) <= LOGPROB_TOLERANCE
        if not is_near and value != stocks:
            raise DiffersFromStock(f"{name} {_format(value)} instead of {_format(stocks)} at token {first + step * index}")


def _format(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
