"""Counts the full KV that a reload from host memory could leave out, because compressed KV on the device has it.

    sglang-ext-bench spared-by-copies --model MODEL --prompts FOLDER snapkv kvzip

In host memory and on the device, the keys of all heads of a token are adjacent, and one copy transfers a run of consecutive tokens. A
load can leave out a token of a layer if all heads of the layer keep it. Otherwise it would need copies of one head each.

For each method and budget, a line has the share of tokens that all heads of a layer keep. It also has the number of runs in a load of a
layer without these tokens. Both are means over prompts and layers.
"""

import argparse
from statistics import fmean

import torch

from sglang_ext_bench.acceptance.attention_functions import keep_best
from sglang_ext_bench.acceptance.inputs import (
    PREDICTED_METHOD,
    add_input_arguments,
    load_model,
    read_prompts,
)
from sglang_ext_bench.acceptance.prompt_context import (
    SCORING_METHODS,
    PromptContext,
    token_scores,
)
from sglang_ext_bench.options import check_known

BUDGETS = (0.5, 0.25, 0.125, 0.03125)
METHODS = tuple(method for method in SCORING_METHODS if method != PREDICTED_METHOD)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    default = ["snapkv", "kvzip"]
    parser.add_argument("methods", nargs="*", metavar="METHOD", default=default, help=f"of {', '.join(METHODS)}; default: {' '.join(default)}")
    add_input_arguments(parser)


@torch.inference_mode()
def run(args: argparse.Namespace) -> int:
    """Print one line for each method and budget. Returns 0."""
    check_known("METHOD", args.methods, METHODS)
    model, tokenizer = load_model(args)
    contexts = [PromptContext(model, prompt.input_ids) for prompt in read_prompts(args, tokenizer)]
    for method in args.methods:
        scores_by_prompt = [token_scores(method, context, tokenizer, None) for context in contexts]
        for budget in BUDGETS:
            shares, runs = zip(*(common_share_and_runs(scores, budget) for scores in scores_by_prompt))
            print(
                f"{method:8} keeps {budget:.1%}: all heads of a layer keep {fmean(shares):.1%}; {fmean(runs):.0f} runs per layer",
                flush=True,
            )
    return 0


def common_share_and_runs(scores: torch.Tensor, budget: float) -> tuple[float, float]:
    """The share of tokens that all heads of a layer keep, and the runs of other tokens per layer.

    Args:
        scores: [layers, kv_heads, tokens].
        budget: Share of the tokens that each head keeps.
    """
    common = keep_best(scores, budget, (2,)).all(1)
    loaded = ~common
    starts = (loaded[:, 1:] & ~loaded[:, :-1]).sum(1)
    return float(common.float().mean()), float(starts.float().mean()) + 1
