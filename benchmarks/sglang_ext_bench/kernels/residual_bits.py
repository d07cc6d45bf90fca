"""Bits of a number that host memory holds of packed tokens, residual and anchor: ``residual_bits.py --model MODEL TEXT...``."""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressors.catalogue import quantizer
from sglang_ext.mem_cache.host_tier.residuals import ResidualPages

PAGE = 64


def pool_of(model, ids, dtype):
    """A pool that holds full KV of ``ids``, then as many empty slots."""
    with torch.no_grad():
        layers = model(ids, use_cache=True).past_key_values.layers
    kinds = zip(*((layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in layers))
    keys, values = (tuple(torch.cat([x, torch.zeros_like(x)]).to(dtype).contiguous() for x in kind) for kind in kinds)
    return KVBuffers(tuple(range(len(keys))), (1.0,) * len(keys), keys, values)


def sizes_of(model, ids, dtype, bits):
    """Bits of a number of each page but the first, 0 where it is whole; and of an anchor."""
    buffers, tokens = pool_of(model, ids, dtype), ids.shape[1]
    packing = Packing.for_pool(quantizer("lynx", bits), buffers, PAGE)
    slots, blocks = torch.arange(tokens), tokens + torch.arange(packing.packed_slots(tokens))
    packing.write(buffers, slots.expand(len(buffers.keys), buffers.keys[0].shape[1], tokens), slots, blocks)
    pages = ResidualPages(buffers, packing, PAGE)
    rooms = torch.zeros(tokens // PAGE - 1, pages.page_bytes, dtype=torch.uint8)
    sizes = torch.zeros(len(rooms), dtype=torch.int64)
    pages.write(slots[PAGE:], blocks.view(-1, packing.block_slots)[1:], rooms, sizes)
    numbers = pages.page_bytes / dtype.itemsize
    return sizes * 8 / numbers, pages.anchor_bytes * 8 / numbers


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=1024, help="of each text (default: %(default)s)")
    parser.add_argument("texts", type=Path, nargs="+")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    texts = [torch.tensor([tokenizer.encode(path.read_text())[: args.tokens // PAGE * PAGE]]) for path in args.texts]
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for bits in (4, 2):
            found, anchors = zip(*(sizes_of(model, ids[:, : ids.shape[1] // PAGE * PAGE], dtype, bits) for ids in texts))
            sizes = torch.cat(found)
            residual, whole = sizes[sizes > 0].mean(), int((sizes == 0).sum())
            print(f"{str(dtype)[6:]}, {bits} bits: residual {residual:.2f}, anchor {anchors[0]:.2f}, {whole} of {len(sizes)} pages whole")


if __name__ == "__main__":
    main()
