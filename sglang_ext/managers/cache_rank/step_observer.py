"""Follows one decode step layer by layer, applies the selection of each pack of layers, and publishes the pack's queries."""

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
        step: The tokens that the step reads.
        request: The request's state at its rank.
        expected: Sequence of the selection request whose reply is due.
        late: A reply was not there in time.
    """

    step: StepRequest
    request: CpuRankRequest
    expected: int
    late: bool = False


class StepObserver(LayerObserver):
    """Applies each pack's selection when the forward reaches the pack, and publishes a selection request after the pack.

    After the first missing selection, the step waits for no others.

    Args:
        choices: The client.
        parts: The requests of the step.
        read: Reads their queries.
        write: Writes their compressed KV.
        seconds: Maximum wait over all packs and requests.
    """

    def __init__(self, choices: "CpuRankClient", parts: list[RequestStep], read: ReadQueryWindow, write: WriteSelection, seconds: float):
        self._choices = choices
        self._parts = parts
        self._read = read
        self._write = write
        self._left = seconds

    def on_layer_start(self, layer: int) -> None:
        """See :meth:`LayerObserver.on_layer_start`."""
        if self._parts:
            self._choices.on_layer_reached(layer, self._parts[0].request.packs)
        for part in self._parts:
            for place, choice in enumerate(part.request.packs):
                if choice.pack.first == layer:
                    self._commit(part, place)

    def _commit(self, part: RequestStep, pack: int) -> None:
        begun = time.monotonic()
        if not self._choices.commit(part, pack, begun + self._left, self._write) and not part.late:
            part.late, self._left = True, 0.0
            self._choices.count_missed(part, part.request.packs[pack].pack)
        self._left = max(0.0, self._left - (time.monotonic() - begun))

    def on_queries_recorded(self, layer: int) -> None:
        """See :meth:`LayerObserver.on_queries_recorded`."""
        for part in self._parts:
            for place, choice in enumerate(part.request.packs):
                if part.step.starts_selection and choice.pack.layers.stop == layer + 1:
                    self._choices.ask(part, place, self._read, self._write)
