"""Times of packs of layers, from the timeline of an inference rank with cache ranks (AsyncSpade, Table 2)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from sglang_ext_bench.timelines import PackEvent

Pack = tuple[int, int]
"""First layer and number of layers."""


@dataclass
class PackStep:
    """One pack in one step.

    Attributes:
        start: Time at which attention reaches its first layer, in seconds.
        end: Time at which attention reaches the next pack, in seconds. None for the last pack of a step.
        wait: Seconds from :attr:`start` until the selection is written to the compressed KV, or counted as late.
        requests: Events of the selection requests, by lane and sequence.
        selections: Events of the completed selections.
        missed: Late selections.
        kv_bytes: Bytes of the selected K and V.
    """

    start: float
    end: float | None = None
    wait: float = 0.0
    requests: dict[tuple[int, int], PackEvent] = field(default_factory=dict)
    selections: list[PackEvent] = field(default_factory=list)
    missed: int = 0
    kv_bytes: int = 0

    @property
    def inference(self) -> float | None:
        """Seconds in which the model computes its layers. None for the last pack of a step, whose end is unknown."""
        return None if self.end is None else self.end - self.start - self.wait

    @property
    def known_end(self) -> float | None:
        """Latest time at which the model is known to compute it, in seconds.

        For the last pack of a step, the last selection request. It has the queries of the last layer, whose own time is left out. None
        without requests.
        """
        return max((event.at for event in self.requests.values()), default=None) if self.end is None else self.end

    @property
    def is_complete(self) -> bool:
        """All of its selection requests were completed."""
        return bool(self.requests) and len(self.selections) == len(self.requests)

    @property
    def selection(self) -> float:
        """Seconds in which a rank selects for all requests."""
        return sum(event.seconds for event in self.selections)

    @property
    def cycle(self) -> float:
        """Seconds from the first selection request to the last completed selection."""
        return max(event.at for event in self.selections) - min(event.at for event in self.requests.values())


Step = dict[Pack, PackStep]
"""The packs of one step."""


@dataclass(frozen=True)
class PackSummary:
    """Means over steps and packs. The fields are keys of the JSON file. Times are in seconds.

    Attributes:
        name: Name of the server.
        load: Batch, context and selected tokens, in words.
        layers: Layers of the largest pack.
        steps: Number of steps.
        inference: Time of the model's layers.
        selection: Time in which a rank selects for all requests of the batch.
        transfer: The rest of the cycle, in which requests and selections are transferred and queued.
        up: Bytes that are sent to ranks.
        down: Bytes of positions that ranks send back.
        gathered: Bytes of the selected K and V. A rank would send them back if the server had no full KV.
        missed: Share of late selections.
    """

    name: str
    load: str
    layers: int
    steps: int
    inference: float
    selection: float
    transfer: float
    up: float
    down: float
    gathered: float
    missed: float

    @property
    def is_hidden(self) -> bool:
        """Selection and transfer for a pack take no longer than the model's layers."""
        return self.selection + self.transfer <= self.inference

    @property
    def bandwidth(self) -> float:
        """Bytes per second that the link needs to hide the transfer of positions."""
        return (self.up + self.down) / self.inference

    @property
    def gathered_bandwidth(self) -> float:
        """Bytes per second that the link needs to hide the transfer of K and V, as in the paper's Table 2."""
        return (self.up + self.gathered) / self.inference


def parse_steps(events: Iterable[PackEvent]) -> list[Step]:
    """Group the events of a timeline by step, oldest first. The last step may lack selections."""
    steps: list[Step] = []
    pending: dict[tuple[Pack, int, int], PackStep] = {}
    current: Step = {}
    newest: PackStep | None = None
    for event in events:
        pack = event.first, event.count
        if event.kind == "reached":
            if event.first == 0:
                current, newest = {}, None
                steps.append(current)
            if newest is not None:
                newest.end = event.at
            newest = current[pack] = PackStep(event.at)
        elif event.kind == "chosen":
            if (requested_in := pending.pop((pack, event.lane, event.sequence), None)) is not None:
                requested_in.selections.append(event)
        elif pack in current:
            _add_event(current[pack], event)
            if event.kind == "asked":
                pending[pack, event.lane, event.sequence] = current[pack]
    return steps


def _add_event(step: PackStep, event: PackEvent) -> None:
    """Add an event of the inference rank to a pack's step."""
    match event.kind:
        case "asked":
            step.requests[event.lane, event.sequence] = event
        case "written":
            step.wait = event.at - step.start
            step.kv_bytes += event.bytes
        case "missed":
            step.wait = event.at - step.start
            step.missed += 1


def summarize(name: str, load: str, steps: Sequence[Step]) -> PackSummary | None:
    """Summarize the packs whose selection requests were all completed. None if there are none.

    The last pack of each step does not count for the time of the model, since its end is unknown.
    """
    packs = [each for step in steps for each in step.values()]
    complete, inference = [each for each in packs if each.is_complete], [each.inference for each in packs if each.inference is not None]
    if not complete or not inference:
        return None
    selection, cycle = fmean(each.selection for each in complete), fmean(each.cycle for each in complete)
    kv_bytes = [each.kv_bytes for each in packs if each.kv_bytes]
    num_requests = sum(len(each.requests) for each in packs)
    return PackSummary(
        name=name,
        load=load,
        layers=max(count for step in steps for _, count in step),
        steps=len(steps),
        inference=fmean(inference),
        selection=selection,
        transfer=max(0.0, cycle - selection),
        up=fmean(sum(event.bytes for event in each.requests.values()) for each in complete),
        down=fmean(sum(event.bytes for event in each.selections) for each in complete),
        gathered=fmean(kv_bytes) if kv_bytes else 0.0,
        missed=sum(each.missed for each in packs) / max(1, num_requests),
    )
