"""How long jobs take whose prompts are computed on some servers and decoded on others, and where their time goes.

For each method, link rate and number of servers, prefill and decode servers are started on the loopback interface. Jobs of one output
length arrive as a Poisson process; each goes to the prefill server whose queue has the fewest tokens and to the decode server with the
fewest jobs (HACK, section 7.1). Methods are those of bench transfer; they differ in how KV travels.

--rate auto first sends all jobs at once to servers of the first method, which shows how many end in a second, and takes --share of that
for all methods: the highest rate that the first can hold. Name the slowest first.

A job's completion time is divided into waiting (for slots of the decode server), prefill (its queue among it), encoding (what is left of
it once the prompt is computed), transfer (until decoding can begin) and decode, in which a method that reads codes also corrects or
dequantizes. *Tokens used* counts slots of a decode server's pool that were taken at a time, those of copies among them.

JSON has all jobs; it is written after each method, with what is left to measure.
"""

import argparse
from pathlib import Path

from sglang_ext.tools.options import seconds
from sglang_ext_bench.options import DTYPES, names

DEFAULT = "raw,int8,int4"
AUTO = "auto"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder")
    add("--method", type=names, default=DEFAULT, help="names of bench transfer, separated by commas (default: %(default)s)")
    add("--link-gbps", default="10", help="Gbit/s of each prefill server's link, separated by commas; 0: no limit (default: %(default)s)")
    add("--servers", type=names, default=("1:1",), help="prefill servers:decode servers, separated by commas (default: 1:1)")
    add("--rate", default=AUTO, help="jobs per second, separated by commas; 0: all at once (default: %(default)s)")
    add("--share", type=float, default=0.9, help="of what the first method holds, with --rate auto (default: %(default)s)")
    add("--jobs", type=int, default=32, help="of each run; no two have the same prompt (default: %(default)s)")
    add("--context-len", default="2048", help="prompt tokens, separated by commas; jobs take one after the other (default: %(default)s)")
    add("--output-len", type=int, default=160, help="tokens of each answer (default: %(default)s)")
    add("--prompt-file", type=Path, help="take prompts from this text, by the model's tokenizer; default: random tokens")
    add("--seed", type=int, default=0, help="of arrivals")
    add("--server-arg", action="append", default=[], metavar="FLAGS", help="flags of all servers")
    add("--draft-arg", action="append", default=[], metavar="FLAGS", help="flags of decode servers of lynx, as '--kv-compressor kivi'")
    add("--decode-arg", action="append", default=[], metavar="FLAGS", help="flags of all decode servers, for example '--base-gpu-id 1'")
    add("--dtype", default="bfloat16", choices=DTYPES, help="(default: %(default)s)")
    add("--port", type=int, default=0, help="of the first server; the next are taken as well (default: any)")
    add("--start-timeout", type=seconds, default=600, help="seconds until servers must be ready (default: %(default)s)")
    add("--logs", type=Path, help="folder for the servers' logs and timelines")
    add("--json", type=Path, help="write all measurements here")


def run(args: argparse.Namespace) -> int:
    """Run the command, whose module loads PyTorch and SGLang."""
    from sglang_ext_bench.jobs.command import run

    return run(args)
