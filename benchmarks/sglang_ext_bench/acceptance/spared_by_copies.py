"""What of full KV a reload could leave out, as all heads of a layer keep it in the copy: docs/benchmarks.md.

    sglang-ext-bench spared-by-copies --model MODEL --prompts FOLDER [METHODS...]

A token's keys of all heads lie side by side, on the host as on the device, so that one copy moves the tokens that follow one another.
What a layer's heads all keep could stay out of it; what some keep could only in pieces of a head's size.
"""

import torch
from sglang_ext_bench.acceptance.kvzap_acceptance import Context, scores_of
from sglang_ext_bench.acceptance.on_prompts import load, parser_of, prompts_in

BUDGETS = (0.5, 0.25, 0.125, 0.03125)


@torch.inference_mode()
def main() -> None:
    """Print the share of rows that all heads keep, and the runs of consecutive tokens that a load is cut into without them."""
    parser = parser_of(__doc__, "methods", default=["snapkv", "kvzip"])
    args = parser.parse_args()
    model, tokenizer = load(args.model)
    contexts = [Context(model, tokenizer.encode(file.read_text())) for file in prompts_in(args.prompts)]
    for method in args.methods:
        all_scores = [scores_of(method, context, tokenizer, None) for context in contexts]
        for budget in BUDGETS:
            shares, cuts = [], []
            for scores in all_scores:
                best = scores.topk(int(scores.shape[-1] * budget), dim=-1).indices
                of_all = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True).all(1)
                shares.append(float(of_all.float().mean()))
                left = ~of_all
                cuts.append(float((left[:, 1:] & ~left[:, :-1]).sum(1).float().mean()) + 1)
            mean, runs = sum(shares) / len(shares), sum(cuts) / len(cuts)
            print(f"{method:8} keeps {budget:.1%}: all heads of a layer keep {mean:.1%}; {runs:.0f} runs a layer", flush=True)


if __name__ == "__main__":
    main()
