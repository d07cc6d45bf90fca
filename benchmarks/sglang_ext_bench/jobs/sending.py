"""Sends jobs by Poisson arrivals to the prefill server with the shortest queue and the decode server with the fewest jobs (HACK, 7.1)."""

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType

from sglang_ext.core import run_periodically
from sglang_ext_bench.client import SamplingSettings
from sglang_ext_bench.server import BenchServer
from sglang_ext_bench.servers_apart import ServersApart, answer
from sglang_ext_bench.speed.decode_wave import ResponseStream

# Seconds between two readings of a pool's usage.
POLL_SECONDS = 0.2
# Seconds that a prefill server has to finish its part, if the decode server's part broke off.
PREFILL_GRACE_SECONDS = 30.0


@dataclass(frozen=True)
class JobResponse:
    """A completed job as the client saw it. Times are seconds of ``time.monotonic``.

    Attributes:
        room: SGLang's ``bootstrap_room`` of the job.
        prompt_len: Tokens of the prompt.
        arrival: Time at which it was sent.
        stream: The response with the times of its chunks.
        prefill_server: Index of the prefill server.
        decode_server: Index of the decode server.
    """

    room: int
    prompt_len: int
    arrival: float
    stream: ResponseStream
    prefill_server: int
    decode_server: int


def arrival_times(count: int, rate: float | None, seed: int) -> list[float]:
    """Draw the arrival times of ``count`` jobs in seconds: a Poisson process of ``rate`` per second, or all 0 without a rate."""
    if rate is None:
        return [0.0] * count
    draw, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(now)
        now += draw.expovariate(rate)
    return times


@dataclass
class ServerQueues:
    """Loads of the servers of one role, for choosing the server of the next job. Methods may be called from any thread.

    Attributes:
        loads: Load of each server, in the unit of the jobs' sizes.
    """

    loads: list[int]
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def assign(self, size: int) -> int:
        """Add ``size`` to the server with the lowest load. Returns its index, the lowest one of equal loads."""
        with self._lock:
            index = min(range(len(self.loads)), key=lambda index: self.loads[index])
            self.loads[index] += size
            return index

    def release(self, index: int, size: int) -> None:
        """Subtract ``size`` from the load of a server."""
        with self._lock:
            self.loads[index] -= size


class PoolUsageMonitor:
    """Context manager that polls the usage of the servers' pools.

    Attributes:
        peak: Most used tokens of a server, compressed KV included, and the size of its pool in tokens.
    """

    def __init__(self, servers: Sequence[BenchServer]) -> None:
        self._servers = servers
        self._polling = run_periodically(self._poll, POLL_SECONDS)
        self.peak = (0, 0)

    def __enter__(self) -> "PoolUsageMonitor":
        self._polling.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._polling.__exit__(kind, error, trace)

    def _poll(self) -> None:
        for server in self._servers:
            try:
                loads = server.request("v1/loads?include=core", timeout=5)["loads"]
            except (OSError, KeyError, TypeError):
                continue
            self.peak = max([self.peak, *((load["num_used_tokens"], load["max_total_num_tokens"]) for load in loads)])


def send_jobs(servers: ServersApart, prompts: Sequence[tuple[int, ...]], times: Sequence[float], new_tokens: int) -> list[JobResponse]:
    """Send each prompt at its time, with greedy decoding, and wait for all responses.

    Args:
        servers: Prefill and decode servers.
        prompts: Token ids of each job.
        times: Seconds from now, ascending.
        new_tokens: Output tokens of each job. An end-of-sequence token does not end it.

    Raises:
        CommandError: A server refused a job, or a job broke off.
    """
    prefill_queues, decode_queues = (ServerQueues([0] * len(servers.of[role])) for role in ("prefill", "decode"))
    with ThreadPoolExecutor(2 * len(prompts)) as pool:

        def send_job(prompt: tuple[int, ...]) -> JobResponse:
            prefill, decode = prefill_queues.assign(len(prompt)), decode_queues.assign(1)
            body = {"input_ids": list(prompt), "sampling_params": SamplingSettings().as_json(new_tokens), **servers.room(prefill)}
            arrival = time.monotonic()
            prefilled = pool.submit(servers.of["prefill"][prefill].post, "generate", body)
            prefilled.add_done_callback(lambda _: prefill_queues.release(prefill, len(prompt)))
            try:
                stream = answer(servers.of["decode"][decode], body, new_tokens, prefilled, PREFILL_GRACE_SECONDS, "a job")
            finally:
                decode_queues.release(decode, 1)
            return JobResponse(body["bootstrap_room"], len(prompt), arrival, stream, prefill, decode)

        start, responses = time.monotonic(), []
        for prompt, seconds in zip(prompts, times, strict=True):
            time.sleep(max(0.0, start + seconds - time.monotonic()))
            responses.append(pool.submit(send_job, prompt))
        return [each.result() for each in responses]
