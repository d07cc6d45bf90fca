"""Quest: select pages of tokens by an upper bound of the products of their keys with the step's own query.

Tang et al. 2024, arXiv 2406.10774.
"""

from dataclasses import dataclass
from typing import ClassVar

from sglang_ext.mem_cache.compressors.contracts.registry import register
from sglang_ext.mem_cache.compressors.each_step.step_selector import StepSelector
from sglang_ext.mem_cache.selection.scoring import QuestScoring


@register("quest")
@dataclass(frozen=True)
class Quest(StepSelector):
    """Score pages of 16 tokens by the smallest and largest key of each channel, which bound the products with the query.

    All tokens of a page have the same score: the mean bound over the query heads of a KV head. In each layer the step's own query
    selects, and attention waits for it. In the paper the first two layers read all tokens; here they select, too. On a GPU the first and
    newest tokens are kept as whole pages, one and two.

    Attributes:
        in_attention: Whether attention itself selects, by extremes stored beside the pool, as on a GPU (compressed/layouts/pages.py). No
            queries are recorded then.
    """

    scoring: ClassVar[QuestScoring] = QuestScoring()
    synchronous: ClassVar[bool] = True
    in_attention: bool = False

    @property
    def always_kept(self) -> int:
        """:attr:`Compressor.always_kept`, in whole pages if attention selects."""
        page = self.scoring.page
        return sum(-(-each // page) * page for each in (self.sinks, self.recent)) if self.in_attention else super().always_kept

    @property
    def window(self) -> int:
        """Number of queries that are recorded."""
        return 0 if self.in_attention else 1
