"""A real SGLang server with the requests that tests send, and the flags that several tests share."""

import os
import re
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import IO, Any

import pytest
from preloaded import Preloaded
from waiting import tries

from sglang_ext_bench.soaking.soak import server_environment
from sglang_ext.platforms import activate
from sglang_ext.tools.server_process import HEALTH_SECONDS
from sglang_ext_bench.server import BenchServer

STRICT = server_environment(retraction_steps=None)
# Seeds, processors and hidden states are per request: what else is asked does not depend on these flags.
STOCK = ("--enable-deterministic-inference", "--enable-custom-logit-processor", "--enable-return-hidden-states")
# Of a quarter of the default's drafts fewer are wrong, and an answer takes more rounds; other servers draft 8.
DRAFTING = (*STOCK, "--kv-mode", "verified", "--kv-budget", "0.25", "--kv-draft-length", "4", "--enable-metrics")
# What users run, in SGLang's overlapped loop.
VERIFIED = DRAFTING
PAGED = (
    *("--kv-mode", "verified", "--kv-compressor", "sink-recent", "--kv-budget", "0.125", "--kv-more-compressors", "hack"),
    *("--page-size", "16", "--chunked-prefill-size", "256", "--kv-draft-length", "4",),
    # SGLang's plain loop: a result is processed before the next round is built.
    *("--max-total-tokens", "16384", "--disable-overlap-schedule"),
)
# A user's own.
OWN = f"{Path(__file__).parents[2]}/examples/key_norm.py:KeyNorm"
# Three methods that drop tokens, one of them a user's own, and one that packs them, which serves whoever asks for none.
SEVERAL = (
    *(*STOCK, "--kv-mode", "verified", "--kv-compressor", "kivi", "--kv-bits", "4", "--kv-draft-length", "8"),
    "--enable-metrics",
    *("--kv-more-compressors", f"snapkv,snapkv:0.125,{OWN}"),
)
# A pool that does not hold all prompts at once, and host memory for the rest.
CROWDED = (
    *VERIFIED,
    *("--max-running-requests", "20", "--max-total-tokens", "3584", "--kv-host-gb", "0.3"),
)
# A request with ``require_reasoning`` leaves the prefix cache with its answer.
STRIPS_THOUGHTS = ("--reasoning-parser", "qwen3", "--strip-thinking-cache")
# What former versions read of the environment: a shell may have left it.
LEFT = {"SGLANG_EXT_SIMULATE_ACCEPTANCE": "0", "SGLANG_EXT_CORRUPT_LOADS": "1", "SGLANG_EXT_LOCK_STEP": "1"}
# Slots of a server that does not say how many; each thousand takes 0.2 s to allocate.
POOL_TOKENS = 8192
NO_WARMUP = "--skip-server-warmup"
ON_GPU = activate() is None
# SGLang wants a NUMA node for each rank of the three that the demo model's heads allow, or to be told its cores.
_AVAILABLE = sorted(os.sched_getaffinity(0))
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(_AVAILABLE[rank % len(_AVAILABLE)]) for rank in range(3)), "OMP_NUM_THREADS": "1"}
# Where no kernel is compiled, leaving PyTorch's compiler out saves a fifth of a start. Huge pages are allocated, and read, in less time.
QUICK_START = {} if ON_GPU else {"TORCHDYNAMO_DISABLE": "1", "THP_MEM_ALLOC_ENABLE": "1"}
OFFLINE = {"HF_HUB_OFFLINE": "1"}
# Length of the answers that fixture ``expected`` holds: four rounds of drafts and more.
EXPECTED_TOKENS = 20


class Server(BenchServer):
    """A running server, with the requests that tests send; a fork of ``preloaded`` where that has loaded what it would."""

    def __init__(self, *given: Any, preloaded: Preloaded | None = None, **named: Any) -> None:
        super().__init__(*given, **named)
        self.preloaded = preloaded

    def launch(self, log: IO[bytes]) -> Any:
        if self.preloaded is None or not self.preloaded.serves(self.env):
            return super().launch(log)
        return self.preloaded.start(self.command, log, self.env)

    def alive(self, timeout: float = HEALTH_SECONDS) -> bool:
        """Whether it answers a request for one token in time. SGLang's ``/health`` asks for the same, and then sleeps for a second."""
        if "--disaggregation-mode" in self.command or NO_WARMUP not in self.command:
            return super().alive(timeout)
        try:
            self.request("generate", {"input_ids": [0], "log_metrics": False, **greedy(1)}, timeout)
        except OSError:
            return False
        return True

    def ask(self, **body: Any) -> Any:
        """POST /generate."""
        return self.request("generate", body)

    def metric(self, *names: str) -> float:
        """Sum of the samples of its metrics page that begin with one of ``names``."""
        lines = self.request("metrics").splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names))

    def ask_all(
        self, prompts: list[list[int]], workers: int = 4, cold: bool = True, **body: Any
    ) -> list[Any]:
        """Answers to all prompts, ``workers`` at once, by default from an empty prefix cache."""
        if cold:
            self.flush_cache()
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(lambda ids: self.ask(input_ids=ids, **body), prompts))

    def ask_beside(self, running: dict[str, Any], **body: Any) -> tuple[Any, Any]:
        """The answer to ``body``, sent once ``running`` decodes, and the answer to ``running``."""
        begun = Event()

        def run() -> Any:
            chunk = None
            for chunk in self.stream("generate", {**running, "stream": True}):
                begun.set()
            return chunk

        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(run)
            assert begun.wait(self.request_timeout)
            return self.ask(**body), other.result()


