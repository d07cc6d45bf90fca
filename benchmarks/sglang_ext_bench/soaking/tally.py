"""What happened in a soak, counted by the threads of its traffic."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_ext_bench.soaking.answers import Sample
from sglang_ext_bench.soaking.traffic import Request

SHOWN_PROBLEMS = 20
OUTCOMES = ("answered", "aborted", "refused", "wrong")
COLUMNS = (*OUTCOMES, "streamed", "retracted", "stock's own")


@dataclass
class Tally:
    """Counters, changed under ``lock``; ``problems`` says in words what went wrong.

    Attributes:
        options: of each way to ask, how many of its requests had each of :data:`COLUMNS`.
        stocks_own: differences that stock SGLang makes too, by what they are.
        fallbacks: answers by why they were last served with full KV.
        retractions: of all answers; a request may have several.
        drafts: tokens drafted for them.
        accepted: how many of these were right.
    """

    options: dict[str, Counter[str]] = field(default_factory=dict)
    stocks_own: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    retractions: int = 0
    drafts: int = 0
    accepted: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, outcome: str, request: Request, samples: Sequence[Sample] = ()) -> None:
        """Count one request and what its answers say."""
        with self.lock:
            of_option = self._of(request)
            of_option[outcome] += 1
            of_option["streamed"] += request.stream
            of_option["retracted"] += any(sample.retractions for sample in samples)
            for sample in samples:
                self.retractions += sample.retractions
                self.drafts += sample.drafts
                self.accepted += sample.accepted
                self.fallbacks[str(sample.fallback)] += 1

    def count_stocks_own(self, request: Request, differences: Sequence[str]) -> None:
        """Count differences from stock's answer that stock itself makes in the overlapped loop."""
        with self.lock:
            self._of(request)["stock's own"] += bool(differences)
            self.stocks_own.update(differences)

    def fail(self, problem: str, request: Request | None = None) -> None:
        """Note something that must not happen."""
        with self.lock:
            if request is not None:
                self._of(request)["wrong"] += 1
            self.problems.append(problem)

    def _of(self, request: Request) -> Counter[str]:
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
        """Requests by how they asked and by what became of them, with their sums."""
        with self.lock:
            rows = {**dict(sorted(self.options.items())), "all": self._totals()}
            width = max(map(len, rows))
            lines = [" ".join([" " * width, *(f"{name:>11}" for name in COLUMNS)])]
            lines += [" ".join([f"{name:{width}}", *(f"{row[each]:>11}" for each in COLUMNS)]) for name, row in rows.items()]
            lines += [f"stock's own: {count} times {name}" for name, count in sorted(self.stocks_own.items())]
            return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The totals."""
        with self.lock:
            totals = self._totals()
            return {
                "outcomes": {name: totals[name] for name in OUTCOMES},
                "streamed": totals["streamed"],
                "retracted": totals["retracted"],
                "options": {name: dict(row) for name, row in self.options.items()},
                "stocks_own": dict(self.stocks_own),
                "retractions": self.retractions,
                "drafts": self.drafts,
                "accepted": self.accepted,
                "fallbacks": dict(self.fallbacks),
                "problems": self.problems[:SHOWN_PROBLEMS],
            }
