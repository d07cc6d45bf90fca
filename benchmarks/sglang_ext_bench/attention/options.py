"""Time, bytes and error of one layer's attention, by how KV is kept; no server and no model.

On a GPU *full* is FlashInfer's attention in bfloat16, and *fp8* its attention over KV as stock SGLang has it with
--kv-cache-dtype fp8_e4m3. *Fused* reads KIVI's blocks; *dequantized, then full* makes them whole first, as CacheGen and KVQuant do;
*hack* multiplies codes as integers, on an NVIDIA GPU by a kernel in Gluon where that takes the blocks; *Triton* is the one for all
others: with SE off it adds up codes in each step, with RQE off it quantizes the newest tokens' values in each step. On a CPU *full* is
PyTorch's attention in float32, and arms that exist as kernels alone are left out. A step is of one token of each request, a prefill
of a prompt of which nothing is known. Bytes are those that must be read and written of KV, and *bandwidth* their share of what a copy
moves on the same device. *Error* is that of the computation, against float64 with the numbers that codes mean; *loss* is the error
against full KV in float64. Both are shares of the greatest output, of the first request, or of the prompt's newest tokens. Times are
medians of calls that find nothing in the device's cache.
"""

import argparse
from pathlib import Path

# By device: contexts, batches, prompts.
DEFAULTS = {"cpu": ("1024", "2", "512"), "cuda": ("8192,32768", "8,16", "16384")}
DIMS = (64, 128)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line; the default shape is that of Llama-3.1-8B."""
    add = parser.add_argument
    here = "default: {}; on a GPU {}".format
    contexts, batch, prompts = map(here, *DEFAULTS.values())
    add("--device", choices=tuple(DEFAULTS), help="where (default: cuda where there is one)")
    add("--contexts", help=f"tokens of each request in a step, separated by commas ({contexts})")
    add("--batch", help=f"requests of a step, separated by commas ({batch})")
    add("--prefill", help=f"tokens of prompts, separated by commas; 0 for none ({prompts})")
    add("--bits", type=int, default=4, help="of codes: 4 or 2 (default: %(default)s)")
    add("--partition", default="64", help="numbers that share a scale in hack, separated by commas (default: %(default)s)")
    add("--heads", type=int, default=32, help="of queries (default: %(default)s)")
    add("--kv-heads", type=int, default=8, help="of keys and values (default: %(default)s)")
    add("--head-dim", type=int, default=128, choices=DIMS, help="channels of a head (default: %(default)s)")
    add("--json", type=Path, help="write all figures here")


def run(args: argparse.Namespace) -> int:
    """Run the command, whose module loads PyTorch and SGLang."""
    from sglang_ext_bench.attention.command import run

    return run(args)
