"""A prefix tree in mode lossy: requests' copies are packed, and full KV that they hold is given back. Prompts may attend to codes."""

import torch
from tiered_helpers import PAGE, ROWS, World, kv_of

from sglang_ext.mem_cache.compressed.cache import CompressedKVCache
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing, QuantizedLayout
from sglang_ext.mem_cache.compressed.queries import QueryWindows
from sglang_ext.mem_cache.compressors.catalogue import method
from sglang_ext.mem_cache.prefix_cache.nodes import SharedPrefix, below
from sglang_ext.mem_cache.prefix_cache.quantized_only import QuantizedOnlyKV
from sglang_ext.mem_cache.prefix_cache.quantized_prefill_kv import QuantizedPrefillKV

HEADS, DIM, SINKS, WIDTH = 2, 64, 4, 1024


class Lossy(World):
    """A world whose KV is packed; each token's numbers follow from it and from its place, smooth enough for few bits."""

    def __init__(self, slots=3000, name="int8", on_codes=False, chunk=None):
        super().__init__(slots=slots, host=False)
        self.table.req_to_token = torch.zeros(2 * ROWS, WIDTH, dtype=torch.int32)
        kv = tuple((torch.zeros(slots + PAGE, HEADS, DIM),) for _ in "kv")
        self.lossy = KVBuffers((0,), (1.0,), *kv)
        made = method(name)
        self.packing = Packing.for_pool(made.quantizer, self.lossy, PAGE)
        of_copies = CompressionMethod(made.compressor, 1.0, self.packing, name, name)
        self.compressed_kv = CompressedKVCache(
            methods=(of_copies,), token_table=self.table.req_to_token, rows=ROWS, buffers=self.lossy, allocator=self.allocator,
            tree_cache=self.cache, queries=QueryWindows(0, (0,), 0), layout=QuantizedLayout.for_table(self.packing, self.table.req_to_token),
            frees_full_kv=True,
        )
        parts = self.cache.nodes, self.compressed_kv, self.packing, lambda req: of_copies
        self.codes = QuantizedPrefillKV(*parts, chunk=chunk) if on_codes else QuantizedOnlyKV(*parts)
        self.cache.bind(self.compressed_kv, inserts_outputs=False, freed_full_kv=self.codes)

    def write(self, slots, kv):
        # Before the forward that computes this, as the worker does.
        self.codes.write_restored()
        super().write(slots, kv)
        self.lossy.keys[0][slots], self.lossy.values[0][slots] = numbers(kv), -numbers(kv)

    def compress(self, req, matched=0):
        prefix = SharedPrefix(req.last_node, matched) if matched else None
        return self.compressed_kv.compress(req.req_pool_idx, req.length, 0, prefix)

    def round(self, *requests):
        """The beginning of a round of these."""
        self.codes.free_full_kv([], {req.req_pool_idx: (req.last_node, self.compressed_kv.get(req.req_pool_idx).covered) for req in requests})

    def decoding(self, tokens):
        """A request that was prefilled and decodes on its copy; its match."""
        matched = self.match(tokens[:-1])
        req = self.start(tokens)
        if req is not None and not self.compress(req, len(matched.device_indices) + matched.host_hit_length):
            self.finish(req, is_insert=False)
            return None
        return req

    def check(self):
        self.check_owners()
        for node in below(self.cache.root_node):
            expected = numbers(kv_of_path(self, node))[node.start :]
            if node.on_device:
                assert_near(self.lossy.keys[0][node.value], expected)
            if node.replacing_segments:
                for segment in node.replacing_segments:
                    made = self.made_of(segment)[:, : segment.end - segment.start].transpose(0, 1)
                    begin, end = max(segment.start, node.start), min(segment.end, node.end)
                    assert_near(made[begin - segment.start : end - segment.start], expected[begin - node.start : end - node.start])
        for row, view in self.compressed_kv.items():
            assert torch.equal(self.table.req_to_token[ROWS + row, : view.num_slots].long(), view.slots)

    def made_of(self, segment):
        block = self.packing.read(self.lossy.keys[0], self.packing.keys, segment.slots[: segment.packed])
        return self.packing.dequantize(block, self.packing.keys, None)


def kv_of_path(world, node):
    return kv_of(world.tokens_to(node))


def numbers(kv):
    """Of each of int64 [tokens], in [-1, 1]: float32 [tokens, HEADS, DIM]."""
    return torch.sin((kv % 1009).float()[:, None, None] + torch.arange(DIM) / 7 + torch.arange(HEADS)[:, None])


def assert_near(found, expected):
    # What was made of codes may have been packed again.
    assert (found - expected).abs().max() < 0.05, (found - expected).abs().max()


def distinct(number, tokens):
    return [1000 * number + place for place in range(tokens)]
