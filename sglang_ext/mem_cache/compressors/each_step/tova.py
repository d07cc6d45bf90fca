"""TOVA: select tokens by the attention of the newest query, equally in all heads of a layer. Oren et al. 2024, arXiv 2401.06104."""

from dataclasses import dataclass
from typing import ClassVar

from sglang_ext.mem_cache.compressors.contracts.registry import register
from sglang_ext.mem_cache.compressors.each_step.step_selector import StepSelector
from sglang_ext.mem_cache.selection import baselines


@register("tova")
@dataclass(frozen=True)
class Tova(StepSelector):
    """Score tokens by the previous step's attention, averaged over a layer's query heads. All its KV heads read the same tokens.

    In the paper a token that is not selected is lost for all later steps. Here it stays in full KV, and can be selected again.
    """

    scoring: ClassVar[baselines.TovaScoring] = baselines.TovaScoring()
