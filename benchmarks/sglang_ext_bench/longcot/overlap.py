"""Overlap of early selections with the selection of a step's own query (AsyncSpade, Figures 4 and 5), without a server.

The steps are the last tokens of each prompt. Each selects from the tokens before it, by score alone: sinks and newest tokens get no special
treatment.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.selection.predictors import CurrentQuery, RegressedQuery
from sglang_ext.mem_cache.selection.scoring import group_attention, top_tokens
from sglang_ext.mem_cache.selection.scoring_keys import SCORE_BITS, KeySpec, QuantizedKeys
from sglang_ext.tools import CommandError
from sglang_ext_bench.baselines.scoring_inputs import Scoring, ScoringInputs
from sglang_ext_bench.baselines.scorings import PredictedScoring, QuestScoring, RecentScoring, overlap
from sglang_ext_bench.baselines.tova import TovaScoring
from sglang_ext_bench.baselines.true_query import TrueQueryScoring

STEPS = 64
"""Steps of each prompt."""
WINDOW = 64
"""Queries before each step."""
DISTANCES = (1, 2, 4, 8, 16, 32, 64)
"""Ages of queries in steps."""
ATTENTION = "selection_overlap"
"""Name of the attention function in transformers."""
PREDICTED = (PredictedScoring(CurrentQuery()), PredictedScoring(RegressedQuery()))


@dataclass(frozen=True)
class Overlap:
    """The overlap of one way to select. The fields are keys of the JSON file.

    Attributes:
        name: Name of the way. ``distance D`` selects by the query D steps before.
        share: Share of the context that is selected.
        mean: Mean share of the tokens of the step's own query that this way also selects.
    """

    name: str
    share: float
    mean: float


@dataclass(frozen=True)
class Unshifted(Scoring):
    """Scores with the regression of the step's own query on the queries before it (Figure 5, without shifting).

    It is an upper bound: a prediction does not have the step's own query.
    """

    name: ClassVar[str] = "regressed, without the shift"
    synchronous: ClassVar[bool] = True

    def scores(self, seen: ScoringInputs) -> torch.Tensor:
        """Scores as in :class:`~sglang_ext_bench.baselines.scorings.PredictedScoring`, but without shifting the weights by one step."""
        method = RegressedQuery()
        positions = seen.positions[:, -method.window :]
        plain = seen.rotary.rotate(seen.queries[..., -method.window :, :].float(), -positions[:, None, None])
        regressed = method.weights(plain)[..., None, :] @ plain[..., :-1, :]
        query = seen.rotary.rotate(regressed, positions[:, None, None, -1:]).squeeze(-2)
        return seen.score(query, lambda own, keys: group_attention(own, keys, seen.scaling))


class QueryRecorder:
    """An attention function of transformers that records the newest queries of each layer, with rotary embedding.

    Attributes:
        queries: Queries [heads, STEPS + WINDOW, head_dim] by layer.
    """

    def __init__(self) -> None:
        self.queries: dict[int, torch.Tensor] = {}

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of queries [1, heads, tokens, head_dim]."""
        self.queries[module.layer_idx] = query[0, :, -STEPS - WINDOW :].clone()
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def layer_inputs(model: PreTrainedModel, recorder: QueryRecorder, prompt: list[int]) -> Iterator[ScoringInputs]:
    """Run the model on a prompt. Yields the scoring inputs of each layer, with one request per step.

    A request has the queries before its step, the step's own query, and the keys of the tokens before the step.
    """
    cache = DynamicCache()
    model(torch.tensor([prompt]), past_key_values=cache, logits_to_keep=1)
    rotary = Rotary(model.model.rotary_emb.inv_freq.float())
    lengths = torch.arange(len(prompt) - STEPS, len(prompt))
    positions = lengths[:, None] + torch.arange(-WINDOW, 1)
    for index, layer in enumerate(cache.layers):
        queries = recorder.queries[index].unfold(1, WINDOW + 1, 1).permute(1, 0, 3, 2)[:, None]
        keys = layer.keys[:, None].expand(STEPS, -1, -1, -1, -1)
        yield ScoringInputs(queries, positions, keys, layer.keys.shape[-1] ** -0.5, rotary, lengths)


