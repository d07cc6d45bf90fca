"""Time the creation of compressed KV for one context, beside the prefill of the context.

    sglang-ext-bench compression-time --model MODEL
    sglang-ext-bench compression-time --device cuda --layers 36 --kv-heads 8 --group 4 --dim 128 --tokens 32768 --prefill-seconds 1.55

The first command is for the demo model on a CPU, the second for the shapes of Qwen3-8B on a GPU. KV and queries are random. A method
scores all tokens, selects some, and writes the compressed KV, as the server does after a prompt. The command prints one line per method:
milliseconds, and their share of the prefill if that is known.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from sglang_ext.config.model_folder import read_config
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors import ContextKV, Part, catalogue, kept_count
from sglang_ext.tools import CommandError
from sglang_ext_bench.kernels.options import add_sizes, check_device, check_sizes
from sglang_ext_bench.kernels.timing import wall_seconds
from sglang_ext_bench.options import check_budgets
from sglang_ext_bench.quality.named_method import NamedMethod

DROPPING = ("sink-recent", "snapkv", "expected-attention")
QUANTIZING = ("int8", "int4", "kivi", "kivi:2", "rotatekv", "turboquant:4", "lynx", "kvquant")
METHODS = (*DROPPING, *QUANTIZING, "snapkv+kivi")
PREFILL_REPEATS = 2
SIZES = {
    "layers": (30, "layers"), "kv-heads": (3, "KV heads"), "group": (3, "query heads of a KV head"), "dim": (64, "channels of a head"),
    "tokens": (2048, "tokens of the context"), "repeats": (5, "measurements, whose median is printed"),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("methods", nargs="*", help="methods, as sglang-ext-bench quality --compressor names them (default: those that the device supports)")
    add("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    add("--model", type=Path, help="folder of a model whose prefill is timed on the CPU; its shapes are given by the options below")
    add_sizes(parser, SIZES)
    add("--budget", type=float, default=0.25, help="share of tokens that dropping methods keep (default: %(default)s)")
    add("--prefill-seconds", type=float, default=0.0, help="known time of the prefill, without --model")


@torch.inference_mode()
def run(args: argparse.Namespace) -> int:
    """Print a line for each method.

    Raises:
        CommandError: An option is out of range, or a method does not exist.
        OptionError: The model's folder has no config.json.
    """
    check_sizes(args, SIZES)
    check_budgets([args.budget])
    check_device(args.device)
    if args.model:
        read_config(args.model)
    if args.dim % 2:
        raise CommandError(f"--dim {args.dim}: pass an even number, which rotary embedding needs")
    methods = [NamedMethod.parse(name) for name in args.methods or default_methods(args.device)]
    prefill = prefill_seconds(args.model, args.tokens) if args.model else args.prefill_seconds
    print(f"{args.tokens} tokens, {args.layers} layers, {args.kv_heads} KV heads of {args.dim}; prefill {1000 * prefill:.1f} ms")
    for name, method in zip(args.methods or default_methods(args.device), methods):
        try:
            took = wall_seconds(compression(args, method), args.device, args.repeats)
        except (RuntimeError, ValueError) as error:
            print(f"{name:20} {error}")
            continue
        share = f"  {took / prefill:.1%} of the prefill" if prefill else ""
        print(f"{name:20} {1000 * took:9.2f} ms{share}", flush=True)
    return 0


def default_methods(device: str) -> tuple[str, ...]:
    """Methods that run on the device. On a GPU, quantizers need kernels."""
    if device == "cpu":
        return METHODS
    return tuple(name for name in METHODS if name not in catalogue.packing() or name in catalogue.on_gpu())


def prefill_seconds(model: Path, tokens: int) -> float:
    """Return the seconds of a forward of ``tokens`` tokens with transformers, on the CPU."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    input_ids = torch.randint(loaded.config.vocab_size, (1, tokens))
    return wall_seconds(lambda: loaded(input_ids, use_cache=True, logits_to_keep=1), "cpu", PREFILL_REPEATS)


def random_context(args: argparse.Namespace, window: int) -> ContextKV:
    """Create random KV of a context, in random slots of a pool of twice its tokens.

    Args:
        args: Options of the command.
        window: Newest queries that the method reads.
    """
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


def compression(args: argparse.Namespace, method: NamedMethod) -> Callable[[], None]:
    """Return a call that creates the compressed KV of one context, as the server does.

    Args:
        args: Options of the command.
        method: The method.
    """
    quantizer_name = next((part for part in method.compressor.split("+") if part != method.drop_method), None)
    compressor = None if method.drop_method is None else catalogue.create(method.drop_method)
    context = random_context(args, 0 if compressor is None else compressor.window)
    used = torch.zeros(2 * args.tokens, dtype=torch.bool, device=args.device).index_fill_(0, context.slots, True)
    free_slots = torch.argsort(used.float() + torch.rand(len(used), device=args.device))[: args.tokens]
    packing = None
    if quantizer_name is not None:
        quantizer = catalogue.quantizer(quantizer_name, catalogue.code_bits(quantizer_name, method.bits))
        packing = Packing.for_pool(quantizer, context.buffers, 1, context.rotary)
    unit = packing.unit if packing else 1
    tokens = args.tokens // unit * unit
    all_tokens = torch.arange(tokens, device=args.device).expand(args.layers, args.kv_heads, -1)

    def compress() -> None:
        kept = all_tokens
        if compressor is not None:
            (kept,) = compressor.select(context, [Part(0, tokens, kept_count(tokens, args.budget, unit))])
        if packing is None:
            context.buffers.copy_kept(kept, context.slots, free_slots[: kept.shape[-1]])
        else:
            packing.write(context.buffers, kept, context.slots, free_slots[: packing.held_slots(kept.shape[-1])])

    return compress
