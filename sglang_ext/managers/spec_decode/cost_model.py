"""Cost model of decode rounds: predicts the time of plain steps, draft steps and verifications at any load, from measured rounds.

In the base model a forward takes a fixed time plus a time per byte that it reads. It reads the weights once, and the KV of its requests. The
model is fitted to plain steps, or to draft steps until a plain step was measured. The ratio of measured to predicted times corrects
predictions near the measured loads, by kind of work. Far from them the base model alone counts.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import log2
from statistics import median_low
from typing import NamedTuple

import numpy as np

# Number of newest times whose median counts. The median leaves out a single stall, such as a kernel's compilation.
RECENT_TIMES = 5
# Times are kept by cells of a grid over the logarithms of a load, with this number of cells per doubling.
CELLS_PER_DOUBLING = 2
# Doublings over which a measured correction fades. Weight of "no correction"; a time at the same load has weight 1.
CORRECTION_RANGE, NO_CORRECTION = 0.4, 0.02
# A doubling of a verification's width counts as this share of a doubling of the load.
WIDTH_DISTANCE = 0.5
# A doubling of the selection interval counts as this number of doublings of the load: times at one interval predict little at another.
INTERVAL_DISTANCE = 2.0
# A cell with a single time is ignored if the time is more than STALL times that of the base model: the round stalled.
STALL = 4.0
# Weight of a fixed time of 0 in the fit of the base model; a measured time has weight 1.
NO_FIXED_TIME = 0.01


def expected_tokens(probability: np.ndarray | float, drafts: np.ndarray | int) -> np.ndarray:
    """Mean tokens of a round of ``drafts`` draft steps, with the bonus token, if each is accepted with this probability."""
    # At probability 1 the formula divides by 0.
    p = np.minimum(probability, 1 - 1e-9)
    return (1 - p ** (drafts + 1)) / (1 - p)


class BatchLoad(NamedTuple):
    """The size of a batch. ``uncompressed``: context tokens of requests without compressed KV. ``selection_interval``: in steps."""

    requests: int
    tokens: int
    uncompressed: int = 0
    selection_interval: int = 1

    @classmethod
    def of(cls, lengths: Sequence[int], uncompressed: int = 0) -> "BatchLoad":
        """The load of requests with these context lengths, in tokens."""
        return cls(len(lengths), sum(lengths), uncompressed)

    @property
    def coordinates(self) -> tuple[float, float]:
        """Coordinates of the load: log2 of the number of requests, log2 of their mean context. A distance of 1 is a doubling."""
        return log2(self.requests), log2(max(1.0, self.tokens / self.requests))


class RoundTimes(NamedTuple):
    """The steps of a round, or of several that are added up, and their measured seconds.

    Attributes:
        compressing: Seconds from the beginning of the round to its first step, in which compressed KV is created and refreshed.
        drafting, later_steps: Seconds of all draft steps, from the preparation of the first one; and without the first one.
        whole: Seconds of the round without ``compressing``, up to the next round.
        follows_plain: Whether the round before was plain. After drafts or a prefill the device waits for the host.
    """

    num_draft_steps: int
    num_plain_steps: int
    compressing: float
    drafting: float
    whole: float
    later_steps: float | None = None
    num_rounds: int = 1
    follows_plain: bool = True

    @property
    def plain_step(self) -> float | None:
        """Seconds of a plain step that did not wait for the host; None if the round has none."""
        if self.follows_plain:
            return self.whole / self.num_plain_steps
        return None if self.later_steps is None else self.later_steps / (self.num_plain_steps - 1)

    @property
    def return_wait(self) -> float | None:
        """Seconds that the device waited for the host before plain steps that follow drafts or a prefill; None if there was no measured wait."""
        if self.num_draft_steps or self.follows_plain or self.later_steps is None:
            return None
        return max(0.0, self.whole - self.num_plain_steps * self.plain_step)

    @property
    def draft_step(self) -> float:
        """Seconds of a draft step: the mean of those after the first one, for which the device waits, if there are any."""
        if self.later_steps is None:
            return self.drafting / self.num_draft_steps
        return self.later_steps / (self.num_draft_steps - self.num_rounds)

    @property
    def rest(self) -> float:
        """Seconds of the round without its draft steps: the wait for the first one, the verification, the time to the next round."""
        return self.whole - self.num_draft_steps * self.draft_step

    def plus(self, other: "RoundTimes") -> "RoundTimes":
        """The times of both together."""
        known = [each for each in (self.later_steps, other.later_steps) if each is not None]
        sums = (a + b for a, b in zip(self[:5], other[:5]))
        return RoundTimes(*sums, sum(known) if known else None, self.num_rounds + other.num_rounds)


@dataclass
class RecentTimes:
    """The last :data:`RECENT_TIMES` times of one kind of work, in seconds."""

    times: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_TIMES))

    @property
    def seconds(self) -> float:
        """The median; of an even number the lower middle one; 0 if there is no time."""
        return median_low(self.times) if self.times else 0.0


class TimeSample(NamedTuple):
    """A measured time: coordinates of the load in doublings, bytes that the forward read, and seconds."""

    coordinates: tuple[float, ...]
    size: float
    seconds: float


@dataclass
class ForwardTimeModel:
    """The base model: a forward takes ``fixed + per_byte * bytes`` seconds."""

    fixed: float = 0.0
    # Before the first measurement any value above 0 works, because only ratios of predictions are used.
    per_byte: float = 1.0

    def seconds(self, size: float | np.ndarray) -> float | np.ndarray:
        """Seconds of a forward that reads ``size`` bytes."""
        return self.fixed + self.per_byte * size


@dataclass
class MeasuredTimes:
    """The measured times of one kind of work: the newest samples of each cell of the grid."""

    cells: dict[tuple[int, ...], deque[TimeSample]] = field(default_factory=dict)
    # The sample with the median time of each cell; of an even number the lower middle one.
    _median: dict[tuple[int, ...], TimeSample] = field(default_factory=dict)

    @cached_property
    def _medians(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Median sample of each cell: coordinates [cells, dimensions], bytes [cells], seconds [cells]; and number of samples [cells]."""
        columns = (np.array(column, dtype=float) for column in zip(*self._median.values()))
        return *columns, np.array([len(cell) for cell in self.cells.values()])

    def fit(self) -> ForwardTimeModel:
        """Fit the base model to the median samples: least squared relative errors. If their sizes hardly differ, the fixed time is 0."""
        from scipy.optimize import nnls

        _, sizes, seconds, _ = self._medians
        # Scale both columns to the order of the times: the solver would ignore a much smaller one.
        scale = sizes.mean()
        rows = np.stack([1 / seconds, sizes / scale / seconds], axis=1)
        rows = np.vstack([rows, [np.sqrt(NO_FIXED_TIME * len(sizes)) / seconds.mean(), 0.0]])
        found, _ = nnls(rows, np.append(np.ones(len(sizes)), 0.0))
        return ForwardTimeModel(float(found[0]), float(found[1]) / scale)

    def observe(self, sample: TimeSample) -> None:
        """Record a measured time."""
        cell = tuple(round(CELLS_PER_DOUBLING * each) for each in sample.coordinates)
        samples = self.cells.setdefault(cell, deque(maxlen=RECENT_TIMES))
        samples.append(sample)
        self._median[cell] = sorted(samples, key=lambda each: each.seconds)[(len(samples) - 1) // 2]
        self.__dict__.pop("_medians", None)

    def is_near(self, coordinates: tuple[float, ...], doublings: float) -> bool:
        """Whether a time was measured at most ``doublings`` away from ``coordinates``."""
        return bool(self.cells) and bool(self._squares(coordinates).min() <= doublings**2)

    def is_confirmed(self, coordinates: tuple[float, ...]) -> bool:
        """Whether the measured cell nearest to ``coordinates`` has at least two times."""
        return bool(self.cells) and bool(self._medians[3][self._squares(coordinates).argmin()] > 1)

    def predict(self, coordinates: tuple[float, ...], size: float, base: ForwardTimeModel) -> float:
        """Seconds of a forward at ``coordinates`` that reads ``size`` bytes."""
        seconds = base.seconds(size)
        if not self.cells:
            return seconds
        _, sizes, measured, counts = self._medians
        weights = np.exp(-self._squares(coordinates) / (2 * CORRECTION_RANGE**2))
        corrections = np.log(measured / base.seconds(sizes))
        weights[(counts == 1) & (corrections > np.log(STALL))] = 0.0
        return seconds * float(np.exp(weights @ corrections / (weights.sum() + NO_CORRECTION)))

    def _squares(self, coordinates: tuple[float, ...]) -> np.ndarray:
        return ((self._medians[0] - np.array(coordinates)) ** 2).sum(1)


@dataclass
class RoundCosts:
    """Predicts the seconds of the parts of a round, at any load.

    ``weights``, ``token_bytes``: bytes of the model's weights, and of a token's full KV in all layers. ``share``: of a context's bytes that a
    draft step reads, approximately. ``widths``: tokens per request of the captured verification graphs, ascending; empty without graphs.
    ``compressing``: seconds to create compressed KV, per context token. ``return_wait``: seconds that the device waits for the host
    when plain decoding goes on after drafts.
    """

    weights: float = 1.0
    token_bytes: float = 0.0
    share: float = 1.0
    widths: tuple[int, ...] = ()
    plain_step_times: MeasuredTimes = field(default_factory=MeasuredTimes)
    draft_times: MeasuredTimes = field(default_factory=MeasuredTimes)
    rest_times: MeasuredTimes = field(default_factory=MeasuredTimes)
    compressing: RecentTimes = field(default_factory=RecentTimes)
    return_wait: RecentTimes = field(default_factory=RecentTimes)
    _base: ForwardTimeModel = field(default_factory=ForwardTimeModel)

    def observe(self, load: BatchLoad, spent: RoundTimes) -> None:
        """Record the seconds of a round."""
        if not spent.num_draft_steps:
            if spent.return_wait is not None:
                self.return_wait.times.append(spent.return_wait)
            if spent.plain_step:
                self.plain_step_times.observe(TimeSample(load.coordinates, self._bytes(load), spent.plain_step))
                self._base = self.plain_step_times.fit()
            return
        if load.uncompressed:
            self.compressing.times.append(spent.compressing / load.uncompressed)
        # The time of a round's only draft step includes the wait for it. So it counts only if no other time is known.
        has_later_steps = spent.num_draft_steps > spent.num_rounds
        if spent.drafting > 0 and (has_later_steps or not self.draft_times.cells):
            self.draft_times.observe(TimeSample(self._draft_coordinates(load), self._bytes(load, self.share), spent.draft_step))
            if not self.plain_step_times.cells:
                self._base = self.draft_times.fit()
        rest = spent.rest if has_later_steps else spent.whole - spent.num_draft_steps * self.draft_seconds(load)
        if rest > 0:
            self.rest_times.observe(TimeSample(self._rest_coordinates(load, spent.num_draft_steps), self._bytes(load), rest))

    def step_seconds(self, load: BatchLoad) -> float:
        """Seconds of a plain step."""
        step = self.plain_step_times.predict(load.coordinates, self._bytes(load), self._base)
        if not self.rest_times.cells or self.plain_step_times.is_confirmed(load.coordinates):
            return step
        # A single measured step may have stalled. A verification reads as much, so its time is the upper limit.
        return min(step, self.rest_seconds(load, 1))

    def draft_seconds(self, load: BatchLoad) -> float:
        """Seconds of a draft step."""
        return self.draft_times.predict(self._draft_coordinates(load), self._bytes(load, self.share), self._base)

    def rest_seconds(self, load: BatchLoad, drafts: int) -> float:
        """Seconds of a round with ``drafts`` draft steps, without these steps."""
        return self.rest_times.predict(self._rest_coordinates(load, drafts), self._bytes(load), self._base)

    def compressing_seconds(self, load: BatchLoad) -> float:
        """Seconds to create the missing compressed KV. Before it is measured: the time to read the full KV once."""
        return load.uncompressed * (self.compressing.seconds if self.compressing.times else self._base.per_byte * self.token_bytes)

    def round_seconds(self, load: BatchLoad, drafts: Sequence[int]) -> np.ndarray:
        """Seconds of rounds with these numbers of draft steps, float64 [rounds]; 0 means a plain step."""
        draft, by_width = self.draft_seconds(load), {self._width(count): count for count in drafts if count}
        rests = {width: self.rest_seconds(load, count) for width, count in by_width.items()}
        return np.array([count * draft + rests[self._width(count)] if count else self.step_seconds(load) for count in drafts])

    def _bytes(self, load: BatchLoad, share: float = 1.0) -> float:
        return self.weights + share * self.token_bytes * load.tokens

    def _width(self, drafts: int) -> int:
        """Tokens per request in the verification of ``drafts`` draft tokens."""
        if not self.widths:
            return drafts + 1
        return next((width for width in self.widths if width > drafts), self.widths[-1])

    @staticmethod
    def _draft_coordinates(load: BatchLoad) -> tuple[float, ...]:
        return *load.coordinates, INTERVAL_DISTANCE * log2(load.selection_interval)

    def _rest_coordinates(self, load: BatchLoad, drafts: int) -> tuple[float, ...]:
        return *load.coordinates, WIDTH_DISTANCE * log2(self._width(drafts))
