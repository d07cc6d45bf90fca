"""The options that the speed benchmarks share: which servers are compared, and where results go."""

import argparse
from pathlib import Path

from sglang_ext.core import DEFAULT_BUDGET
from sglang_ext.tools.options import seconds
from sglang_ext_bench.options import DTYPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line that say what is compared, and where results go."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder; with --load-format dummy its config.json does")
    add("--compressor", default="snapkv", help="names, separated by commas")
    add("--budget", default=str(DEFAULT_BUDGET), help="shares, separated by commas (default: %(default)s, as the server's)")
    add("--draft-length", default="15", help="numbers, or auto, separated by commas")
    add("--full-tier", default="device", help="where full KV of running requests lies: device, auto, host, separated by commas")
    add("--offload-draft-length", default="64", help="tokens drafted before full KV is loaded, separated by commas")
    add("--host-gb", type=float, default=0.0, help="host memory for full KV, with --full-tier auto or host")
    beside = "also run the first compressor with this pair, beside all combinations"
    add("--also", action="append", default=[], metavar="BUDGET:DRAFTS", help=beside)
    add("--force-acceptance", metavar="P", help="accept each draft with this probability; several separated by commas")
    stock = "also run stock SGLang with these flags, for example '--speculative-algorithm NGRAM'"
    add("--baseline", action="append", default=[], metavar="FLAGS", help=stock)
    add("--server-arg", action="append", default=[], metavar="FLAGS", help="flags of all servers")
    add("--dtype", default="bfloat16", choices=DTYPES)
    add("--start-timeout", type=seconds, default=600, help="seconds until servers must be ready (default: %(default)s)")
    add("--logs", type=Path, help="folder for the servers' logs")
    add("--json", type=Path, help="write all measurements here")
    add("--plot", type=Path, help="write a PNG here")
