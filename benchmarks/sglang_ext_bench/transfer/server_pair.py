"""A prefill server and a decode server on this machine, and requests to both."""

import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from sglang_ext.tools import ROLES
from sglang_ext_bench.client import SamplingSettings
from sglang_ext_bench.servers_apart import ServersApart, answer
from sglang_ext_bench.speed.decode_wave import ResponseStream
from sglang_ext_bench.timelines import TransferEvent, read_timeline

# By default SGLang transfers a cached prefix before it computes the rest, so the transfer would start before the end of prefill. The pair
# turns this off, unless the benchmark's environment sets the variable.
EARLY_SENDS = "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX"
# Seconds that the prefill server has to finish its part, if the decode server's part broke off.
PREFILL_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class TransferResponse:
    """A completed request to both servers. Times are seconds of ``time.monotonic``.

    Attributes:
        sent: Time at which the request was sent.
        stream: The decode server's response, with the times of its chunks.
        events: Events of the request in the timeline. Empty for SGLang's own backend.
        cached: Tokens of the prompt in the prefill server's prefix cache.
    """

    sent: float
    stream: ResponseStream
    events: tuple[TransferEvent, ...]
    cached: int


class ServerPair:
    """Context manager that starts and stops a prefill server and a decode server.

    Args:
        model: Folder of the model.
        flags: Flags by role, ``prefill`` and ``decode``.
        folder: Folder for logs and timelines.
        name: Prefix of the file names.
        start_timeout: Seconds until both servers must be ready.
        port: Port of the prefill server. The decode server and SGLang's bootstrap server use the next two. 0: any.
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

    def __enter__(self) -> "ServerPair":
        self._servers.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._servers.stop()
        self._pool.shutdown()

    def flush_cache(self) -> None:
        """Empty the prefill server's prefix cache."""
        self._prefill.flush_cache()

    def send(self, input_ids: tuple[int, ...], new_tokens: int) -> TransferResponse:
        """Send one request to both servers, with greedy decoding, and wait for its output.

        Raises:
            CommandError: A server refused the request, or its output broke off.
        """
        room = self._servers.room()
        body = {"input_ids": list(input_ids), "sampling_params": SamplingSettings().as_json(new_tokens), **room}
        sent = time.monotonic()
        prefilled = self._pool.submit(self._prefill.post, "generate", body)
        stream = answer(self._decode, body, new_tokens, prefilled, PREFILL_GRACE_SECONDS)
        cached = prefilled.result()["meta_info"]["cached_tokens"]
        events = tuple(event for event in read_timeline(self._timeline) if event.room == room["bootstrap_room"])
        return TransferResponse(sent, stream, events, cached)


def timeline_file(folder: Path, name: str) -> Path:
    """Path of the timeline to which both servers of a pair append events."""
    return folder / f"{name}-timeline.jsonl"
