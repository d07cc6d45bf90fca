"""The traffic of a soak: random requests from several threads, with a check of each answer."""

import argparse
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any, Protocol

from sglang_ext_bench.prompts import Prompt
from sglang_ext_bench.server import describe_error
from sglang_ext_bench.soaking.answers import (
    AnswerError,
    Sample,
    check,
    check_lossy,
    read_message,
    read_samples,
    read_stream,
    read_streamed_message,
)
from sglang_ext_bench.soaking.request_options import Option
from sglang_ext_bench.soaking.tally import Tally
from sglang_ext_bench.soaking.traffic import SoakCase, SoakRequest, draw_request

PROGRESS_SECONDS = 5.0
ABORTED_BY_CLIENT = "Aborted by AbortReq."
"""SGLang's error, with status 400, for a request that is aborted while its grammar is compiled."""

References = dict[tuple[int, str], tuple[Sample, ...]]
"""Stock's answers by (index of the prompt, name of the option)."""


class SoakServer(Protocol):
    """The methods of :class:`~sglang_ext_bench.server.RequestClient` that the traffic calls."""

    def post(self, path: str, body: dict[str, Any]) -> Any: ...

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]: ...

    def post_quietly(self, path: str, body: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Soak:
    """Data that all threads of the traffic share.

    Attributes:
        server: The tested server.
        prompts: All prompts. Requests name them by their index.
        cases: The cases to draw requests from.
        references: Stock's answer to each case. Empty for a lossy server, whose answers are approximate.
        is_overlapped: Both servers run SGLang's overlapped loop, so that stock's known deviations are allowed.
        tally: Counts the outcomes.
        compressors: Values of ``kv_compressor`` that requests name. Empty: no request names one.
    """

    server: SoakServer
    prompts: Sequence[Prompt]
    cases: Sequence[SoakCase]
    references: References
    is_overlapped: bool
    tally: Tally
    compressors: Sequence[str] = ()


def run_traffic(soak: Soak, args: argparse.Namespace) -> None:
    """Send random requests from ``args.workers`` threads.

    The traffic ends after ``args.requests`` requests, after ``args.minutes`` minutes, or at the first problem.
    """
    numbers = count(1)  # its next() is atomic
    deadline = time.monotonic() + 60 * args.minutes

    def work(index: int) -> None:
        random = Random(args.seed * 1000 + index)
        reusable_rid = None
        while time.monotonic() < deadline and not soak.tally.problems:
            number = next(numbers)
            if args.requests and number > args.requests:
                return
            rid = reusable_rid or f"soak-{index:03d}-{number:06d}"
            reusable_rid = None
            request = draw_request(random, rid, soak.cases, args.output_len, soak.compressors)
            # Reuse the id of an aborted request at once. SGLang aborts a streamed request again two seconds after its end.
            if send(soak, request) and not request.stream:
                reusable_rid = rid

    with ThreadPoolExecutor(args.workers) as pool:
        running = [pool.submit(work, index) for index in range(args.workers)]
        while wait(running, PROGRESS_SECONDS).not_done:
            remaining = max(0.0, deadline - time.monotonic())
            print(f"\r{remaining:5.0f} s left: {soak.tally.progress()}", end="", flush=True)
    print()
    for worker in running:
        worker.result()  # raises the exception of the thread


def send(soak: Soak, request: SoakRequest) -> bool:
    """Send one request and check its answer. Return whether it was aborted, and its id can be used again.

    A malformed request must be refused with status 400.
    """
    tally, samples = soak.tally, ()
    with abort_later(soak.server, request):
        try:
            samples = request_answer(soak.server, request, soak.prompts)
            if request.kind == "malformed":
                raise AnswerError(f"{dict(request.invalid_params)} was accepted")
            if soak.references:
                check(request, samples, soak.references[request.prompt, request.option.name])
            else:
                check_lossy(request, samples)
        except (AnswerError, OSError) as error:
            if request.kind == "malformed" and getattr(error, "code", None) == 400:
                tally.add("refused", request)
                return False
            message = describe_error(error) if isinstance(error, OSError) else str(error)
            if request.kind != "abort" or ABORTED_BY_CLIENT not in message:
                tally.fail(f"{request}: {message}", request)
                return False
            samples = (Sample((), "abort"),)
    deviations = sorted(frozenset().union(*(sample.known_deviations for sample in samples)))
    if deviations and not soak.is_overlapped:
        tally.fail(f"{request}: {', '.join(deviations)} in the plain loop", request)
        return False
    tally.count_known_deviations(request, deviations)
    is_aborted = samples[0].is_aborted
    tally.add("aborted" if is_aborted else "answered", request, samples)
    return is_aborted and not any(sample.leaves_text for sample in samples)


@contextmanager
def abort_later(server: SoakServer, request: SoakRequest) -> Iterator[None]:
    """Abort a request of kind "abort" after its delay, if it still runs. On exit no abort is pending, so that its id is free."""
    if request.kind != "abort":
        yield
        return
    timer = threading.Timer(request.delay, server.post_quietly, ("abort_request", {"rid": request.rid}))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def request_answer(server: SoakServer, request: SoakRequest, prompts: Sequence[Prompt]) -> tuple[Sample, ...]:
    """Send a request and return its answers, streamed or not.

    Raises:
        AnswerError: The answer is malformed.
        OSError: The server refused the request or is gone.
    """
    return post(server, request.option, request.body(prompts), request.stream)


def post(server: SoakServer, option: Option, body: dict[str, Any], stream: bool) -> tuple[Sample, ...]:
    """Send the body of a request and return its answers.

    Args:
        server: The server.
        option: The request option of the body.
        body: The JSON body.
        stream: Whether the body asks for a stream.

    Raises:
        AnswerError: The answer is malformed.
        OSError: The server refused the request or is gone.
    """
    if not stream:
        read = read_samples if option.tool_choice is None else read_message
        return read(server.post(option.path, body))
    read_chunks = read_stream if option.tool_choice is None else read_streamed_message
    try:
        return read_chunks(server.stream(option.path, body))
    except json.JSONDecodeError as error:
        raise AnswerError(f"a chunk of the stream is not JSON: {error}") from error
