"""Stores the scores of one arm in a JSON file. An interrupted run continues with the missing ones."""

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_ext.tools import CommandError
from sglang_ext_bench.options import file_name
from sglang_ext_bench import report
from sglang_ext_bench.quality.suites.case import SuiteCase


@dataclass(frozen=True)
class ScoredAnswer:
    """One answer and its score.

    Attributes:
        score: 0.0 to 1.0.
        fallback: Why the full KV served the request at its end. None if the compressed KV served it.
        text: Text of the answer.
    """

    score: float
    fallback: str | None
    text: str


class StoredResults:
    """The scores of one arm, by :attr:`SuiteCase.id`.

    Args:
        folder: Folder with a file for each arm.
        arm: Name of the arm.
        settings: Settings that change the answers. A file with other settings is refused.

    Raises:
        CommandError: The file has other settings, or is malformed.
    """

    def __init__(self, folder: Path, arm: str, settings: Mapping[str, Any]) -> None:
        self.arm = arm
        self.path = folder / f"{file_name(arm)}.json"
        self._lock = threading.Lock()
        self._settings = dict(settings)
        self._hardware, self._date = "", ""
        self._bytes_share: float | None = None
        self._scored: dict[str, ScoredAnswer] = {}
        if self.path.exists():
            self._read()

    def _read(self) -> None:
        try:
            found = json.loads(self.path.read_text())
            settings = found["settings"]
            self._hardware, self._date, self._bytes_share = found["hardware"], found["date"], found["bytes_share"]
            self._scored = {name: ScoredAnswer(**each) for name, each in found["cases"].items()}
        except (ValueError, KeyError, TypeError) as error:
            raise CommandError(f"--results {self.path} is malformed ({error!r}): remove it, or pass another folder") from error
        if settings != self._settings:
            raise CommandError(
                f"--results {self.path} has answers with the settings {settings}, but this run has {self._settings}: pass another folder, "
                "or remove the file"
            )

    @property
    def bytes_share(self) -> float | None:
        """Bytes of KV that a decode step reads, as a share of the full KV. None if they were not measured."""
        return self._bytes_share

    @property
    def origin(self) -> str:
        """Hardware and date of the last answer. Empty without an answer."""
        return f"{self._hardware}, {self._date}" if self._date else ""

    def missing(self, cases: Iterable[SuiteCase]) -> list[SuiteCase]:
        """The cases that have no score yet."""
        return [case for case in cases if case.id not in self._scored]

    def find(self, case: SuiteCase) -> ScoredAnswer | None:
        """The answer to a case. None if it has none yet."""
        return self._scored.get(case.id)

    def set_bytes_share(self, share: float | None) -> None:
        """Store :attr:`bytes_share`."""
        with self._lock:
            self._bytes_share = share
            self._write()

    def add(self, scored: Mapping[SuiteCase, ScoredAnswer]) -> None:
        """Store answers."""
        with self._lock:
            self._scored |= {case.id: each for case, each in scored.items()}
            self._write()

    def _write(self) -> None:
        origin = report.origin()
        self._hardware, self._date = origin["hardware"], origin["date"]
        found = {
            "arm": self.arm,
            "settings": self._settings,
            **origin,
            "bytes_share": self._bytes_share,
            "cases": {name: asdict(each) for name, each in self._scored.items()},
        }
        report.write_json(self.path, found)
