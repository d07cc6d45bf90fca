"""How much of what a step's own query selects a choice made before it has, by how it is made (AsyncSpade, Figures 4 and 5); no server.

Steps are the last tokens of each prompt, over the tokens before them; sets are the best by scores alone, without sinks and newest tokens.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import ClassVar

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.selection.predictors import CurrentQuery, RegressedQuery
from sglang_ext.mem_cache.selection.scoring import PredictedScoring, QuestScoring, Scoring, ScoringInputs, group_attention
from sglang_ext.mem_cache.selection.scoring_keys import (
    SCORE_BITS,
    KeySpec,
    scoring_keys,
)
from sglang_ext.mem_cache.selection.top_tokens import overlap, top_tokens
from sglang_ext.tools import CommandError
from sglang_ext_bench.baselines.scorings import RecentScoring
from sglang_ext_bench.baselines.tova import TovaScoring
from sglang_ext_bench.baselines.true_query import TrueQueryScoring

STEPS, WINDOW, DISTANCES, NAME = 64, 64, (1, 2, 4, 8, 16, 32, 64), "selection_overlap"
PREDICTED = (PredictedScoring(CurrentQuery()), PredictedScoring(RegressedQuery()))


@dataclass(frozen=True)
class Overlap:
    """Of one way to choose.

    Attributes:
        name: of the way; ``distance D`` is the query D steps before.
        share: of the context's tokens, that were selected.
        mean: share of the step's own set that was in it.
    """

    name: str
    share: float
    mean: float


@dataclass(frozen=True)
class Unshifted(Scoring):
    """By the regression of the step's own query on those before it: what a prediction cannot have (Figure 5, without shifting)."""

    name: ClassVar[str] = "regressed, without the shift"
    synchronous: ClassVar[bool] = True

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """As :class:`~sglang_ext.mem_cache.selection.scoring.PredictedScoring`'s, by the same weights over the queries that they are of."""
        method = RegressedQuery()
        positions = seen.positions[:, -method.window :]
        plain = seen.rotary.rotated(seen.queries[..., -method.window :, :].float(), -positions[:, None, None])
        joined = method.weights(plain)[..., None, :] @ plain[..., :-1, :]
        query = seen.rotary.rotated(joined, positions[:, None, None, -1:]).squeeze(-2)
        return group_attention(query, seen.keys, seen.scaling, seen.beyond)


class Noting:
    """An attention function of transformers that notes the newest queries of each layer, rotary embedding applied."""

    def __init__(self) -> None:
        self.queries: dict[int, torch.Tensor] = {}

    def __call__(self, module, query, key, value, attention_mask, **kwargs) -> tuple[torch.Tensor, None]:
        """Attention of [1, heads, tokens, head_dim]."""
        self.queries[module.layer_idx] = query[0, :, -STEPS - WINDOW :].clone()
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def contexts(model: PreTrainedModel, noting: Noting, prompt: list[int]) -> Iterator[ScoringInputs]:
    """Of each layer the steps as requests: the queries before each and its own, over the tokens before it."""
    cache = DynamicCache()
    model(torch.tensor([prompt]), past_key_values=cache, logits_to_keep=1)
    rotary = Rotary(model.model.rotary_emb.inv_freq.float())
    lengths = torch.arange(len(prompt) - STEPS, len(prompt))
    positions = lengths[:, None] + torch.arange(-WINDOW, 1)
    for index, layer in enumerate(cache.layers):
        queries = noting.queries[index].unfold(1, WINDOW + 1, 1).permute(1, 0, 3, 2)[:, None]
        keys = layer.keys[:, None].expand(STEPS, -1, -1, -1, -1)
        yield ScoringInputs(queries, positions, keys, layer.keys.shape[-1] ** -0.5, rotary, lengths)


def before(seen: ScoringInputs) -> ScoringInputs:
    """What is known before the steps' own queries."""
    return replace(seen, queries=seen.queries[..., :-1, :], positions=seen.positions[:, :-1])


