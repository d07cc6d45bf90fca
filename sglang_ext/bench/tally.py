"""What happened in a soak, counted by the threads of its traffic."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_ext.bench.answers import Sample
from sglang_ext.bench.traffic import Request

SHOWN_PROBLEMS = 20


@dataclass
class Tally:
    """Counters, changed under ``lock``; ``problems`` says in words what went wrong."""

    outcomes: Counter[str] = field(default_factory=Counter)
    options: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    streamed: int = 0
    retractions: int = 0
    drafts: int = 0
    accepted: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, outcome: str, request: Request, samples: Sequence[Sample] = ()) -> None:
        """Count one request and what its answers say."""
        with self.lock:
            self.outcomes[outcome] += 1
            self.options[request.option.name] += 1
            self.streamed += request.stream
            for sample in samples:
                self.retractions += sample.retractions
                self.drafts += sample.drafts
                self.accepted += sample.accepted
                self.fallbacks[str(sample.fallback)] += 1

    def fail(self, problem: str) -> None:
        """Note something that must not happen."""
        with self.lock:
            self.outcomes["failed"] += 1
            self.problems.append(problem)

    def progress(self) -> str:
        """One line for the console."""
        with self.lock:
            counts = ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))
            return f"{counts or 'no answer yet'}, {self.retractions} retractions"

    def as_json(self) -> dict[str, Any]:
        """The totals."""
        with self.lock:
            return {
                "outcomes": dict(self.outcomes),
                "options": dict(self.options),
                "streamed": self.streamed,
                "retractions": self.retractions,
                "drafts": self.drafts,
                "accepted": self.accepted,
                "fallbacks": dict(self.fallbacks),
                "problems": self.problems[:SHOWN_PROBLEMS],
            }
