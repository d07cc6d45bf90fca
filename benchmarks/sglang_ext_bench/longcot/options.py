"""Measure the time per token of long outputs with sparse attention, compared with stock (AsyncSpade, Figures 2, 4, 5, 10 and Table 2).

The benchmark starts one server for each method, mode and number of selected tokens, and with cache ranks also for each pack size. It sends
each --load with that number of selected tokens: a batch of prompts from the prefix cache. Outputs are two rounds longer than the longest
--output-len. Times are those of tokens from one --output-len to the next, which must be at least a round apart. Acceptance is reported for
--mode verified.

With cache ranks on a CPU, the inference rank writes a timeline (--kv-bench-timeline). A table shows per pack of layers: the model's time,
the time in which the rank selects for the batch, and the rest of a cycle. It also shows the bandwidth that hides the cycle behind a pack's
inference, for positions, which the server transfers, and for K and V as in the paper. On GPUs a pack has all layers, and there is no
timeline. Operations are those of the paper's equations 6 to 11.

--pages times the parts of a layer's step that selects pages of 16 tokens. It uses the model's shapes on this device. --overlap-prompts runs
the model itself on the .txt files of a folder. --method "" starts no servers. sglang-ext-bench quality compares quality at equal numbers of
tokens.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from sglang_ext.tools import CommandError
from sglang_ext_bench.longcot.arms import ARMS, AUTO, LENGTHS, LOADS, ON_CPUS, PACKS
from sglang_ext_bench.options import DTYPES, add_start_timeout, check_counts, names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``longcot``."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder; with --load-format dummy it needs only config.json")
    all_methods = f"all; on GPUs without {', '.join(ON_CPUS)}, and without spade-ranks if no GPU is left for it"
    add("--method", type=names, help=f"some of {', '.join(ARMS)}, separated by commas (default: {all_methods})")
    add("--mode", type=names, default=("lossy", "verified"), help="lossy, verified, separated by commas (default: both)")
    add("--load", help=f"BATCH:CONTEXT:SELECT, separated by commas (default: {LOADS['cpu']}; on a GPU {LOADS['cuda']})")
    add("--output-len", help=f"output tokens, separated by commas (default: {LENGTHS['cpu']}; on a GPU {LENGTHS['cuda']})")
    add("--repeats", type=int, default=1, help="waves of each load (default: %(default)s)")
    add("--draft-length", type=int, default=16, help="draft tokens of a round in mode verified (default: %(default)s)")
    add("--select-every", default="1", help="selection intervals in steps, separated by commas (default: %(default)s)")
    add("--select-by", default="current", help="predictor of spade, a value of --kv-select-by (default: %(default)s)")
    add("--ranks", type=int, default=1, help="cache ranks of spade-ranks (default: %(default)s)")
    default_packs = f"default: {','.join(PACKS)}; on GPUs auto, the only value allowed there"
    add("--pack-layers", type=names, help=f"maximum layers per pack, or auto, separated by commas ({default_packs})")
    add("--prompt-file", type=Path, help="text file from which prompts are cut by the model's tokenizer (default: random tokens)")
    add("--pages", action="store_true", help="also time the parts of a layer's step that selects pages")
    add("--overlap-prompts", type=Path, metavar="FOLDER", help="also measure overlaps of selections on these prompts")
    add("--overlap-share", type=float, default=0.125, help="share of the context that is selected for overlaps (default: %(default)s)")
    add("--server-arg", action="append", default=[], metavar="FLAGS", help="flags of all servers")
    add("--dtype", default="bfloat16", choices=DTYPES, help="data type of the model (default: %(default)s)")
    add_start_timeout(parser)
    add("--logs", type=Path, help="folder for logs and timelines of the servers (default: none are kept)")
    add("--json", type=Path, help="write all results to this file")
    add("--plot", type=Path, help="write a plot to this PNG file")


def check_options(args: argparse.Namespace, lengths: Sequence[int]) -> None:
    """Refuse values that are out of range, and a run without anything to measure.

    Args:
        args: Options of the command.
        lengths: Output lengths, ascending.

    Raises:
        CommandError: Names the option.
    """
    from sglang_ext.mem_cache.selection.predictors import PREDICTORS

    if not args.method and not args.pages and args.overlap_prompts is None:
        raise CommandError('--method "" starts no server, so there is nothing to measure: pass a method, --pages or --overlap-prompts')
    check_counts({"--repeats": args.repeats, "--draft-length": args.draft_length, "--ranks": args.ranks})
    if args.select_by not in PREDICTORS:
        raise CommandError(f"--select-by {args.select_by!r}: pass {' or '.join(PREDICTORS)}")
    if lengths[0] < 2:
        raise CommandError("--output-len 1: times are those of tokens after the first: pass numbers from 2")
    if wrong := [each for each in args.pack_layers if each != AUTO and not (each.isdecimal() and int(each))]:
        raise CommandError(f"--pack-layers {wrong[0]!r}: pass numbers of layers from 1, or auto, separated by commas")
    if not 0 < args.overlap_share < 1:
        raise CommandError(f"--overlap-share {args.overlap_share:g}: pass a share of the context between 0 and 1")


def run(args: argparse.Namespace) -> int:
    """Run the command. Its module loads PyTorch and SGLang."""
    from sglang_ext_bench.longcot.command import run

    return run(args)
