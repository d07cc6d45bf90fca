"""Verifications in lock-step, which staggered ones are compared with: ``--kv-bench-lock-step``.

All requests gather drafts; once the last has enough, the full KV of one after another is loaded and verified. Who has
verified waits for the others: its drafts of these rounds are thrown away, so that the device is as busy as the link was not.
"""

from dataclasses import dataclass, field


@dataclass
class LockStep:
    """Lets requests verify only after all have gathered their drafts.

    Attributes:
        waiting: rows that verified, and wait for the others.
    """

    waiting: set[int] = field(default_factory=set)
    _verifying: bool = False

    def allowed(self, wanted: dict[int, int]) -> dict[int, int]:
        """Which requests may verify, of those whose full KV has to be loaded.

        Args:
            wanted: by row, rounds after this one until enough drafts are gathered, at least 1.
        """
        if not self._verifying:
            self._verifying = bool(wanted) and max(wanted.values()) <= 1
        left = {row: rounds for row, rounds in wanted.items() if row not in self.waiting}
        if self._verifying and not left:
            self._verifying = False
            self.waiting.clear()
        return left if self._verifying else {}

    def verified(self, rows: set[int]) -> None:
        """These rows have verified."""
        if self._verifying:
            self.waiting |= rows