class Servers:
    """Starts servers on demand: stock stays, another one ends when the next is asked for.

    They are forks of ``preloaded``, but for those of ``sglang serve``, which start as a user's do. They sleep when idle: SGLang's
    scheduler polls otherwise, and takes a core from the other server. What ends mostly waits, so that the next one starts meanwhile.
    """

    def __init__(self, model: Path, folder: Path, preloaded: Preloaded | None) -> None:
        self.model = model
        self.folder = folder
        self.preloaded = preloaded
        self.running: dict[tuple, Server] = {}
        self.background = ThreadPoolExecutor()
        self.ending: list[Future[None]] = []
        self.started = 0

    def launch(
        self, *flags: str, env: dict[str, str] | None = None, console: bool = False, preloaded: Preloaded | None = None
    ) -> Server:
        """The server with these flags and environment variables.

        Args:
            console: start ``sglang serve``, as a user does.
            preloaded: what forks it, where that is not the installed SGLang.
        """
        key = (*flags, *sorted((env or {}).items()), *(["console"] if console else []))
        for other, server in list(self.running.items()):
            replaced = STOCK not in (key, other) and other != key
            if replaced or not server.running:
                self._end(other)
        if key not in self.running:
            self.running[key] = self._start(flags, env, console, preloaded or self.preloaded)
        return self.running[key]

    def stop(self) -> None:
        """End all servers."""
        for key in list(self.running):
            self._end(key)
        for ended in self.ending:
            ended.result()

    def _end(self, key: tuple) -> None:
        self.ending.append(self.background.submit(self.running.pop(key).stop))

    def _start(self, flags: tuple[str, ...], env: dict[str, str] | None, console: bool, preloaded: Preloaded | None) -> Server:
        self.started += 1
        pool = () if "--max-total-tokens" in flags else ("--max-total-tokens", str(POOL_TOKENS))
        # SGLang's warmup begins with a sleep of a second. Only `sglang serve` keeps it, as users have it.
        warmup = () if console else (NO_WARMUP,)
        server = Server(
            str(self.model),
            ("--dtype", "float32", "--sleep-on-idle", *warmup, *pool, *flags),
            self.folder / f"server-{self.started}.log",
            request_timeout=300,
            env={**OFFLINE, **({} if console else QUICK_START), **(env or {})},
            preloaded=None if console else preloaded,
        )
        if console:
            command = Path(sys.executable).with_name("sglang")
            server.command = (str(command), "serve", *server.command[3:])
        return server.__enter__()


@contextmanager
def sampled(server: Server, name: str, seconds: float = 0.2) -> Iterator[list[float]]:
    """Values of a metric, from before the block on one each so many seconds while it runs; the list is filled as it goes."""
    values, ended = [server.metric(name)], Event()

    def watch() -> None:
        while not ended.wait(seconds):
            values.append(server.metric(name))

    with ThreadPoolExecutor(1) as background:
        done = background.submit(watch)
        try:
            yield values
        finally:
            ended.set()
    done.result()


# So that a server's log has each of its steps.
LOGGED = ("--decode-log-interval", "1")


def most_running(server: Server, since: int) -> int:
    """Requests of its largest step, by the log of a server with :data:`LOGGED` from its ``since``-th byte on; 0 without a step.

    SGLang's metric of the same name is told at prefills and every so many steps.
    """
    log = server.log.read_bytes()[since:].decode(errors="replace")
    return max(map(int, re.findall(r"Decode batch.*?#running-req: (\d+)", log)), default=0)


def greedy(tokens: int, **more: Any) -> dict[str, Any]:
    """Body of a greedy request for exactly ``tokens`` tokens."""
    return {"sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}}


def assert_same_answers(expected: Any, found: Any, fallback: str | None) -> None:
    """Equal tokens, text and end of one answer or of a list, and why ``found`` was served with full KV."""
    expected, found = (r if isinstance(r, list) else [r] for r in (expected, found))
    for part in ("output_ids", "text"):
        assert [r[part] for r in found] == [r[part] for r in expected]
    ends = [[r["meta_info"]["finish_reason"] for r in side] for side in (expected, found)]
    assert ends[0] == ends[1]
    assert {r["meta_info"]["kv_fallback"] for r in found} == {fallback}


def assert_times_of_tokens(server: Server, prompt: list[int], tokens: int) -> None:
    """SGLang's times of an answer that is not streamed: the first token is the prefill's, the others are decoded at the speed told."""
    names = [f"sglang:{name}_seconds_{part}" for name in ("time_to_first_token", "e2e_request_latency") for part in ("count", "sum")]
    for _ in tries(3, "the first token came after four fifths of the time"):
        before = [server.metric(name) for name in names]
        told = server.ask(input_ids=prompt, **greedy(tokens))["meta_info"]
        firsts, first, ends, end = (server.metric(name) - earlier for name, earlier in zip(names, before))
        assert (firsts, ends) == (1, 1) and 0 < first < end
        assert told["decode_throughput"] == pytest.approx((tokens - 1) / (end - first), rel=0.2)
        if first < 0.8 * end:
            break


def first_name(options: Any) -> str:
    """The name of a parametrized test: its first option."""
    return next(iter(options)) if isinstance(options, dict) else ""
