"""Measure the completion times of jobs on prefill and decode servers, and the phases of each job.

For each method, link rate and number of servers, the benchmark starts prefill and decode servers on the loopback interface. Methods are
those of sglang-ext-bench transfer. They differ in how KV is transferred. Jobs have one output length and arrive as a Poisson process.
Each job goes to the prefill server with the fewest queued tokens and to the decode server with the fewest jobs (HACK, section 7.1).

--rate auto first sends all jobs at once to the servers of the first method. It measures the jobs completed per second. All methods then
get --share of that rate: the highest rate that the first method can sustain. So name the slowest method first.

Phases of a job's completion time:

waiting    Until the decode server has slots.
prefill    Until the prompt is computed, the queue included.
encoding   Until the link has all KV.
transfer   Until decoding can start.
decode     Until the last token. A method that reads codes also corrects or dequantizes in this phase.

"Peak tokens used" counts used slots of a decode server's pool, those of compressed KV included.

The JSON file has all jobs. It is written after each method, with the names of the methods that are not measured yet.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from sglang_ext.tools import CommandError
from sglang_ext_bench.options import DTYPES, add_start_timeout, check_counts, names

DEFAULT = "raw,int8,int4"
AUTO = "auto"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``jobs``."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder")
    add("--method", type=names, default=DEFAULT, help="methods of sglang-ext-bench transfer, separated by commas (default: %(default)s)")
    add("--link-gbps", default="10", help="Gbit/s of each prefill server's link, separated by commas; 0: no limit (default: %(default)s)")
    add("--servers", type=names, default=("1:1",), help="PREFILL:DECODE, numbers of servers, separated by commas (default: 1:1)")
    add("--rate", default=AUTO, help="jobs per second, separated by commas; 0: all at once (default: %(default)s)")
    add("--share", type=float, default=0.9, help="share of the first method's rate, with --rate auto (default: %(default)s)")
    add("--jobs", type=int, default=32, help="jobs per run, each with a different prompt (default: %(default)s)")
    add("--context-len", default="2048", help="tokens of prompts, separated by commas; jobs use them in turn (default: %(default)s)")
    add("--output-len", type=int, default=160, help="output tokens of each job (default: %(default)s)")
    add("--prompt-file", type=Path, help="text file from which prompts are cut by the model's tokenizer (default: random tokens)")
    add("--seed", type=int, default=0, help="seed of the arrivals (default: %(default)s)")
    add("--server-arg", action="append", default=[], metavar="FLAGS", help="flags of all servers")
    add("--draft-arg", action="append", default=[], metavar="FLAGS", help="flags of lynx's decode servers, for example '--kv-compressor kivi'")
    add("--decode-arg", action="append", default=[], metavar="FLAGS", help="flags of all decode servers, for example '--base-gpu-id 1'")
    add("--dtype", default="bfloat16", choices=DTYPES, help="data type of the model (default: %(default)s)")
    add("--port", type=int, default=0, help="port of the first server; the others use the next ports (default: any)")
    add_start_timeout(parser)
    add("--logs", type=Path, help="folder for logs and timelines of the servers (default: none are kept)")
    add("--json", type=Path, help="write all results to this file")


def check_options(args: argparse.Namespace) -> None:
    """Refuse numbers that are out of range.

    Raises:
        CommandError: Names the option.
    """
    check_counts({"--jobs": args.jobs, "--output-len": args.output_len})
    if not 0 < args.share <= 1:
        raise CommandError(f"--share {args.share:g}: pass a share above 0 and up to 1")


def server_counts(texts: Sequence[str]) -> list[tuple[int, int]]:
    """Parse ``--servers``: numbers of prefill and decode servers, as in ``2:1``.

    Raises:
        CommandError: A text has another form.
    """
    counts = []
    for text in texts:
        prefill, colon, decode = text.partition(":")
        if not (colon and prefill.isdecimal() and decode.isdecimal() and int(prefill) and int(decode)):
            raise CommandError(f"--servers {text!r}: pass PREFILL:DECODE, numbers of servers of at least 1, for example 2:1")
        counts.append((int(prefill), int(decode)))
    return counts


def run(args: argparse.Namespace) -> int:
    """Run the command. Its module loads PyTorch and SGLang."""
    from sglang_ext_bench.jobs.command import run

    return run(args)
