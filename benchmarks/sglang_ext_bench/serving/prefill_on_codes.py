"""Measures the loss of `--kv-prefill quantized` on the text of prompts.

    sglang-ext-bench prefill-on-codes --model MODEL --tokens 700

The prompts are four texts of Python's documentation and source code. One server prefills exactly, the others on the codes of `hack`.

A line for each server has the mean negative log-probability of a token, the number of tokens, and the mean absolute difference of a token's
log-probability from the exact one.
"""

import argparse
import inspect
import statistics
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path

from sglang_ext_bench.options import check_counts
from sglang_ext_bench.prompts import load_tokenizer
from sglang_ext_bench.server import BenchServer

LOSSY = ("--kv-mode", "lossy", "--kv-compressor", "hack", "--dtype", "float32")
QUANTIZED_PREFILL = (*LOSSY, "--kv-prefill", "quantized")
SERVERS: dict[str, tuple[str, ...]] = {
    "exact": LOSSY,
    **{
        f"{bits} bits, partitions of {size}": (*QUANTIZED_PREFILL, "--kv-bits", str(bits), "--kv-partition", str(size))
        for bits in (4, 2)
        for size in (32, 64)
    },
}
"""Flags by name. The first server has the exact log-probabilities."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--tokens", type=int, default=700, help="tokens of each prompt (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure one server after another. Returns 0."""
    check_counts({"--tokens": args.tokens}, least=2)
    tokenizer = load_tokenizer(str(args.model))
    prompts = [tokenizer.encode(text)[: args.tokens] for text in own_texts()]
    exact: list[float] = []
    for name, flags in SERVERS.items():
        with tempfile.TemporaryDirectory() as folder, BenchServer(str(args.model), flags, Path(folder) / "server.log") as server:
            found = prompt_logprobs(server, prompts)
        exact = exact or found
        difference = statistics.mean(abs(one - other) for one, other in zip(found, exact, strict=True))
        loss = -statistics.mean(found)
        print(f"{name}: {loss:.3f} nats per token over {len(found)} tokens, mean difference from exact {difference:.3f}", flush=True)
    return 0


def own_texts() -> list[str]:
    """Two texts of Python's documentation and two of its source code."""
    from pydoc_data.topics import topics

    documentation = "\n".join(topics[name] for name in sorted(topics))
    return [documentation[:20_000], documentation[40_000:60_000], inspect.getsource(argparse), inspect.getsource(textwrap)]


def prompt_logprobs(server: BenchServer, prompts: Sequence[list[int]]) -> list[float]:
    """Log-probabilities of all tokens of the prompts but the first one of each."""
    found = []
    for prompt in prompts:
        body = {"input_ids": prompt, "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 1}}
        logprobs = server.request("generate", body)["meta_info"]["input_token_logprobs"]
        found += [entry[0] for entry in logprobs[1:]]
    return found
