"""Starts the servers of a suite and sends the cases to them."""

import os
import queue
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from rich.console import Console

from sglang_ext.tools import CommandError
from sglang_ext_bench.options import file_name
from sglang_ext_bench.client import SamplingSettings, generate
from sglang_ext_bench.quality.server_measurements import compressed_share, run_parallel, token_bytes
from sglang_ext_bench.quality.suites.arms import SuiteArm, SuiteServer, selector_share
from sglang_ext_bench.quality.suites.case import SuiteCase
from sglang_ext_bench.quality.suites.stored_results import ScoredAnswer, StoredResults
from sglang_ext_bench.server import BenchServer, RequestClient

POOL_SHARE = 0.8
"""Share of a GPU's memory for the weights and the KV of all its servers, if several share the GPU."""
MEMORY_FLAG = "--mem-fraction-static"
MEASURED_PROMPT, MEASURED_TOKENS = 2048, 96
"""Bytes of compressed KV are measured while the server generates MEASURED_TOKENS tokens. The prompt is the shortest one of at least
MEASURED_PROMPT tokens, else the longest one."""


@dataclass(frozen=True)
class ServerSettings:
    """Settings of all servers of a suite.

    Attributes:
        model: Model folder or name.
        dtype: Data type of the weights and of the KV.
        flags: Flags of all servers.
        on_gpus: The servers run on NVIDIA GPUs.
        at_once: Servers that run at the same time. They are distributed over the GPUs.
        concurrency: Requests in flight at each server.
        port: Port, if one server runs at a time. 0: any free port.
        start_timeout: Seconds for the start of a server.
        request_timeout: Seconds for one request.
        logs: Folder of the logs. None: a temporary folder.
    """

    model: str
    dtype: str
    flags: tuple[str, ...]
    on_gpus: bool
    at_once: int
    concurrency: int
    port: int
    start_timeout: float
    request_timeout: float
    logs: Path | None

    def server_flags(self, server: SuiteServer) -> tuple[str, ...]:
        """All flags of a server."""
        shared = -(-self.at_once // len(gpus())) if self.on_gpus else 1
        memory = (MEMORY_FLAG, f"{POOL_SHARE / shared:.3g}") if shared > 1 and MEMORY_FLAG not in self.flags else ()
        return ("--dtype", self.dtype, "--enable-metrics", *memory, *self.flags, *server.flags(self.on_gpus))


def gpus() -> list[str]:
    """The GPUs of this process, as in ``CUDA_VISIBLE_DEVICES``. At least one."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return named.split(",")
    return [str(each) for each in range(max(1, torch.cuda.device_count()))]


def run_cases(
    settings: ServerSettings, servers: Sequence[SuiteServer], cases: Sequence[SuiteCase], results: Mapping[str, StoredResults], console: Console
) -> dict[str, str]:
    """Send each case to each arm that has no score of it yet.

    Args:
        settings: Settings of all servers.
        servers: The servers and their arms.
        cases: The cases of all suites.
        results: The scores of each arm, by its name.
        console: Shows the progress.

    Returns:
        The error of each server that failed, by its name.
    """
    failed: dict[str, str] = {}
    free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for place in range(settings.at_once):
        # A server that runs alone may use all GPUs.
        is_alone = settings.at_once == 1 or not settings.on_gpus
        free.put(None if is_alone else gpus()[place % len(gpus())])

    def run_server(server: SuiteServer) -> None:
        gpu = free.get()
        try:
            _run_server(settings, server, gpu, cases, results, console)
        except CommandError as error:
            failed[server.name] = str(error)
            console.print(f"{server.name}: failed: {error}", markup=False)
        finally:
            free.put(gpu)

    pending = [server for server in servers if any(results[arm.name].missing(cases) for arm in server.arms)]
    pool = ThreadPoolExecutor(settings.at_once)
    try:
        list(pool.map(run_server, pending))
    finally:
        pool.shutdown(cancel_futures=True)
    return failed


def _run_server(
    settings: ServerSettings,
    server: SuiteServer,
    gpu: str | None,
    cases: Sequence[SuiteCase],
    results: Mapping[str, StoredResults],
    console: Console,
) -> None:
    with ExitStack() as stack:
        logs = settings.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        logs.mkdir(parents=True, exist_ok=True)
        console.print(f"{server.name}: starting", markup=False)
        env = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        log = logs / f"{file_name(server.name)}.log"
        times = {"start_timeout": settings.start_timeout, "request_timeout": settings.request_timeout}
        flags = settings.server_flags(server)
        client = stack.enter_context(BenchServer(settings.model, flags, log, settings.port, **times, env=env))
        for arm in server.arms:
            if results[arm.name].bytes_share is None:
                results[arm.name].set_bytes_share(_bytes_share(settings, server, arm, client, cases))
        for name, cell in groupby(cases, key=lambda case: (case.suite, case.task, case.length)):
            _run_cell(settings, server, client, list(cell), results)
            console.print(f"{server.name}: {' '.join(str(part) for part in name if part)}", markup=False)


def _run_cell(
    settings: ServerSettings, server: SuiteServer, client: RequestClient, cases: Sequence[SuiteCase], results: Mapping[str, StoredResults]
) -> None:
    """Send the cases of one task and length. All arms of a server get a prompt one after another, so that it is prefilled once."""
    width = len(cases) if len(server.arms) == 1 else settings.concurrency
    for begin in range(0, len(cases), width):
        for arm in server.arms:
            missing = results[arm.name].missing(cases[begin : begin + width])
            sampling = _sampling(server, arm, ignore_eos=False)
            answers = run_parallel(settings.concurrency, missing, lambda case: _answer(client, case, sampling))
            results[arm.name].add(dict(zip(missing, answers, strict=True)))


def _sampling(server: SuiteServer, arm: SuiteArm, ignore_eos: bool) -> SamplingSettings:
    """Greedy settings. The request names its method if the server has several."""
    method = arm.offer.name if arm.offer is not None and len(server.arms) > 1 else None
    return SamplingSettings(ignore_eos=ignore_eos, kv_compressor=method)


def _answer(client: RequestClient, case: SuiteCase, sampling: SamplingSettings) -> ScoredAnswer:
    found = generate(client, case.input_ids, sampling, case.new_tokens)
    if found.error:
        raise CommandError(f"the request {case.id} failed: {found.error}")
    return ScoredAnswer(case.score(found.text), found.fallback, found.text)


def _bytes_share(
    settings: ServerSettings, server: SuiteServer, arm: SuiteArm, client: RequestClient, cases: Sequence[SuiteCase]
) -> float | None:
    """Bytes of KV that a decode step reads, as a share of the full KV. None if the server reports no compressed KV.

    For a method that selects tokens in each step, the share is computed: the selected tokens and the selector's reads. For other methods,
    the compressed KV is measured.
    """
    if arm.offer is None:
        return 1.0
    if arm.points_to_full_kv:
        return arm.offer.budget + selector_share(arm)
    by_length = sorted((case.input_ids for case in cases), key=len)
    prompt = next((ids for ids in by_length if len(ids) >= MEASURED_PROMPT), by_length[-1])
    sampling = _sampling(server, arm, ignore_eos=True)
    return compressed_share(client, prompt, MEASURED_TOKENS, token_bytes(settings.model, settings.dtype), sampling)
