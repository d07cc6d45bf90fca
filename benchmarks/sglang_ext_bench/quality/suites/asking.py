"""Sends the cases of a suite to the servers of its arms."""

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
from sglang_ext.tools.server_client import ServerClient
from sglang_ext.tools.server_process import ServerProcess, file_name
from sglang_ext_bench.client import SamplingSettings, generate
from sglang_ext_bench.quality.copy_bytes import copy_share, token_bytes
from sglang_ext_bench.quality.suites.case import Case
from sglang_ext_bench.quality.suites.served import SuiteArm, SuiteServer, selector_share
from sglang_ext_bench.quality.suites.stored_results import Scored, StoredResults
from sglang_ext_bench.quality.together import together

POOL_SHARE = 0.8
"""Share of a GPU's memory for weights and KV of all servers together, if several share the GPU."""
MEMORY_FLAG = "--mem-fraction-static"
MEASURED_PROMPT, MEASURED_TOKENS = 2048, 96
"""Bytes of compressed KV are measured while a prompt generates MEASURED_TOKENS tokens: the shortest prompt of at least MEASURED_PROMPT
tokens, or else the longest one."""


@dataclass(frozen=True)
class Servers:
    """How servers are started.

    Attributes:
        model: folder or name.
        dtype: of the weights and of the KV.
        flags: of all servers.
        on_gpus: whether they run on NVIDIA GPUs.
        at_once: servers that run side by side; they take turns on the GPUs.
        concurrency: requests in flight at each.
        port: of the only server that runs; 0 for any free ones.
        start_timeout: seconds.
        request_timeout: seconds.
        logs: folder of their logs; None for a temporary one.
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

    def flags_of(self, server: SuiteServer) -> tuple[str, ...]:
        """All flags of a server."""
        shared = -(-self.at_once // len(gpus())) if self.on_gpus else 1
        memory = (MEMORY_FLAG, f"{POOL_SHARE / shared:.3g}") if shared > 1 and MEMORY_FLAG not in self.flags else ()
        return ("--dtype", self.dtype, "--enable-metrics", *memory, *self.flags, *server.flags(self.on_gpus))


def gpus() -> list[str]:
    """The GPUs of this process, as ``CUDA_VISIBLE_DEVICES`` names them; at least one."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named:
        return named.split(",")
    return [str(each) for each in range(max(1, torch.cuda.device_count()))]


def ask_all(
    servers: Servers, wanted: Sequence[SuiteServer], cases: Sequence[Case], results: Mapping[str, StoredResults], console: Console
) -> dict[str, str]:
    """Send each case to each arm that has no score of it yet.

    Args:
        servers: how they are started.
        wanted: the servers.
        cases: of all suites.
        results: the scores of each arm, by its name.
        console: shows the progress.

    Returns:
        The error of each server that failed, by its name.
    """
    failed: dict[str, str] = {}
    free: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for turn in range(servers.at_once):
        # A server that runs alone may use all GPUs.
        alone = servers.at_once == 1 or not servers.on_gpus
        free.put(None if alone else gpus()[turn % len(gpus())])

    def ask(server: SuiteServer) -> None:
        gpu = free.get()
        try:
            _ask_server(servers, server, gpu, cases, results, console)
        except CommandError as error:
            failed[server.name] = str(error)
            console.print(f"{server.name}: failed: {error}", markup=False)
        finally:
            free.put(gpu)

    pending = [server for server in wanted if any(results[arm.name].missing(cases) for arm in server.arms)]
    pool = ThreadPoolExecutor(servers.at_once)
    try:
        list(pool.map(ask, pending))
    finally:
        pool.shutdown(cancel_futures=True)
    return failed


def _ask_server(
    servers: Servers,
    server: SuiteServer,
    gpu: str | None,
    cases: Sequence[Case],
    results: Mapping[str, StoredResults],
    console: Console,
) -> None:
    with ExitStack() as stack:
        logs = servers.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        logs.mkdir(parents=True, exist_ok=True)
        console.print(f"{server.name}: starting", markup=False)
        env = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        log = logs / f"{file_name(server.name)}.log"
        times = servers.start_timeout, servers.request_timeout
        flags = servers.flags_of(server)
        running = stack.enter_context(ServerProcess(servers.model, flags, log, servers.port, *times, env=env))
        for arm in server.arms:
            if results[arm.name].bytes_share is None:
                results[arm.name].set_bytes_share(_bytes_share(servers, server, arm, running, cases))
        for name, cell in groupby(cases, key=lambda case: (case.suite, case.task, case.length)):
            _ask_cell(servers, server, running, list(cell), results)
            console.print(f"{server.name}: {' '.join(str(part) for part in name if part)}", markup=False)


def _ask_cell(
    servers: Servers, server: SuiteServer, client: ServerClient, cases: Sequence[Case], results: Mapping[str, StoredResults]
) -> None:
    """Send the cases of one task and length. A prompt is sent to all arms of a server in turn, so that it is computed once."""
    width = len(cases) if len(server.arms) == 1 else servers.concurrency
    for begin in range(0, len(cases), width):
        for arm in server.arms:
            missing = results[arm.name].missing(cases[begin : begin + width])
            sampling = _sampling(server, arm, ignore_eos=False)
            answers = together(servers.concurrency, missing, lambda case: _answer(client, case, sampling))
            results[arm.name].add(dict(zip(missing, answers, strict=True)))


def _sampling(server: SuiteServer, arm: SuiteArm, ignore_eos: bool) -> SamplingSettings:
    """Greedy; a request names its method where the server has several."""
    named = arm.offer.name if arm.offer is not None and len(server.arms) > 1 else None
    return SamplingSettings(ignore_eos=ignore_eos, kv_compressor=named)


def _answer(client: ServerClient, case: Case, sampling: SamplingSettings) -> Scored:
    found = generate(client, case.input_ids, sampling, case.new_tokens)
    if found.error:
        raise CommandError(f"the request {case.id} failed: {found.error}")
    return Scored(case.score(found.text), found.fallback, found.text)


def _bytes_share(
    servers: Servers, server: SuiteServer, arm: SuiteArm, client: ServerClient, cases: Sequence[Case]
) -> float | None:
    """Bytes of KV that a decode step reads, as a share of the full KV; None if the server reports no compressed KV.

    For a method that selects, the selected tokens and the selector's reads are computed. For others, the compressed KV is measured.
    """
    if arm.offer is None:
        return 1.0
    if arm.points:
        return arm.offer.budget + selector_share(arm)
    by_length = sorted((case.input_ids for case in cases), key=len)
    prompt = next((ids for ids in by_length if len(ids) >= MEASURED_PROMPT), by_length[-1])
    sampling = _sampling(server, arm, ignore_eos=True)
    return copy_share(client, prompt, MEASURED_TOKENS, token_bytes(servers.model, servers.dtype), sampling)
