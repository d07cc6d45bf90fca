"""Select tokens by the attention of the step's own query: the upper limit for predictions of it (AsyncSpade, section 4.1)."""

from dataclasses import dataclass
from typing import ClassVar

from sglang_ext.mem_cache.compressors.contracts.registry import register
from sglang_ext.mem_cache.compressors.each_step.step_selector import StepSelector
from sglang_ext.mem_cache.selection import baselines


@register("true-query")
@dataclass(frozen=True)
class TrueQuerySelector(StepSelector):
    """Score by the mean attention over the query heads of a KV head, computed in each layer before the step's attention, which waits.

    It reads all keys in each step, as full attention does. It only saves reads of values.
    """

    scoring: ClassVar[baselines.TrueQueryScoring] = baselines.TrueQueryScoring()
    synchronous: ClassVar[bool] = True
