"""Which transfers are done, on all tensor-parallel ranks.

Each rank moves its heads' part of the same pages, and is done with it at a time of its own. What the tree does then must be
the same everywhere: a transfer counts as done once the ranks have told each other so, and pages that came back changed on
one rank are lost on all.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from sglang_ext.mem_cache.host_tier.transfers import Outcome, Transfer, TransferError
from sglang_ext.ranks import Ranks


@dataclass
class Arrivals:
    """The transfers of one rank. All ranks ask for the same ones, in the same order.

    Attributes:
        ranks: who must find the same.
    """

    ranks: Ranks = Ranks()
    _known: "WeakKeyDictionary[Transfer, Outcome]" = field(default_factory=WeakKeyDictionary)

    def update(self, transfers: Iterable[Transfer]) -> None:
        """Find out which of ``transfers`` are done by now; waits for the other ranks, but for no transfer."""
        unknown = [transfer for transfer in dict.fromkeys(transfers) if transfer not in self._known]
        if not unknown:
            return
        mine = [transfer.outcome if transfer.done else None for transfer in unknown]
        for transfer, outcomes in zip(unknown, zip(*self.ranks.gather(mine))):
            if None not in outcomes:
                failed = {page for outcome in outcomes for page in outcome.failed}
                self._known[transfer] = Outcome(max(outcome.seconds for outcome in outcomes), sorted(failed))

    def done(self, transfer: Transfer) -> bool:
        """Whether :meth:`update` or :meth:`wait` found it done on all ranks; one rank alone looks now."""
        if self.ranks.group is None:
            self.update([transfer])
        return transfer in self._known

    def wait(self, transfer: Transfer) -> None:
        """Wait until it is done on all ranks."""
        transfer.synchronize()
        self.update([transfer])

    def outcome(self, transfer: Transfer) -> Outcome:
        """What it brought: the longest time of all ranks, and the pages that came back changed on any.

        Raises:
            TransferError: it is not known to be done.
        """
        if not self.done(transfer):
            raise TransferError(f"a transfer of {transfer.size} bytes is still under way on some rank; ask once it is done")
        return self._known[transfer]
