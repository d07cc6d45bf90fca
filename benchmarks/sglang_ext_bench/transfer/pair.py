"""A prefill and a decode server on this machine, and requests that go through both."""

import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from sglang_ext.managers.kv_transfer import timeline
from sglang_ext.managers.kv_transfer.timeline import TransferEvent
from sglang_ext.tools import ROLES
from sglang_ext_bench.client import SamplingSettings
from sglang_ext_bench.servers_apart import ServersApart, answer
from sglang_ext_bench.speed.decode_wave import Stream

# SGLang sends a cached prefix before the forward of what follows it, so that it would travel before the prefill's end; a benchmark's own
# environment may leave that on.
EARLY_SENDS = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
# Seconds in which the prefill server has ended a request whose answer broke off.
PATIENCE = 5.0


@dataclass(frozen=True)
class Passed:
    """A request that went through both servers; seconds are of ``time.monotonic``.

    Attributes:
        sent: when both servers were asked.
        stream: the decode server's answer, its times those seconds.
        events: what the servers' timelines say of it; empty of stock's.
        cached: tokens of the prompt that the prefill server had.
    """

    sent: float
    stream: Stream
    events: tuple[TransferEvent, ...]
    cached: int


class Pair:
    """Context manager: starts both servers at once, and ends them.

    Args:
        model: folder.
        flags: of both, by role: ``prefill`` and ``decode``, beside those that the roles need.
        folder: for logs and timelines.
        name: of these files.
        start_timeout: seconds until both must be healthy.
        port: of the prefill server; the decode server and SGLang's bootstrap server have the two after it. 0: any.
    """

    def __init__(self, model: Path, flags: Mapping[str, tuple[str, ...]], folder: Path, name: str, start_timeout: float, port: int) -> None:
        self._timeline = timeline_file(folder, name)
        self._timeline.unlink(missing_ok=True)
        env = {role: {EARLY_SENDS: os.environ.get(EARLY_SENDS, "0")} for role in ROLES}
        self._servers = ServersApart(
            str(model), {role: [flags[role]] for role in ROLES}, folder, name, port, env, start_timeout=start_timeout
        )
        self._prefill, self._decode = (self._servers.of[role][0] for role in ROLES)
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> "Pair":
        self._servers.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._servers.stop()
        self._pool.shutdown()

    def forget_prompts(self) -> None:
        """Empty the prefill server's prefix cache."""
        self._prefill.flush_cache()

    def ask(self, input_ids: tuple[int, ...], new_tokens: int) -> Passed:
        """Send one request through both, greedy.

        Raises:
            CommandError: one of them refused it, or it broke off.
        """
        room = self._servers.room()
        body = {"input_ids": list(input_ids), "sampling_params": SamplingSettings().as_json(new_tokens), **room}
        sent = time.monotonic()
        prefilled = self._pool.submit(self._prefill.post, "generate", body)
        stream = answer(self._decode, body, new_tokens, prefilled, PATIENCE)
        cached = prefilled.result()["meta_info"]["cached_tokens"]
        events = tuple(event for event in timeline.read(self._timeline) if event.room == room["bootstrap_room"])
        return Passed(sent, stream, events, cached)


def timeline_file(folder: Path, name: str) -> Path:
    """Where both servers of a pair write what becomes of requests."""
    return folder / f"{name}-timeline.jsonl"
