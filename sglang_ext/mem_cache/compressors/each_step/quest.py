"""Quest: pages of tokens by the most that a key within their bounds could give the step's own query.

Tang et al. 2024, arXiv 2406.10774.
"""

from dataclasses import dataclass
from typing import ClassVar

from sglang_ext.mem_cache.compressors.contracts.registry import register
from sglang_ext.mem_cache.compressors.each_step.step_selector import StepSelector
from sglang_ext.mem_cache.selection import baselines


@register("quest")
@dataclass(frozen=True)
class Quest(StepSelector):
    """Least and largest keys of each page of 16 tokens, by channel, bound its products with the query: the mean bound over the query
    heads of a KV head is that of all tokens of the page.

    In each layer the step's own query chooses, so that attention waits for it. In the paper the first two layers read all; here they
    choose, too. On a GPU first and newest tokens are kept by whole pages, one and two.

    Attributes:
        in_attention: whether attention itself chooses, by extremes that lie beside the pool, as on a GPU
            (compressed/layouts/pages.py): no queries are kept then.
    """

    scoring: ClassVar[baselines.QuestScoring] = baselines.QuestScoring()
    synchronous: ClassVar[bool] = True
    in_attention: bool = False

    @property
    def always_kept(self) -> int:
        """As :attr:`Compressor.always_kept`; in attention whole pages."""
        page = self.scoring.page
        return sum(-(-each // page) * page for each in (self.sinks, self.recent)) if self.in_attention else super().always_kept

    @property
    def window(self) -> int:
        """Queries that are kept."""
        return 0 if self.in_attention else 1
