"""Cost model of decode rounds: predicts how long plain steps, draft steps and verifications take, from measured rounds at any load.

A forward takes a fixed time plus a time per byte that it reads: the weights once, and the KV of all tokens that its requests attend to. This
base model is fitted to plain steps, before one was measured to draft steps. What one kind of work takes more or less than the base model says is measured at some loads. Near these
loads it corrects the prediction, far from them the base model alone counts. So a server that has never seen a load begins there with a prediction.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import log2
from statistics import median_low
from typing import NamedTuple

import numpy as np

# Newest times whose median counts: a stall, as when a kernel is compiled, is in one of them.
RECENT_TIMES = 5
# Cells of a grid over the logarithms of a load: so many per doubling. Each keeps its newest times.
CELLS_PER_DOUBLING = 2
# Doublings over which a measured correction fades, and the weight of no correction beside that of a time at the same load.
REACH, NO_CORRECTION = 0.4, 0.02
# A doubling of a verification's width is so much of a doubling of the load.
WIDTH_DISTANCE = 0.5
# A doubling of the selection interval is so many doublings of the load: times at one interval say little of another.
INTERVAL_DISTANCE = 2.0
# The only time of a cell is left out where it is so many times that of the base model: the round stalled.
STALL = 4.0
# Weight of a fixed time of 0 in the fit of the base model, beside that of each measured time.
NO_FIXED_TIME = 0.01


class Load(NamedTuple):
    """How much a round's batch asks of a forward.

    Attributes:
        requests: in the batch.
        tokens: of the contexts of all requests.
        uncopied: of these, tokens of requests that have no compressed KV yet.
        every: selection interval, in steps; 1 for methods that do not select in steps.
    """

    requests: int
    tokens: int
    uncopied: int = 0
    every: int = 1

    @classmethod
    def of(cls, lengths: Sequence[int], uncopied: int = 0) -> "Load":
        """Of requests with so many tokens each."""
        return cls(len(lengths), sum(lengths), uncopied)

    @property
    def place(self) -> tuple[float, float]:
        """Logarithms to base 2 of the requests and of their mean context, between which distances are doublings."""
        return log2(self.requests), log2(max(1.0, self.tokens / self.requests))


class Spent(NamedTuple):
    """Seconds of an iteration.

    Attributes:
        drafts: draft steps; 0 in plain decoding.
        steps: plain steps; 0 in a round with drafts.
        copying: from the iteration's beginning until its first step, while copies are made.
        drafting: of all draft steps.
        whole: from the first step to the next iteration.
    """

    drafts: int
    steps: int
    copying: float
    drafting: float
    whole: float


@dataclass
class Recent:
    """The newest times of one kind.

    Attributes:
        newest: in seconds.
    """

    newest: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_TIMES))

    @property
    def seconds(self) -> float:
        """Their median; of two the shorter; 0 where there are none."""
        return median_low(self.newest) if self.newest else 0.0


class Sample(NamedTuple):
    """A measured time: where it was measured, the bytes that the forward read, and the seconds that it took."""

    place: tuple[float, ...]
    size: float
    seconds: float


@dataclass
class Base:
    """Seconds of a forward by the bytes that it reads.

    Attributes:
        fixed: seconds, whatever is read.
        per_byte: seconds.
    """

    fixed: float = 0.0
    # Before a time is measured only ratios of predictions tell, and any value will do.
    per_byte: float = 1.0

    @classmethod
    def fitted(cls, sizes: np.ndarray, seconds: np.ndarray) -> "Base":
        """The base that explains times best: least squares of relative errors, nothing below 0.

        Times at sizes that hardly differ tell no fixed time: then the time is proportional to the bytes.

        Args:
            sizes: bytes, above 0, [times].
            seconds: above 0, [times].
        """
        from scipy.optimize import nnls

        # Both columns are of the order of the times, or the solver would lose one.
        scale = sizes.mean()
        rows = np.stack([1 / seconds, sizes / scale / seconds], axis=1)
        rows = np.vstack([rows, [np.sqrt(NO_FIXED_TIME * len(sizes)) / seconds.mean(), 0.0]])
        found, _ = nnls(rows, np.append(np.ones(len(sizes)), 0.0))
        return cls(float(found[0]), float(found[1]) / scale)

    def seconds(self, size: float) -> float:
        """Of a forward that reads so many bytes."""
        return self.fixed + self.per_byte * size


@dataclass
class Times:
    """The measured times of one kind of work.

    Attributes:
        cells: the newest samples by cell of the grid.
    """

    cells: dict[tuple[int, ...], deque[Sample]] = field(default_factory=dict)
    # Of each cell the sample with the median time, of two the shorter.
    _median: dict[tuple[int, ...], Sample] = field(default_factory=dict)

    @cached_property
    def _medians(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of each cell the median sample: places [cells, coordinates], bytes and seconds [cells]; and the number of samples [cells]."""
        columns = (np.array(column, dtype=float) for column in zip(*self._median.values()))
        return *columns, np.array([len(cell) for cell in self.cells.values()])

    @property
    def sizes(self) -> np.ndarray:
        """Bytes of the median sample of each cell."""
        return self._medians[1]

    @property
    def seconds(self) -> np.ndarray:
        """Times of the median sample of each cell."""
        return self._medians[2]

    def observe(self, sample: Sample) -> None:
        """Take a time."""
        cell = tuple(round(CELLS_PER_DOUBLING * each) for each in sample.place)
        samples = self.cells.setdefault(cell, deque(maxlen=RECENT_TIMES))
        samples.append(sample)
        self._median[cell] = sorted(samples, key=lambda each: each.seconds)[(len(samples) - 1) // 2]
        self.__dict__.pop("_medians", None)

    def is_near(self, place: tuple[float, ...], doublings: float) -> bool:
        """Whether a time was measured at a load no further from ``place`` than so many doublings."""
        return bool(self.cells) and bool(self._squares(place).min() <= doublings**2)

    def is_confirmed(self, place: tuple[float, ...]) -> bool:
        """Whether the measured load nearest to ``place`` has two times or more."""
        return bool(self.cells) and bool(self._medians[3][self._squares(place).argmin()] > 1)

    def predict(self, place: tuple[float, ...], size: float, base: Base) -> float:
        """Seconds at ``place`` of a forward that reads ``size`` bytes."""
        seconds = base.seconds(size)
        if not self.cells:
            return seconds
        weights = np.exp(-self._squares(place) / (2 * REACH**2))
        corrections = np.log(self.seconds / (base.fixed + base.per_byte * self.sizes))
        weights[(self._medians[3] == 1) & (corrections > np.log(STALL))] = 0.0
        return seconds * float(np.exp(weights @ corrections / (weights.sum() + NO_CORRECTION)))

    def _squares(self, place: tuple[float, ...]) -> np.ndarray:
        return ((self._medians[0] - np.array(place)) ** 2).sum(1)


@dataclass
class RoundCosts:
    """Predicts the seconds of a round's parts at any load.

    Attributes:
        weights: bytes of the model's weights.
        token_bytes: bytes of a token's full KV, in all layers.
        share: of a context's bytes that a draft step reads, about.
        widths: tokens of a request in the captured verifications, ascending; empty where any number is computed as it is.
        step: times of plain steps.
        draft: times of draft steps.
        rest: times of a round without its draft steps, to the beginning of the next.
        copying: seconds of making compressed KV, per token that had none.
    """

    weights: float = 1.0
    token_bytes: float = 0.0
    share: float = 1.0
    widths: tuple[int, ...] = ()
    step: Times = field(default_factory=Times)
    draft: Times = field(default_factory=Times)
    rest: Times = field(default_factory=Times)
    copying: Recent = field(default_factory=Recent)
    _base: Base = field(default_factory=Base)

    def observe(self, load: Load, spent: Spent) -> None:
        """Take the seconds of an iteration."""
        if not spent.drafts:
            if spent.whole > 0:
                self.step.observe(Sample(load.place, self._bytes(load), spent.whole / spent.steps))
                self._base = Base.fitted(self.step.sizes, self.step.seconds)
            return
        if load.uncopied:
            self.copying.newest.append(spent.copying / load.uncopied)
        if spent.drafting > 0:
            self.draft.observe(Sample(self._place_of_draft(load), self._bytes(load, self.share), spent.drafting / spent.drafts))
            if not self.step.cells:
                self._base = Base.fitted(self.draft.sizes, self.draft.seconds)
        if spent.whole > spent.drafting:
            self.rest.observe(Sample(self._place_of_rest(load, spent.drafts), self._bytes(load), spent.whole - spent.drafting))

    def step_seconds(self, load: Load) -> float:
        """Of a plain step. Before a second one was measured near the load: no longer than a verification, which reads as much, as the only one
        may have stalled."""
        step = self.step.predict(load.place, self._bytes(load), self._base)
        return min(step, self.rest_seconds(load, 1)) if self.rest.cells and not self.step.is_confirmed(load.place) else step

    def draft_seconds(self, load: Load) -> float:
        """Of a draft step."""
        return self.draft.predict(self._place_of_draft(load), self._bytes(load, self.share), self._base)

    def rest_seconds(self, load: Load, drafts: int) -> float:
        """Of a round with so many drafts, without its draft steps."""
        return self.rest.predict(self._place_of_rest(load, drafts), self._bytes(load), self._base)

    def copying_seconds(self, load: Load) -> float:
        """Of making compressed KV for the requests that have none. Before that was measured: of reading their full KV once."""
        return load.uncopied * (self.copying.seconds if self.copying.newest else self._base.per_byte * self.token_bytes)

    def round_seconds(self, load: Load, drafts: Sequence[int]) -> np.ndarray:
        """Of rounds with so many drafts each, float64 [rounds]; 0 drafts for a plain step."""
        draft, rests = self.draft_seconds(load), {}
        for count in drafts:
            width = self._width(count)
            if count and width not in rests:
                rests[width] = self.rest_seconds(load, count)
        return np.array([count * draft + rests[self._width(count)] if count else self.step_seconds(load) for count in drafts])

    def _bytes(self, load: Load, share: float = 1.0) -> float:
        return self.weights + share * self.token_bytes * load.tokens

    def _width(self, drafts: int) -> int:
        """Tokens of a request in the verification of so many drafts."""
        if not self.widths:
            return drafts + 1
        return next((width for width in self.widths if width > drafts), self.widths[-1])

    @staticmethod
    def _place_of_draft(load: Load) -> tuple[float, ...]:
        return *load.place, INTERVAL_DISTANCE * log2(load.every)

    def _place_of_rest(self, load: Load, drafts: int) -> tuple[float, ...]:
        return *load.place, WIDTH_DISTANCE * log2(self._width(drafts))
