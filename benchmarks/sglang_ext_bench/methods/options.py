"""All compression methods on one model and one prompt set: acceptance, bytes that a draft step reads, milliseconds per token.

Starts stock SGLang and verified servers with a fixed draft length. One server measures several methods where these can serve together.
Each wave has code and prose at once, all prompts in the prefix cache, and verification decides what is accepted. Acceptance is counted for
each kind of text, prompt length and temperature.

--json keeps the figures of each server as soon as they are there. A second run with the same options measures only the missing servers.
Without --model nothing is measured, and the table of --json is printed. `sglang-ext-bench pages` writes it to docs/methods.md.
"""

import argparse
from pathlib import Path

from sglang_ext_bench.methods.servers import KINDS
from sglang_ext_bench.options import DTYPES, add_start_timeout, names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    add = parser.add_argument
    add("--model", type=Path, help="Hugging Face folder; without it nothing is measured, and the table of --json is printed")
    add("--context-len", default="4096,16384,30000", help="prompt tokens, separated by commas (default: %(default)s)")
    add("--temperature", default="0,0.7", help="separated by commas; 0 is greedy (default: %(default)s)")
    add("--requests", type=int, default=8, help="of each kind of text, at once (default: %(default)s)")
    add("--output-len", type=int, default=128, help="output tokens of each request (default: %(default)s)")
    add("--draft-length", type=int, default=15, help="(default: %(default)s)")
    add("--select-every", type=int, default=1, help="draft steps between two selections of spade (default: %(default)s)")
    for kind in KINDS:
        add(f"--{kind}-file", type=Path, help=f"text from which prompts of {kind} are cut; default: text of this Python installation")
    add("--server", action="extend", type=names, help="servers to measure, by name, separated by commas; can be repeated; default: all")
    add("--at-once", type=int, default=1, help="servers that are started together; their memory adds up (default: %(default)s)")
    add("--server-arg", action="append", default=[], metavar="FLAGS", help="flags of all servers")
    add("--dtype", default="bfloat16", choices=DTYPES, help="(default: %(default)s)")
    add_start_timeout(parser)
    add("--logs", type=Path, help="folder for the servers' logs; default: none are kept")
    add("--json", type=Path, help="keep all figures here; a second run measures what is missing")


def run(args: argparse.Namespace) -> int:
    """Run the command. Its module loads PyTorch and SGLang."""
    from sglang_ext_bench.methods.command import run

    return run(args)
