"""What sampling needs, kept while the same requests run."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_ext.managers.sampling import Sampling
from sglang_ext.managers.sampling_rows import Row

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


class SamplingCache:
    """Keeps a batch's samplings while the same requests run: making one takes a dozen operations on the device.

    Attributes:
        model_runner: the target's.
        most: samplings that are kept; those of some of the batch's requests are many.
    """

    def __init__(self, model_runner: "ModelRunner", most: int = 64):
        self.model_runner = model_runner
        self.most = most
        self._owners: list = []
        self._kept: dict[tuple[tuple[int, ...], int, bool], Sampling] = {}

    def get(
        self,
        batch: "ScheduleBatch",
        states: list,
        requests: tuple[int, ...],
        width: int,
        logprobs: bool,
        rows: Callable[[], list[Row]],
    ) -> Sampling:
        """The sampling of ``width`` rows of each of some requests.

        Args:
            batch: all requests.
            states: their draft states; with the requests they say whether a sampling can be used again.
            requests: whose rows they are, by their places in the batch.
            width: rows of each.
            logprobs: as for :meth:`Sampling.of`.
            rows: makes the rows, where they are needed.
        """
        if _changes(batch.sampling_info) or any(req.grammar is not None for req in batch.reqs):
            return Sampling.of(self.model_runner, batch, rows(), logprobs)
        owners = [*batch.reqs, *states]
        if len(owners) != len(self._owners) or any(a is not b for a, b in zip(owners, self._owners)):
            self._owners, self._kept = owners, {}
        key = requests, width, logprobs
        if key not in self._kept:
            if len(self._kept) >= self.most:
                self._kept.clear()
            self._kept[key] = Sampling.of(self.model_runner, batch, rows(), logprobs)
        return self._kept[key]


def _changes(info: "SamplingBatchInfo") -> bool:
    """Whether what is sampled from depends on the output so far."""
    penalties = (info.acc_additive_penalties, info.acc_scaling_penalties)
    return any(p is not None for p in penalties) or info.has_custom_logit_processor
