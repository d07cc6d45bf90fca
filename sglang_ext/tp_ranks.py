"""The tensor-parallel ranks of a model: each holds some of the heads, all must decide alike.

Copies, rounds and accepted tokens follow from token ids and lengths, which all ranks have. What follows from
measured times does not: rank 0 decides that for all.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator


class RankError(RuntimeError):
    """Ranks decided differently: their collectives would mix up requests."""


@dataclass(frozen=True)
class TPRanks:
    """One process's place among the ranks.

    Attributes:
        group: SGLang's group of the ranks; None for a single one.
    """

    group: "GroupCoordinator | None" = None

    @classmethod
    def from_group(cls, group: "GroupCoordinator") -> "TPRanks":
        """The ranks of SGLang's tensor-parallel ``group``."""
        return cls(group if group.world_size > 1 else None)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which counts for all."""
        return self.rank == 0

    @property
    def rank(self) -> int:
        """This process's number among the ranks."""
        return 0 if self.group is None else self.group.rank_in_group

    def agree(self, value: Any) -> Any:
        """Rank 0's value, on all ranks; waits for them on the host."""
        return value if self.group is None else self.group.broadcast_object(value, src=0)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order; waits for them on the host."""
        return [value] if self.group is None else self.group.all_gather_object(value)

    def check_equal(self, what: str, value: Any) -> None:
        """Check that all ranks have this value.

        Raises:
            RankError: names what differs, and the values by rank.
        """
        values = self.gather(value)
        if any(other != value for other in values):
            raise RankError(f"{what} differs between tensor-parallel ranks: {values}")
