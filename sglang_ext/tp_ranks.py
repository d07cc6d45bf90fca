"""The tensor-parallel ranks of a model. Each holds some of the heads, and all must make the same decisions.

Compressed KV, rounds and accepted tokens depend on token ids and lengths, which all ranks have. Decisions that depend on measured times
could differ, so rank 0 makes them for all ranks.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator


class RankError(RuntimeError):
    """Ranks made different decisions, so their collectives would mix up requests."""


@dataclass(frozen=True)
class TPRanks:
    """The position of this process among the tensor-parallel ranks.

    Attributes:
        group: SGLang's group of the ranks; None for a single rank.
    """

    group: "GroupCoordinator | None" = None

    @classmethod
    def from_group(cls, group: "GroupCoordinator") -> "TPRanks":
        """The ranks of SGLang's tensor-parallel ``group``."""
        return cls(group if group.world_size > 1 else None)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which reports counts for all ranks."""
        return self.rank == 0

    @property
    def rank(self) -> int:
        """Index of this process among the ranks."""
        return 0 if self.group is None else self.group.rank_in_group

    def agree(self, value: Any) -> Any:
        """Rank 0's value, on all ranks. Waits for them on the host."""
        return value if self.group is None else self.group.broadcast_object(value, src=0)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order. Waits for them on the host."""
        return [value] if self.group is None else self.group.all_gather_object(value)

    def check_equal(self, what: str, value: Any) -> None:
        """Check that all ranks have this value.

        Raises:
            RankError: With the name of the value, and the values by rank.
        """
        values = self.gather(value)
        if any(other != value for other in values):
            raise RankError(f"{what} differs between tensor-parallel ranks: {values}")
