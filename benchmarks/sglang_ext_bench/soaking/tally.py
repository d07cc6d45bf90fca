"""Counts the outcomes of a soak's requests, and collects its problems."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_ext_bench.soaking.answers import Sample
from sglang_ext_bench.soaking.traffic import SoakRequest

MAX_SHOWN_PROBLEMS = 20
OUTCOMES = ("answered", "aborted", "refused", "wrong")
STOCKS_OWN = "stock's own"
COLUMNS = (*OUTCOMES, "streamed", "retracted", STOCKS_OWN)


@dataclass
class Tally:
    """Counters of a soak. All threads of the traffic update them, under ``lock``.

    Attributes:
        options: For each request option, the number of requests in each of :data:`COLUMNS`.
        known_deviations: Deviations that stock SGLang has too, with their counts.
        fallbacks: Answers by their fallback: why the full KV served them at their end.
        problems: Descriptions of all errors and wrong answers.
        retractions: Retractions of all answers. A request may have several.
        drafts: Draft tokens of all answers.
        accepted: Accepted draft tokens.
        lock: Guards all counters.
    """

    options: dict[str, Counter[str]] = field(default_factory=dict)
    known_deviations: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    retractions: int = 0
    drafts: int = 0
    accepted: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, outcome: str, request: SoakRequest, samples: Sequence[Sample] = ()) -> None:
        """Count one request and the counters of its answers."""
        with self.lock:
            row = self._row(request)
            row[outcome] += 1
            row["streamed"] += request.stream
            row["retracted"] += any(sample.retractions for sample in samples)
            for sample in samples:
                self.retractions += sample.retractions
                self.drafts += sample.drafts
                self.accepted += sample.accepted
                self.fallbacks[str(sample.fallback)] += 1

    def count_known_deviations(self, request: SoakRequest, deviations: Sequence[str]) -> None:
        """Count deviations that stock SGLang has too in the overlapped loop."""
        with self.lock:
            self._row(request)[STOCKS_OWN] += bool(deviations)
            self.known_deviations.update(deviations)

    def fail(self, problem: str, request: SoakRequest | None = None) -> None:
        """Record a problem, and count its request as wrong."""
        with self.lock:
            if request is not None:
                self._row(request)["wrong"] += 1
            self.problems.append(problem)

    def _row(self, request: SoakRequest) -> Counter[str]:
        return self.options.setdefault(request.option.name, Counter())

    def _totals(self) -> Counter[str]:
        return sum(self.options.values(), Counter())

    def progress(self) -> str:
        """One line for the console."""
        with self.lock:
            totals = self._totals()
            counts = ", ".join(f"{totals[name]} {name}" for name in OUTCOMES if totals[name])
            return f"{counts or 'no answer yet'}, {self.retractions} retractions"

    def table(self) -> str:
        """The outcomes of each request option and their sums, with a header line."""
        with self.lock:
            rows = {**dict(sorted(self.options.items())), "all": self._totals()}
            width = max(map(len, rows))
            lines = [" ".join([" " * width, *(f"{name:>11}" for name in COLUMNS)])]
            lines += [" ".join([f"{name:{width}}", *(f"{row[each]:>11}" for each in COLUMNS)]) for name, row in rows.items()]
            lines += [f"{STOCKS_OWN}: {count} times {name}" for name, count in sorted(self.known_deviations.items())]
            return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The totals as JSON values."""
        with self.lock:
            totals = self._totals()
            return {
                "outcomes": {name: totals[name] for name in OUTCOMES},
                "streamed": totals["streamed"],
                "retracted": totals["retracted"],
                "options": {name: dict(row) for name, row in self.options.items()},
                "stocks_own": dict(self.known_deviations),
                "retractions": self.retractions,
                "drafts": self.drafts,
                "accepted": self.accepted,
                "fallbacks": dict(self.fallbacks),
                "problems": self.problems[:MAX_SHOWN_PROBLEMS],
            }
