"""Measure time, bytes and error of one layer's attention over full and compressed KV, without a server and a model.

Variants:

    full                       FlashInfer in bfloat16; on a CPU PyTorch in float32
    fp8                        FlashInfer over the KV of stock SGLang with --kv-cache-dtype fp8_e4m3
    fused                      attention that reads KIVI's blocks
    dequantized, then full     blocks are dequantized in each call, as in CacheGen and KVQuant, and then read by full
    hack                       multiplies codes as integers, with a Gluon kernel on an NVIDIA GPU if it supports the blocks
    hack, Triton               the kernel for other GPUs and blocks

Variants that exist only as kernels are left out on a CPU. A step has one token of each request. A prefill has a prompt without a cached
prefix.

Columns:

    MB           KV that must be read and written
    bandwidth    its share of the bandwidth that a copy reaches on the same device
    error        error of the computation, against float64 with the numbers that the codes represent
    loss         error against full KV in float64

Error and loss are shares of the largest output, of the first request or of the prompt's newest tokens. Times are medians of calls that
start with an empty device cache.
"""

import argparse
from pathlib import Path

DEFAULTS = {"cpu": ("1024", "2", "512"), "cuda": ("8192,32768", "8,16", "16384")}
"""Default contexts, batches and prompts, by device."""
DIMS = (64, 128)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``attention``. The default shape is that of Llama-3.1-8B."""
    add = parser.add_argument
    contexts, batch, prompts = (f"default: {cpu}; on a GPU {gpu}" for cpu, gpu in zip(*DEFAULTS.values()))
    add("--device", choices=tuple(DEFAULTS), help="device (default: cuda if there is a GPU)")
    add("--contexts", help=f"tokens of each request in a step, separated by commas ({contexts})")
    add("--batch", help=f"requests of a step, separated by commas ({batch})")
    add("--prefill", help=f"tokens of prompts, separated by commas; 0 for none ({prompts})")
    add("--bits", type=int, default=4, help="bits of codes: 4 or 2 (default: %(default)s)")
    add("--partition", default="64", help="numbers with a common scale in hack, separated by commas (default: %(default)s)")
    add("--heads", type=int, default=32, help="query heads (default: %(default)s)")
    add("--kv-heads", type=int, default=8, help="KV heads (default: %(default)s)")
    add("--head-dim", type=int, default=128, choices=DIMS, help="channels of a head (default: %(default)s)")
    add("--json", type=Path, help="write all figures to this file")


def run(args: argparse.Namespace) -> int:
    """Run the command. Its module loads PyTorch and SGLang."""
    from sglang_ext_bench.attention.command import run

    return run(args)
