"""TovaScoring: tokens by the attention of the newest query, alike in all heads of a layer. Oren et al. 2024, arXiv 2401.06104."""

from dataclasses import dataclass
from typing import ClassVar

from sglang_ext.mem_cache.compressors.contracts.registry import register
from sglang_ext.mem_cache.compressors.each_step.step_selector import StepSelector
from sglang_ext.mem_cache.selection import baselines


@register("tova")
@dataclass(frozen=True)
class Tova(StepSelector):
    """The weights of the step before, mean over the query heads of a layer; all its KV heads read the same tokens.

    In the paper what is not chosen is gone for all later steps. Here it stays in full KV, and comes back when it is attended to again.
    """

    scoring: ClassVar[baselines.TovaScoring] = baselines.TovaScoring()
