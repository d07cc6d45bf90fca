"""How many greedy drafts full KV accepts, by how heads share a budget, without a server: docs/benchmarks.md.

    sglang-ext-bench head-budgets-acceptance --model MODEL --prompts FOLDER [--predictor FOLDER] [METHODS...]

Rounds are those of kvzap_acceptance.py. What a head does not keep is masked, so that heads may keep different numbers.
"""

from dataclasses import replace
from pathlib import Path

import torch
from sglang_ext_bench.acceptance.kvzap_acceptance import Context, scores_of
from sglang_ext_bench.acceptance.on_prompts import load, parser_of, prompts_in
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedTokenizerBase,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors.expected_attention import ExpectedAttention
from sglang_ext.mem_cache.scores.model_key import model_key
from sglang_ext.mem_cache.scores.predictor import Predictor

BUDGETS, NAME = (0.25, 0.125), "head_budgets"
# Axes of the scores, [layers, kv_heads, tokens], over which tokens compete.
SHARED = {"head": (2,), "layer": (1, 2), "model": (0, 1, 2)}


class Masked:
    """An attention function of transformers in which each KV head sees only what it keeps of the prompt.

    Attributes:
        kept: bool [layers, kv_heads, tokens of the prompt]; None to see all.
    """

    kept: torch.Tensor | None = None

    def __call__(self, module, query, key, value, attention_mask, **kwargs) -> tuple[torch.Tensor, None]:
        """Attention of [1, heads, tokens, head_dim]."""
        if self.kept is not None:
            kept, count = self.kept[module.layer_idx], query.shape[2]
            tail = torch.ones(count, key.shape[2] - kept.shape[1], dtype=torch.bool).tril(key.shape[2] - kept.shape[1] - count)
            of_query = kept.repeat_interleave(query.shape[1] // len(kept), 0)[:, None].expand(-1, count, -1)
            attention_mask = torch.cat([of_query, tail.expand(len(of_query), -1, -1)], dim=-1)[None]
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def kept_of(scores: torch.Tensor, budget: float, shared: tuple[int, ...]) -> torch.Tensor:
    """The best of what competes over the axes ``shared``: bool, as ``scores``."""
    flat = scores.flatten(scores.dim() - len(shared))
    best = flat.topk(int(flat.shape[-1] * budget), dim=-1).indices
    return torch.zeros_like(flat, dtype=torch.bool).scatter_(-1, best, True).view_as(scores)


def accepted(context: Context, masked: Masked, kept: torch.Tensor) -> tuple[int, int]:
    """Drafts that are accepted, and offered, over the whole answer."""
    context.model.set_attn_implementation(NAME)
    masked.kept = kept
    found = context.rounds(context.whole)
    masked.kept = None
    context.model.set_attn_implementation("sdpa")
    return found


def method_scores(
    method: str, context: Context, tokenizer: PreTrainedTokenizerBase, predictor: Predictor | None
) -> torch.Tensor:
    """A method's scores of the prompt: float32 [layers, kv_heads, tokens]."""
    if method != "expected-attention":
        return scores_of(method, context, tokenizer, predictor)
    expected, rotary = ExpectedAttention(), Rotary(context.model.model.rotary_emb.inv_freq.float())
    return torch.stack([expected.scores(replace(layer, rotary=rotary)) for layer in context.layers(expected.window)])


@torch.inference_mode()
def main() -> None:
    """Print accepted and offered drafts by method, what tokens compete in, and budget, after each prompt."""
    parser = parser_of(__doc__, "methods", default=["kvzip", "snapkv", "expected-attention"])
    parser.add_argument("--predictor", type=Path, help="for kvzap")
    args = parser.parse_args()
    masked = Masked()
    AttentionInterface.register(NAME, masked)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model, tokenizer = load(args.model)
    predictor = Predictor.read(args.predictor, model_key(args.model)) if args.predictor else None
    counts: dict[tuple[str, str, float], list[int]] = {}
    for file in prompts_in(args.prompts):
        context = Context(model, tokenizer.encode(file.read_text()))
        for method in args.methods:
            scores = method_scores(method, context, tokenizer, predictor)
            for name, shared in SHARED.items():
                for budget in BUDGETS:
                    found = accepted(context, masked, kept_of(scores, budget, shared))
                    total = counts.setdefault((method, name, budget), [0, 0])
                    total[:] = (before + more for before, more in zip(total, found))
        print(file.name, {name: f"{a}/{o} {a / o:.3f}" for name, (a, o) in counts.items()}, flush=True)


if __name__ == "__main__":
    main()
