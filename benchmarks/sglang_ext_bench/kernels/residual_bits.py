"""Count the bits per number of the residuals that host memory holds, for the KV of a model. Runs on a CPU.

    sglang-ext-bench residual-bits --model MODEL --tokens 1024 docs/architecture.md

With --kv-compressor lynx --kv-host-gb, a page in host memory is the residual of a quantized page. A load transfers the residual alone
while the anchor is on the device, and both otherwise. The command prints one line per dtype of the pool and bits of the anchor:

    residual, anchor    mean bits per number
    pages whole         pages that are stored exactly, because their residual is not smaller
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sglang_ext.config.model_folder import read_config
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressors.catalogue import quantizer
from sglang_ext.mem_cache.host_tier.page_copies import ResidualPages
from sglang_ext.tools import CommandError

PAGE = 64
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ANCHOR_BITS = (4, 2)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the model")
    tokens = f"first tokens of each text to use, rounded down to pages of {PAGE} (default: %(default)s)"
    add("--tokens", type=int, default=1024, help=tokens)
    add("texts", type=Path, nargs="+", help=f"text files of at least {2 * PAGE} tokens")


@torch.inference_mode()
def run(args: argparse.Namespace) -> int:
    """Print a line for each dtype and number of bits.

    Raises:
        CommandError: A text does not exist or is too short, or --tokens is out of range.
        OptionError: The model's folder has no config.json.
    """
    if args.tokens < 2 * PAGE:
        raise CommandError(f"--tokens {args.tokens}: pass at least {2 * PAGE}, two pages; the first one is not counted")
    read_config(args.model)
    for path in args.texts:
        if not path.is_file():
            raise CommandError(f"{path}: there is no such file; pass text files")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = [tokenizer.encode(path.read_text())[: args.tokens] for path in args.texts]
    prompts = [token_ids[: len(token_ids) // PAGE * PAGE] for token_ids in prompts]
    for path, token_ids in zip(args.texts, prompts):
        if len(token_ids) < 2 * PAGE:
            raise CommandError(f"{path}: it has fewer than {2 * PAGE} tokens; pass longer texts")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    for dtype in DTYPES:
        for bits in ANCHOR_BITS:
            found, anchors = zip(*(page_bits(model, torch.tensor([token_ids]), dtype, bits) for token_ids in prompts))
            sizes = torch.cat(found)
            residual, whole = sizes[sizes > 0].mean(), int((sizes == 0).sum())
            print(f"{str(dtype)[6:]}, {bits} bits: residual {residual:.2f}, anchor {anchors[0]:.2f}, {whole} of {len(sizes)} pages whole")
    return 0


def page_bits(model: PreTrainedModel, input_ids: torch.Tensor, dtype: torch.dtype, bits: int) -> tuple[torch.Tensor, float]:
    """Return the bits per number of each page's residual except the first page's, and of an anchor. 0 if a page is stored whole.

    Args:
        model: The model.
        input_ids: A prompt of whole pages, int64 [1, tokens].
        dtype: dtype of the pool.
        bits: Bits of a number in the anchor.
    """
    buffers, tokens = prompt_kv(model, input_ids, dtype), input_ids.shape[1]
    packing = Packing.for_pool(quantizer("lynx", bits), buffers, PAGE)
    slots, blocks = torch.arange(tokens), tokens + torch.arange(packing.packed_slots(tokens))
    packing.write(buffers, slots.expand(len(buffers.keys), buffers.keys[0].shape[1], tokens), slots, blocks)
    pages = ResidualPages(buffers, packing, PAGE)
    frames = torch.zeros(tokens // PAGE - 1, pages.page_bytes, dtype=torch.uint8)
    sizes = torch.zeros(len(frames), dtype=torch.int64)
    # The first page holds the exact first tokens, so it is not like the others.
    pages.write(slots[PAGE:], blocks.view(-1, packing.block_slots)[1:], frames, sizes)
    numbers = pages.page_bytes / dtype.itemsize
    return sizes * 8 / numbers, pages.anchor_bytes * 8 / numbers


def prompt_kv(model: PreTrainedModel, input_ids: torch.Tensor, dtype: torch.dtype) -> KVBuffers:
    """Return a pool with the KV of a prompt, followed by equally many empty slots. ``input_ids`` is int64 [1, tokens]."""
    layers = model(input_ids, use_cache=True).past_key_values.layers
    parts = zip(*((layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in layers))
    keys, values = (tuple(torch.cat([x, torch.zeros_like(x)]).to(dtype).contiguous() for x in part) for part in parts)
    return KVBuffers(tuple(range(len(keys))), (1.0,) * len(keys), keys, values)
