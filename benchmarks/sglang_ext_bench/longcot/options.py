"""Time per token of long answers from sparse attention, beside stock, and where it goes (AsyncSpade, Figures 2, 4, 5, 10, Table 2).

For each method, mode, number of selected tokens and, with cache ranks, pack size, a server is started, and each --load of as many selected
tokens sent: its batch at once, prompts in the prefix cache before, answers of the longest --output-len and two rounds more whatever they
are. Times are of tokens from one of --output-len to the next, which are at least a round apart. Acceptance is of --mode verified; in lossy
a choice stands unverified.

With cache ranks on a CPU the inference rank writes a timeline (--kv-bench-timeline): per pack of layers the model's time, the rank's
choosing for the whole batch, and the rest of a cycle, with the bytes a second that would have to travel for a cycle to be hidden behind a
pack's inference: positions, as it is served, or K and V, as in the paper. On GPUs, where all layers of a step are one pack, there is
none. Operations are the paper's equations (6) to (11).

--pages times the parts of a layer's step with choices by pages of 16 on this device, of the model's shapes; --overlap-prompts runs the
model itself over a folder's .txt files. --method "" leaves servers out. Quality at equal numbers of tokens is bench quality's.
"""

import argparse
from pathlib import Path

from sglang_ext.tools.options import seconds
from sglang_ext_bench.longcot.arms import ARMS, LENGTHS, LOADS, ON_CPUS, PACKS
from sglang_ext_bench.options import DTYPES, names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder; with --load-format dummy its config.json does")
    all_here = f"all; on GPUs without {', '.join(ON_CPUS)}, and without ranks where these have no GPU"
    add("--method", type=names, help=f"some of {', '.join(ARMS)}, separated by commas (default: {all_here})")
    add("--mode", type=names, default=("lossy", "verified"), help="lossy, verified, separated by commas (default: both)")
    add("--load", help=f"BATCH:CONTEXT:SELECT, separated by commas (default: {LOADS['cpu']}; on a GPU {LOADS['cuda']})")
    add("--output-len", help=f"tokens of answers, separated by commas (default: {LENGTHS['cpu']}; on a GPU {LENGTHS['cuda']})")
    add("--repeats", type=int, default=1, help="waves of each load (default: %(default)s)")
    add("--draft-length", type=int, default=16, help="of verified decoding (default: %(default)s)")
    add("--select-every", default="1", help="steps after which tokens are chosen anew, separated by commas (default: %(default)s)")
    add("--select-by", default="current", help="predictor of spade, a value of --kv-select-by (default: %(default)s)")
    add("--ranks", type=int, default=1, help="cache ranks of spade-ranks (default: %(default)s)")
    packs_here = f"default: {','.join(PACKS)}; on GPUs auto, which alone is served there"
    add("--pack-layers", type=names, help=f"layers of a pack at most, or auto, separated by commas ({packs_here})")
    add("--prompt-file", type=Path, help="take prompts from this text, by the model's tokenizer; default: random tokens")
    add("--pages", action="store_true", help="also time the parts of a layer's step with choices by pages")
    add("--overlap-prompts", type=Path, metavar="FOLDER", help="also measure overlaps on these prompts")
    add("--overlap-share", type=float, default=0.125, help="of the context, that is selected for overlaps (default: %(default)s)")
    add("--server-arg", action="append", default=[], metavar="FLAGS", help="flags of all servers")
    add("--dtype", default="bfloat16", choices=DTYPES)
    add("--start-timeout", type=seconds, default=600, help="seconds until servers must be ready (default: %(default)s)")
    add("--logs", type=Path, help="folder for the servers' logs and timelines")
    add("--json", type=Path, help="write all measurements here")
    add("--plot", type=Path, help="write a PNG here")


def run(args: argparse.Namespace) -> int:
    """Run the command, whose module loads PyTorch and SGLang."""
    from sglang_ext_bench.longcot.command import run

    return run(args)
