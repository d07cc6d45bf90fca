"""The tensor-parallel ranks of a model. Each holds some of the heads. All must make the same decisions.

Compressed KV, rounds and accepted tokens depend on token ids and lengths, which are equal on all ranks. Decisions that depend on measured
times are made by rank 0 for all.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator


class RankError(RuntimeError):
    """Ranks decided differently: their collectives would mix up requests."""


@dataclass(frozen=True)
class TPRanks:
    """This process and its tensor-parallel group.

    Attributes:
        group: SGLang's group of the ranks. None for a single rank.
    """

    group: "GroupCoordinator | None" = None

    @classmethod
    def from_group(cls, group: "GroupCoordinator") -> "TPRanks":
        """The ranks of SGLang's tensor-parallel ``group``."""
        return cls(group if group.world_size > 1 else None)

    @property
    def first(self) -> bool:
        """Whether this is rank 0, whose decisions apply to all."""
        return self.rank == 0

    @property
    def rank(self) -> int:
        """This process's rank in the group."""
        return 0 if self.group is None else self.group.rank_in_group

    def agree(self, value: Any) -> Any:
        """Return rank 0's value on all ranks. Waits for the other ranks on the host."""
        return value if self.group is None else self.group.broadcast_object(value, src=0)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order. Waits for the other ranks on the host."""
        return [value] if self.group is None else self.group.all_gather_object(value)

    def check_equal(self, what: str, value: Any) -> None:
        """Check that all ranks have this value.

        Raises:
            RankError: Names what differs, and the values by rank.
        """
        values = self.gather(value)
        if any(other != value for other in values):
            raise RankError(f"{what} differs between tensor-parallel ranks: {values}")
