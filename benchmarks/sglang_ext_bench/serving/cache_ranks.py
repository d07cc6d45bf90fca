"""Acceptance and speed of long answers where cache ranks choose tokens, beside stock and the same choice between steps: docs/benchmarks.md.

    sglang-ext-bench cache-ranks --model MODEL --prompts FOLDER [--context 2048] [--output 64] [--ranks 1] [--mode verified]

Each server answers the same prompts, the beginnings of the folder's files, one at a time, on a CPU in float32. For each: whether its
answers are stock's, drafts that were accepted, milliseconds a token after the first, and of cache ranks what was missed and waited for.
"""

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sglang_ext_bench.acceptance.on_prompts import prompts_in
from transformers import AutoTokenizer

from sglang_ext.tools.server_process import ServerProcess

RANK_METRICS = ("missed_selections_total", "selection_wait_seconds_total", "choosing_seconds", "copies_total", "cache_rank_starts_total")


def answer(server: ServerProcess, prompt: list[int], tokens: int) -> tuple[list[int], dict[str, Any], float]:
    """Token ids, ``meta_info``, and seconds a token after the first."""
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens}, "stream": True}
    first = last = None
    for last in server.stream("generate", body):
        first = first or (time.perf_counter(), len(last["output_ids"]))
    return last["output_ids"], last["meta_info"], (time.perf_counter() - first[0]) / max(1, tokens - first[1])


def rank_metrics(server: ServerProcess) -> list[str]:
    """What it tells of cache ranks."""
    lines = server.request("metrics").splitlines()
    told = [line for line in lines if line.startswith(tuple(f"sglang_ext:{name}" for name in RANK_METRICS))]
    return [line for line in told if not line.endswith(" 0.0")]


def measure(
    name: str, flags: Sequence[str], prompts: list[list[int]], args: argparse.Namespace, stock: list[list[int]] | None
) -> list[list[int]]:
    """One server's answers, told in a line for each prompt."""
    pool = 2 * (args.context + args.output)
    given = ("--device", "cpu", "--dtype", "float32", "--max-total-tokens", str(pool), "--enable-metrics", *flags)
    answers, totals = [], Counter()
    with ServerProcess(str(args.model), given, Path(args.logs, f"{name}.log")) as server:
        for i, prompt in enumerate(prompts):
            server.flush_cache()
            tokens, meta, seconds = answer(server, prompt, args.output)
            answers.append(tokens)
            same = "" if stock is None else f", stock's: {tokens == stock[i]}"
            totals.update(drafts=meta.get("kv_drafts", 0), accepted=meta.get("kv_accepted", 0))
            told = {key: meta.get(f"kv_{key}") for key in ("drafts", "accepted", "fallback", "accept_length")}
            print(f"{name}: prompt {i}: {1e3 * seconds:.1f} ms a token{same}, {told}", flush=True)
        if totals["drafts"]:
            print(f"{name}: {totals['accepted']} of {totals['drafts']} drafts, {totals['accepted'] / totals['drafts']:.3f}", flush=True)
        for line in rank_metrics(server):
            print("   ", line, flush=True)
    return answers


def main() -> None:
    """Stock, choices between steps, cache ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True)
    add("--prompts", type=Path, required=True)
    add("--context", type=int, default=2048, help="tokens of each prompt")
    add("--output", type=int, default=64)
    add("--most", type=int, default=2, help="prompts")
    add("--ranks", type=int, default=1)
    add("--mode", default="verified", choices=["verified", "lossy"])
    add("--select", default="0.125")
    add("--flag", action="append", default=[], help="further flag of the servers that choose, as --flag=--kv-select-by --flag=regressed")
    add("--only", nargs="*", default=["stock", "between-steps", "cache-ranks"])
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    encoded = (tokenizer.encode(file.read_text())[: args.context] for file in prompts_in(args.prompts))
    prompts = [prompt for prompt in encoded if len(prompt) == args.context][: args.most]
    spade = ("--kv-mode", args.mode, "--kv-compressor", "spade", "--kv-select", args.select, *args.flag)
    spade = (*spade, "--kv-draft-length", "16") if args.mode == "verified" else spade
    servers = {"stock": (), "between-steps": spade, "cache-ranks": (*spade, "--kv-cache-ranks", str(args.ranks))}
    with tempfile.TemporaryDirectory() as args.logs:
        stock = None
        for name in args.only:
            found = measure(name, servers[name], prompts, args, stock)
            stock = found if name == "stock" else stock


if __name__ == "__main__":
    main()
