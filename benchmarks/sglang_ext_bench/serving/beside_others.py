"""What a request with a JSON schema and one with a penalty cost those that are asked beside them: docs/benchmarks.md.

    sglang-ext-bench beside-others --model MODEL [--context-len 32768] [--server-arg FLAGS]

Eight requests decode at once, six of them plain: beside two plain ones, then beside one with a schema and one with a penalty. What
counts are tokens a second of the six. MODEL has a tokenizer, which a schema needs; weights may be dummies, acceptance is forced.
"""

import argparse
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sglang_ext.config.benchmark_options import PARAMETER
from sglang_ext.tools.server_process import ServerProcess
from sglang_ext.tools.options import split_flags as words
from sglang_ext_bench.speed.decode_wave import read

PLAIN, BATCH = 6, 8
SCHEMA = '{"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 200}'
COMPANY: dict[str, tuple[dict[str, Any], ...]] = {
    "plain": ({}, {}),
    "schema": ({"json_schema": SCHEMA}, {}),
    "penalty": ({}, {"frequency_penalty": 0.1}),
    "schema and penalty": ({"json_schema": SCHEMA}, {"frequency_penalty": 0.1}),
}


def rate(server: ServerProcess, prompts: list[list[int]], options: tuple[dict[str, Any], ...], args: argparse.Namespace) -> float:
    """Tokens a second of the plain requests beside two with ``options``, from when all decode until the first of all has ended."""
    common = {"temperature": 0, "ignore_eos": True, "max_new_tokens": args.output_len, "custom_params": {PARAMETER: args.acceptance}}
    asked = [common] * PLAIN + [{**common, **more} for more in options]
    bodies = [{"input_ids": prompt, "sampling_params": sampling} for prompt, sampling in zip(prompts, asked)]
    began = time.perf_counter()
    with ThreadPoolExecutor(BATCH) as pool:
        streams = list(pool.map(lambda body: read(server, body, began), bodies))
    first, last = max(stream.times[0] for stream in streams), min(stream.times[-1] for stream in streams)
    told = [(len(stream.times), stream.tokens[-1], stream.meta.get("kv_drafts"), stream.meta.get("kv_accepted")) for stream in streams]
    print(f"    {last - first:.2f} s; chunks, tokens, drafts, accepted: {told[0]}, {told[-2]}, {told[-1]}", flush=True)
    return sum(stream.rate(first, last) for stream in streams[:PLAIN])


def main() -> None:
    """Each company in turn, several times, on one server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True)
    add("--context-len", type=int, default=32768)
    add("--output-len", type=int, default=256)
    add("--acceptance", type=float, default=0.99, help="probability of each draft")
    add("--vocabulary", type=int, default=49152)
    add("--repeats", type=int, default=3)
    add("--server-arg", action="append", default=[], metavar="FLAGS")
    args = parser.parse_args()
    noise = random.Random(0)
    prompts = [[noise.randrange(100, args.vocabulary) for _ in range(args.context_len)] for _ in range(BATCH)]
    flags = ("--kv-mode", "verified", "--kv-bench-acceptance", str(args.acceptance), *words(args.server_arg))
    with tempfile.TemporaryDirectory() as folder, ServerProcess(str(args.model), flags, Path(folder) / "server.log") as server:
        for prompt in prompts:
            server.request("generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}})
        found: dict[str, list[float]] = {name: [] for name in COMPANY}
        for repeat in range(args.repeats + 1):
            for name, options in COMPANY.items():
                value = rate(server, prompts, options, args)
                # The first wave makes the server ready.
                if repeat:
                    found[name].append(value)
    base = statistics.median(found["plain"])
    for name, values in found.items():
        value = statistics.median(values)
        print(f"beside {name}: {value:.1f} tokens/s of the six ({value / base:.2f}); {', '.join(f'{each:.1f}' for each in values)}")


if __name__ == "__main__":
    main()
