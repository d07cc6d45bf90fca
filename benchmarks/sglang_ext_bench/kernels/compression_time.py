"""What making a copy takes beside the prefill of its context: docs/benchmarks.md.

    sglang-ext-bench compression-time --model MODEL                                   # the demo model, on a CPU
    sglang-ext-bench compression-time --device cuda --layers 36 --kv-heads 8 --group 4 --dim 128 --tokens 32768 \
        --prefill-seconds 1.55                                                              # Qwen3-8B shapes, on a GPU

KV and queries are noise. A method scores all tokens, chooses, and writes the copy, as the server does after a prompt. With --model the prefill
is timed too: the model's forward in PyTorch.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors import ContextKV, Part, catalogue, kept_count
from sglang_ext.mem_cache.compressors.catalogue import create, quantizer
from sglang_ext_bench.quality.named_method import NamedMethod

DROPPING = ("sink-recent", "snapkv", "expected-attention")
PACKING = ("int8", "int4", "kivi", "kivi:2", "rotatekv", "turboquant:4", "lynx", "kvquant")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("methods", nargs="*", help="as bench quality names them; all that the device has")
    add("--device", default="cpu")
    add("--model", type=Path, help="folder of a model, whose prefill is timed and whose shapes are taken")
    add("--layers", type=int, default=30)
    add("--kv-heads", type=int, default=3)
    add("--group", type=int, default=3, help="query heads of a KV head")
    add("--dim", type=int, default=64)
    add("--tokens", type=int, default=2048)
    add("--budget", type=float, default=0.25, help="of methods that drop tokens")
    add("--prefill-seconds", type=float, default=0.0)
    add("--repeats", type=int, default=5)
    return parser.parse_args()


def seconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """Median of some runs, after one that is not counted."""
    found = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def prefill(args: argparse.Namespace) -> float:
    """Seconds of a forward of ``--tokens`` tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    ids = torch.randint(1000, 40000, (1, args.tokens))
    with torch.inference_mode():
        return seconds(lambda: model(ids, use_cache=True, logits_to_keep=1), "cpu", 2)


def context_of(args: argparse.Namespace, window: int) -> ContextKV:
    """Noise, in slots that lie anywhere in a pool of twice the tokens."""
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=args.device, dtype=dtype)

    keys, values = (tuple(noise(2 * args.tokens, args.kv_heads, args.dim) for _ in range(args.layers)) for _ in "kv")
    buffers = KVBuffers(tuple(range(args.layers)), (args.dim**-0.5,) * args.layers, keys, values)
    queries = noise(args.layers, window, args.kv_heads * args.group, args.dim)
    slots = torch.randperm(2 * args.tokens, device=args.device)
    frequencies = 1e4 ** -(torch.arange(0, args.dim, 2, device=args.device, dtype=torch.float32) / args.dim)
    positions = torch.arange(args.tokens - window, args.tokens, device=args.device)
    return ContextKV(buffers, slots[: args.tokens], queries, positions, Rotary(frequencies))


def copying(args: argparse.Namespace, name: str) -> Callable[[], None]:
    """What the server does for one context with this method."""
    named = NamedMethod.parse(name)
    packs = next((part for part in named.compressor.split("+") if part != named.drop_method), None)
    chooser = None if named.drop_method is None else create(named.drop_method)
    context = context_of(args, 0 if chooser is None else chooser.window)
    taken = torch.zeros(2 * args.tokens, dtype=torch.bool, device=args.device).index_fill_(0, context.slots, True)
    spare = torch.argsort(taken.float() + torch.rand(len(taken), device=args.device))[: args.tokens]
    packing = Packing.for_pool(quantizer(packs, catalogue.code_bits(packs, named.bits)), context.buffers, 1, context.rotary) if packs else None
    unit = packing.unit if packing else 1
    tokens = args.tokens // unit * unit
    every = torch.arange(tokens, device=args.device).expand(args.layers, args.kv_heads, -1)

    def copy() -> None:
        kept = every
        if chooser is not None:
            (kept,) = chooser.select(context, [Part(0, tokens, kept_count(tokens, args.budget, unit))])
        if packing is None:
            context.buffers.copy_kept(kept, context.slots, spare[: kept.shape[-1]])
        else:
            packing.write(context.buffers, kept, context.slots, spare[: packing.held_slots(kept.shape[-1])])

    return copy


def main() -> None:
    """Print a line for each method."""
    args = arguments()
    whole = prefill(args) if args.model else args.prefill_seconds
    print(f"{args.tokens} tokens, {args.layers} layers, {args.kv_heads} KV heads of {args.dim}; prefill {1000 * whole:.1f} ms")
    every = (*DROPPING, *PACKING, "snapkv+kivi")
    served = every if args.device == "cpu" else tuple(name for name in every if name not in catalogue.packing() or name in catalogue.on_gpu())
    for name in args.methods or served:
        try:
            took = seconds(copying(args, name), args.device, args.repeats)
        except (RuntimeError, ValueError) as error:
            print(f"{name:20} {error}")
            continue
        share = f"  {took / whole:.1%} of the prefill" if whole else ""
        print(f"{name:20} {1000 * took:9.2f} ms{share}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
