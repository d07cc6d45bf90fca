"""Latency against request rate: stock SGLang and verified decoding under Poisson traffic.

Tokens of verified decoding come in bursts, so throughput alone does not say how a stream feels. For each setting a
server is started, and SGLang's own benchmark (``sglang.benchmark.serving``) sends it random prompts at each rate. The
table shows time to first token, inter-token latency and request latency, median and 99th percentile. SGLang divides
the time of a chunk by its tokens; *gap* is what a reader waits for the next chunk.
"""

import argparse
from pathlib import Path

from sglang_ext_bench.speed import server_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    server_options.add_arguments(parser)
    add = parser.add_argument
    add("--tokenizer", type=Path, help="folder of the tokenizer that makes prompts; default: --model")
    add("--rate", default="1,2,4", help="requests per second, separated by commas")
    add("--requests", type=int, default=64, help="at each rate")
    add("--input-len", type=int, default=4096, help="tokens of each prompt")
    add("--output-len", type=int, default=256, help="output tokens of each request")
    add("--seed", type=int, default=0, help="of prompts and arrival times")


def run(args: argparse.Namespace) -> int:
    """Run the command, whose module loads PyTorch and SGLang."""
    from sglang_ext_bench.speed.latency import run

    return run(args)
