"""The prefill servers that a decode rank knows, fetched from their bootstrap servers in background threads.

SGLang's decode scheduler reads a bootstrap server over HTTP in its own thread. A bootstrap server that accepts connections and does not
answer then stops all requests of the decode server for 5 s per attempt. The directory never waits: the scheduler polls it.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import requests
from sglang.srt.disaggregation.common.conn import PrefillServerInfo

logger = logging.getLogger(__name__)

# Bootstrap servers that are read at once.
MAX_FETCHES = 16
# Seconds: for one HTTP response, between two attempts at one address, and that a request waits for its prefill server.
FETCH_TIMEOUT, RETRY_INTERVAL, PATIENCE = 5.0, 1.0, 30.0

# A prefill rank's position: data parallel, context parallel, tensor parallel and pipeline rank.
RankPosition = tuple[int, int, int, int]


@dataclass(frozen=True)
class PrefillServerRecord:
    """A bootstrap server's data about its prefill server.

    Attributes:
        info: Topology. Its rank mapping is resolved for this decode rank.
        ranks: For each prefill rank that this decode rank needs, ``rank_ip`` and ``rank_port`` of its control socket.
    """

    info: PrefillServerInfo
    ranks: dict[RankPosition, dict[str, Any]]


class PrefillDirectory:
    """Fetches prefill servers by bootstrap address. At most one fetch per address runs at a time. Used by one thread.

    Args:
        fetch: Reads one bootstrap server, in a background thread. Any exception is a failed attempt.
        retry_interval: Seconds between two attempts at one address.
        patience: Seconds that a request waits for its prefill server before it fails.
    """

    def __init__(
        self, fetch: Callable[[str], PrefillServerRecord], retry_interval: float = RETRY_INTERVAL, patience: float = PATIENCE
    ) -> None:
        self.patience = patience
        self._fetch, self._retry_interval = fetch, retry_interval
        self._executor = ThreadPoolExecutor(MAX_FETCHES, thread_name_prefix="kv-bootstrap")
        self._running: dict[str, Future[PrefillServerRecord]] = {}
        self._retry_at: dict[str, float] = {}
        self._problems: dict[str, str] = {}

    def poll(self, address: str) -> PrefillServerRecord | None:
        """Return the prefill server once it is fetched. Until then, start a fetch if none runs, and return None. Does not block."""
        running = self._running.get(address)
        if running is None:
            if time.monotonic() >= self._retry_at.get(address, 0.0):
                self._running[address] = self._executor.submit(self._fetch, address)
            return None
        if not running.done():
            return None
        del self._running[address]
        error = running.exception()
        if error is None:
            self._retry_at.pop(address, None)
            self._problems.pop(address, None)
            return running.result()
        if self._problems.get(address) != str(error):
            logger.warning("the bootstrap server at %s cannot be read: %s; next attempt in %g s", address, error, self._retry_interval)
        self._problems[address] = str(error)
        self._retry_at[address] = time.monotonic() + self._retry_interval
        return None

    def problem(self, address: str) -> str:
        """Why the last attempt at an address failed."""
        return self._problems.get(address, "it does not answer")


def fetch_prefill_server(address: str, resolve: Callable[[PrefillServerInfo], list[RankPosition]]) -> PrefillServerRecord:
    """Read the topology and the rank addresses of a prefill server from its bootstrap server.

    Args:
        address: ``host:port`` of the bootstrap server.
        resolve: Maps the topology to this decode rank, and returns the prefill ranks that it needs.

    Raises:
        requests.RequestException: The server does not answer within ``FETCH_TIMEOUT``, or answers with an error status.
    """
    info = PrefillServerInfo(**_get_route(address, (-1, -1, -1, -1)))
    return PrefillServerRecord(info, {position: _get_route(address, position) for position in resolve(info)})


def _get_route(address: str, position: RankPosition) -> dict[str, Any]:
    names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
    response = requests.get(f"http://{address}/route", params=dict(zip(names, position)), timeout=FETCH_TIMEOUT)
    response.raise_for_status()
    return response.json()
