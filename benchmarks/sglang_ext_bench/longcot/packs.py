"""Where the time of a pack of layers goes, from the timeline of an inference rank with cache ranks (AsyncSpade, Table 2)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from sglang_ext.managers.cache_rank.timeline import PackEvent

Pack = tuple[int, int]


@dataclass
class PackStep:
    """One pack in one step.

    Attributes:
        reached: seconds at which attention comes to its first layer.
        ended: at which it comes to the next pack's; None for the step's last pack.
        held: seconds from :attr:`reached` until copies lead to what was chosen, or did not.
        asked: events of its questions, by lane and sequence.
        chosen: events of their answers.
        missed: choices that were not there in time.
        kept_bytes: of K and V that are read of what was chosen.
    """

    reached: float
    ended: float | None = None
    held: float = 0.0
    asked: dict[tuple[int, int], PackEvent] = field(default_factory=dict)
    chosen: list[PackEvent] = field(default_factory=list)
    missed: int = 0
    kept_bytes: int = 0

    @property
    def inference(self) -> float | None:
        """Seconds that the model computes its layers; None for the last pack, after which no layer follows."""
        return None if self.ended is None else self.ended - self.reached - self.held

    @property
    def seen_until(self) -> float | None:
        """Seconds until which the model is known to compute it: of the last pack until its last question, which its last layer's queries
        are of, so that this layer is left out; None where it was not asked for."""
        return max((event.at for event in self.asked.values()), default=None) if self.ended is None else self.ended

    @property
    def whole(self) -> bool:
        """Whether all that was asked was chosen."""
        return bool(self.asked) and len(self.chosen) == len(self.asked)

    @property
    def selection(self) -> float:
        """Seconds that a rank chooses for all requests."""
        return sum(event.seconds for event in self.chosen)

    @property
    def cycle(self) -> float:
        """Seconds from the first question until the last answer."""
        return max(event.at for event in self.chosen) - min(event.at for event in self.asked.values())


Step = dict[Pack, PackStep]


@dataclass(frozen=True)
class PackFigures:
    """Means over steps and packs; seconds.

    Attributes:
        name: the server's.
        load: what it was asked for, in words.
        layers: of a pack as they were served, the most.
        steps: that were looked at.
        inference: of the model's layers.
        selection: that a rank chooses for all requests of the batch.
        transfer: the rest of a cycle: until questions are heard, among others before them, and answers written.
        up, down: bytes that go to ranks and come back.
        gathered: bytes of K and V, were the selected tokens sent back instead of their positions.
        missed: share of choices that were not there in time.
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
    def hidden(self) -> bool:
        """Whether a rank has chosen for a pack before the model has computed one."""
        return self.selection + self.transfer <= self.inference

    @property
    def bandwidth(self) -> float:
        """Bytes a second that must travel for this to be hidden, as it is served: positions."""
        return (self.up + self.down) / self.inference

    @property
    def gathered_bandwidth(self) -> float:
        """The same, were K and V sent as in the paper's Table 2."""
        return (self.up + self.gathered) / self.inference


def steps_of(events: Iterable[PackEvent]) -> list[Step]:
    """The steps of a timeline, oldest first; the last may lack answers."""
    found: list[Step] = []
    places: dict[tuple[Pack, int, int], PackStep] = {}
    current: Step = {}
    newest: PackStep | None = None
    for event in events:
        pack = event.first, event.count
        if event.kind == "reached":
            if event.first == 0:
                current, newest = {}, None
                found.append(current)
            if newest is not None:
                newest.ended = event.at
            newest = current[pack] = PackStep(event.at)
        elif event.kind == "chosen":
            if (asked_in := places.pop((pack, event.lane, event.sequence), None)) is not None:
                asked_in.chosen.append(event)
        elif pack in current:
            _note(current[pack], event)
            if event.kind == "asked":
                places[pack, event.lane, event.sequence] = current[pack]
    return found


def _note(step: PackStep, event: PackEvent) -> None:
    match event.kind:
        case "asked":
            step.asked[event.lane, event.sequence] = event
        case "written":
            step.held = event.at - step.reached
            step.kept_bytes += event.bytes
        case "missed":
            step.held = event.at - step.reached
            step.missed += 1


def figures(name: str, load: str, steps: Sequence[Step]) -> PackFigures | None:
    """Means of those packs of steps whose questions were all answered; None where there are none.

    The last pack of each step counts for what ranks do, not for what the model does: what follows it is no layer.
    """
    packs = [each for step in steps for each in step.values()]
    asked, timed = [each for each in packs if each.whole], [each.inference for each in packs if each.inference is not None]
    if not asked or not timed:
        return None
    selection, cycle = fmean(each.selection for each in asked), fmean(each.cycle for each in asked)
    written = [each.kept_bytes for each in packs if each.kept_bytes]
    due = sum(len(each.asked) for each in packs)
    return PackFigures(
        name=name,
        load=load,
        layers=max(count for step in steps for _, count in step),
        steps=len(steps),
        inference=fmean(timed),
        selection=selection,
        transfer=max(0.0, cycle - selection),
        up=fmean(sum(event.bytes for event in each.asked.values()) for each in asked),
        down=fmean(sum(event.bytes for event in each.chosen) for each in asked),
        gathered=fmean(written) if written else 0.0,
        missed=sum(each.missed for each in packs) / max(1, due),
    )
