"""The traffic of a soak: random requests from several threads, each answer checked against stock's."""

import argparse
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from random import Random

from sglang_ext.bench.answers import AnswerError, Sample, check, last_chunk, read_samples
from sglang_ext.bench.client import ServerClient, describe_error
from sglang_ext.bench.prompts import Prompt
from sglang_ext.bench.tally import Tally
from sglang_ext.bench.traffic import Request, draw_request

PROGRESS_SECONDS = 5.0

References = dict[tuple[int, str], tuple[Sample, ...]]
"""Stock's answers by (prompt, name of the option)."""


def traffic(
    server: ServerClient,
    prompts: tuple[Prompt, ...],
    references: References,
    args: argparse.Namespace,
    tally: Tally,
) -> None:
    """Send random requests from ``args.workers`` threads until the time is over or something fails."""
    deadline = time.monotonic() + 60 * args.minutes

    def work(index: int) -> None:
        chance = Random(args.seed * 1000 + index)
        count = 0
        while time.monotonic() < deadline and not tally.problems:
            count += 1
            request = draw_request(chance, f"soak-{index}-{count}", len(prompts), args.output_len)
            send(server, request, prompts, references[request.prompt, request.option.name], tally)

    with ThreadPoolExecutor(args.workers) as pool:
        running = [pool.submit(work, index) for index in range(args.workers)]
        while wait(running, PROGRESS_SECONDS).not_done:
            left = max(0.0, deadline - time.monotonic())
            print(f"\r{left:5.0f} s left: {tally.progress()}", end="", flush=True)
    print()
    for worker in running:
        worker.result()  # raises what ended the thread


def send(
    server: ServerClient,
    request: Request,
    prompts: tuple[Prompt, ...],
    expected: tuple[Sample, ...],
    tally: Tally,
) -> None:
    """One request; ``abort`` takes it back after a while, ``malformed`` must be refused."""
    if request.kind == "abort":
        body = {"rid": request.rid}
        threading.Timer(request.delay, server.post_quietly, ("abort_request", body)).start()
    try:
        samples = ask(server, request, prompts)
        if request.kind == "malformed":
            raise AnswerError("a top_p of 7 was accepted")
        check(request, samples, expected)
    except AnswerError as error:
        tally.fail(f"{request}: {error}")
    except OSError as error:
        if request.kind == "malformed" and getattr(error, "code", None) == 400:
            tally.add("refused", request)
        else:
            tally.fail(f"{request}: {describe_error(error)}")
    else:
        tally.add("aborted" if samples[0].aborted else "answered", request, samples)


def ask(server: ServerClient, request: Request, prompts: tuple[Prompt, ...]) -> tuple[Sample, ...]:
    """The answers to a request, streamed or not.

    Raises:
        AnswerError: what came is no answer.
        OSError: nothing came.
    """
    body = request.body(prompts)
    if not request.stream:
        return read_samples(server.post("generate", body))
    try:
        return read_samples(last_chunk(server.stream("generate", body)))
    except json.JSONDecodeError as error:
        raise AnswerError(f"a chunk of the stream is no JSON: {error}") from error
