"""Measures the acceptance rate by how KV heads share a budget, with transformers on a CPU and without a server.

    sglang-ext-bench head-budgets-acceptance --model MODEL --prompts FOLDER --predictor FOLDER kvzap kvzip+

Tokens that a head drops are masked, so that heads may keep different numbers of tokens. Rounds are those of kvzap-acceptance.

After each prompt, a line has the figures of all prompts so far. For each method, scope and budget it has the accepted and the offered
drafts and their ratio. The scope says which tokens compete for a budget: those of each head, of each layer, or of the whole model.
"""

import argparse

import torch

from sglang_ext_bench.acceptance.attention_functions import (
    KeptTokensAttention,
    keep_best,
    register_attention,
    use_attention,
)
from sglang_ext_bench.acceptance.inputs import (
    add_scoring_arguments,
    load_model,
    read_predictor,
    read_prompts,
)
from sglang_ext_bench.acceptance.prompt_context import (
    SCORING_METHODS,
    DraftCount,
    PromptContext,
    print_line,
    token_scores,
)

BUDGETS = (0.25, 0.125)
ATTENTION = "head_budgets"
SCOPES = {"head": (2,), "layer": (1, 2), "model": (0, 1, 2)}
"""Axes of the scores, [layers, kv_heads, tokens], along which tokens share a budget."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_scoring_arguments(parser, SCORING_METHODS, ["kvzip", "snapkv", "expected-attention"])


@torch.inference_mode()
def run(args: argparse.Namespace) -> int:
    """Measure all prompts. Returns 0."""
    predictor = read_predictor(args, args.methods, SCORING_METHODS)
    attention = KeptTokensAttention()
    register_attention(ATTENTION, attention)
    model, tokenizer = load_model(args)
    counts: dict[str, DraftCount] = {}
    for prompt in read_prompts(args, tokenizer):
        context = PromptContext(model, prompt.input_ids)
        for method in args.methods:
            scores = token_scores(method, context, tokenizer, predictor)
            for scope, shared_axes in SCOPES.items():
                for budget in BUDGETS:
                    label = f"{method}, {scope}, {budget:g}"
                    found = accept_with_kept(context, attention, keep_best(scores, budget, shared_axes))
                    counts[label] = counts.get(label, DraftCount()) + found
        print_line(prompt.name, counts)
    return 0


def accept_with_kept(context: PromptContext, attention: KeptTokensAttention, kept: torch.Tensor) -> DraftCount:
    """Run rounds in which draft steps read only the ``kept`` tokens of the prompt, bool [layers, kv_heads, tokens]."""
    attention.kept = kept
    with use_attention(context.model, ATTENTION):
        found = context.run_rounds(context.full_cache)
    attention.kept = None
    return found