def chosen(scoring: Scoring, seen: ScoringInputs, count: int) -> torch.Tensor:
    """What each step is given: int64 [steps, layers, kv_heads, count]."""
    scores = scoring.scores(seen if scoring.synchronous else before(seen))
    if not isinstance(scoring, TovaScoring):
        return top_tokens(scores, count, 0, 0, seen.lengths)
    # With TOVA, tokens that are not selected are lost for all later steps.
    alive, steps = torch.ones_like(scores[:1], dtype=torch.bool), []
    for step in range(len(scores)):
        steps.append(top_tokens(scores[step, None].masked_fill(~alive, -1.0), count, 0, 0, seen.lengths[step, None]))
        # What came since is not gone.
        alive = (torch.arange(scores.shape[-1]) >= seen.lengths[step]).expand_as(alive).scatter(-1, steps[-1], True)
    return torch.cat(steps)


def in_bits(keys: torch.Tensor, bits: int) -> torch.Tensor:
    """What a cache rank scores by that holds keys, [steps, layer, kv_heads, tokens, dim], alike in all steps, in so many bits."""
    steps, _, heads, tokens, dim = keys.shape
    held = scoring_keys(KeySpec(1, heads, dim, keys.dtype, bits), tokens)
    held.write(0, keys[0].transpose(1, 2))
    return held.read(0, torch.arange(tokens)).transpose(0, 1).expand(steps, 1, -1, -1, -1)


def overlaps(seen: ScoringInputs, share: float) -> Iterator[tuple[str, float]]:
    """Of one layer, by name: overlap of each way to choose, and of queries at each distance, turned on to the step and not."""
    tokens = seen.keys.shape[-2]
    count = int(share * tokens)
    true = top_tokens(TrueQueryScoring().scores(seen), count, 0, 0, seen.lengths)
    told = {each.name: (each, seen) for each in (*PREDICTED, Unshifted(), QuestScoring(), TovaScoring(), RecentScoring())}
    told |= {f"{each.name}, turned as it was": (each, replace(seen, rotary=None)) for each in PREDICTED}
    for bits in SCORE_BITS[1:]:
        told[f"current, keys of {bits} bits"] = PREDICTED[0], replace(seen, keys=in_bits(seen.keys, bits))
    for name, (scoring, what) in told.items():
        yield name, float(overlap(true, chosen(scoring, what, count), tokens).mean())
    for distance in DISTANCES:
        old = seen.queries[..., -1 - distance, :]
        for name, query in (("distance", seen.rotary.rotated(old, torch.full((1,), distance))), ("distance, turned as it was", old)):
            found = top_tokens(group_attention(query, seen.keys, seen.scaling, seen.beyond), count, 0, 0, seen.lengths)
            yield f"{name} {distance}", float(overlap(true, found, tokens).mean())


@torch.inference_mode()
def measure(folder: Path, prompts: Sequence[Sequence[int]], share: float) -> list[Overlap]:
    """Means over steps, layers, heads and prompts, of a model in float32.

    Args:
        folder: the model's, with weights.
        prompts: token ids, each longer than the steps and the window before them.
        share: of the context's tokens, that are selected.

    Raises:
        CommandError: a prompt is too short.
    """
    if short := [len(prompt) for prompt in prompts if len(prompt) < 2 * (STEPS + WINDOW)]:
        raise CommandError(f"a prompt for overlaps has {short[0]} tokens: pass some of at least {2 * (STEPS + WINDOW)}")
    noting, totals = Noting(), defaultdict(list)
    AttentionInterface.register(NAME, noting)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=NAME).eval()
    for prompt in prompts:
        for seen in contexts(model, noting, list(prompt)):
            for name, found in overlaps(seen, share):
                totals[name].append(found)
    return [Overlap(name, share, fmean(values)) for name, values in totals.items()]
