"""One step of the requests of an inference rank, as its cache ranks are told of it: what is due when, and how long it may be waited for."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ext.managers.cache_rank.cpu_requests import CpuRankRequest
from sglang_ext.mem_cache.compressed.remote_selector import LayerObserver, ReadQueryWindow, StepRequest, WriteSelection

if TYPE_CHECKING:
    from sglang_ext.managers.cache_rank.cpu_client import CpuRankClient


@dataclass
class RequestStep:
    """A request in one step.

    Attributes:
        step: what of it the step reads.
        request: what its rank has.
        expected: sequence of the question whose answer is due.
        late: whether one was not there.
    """

    step: StepRequest
    request: CpuRankRequest
    expected: int
    late: bool = False


class StepObserver(LayerObserver):
    """One step: what is chosen for each pack is written as the forward reaches it, and asked for anew as it has passed.

    After the first that is missed nothing is waited for in the step any more.

    Args:
        choices: of all requests.
        parts: those in the step.
        read: their queries.
        write: writes their copies.
        seconds: that are waited at most, over all packs and requests.
    """

    def __init__(self, choices: "CpuRankClient", parts: list[RequestStep], read: ReadQueryWindow, write: WriteSelection, seconds: float):
        self._choices = choices
        self._parts = parts
        self._read = read
        self._write = write
        self._left = seconds

    def on_layer_start(self, layer: int) -> None:
        """As :meth:`LayerObserver.on_layer_start`."""
        if self._parts:
            self._choices.reach(layer, self._parts[0].request.packs)
        for part in self._parts:
            for place, choice in enumerate(part.request.packs):
                if choice.pack.first == layer:
                    self._commit(part, place)

    def _commit(self, part: RequestStep, pack: int) -> None:
        begun = time.monotonic()
        if not self._choices.commit(part, pack, begun + self._left, self._write) and not part.late:
            part.late, self._left = True, 0.0
            self._choices.miss(part, part.request.packs[pack].pack)
        self._left = max(0.0, self._left - (time.monotonic() - begun))

    def on_queries_recorded(self, layer: int) -> None:
        """As :meth:`LayerObserver.on_queries_recorded`."""
        for part in self._parts:
            for place, choice in enumerate(part.request.packs):
                if part.step.asks and choice.pack.layers.stop == layer + 1:
                    self._choices.ask(part, place, self._read, self._write)
