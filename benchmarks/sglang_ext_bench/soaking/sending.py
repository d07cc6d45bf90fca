"""The traffic of a soak: random requests from several threads, each answer checked against stock's."""

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

from sglang_ext.tools.server_client import describe_error
from sglang_ext_bench.prompts import Prompt
from sglang_ext_bench.soaking.answers import (
    AnswerError,
    Sample,
    check,
    check_form,
    read_message,
    read_samples,
    read_stream,
    read_streamed_message,
)
from sglang_ext_bench.soaking.request_options import Option
from sglang_ext_bench.soaking.soak_prompts import Case
from sglang_ext_bench.soaking.tally import Tally
from sglang_ext_bench.soaking.traffic import Request, draw_request

PROGRESS_SECONDS = 5.0
ABORTED_BEFORE_IT_BEGAN = "Aborted by AbortReq."
"""What SGLang says, as an error with status 400, of a request aborted while its grammar was being compiled."""

References = dict[tuple[int, str], tuple[Sample, ...]]
"""Stock's answers by (prompt, name of the option)."""


class Asked(Protocol):
    """What traffic asks of a server, or of two that are one: as of a :class:`~sglang_ext_bench.client.ServerClient`."""

    def post(self, path: str, body: dict[str, Any]) -> Any: ...

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]: ...

    def post_quietly(self, path: str, body: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Soak:
    """What all threads of the traffic share.

    Attributes:
        server: to be asked.
        prompts: by their index in requests.
        cases: what may be asked.
        references: stock's answer to each case; none of a lossy server, whose answers may be others.
        overlapped: whether both servers ran SGLang's overlapped loop, and so may do what stock does there.
        tally: counts what happened.
        compressors: Values of ``kv_compressor`` that requests name. Empty: no request names one.
    """

    server: Asked
    prompts: Sequence[Prompt]
    cases: Sequence[Case]
    references: References
    overlapped: bool
    tally: Tally
    compressors: Sequence[str] = ()


def traffic(soak: Soak, args: argparse.Namespace) -> None:
    """Send random requests from ``args.workers`` threads, until ``args.requests`` are sent, the time is over or something fails."""
    numbers = count(1)  # its next() is atomic
    deadline = time.monotonic() + 60 * args.minutes

    def work(index: int) -> None:
        chance = Random(args.seed * 1000 + index)
        taken_back = None
        while time.monotonic() < deadline and not soak.tally.problems:
            number = next(numbers)
            if args.requests and number > args.requests:
                return
            rid = taken_back or f"soak-{index:03d}-{number:06d}"
            taken_back = None
            request = draw_request(chance, rid, soak.cases, args.output_len, soak.compressors)
            # The id of an aborted request comes back at once; SGLang aborts a streamed one again two seconds after its end.
            if send(soak, request) and not request.stream:
                taken_back = rid

    with ThreadPoolExecutor(args.workers) as pool:
        running = [pool.submit(work, index) for index in range(args.workers)]
        while wait(running, PROGRESS_SECONDS).not_done:
            left = max(0.0, deadline - time.monotonic())
            print(f"\r{left:5.0f} s left: {soak.tally.progress()}", end="", flush=True)
    print()
    for worker in running:
        worker.result()  # raises what ended the thread


def send(soak: Soak, request: Request) -> bool:
    """One request; ``abort`` takes it back after a while, ``malformed`` must be refused. Whether it was aborted."""
    tally, samples = soak.tally, ()
    with taken_back(soak.server, request):
        try:
            samples = ask(soak.server, request, soak.prompts)
            if request.kind == "malformed":
                raise AnswerError(f"{dict(request.broken)} was accepted")
            if soak.references:
                check(request, samples, soak.references[request.prompt, request.option.name])
            else:
                check_form(request, samples)
        except (AnswerError, OSError) as error:
            if request.kind == "malformed" and getattr(error, "code", None) == 400:
                tally.add("refused", request)
                return False
            told = describe_error(error) if isinstance(error, OSError) else str(error)
            if request.kind != "abort" or ABORTED_BEFORE_IT_BEGAN not in told:
                tally.fail(f"{request}: {told}", request)
                return False
            samples = (Sample((), "abort"),)
    oddities = sorted(frozenset().union(*(sample.oddities for sample in samples)))
    if oddities and not soak.overlapped:
        tally.fail(f"{request}: {', '.join(oddities)} in the plain loop", request)
        return False
    tally.count_stocks_own(request, oddities)
    aborted = samples[0].aborted
    tally.add("aborted" if aborted else "answered", request, samples)
    return aborted


@contextmanager
def taken_back(server: Asked, request: Request) -> Iterator[None]:
    """Abort the request after its delay while it is under way; its id is free afterwards."""
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


def ask(server: Asked, request: Request, prompts: Sequence[Prompt]) -> tuple[Sample, ...]:
    """The answers to a request, streamed or not.

    Raises:
        AnswerError: what came is no answer.
        OSError: nothing came.
    """
    return answer(server, request.option, request.body(prompts), request.stream)


def answer(server: Asked, option: Option, body: dict[str, Any], stream: bool) -> tuple[Sample, ...]:
    """The answers to the request ``body``, which asks in the way ``option``.

    Raises:
        AnswerError: what came is no answer.
        OSError: nothing came.
    """
    if not stream:
        read = read_samples if option.tool_choice is None else read_message
        return read(server.post(option.path, body))
    read_chunks = read_stream if option.tool_choice is None else read_streamed_message
    try:
        return read_chunks(server.stream(option.path, body))
    except json.JSONDecodeError as error:
        raise AnswerError(f"a chunk of the stream is no JSON: {error}") from error
