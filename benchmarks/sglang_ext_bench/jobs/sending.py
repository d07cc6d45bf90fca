"""Poisson arrivals, each sent to the prefill server with the shortest queue (HACK, section 7.1) and the decode server with the fewest."""

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from sglang_ext.periodic import run_periodically
from sglang_ext.tools.server_process import ServerProcess
from sglang_ext_bench.client import SamplingSettings
from sglang_ext_bench.servers_apart import ServersApart, answer
from sglang_ext_bench.speed.decode_wave import Stream

# Seconds between looks at how much of a pool is used.
LOOK = 0.2
# Of a job whose decode server has ended it: seconds in which its prefill server has, too.
PATIENCE = 30.0


@dataclass(frozen=True)
class Answered:
    """A job as its client saw it; seconds of ``time.monotonic``.

    Attributes:
        room: SGLang's ``bootstrap_room`` of it.
        arrived: when it was sent.
        stream: its answer, with times of the same clock.
        prefill, decode: which server of each role took it.
    """

    room: int
    tokens: int
    arrived: float
    stream: Stream
    prefill: int
    decode: int


def arrivals(count: int, rate: float | None, seed: int) -> list[float]:
    """Seconds at which ``count`` jobs arrive: a Poisson process of ``rate`` a second, or all at 0 without one."""
    if rate is None:
        return [0.0] * count
    draw, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(at)
        at += draw.expovariate(rate)
    return found


@dataclass
class Queues:
    """What servers of one role have to do, by which the next job's is chosen. Methods may be called from any thread.

    Attributes:
        load: of each server, in whatever jobs are counted by.
    """

    load: list[int]
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, size: int) -> int:
        """The server with the least to do, the first of several, which has ``size`` more now."""
        with self._lock:
            place = min(range(len(self.load)), key=lambda place: self.load[place])
            self.load[place] += size
            return place

    def done(self, place: int, size: int) -> None:
        """A server has ``size`` less to do."""
        with self._lock:
            self.load[place] -= size


class PoolUse:
    """Context manager: looks at how many tokens of their pools servers use, again and again.

    Attributes:
        peak: most tokens of a server, copies among them, and how many its pool has.
    """

    def __init__(self, servers: Sequence[ServerProcess]) -> None:
        self._servers = servers
        self._looks = run_periodically(self._look, LOOK)
        self.peak = (0, 0)

    def __enter__(self) -> "PoolUse":
        self._looks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._looks.__exit__(*error)

    def _look(self) -> None:
        for server in self._servers:
            try:
                loads = server.request("v1/loads?include=core", timeout=5)["loads"]
            except (OSError, KeyError, TypeError):
                continue
            self.peak = max([self.peak, *((load["num_used_tokens"], load["max_total_num_tokens"]) for load in loads)])


def send(servers: ServersApart, prompts: Sequence[tuple[int, ...]], at: Sequence[float], new_tokens: int) -> list[Answered]:
    """Send each prompt at its time, greedy, and wait for all.

    Args:
        at: seconds from now, in order.
        new_tokens: of each answer, whatever they are.

    Raises:
        CommandError: a job was refused or broke off.
    """
    prefills, decodes = (Queues([0] * len(servers.of[role])) for role in ("prefill", "decode"))
    with ThreadPoolExecutor(2 * len(prompts)) as pool:

        def ask(prompt: tuple[int, ...]) -> Answered:
            prefill, decode = prefills.take(len(prompt)), decodes.take(1)
            body = {"input_ids": list(prompt), "sampling_params": SamplingSettings().as_json(new_tokens), **servers.room(prefill)}
            arrived = time.monotonic()
            prefilled = pool.submit(servers.of["prefill"][prefill].post, "generate", body)
            prefilled.add_done_callback(lambda _: prefills.done(prefill, len(prompt)))
            try:
                stream = answer(servers.of["decode"][decode], body, new_tokens, prefilled, PATIENCE, "a job")
            finally:
                decodes.done(decode, 1)
            return Answered(body["bootstrap_room"], len(prompt), arrived, stream, prefill, decode)

        began, sent = time.monotonic(), []
        for prompt, seconds in zip(prompts, at, strict=True):
            time.sleep(max(0.0, began + seconds - time.monotonic()))
            sent.append(pool.submit(ask, prompt))
        return [each.result() for each in sent]
