"""Measures the acceptance rate of compressors that drop tokens, with transformers on a CPU and without a server.

    sglang-ext-bench kvzap-acceptance --model MODEL --prompts FOLDER --predictor FOLDER snapkv kvzip kvzap

Each round drafts on the kept tokens of the prompt and on the exact KV of the newer tokens. Drafts are greedy; the full KV verifies them.

After each prompt, a line has the figures of all prompts so far. For each method and budget it has the accepted and the offered drafts
and their ratio. A budget is the share of the prompt's tokens that each KV head keeps.
"""

import argparse

import torch

from sglang_ext.mem_cache.compressors import top_positions
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

BUDGETS = (0.5, 0.25, 0.125)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_scoring_arguments(parser, SCORING_METHODS, ["snapkv", "kvzip", "kvzap"])


@torch.inference_mode()
def run(args: argparse.Namespace) -> int:
    """Measure all prompts. Returns 0."""
    predictor = read_predictor(args, args.methods, SCORING_METHODS)
    model, tokenizer = load_model(args)
    counts = {(method, budget): DraftCount() for method in args.methods for budget in BUDGETS}
    for prompt in read_prompts(args, tokenizer):
        context = PromptContext(model, prompt.input_ids)
        for method in args.methods:
            scores = token_scores(method, context, tokenizer, predictor)
            for budget in BUDGETS:
                kept = top_positions(scores, int(len(context.prompt) * budget))
                counts[method, budget] += context.run_rounds(lambda done, kept=kept: context.compressed_cache(kept, done))
        print_line(prompt.name, {f"{method} {budget:g}": count for (method, budget), count in counts.items()})
    return 0