def without_own_query(seen: ScoringInputs) -> ScoringInputs:
    """Remove the steps' own queries."""
    return replace(seen, queries=seen.queries[..., :-1, :], positions=seen.positions[:, :-1])


def select(scoring: Scoring, seen: ScoringInputs, count: int) -> torch.Tensor:
    """Positions that each step selects: int64 [steps, layers, kv_heads, count]."""
    scores = scoring.scores(seen if scoring.synchronous else without_own_query(seen))
    if not isinstance(scoring, TovaScoring):
        return seen.select(scores, count)
    # With TOVA, tokens that are not selected are lost for all later steps.
    alive, steps = torch.ones_like(scores[:1], dtype=torch.bool), []
    for step, length in enumerate(seen.lengths.tolist()):
        steps.append(top_tokens(scores[step, None].masked_fill(~alive, -1.0)[..., :length], count, 0, 0))
        # Tokens that are not selected are dropped. Newer tokens are still there.
        alive = (torch.arange(scores.shape[-1]) >= length).expand_as(alive).scatter(-1, steps[-1], True)
    return torch.cat(steps)


def quantize_keys(keys: torch.Tensor, bits: int) -> torch.Tensor:
    """Keys as a cache rank scores them that stores ``bits`` bits. Keys are [steps, 1, kv_heads, tokens, dim], equal in all steps."""
    steps, _, heads, tokens, dim = keys.shape
    stored, places = QuantizedKeys(KeySpec(1, heads, dim, keys.dtype, bits), tokens), torch.arange(tokens)
    stored.write(places, keys[0].transpose(1, 2))
    return stored.read(0, places).transpose(0, 1).expand(steps, 1, -1, -1, -1)


def measure_layer(seen: ScoringInputs, share: float) -> Iterator[tuple[str, float]]:
    """Yield the name and mean overlap of each way to select, for one layer.

    Queries of each distance count twice: rotated to the step's position, and unrotated.
    """
    tokens = seen.keys.shape[-2]
    count = int(share * tokens)
    true = seen.select(TrueQueryScoring().scores(seen), count)
    ways = {each.name: (each, seen) for each in (*PREDICTED, Unshifted(), QuestScoring(), TovaScoring(), RecentScoring())}
    ways |= {f"{each.name}, unrotated": (each, replace(seen, rotary=None)) for each in PREDICTED}
    for bits in SCORE_BITS[1:]:
        ways[f"current, keys of {bits} bits"] = PREDICTED[0], replace(seen, keys=quantize_keys(seen.keys, bits))
    for name, (scoring, inputs) in ways.items():
        yield name, float(overlap(true, select(scoring, inputs, count), tokens).mean())
    for distance in DISTANCES:
        old = seen.queries[..., -1 - distance, :]
        for name, query in (("distance", seen.rotary.rotate(old, torch.full((1,), distance))), ("distance, unrotated", old)):
            selected = seen.select(seen.score(query, lambda own, keys: group_attention(own, keys, seen.scaling)), count)
            yield f"{name} {distance}", float(overlap(true, selected, tokens).mean())


@torch.inference_mode()
def measure(folder: Path, prompts: Sequence[Sequence[int]], share: float) -> list[Overlap]:
    """Run a model in float32, and return the mean overlaps over steps, layers, heads and prompts.

    Args:
        folder: Folder of the model, with weights.
        prompts: Token ids of each prompt. A prompt has at least twice the steps and the window before them.
        share: Share of the context that is selected.

    Raises:
        CommandError: A prompt is too short.
    """
    if short := [len(prompt) for prompt in prompts if len(prompt) < 2 * (STEPS + WINDOW)]:
        raise CommandError(f"--overlap-prompts: a prompt has {short[0]} tokens: pass prompts of at least {2 * (STEPS + WINDOW)}")
    recorder, totals = QueryRecorder(), defaultdict(list)
    AttentionInterface.register(ATTENTION, recorder)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=ATTENTION).eval()
    for prompt in prompts:
        for seen in layer_inputs(model, recorder, list(prompt)):
            for name, mean in measure_layer(seen, share):
                totals[name].append(mean)
    return [Overlap(name, share, fmean(values)) for name, values in totals.items()]
