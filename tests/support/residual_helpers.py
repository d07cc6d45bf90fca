"""A tiered prefix cache on a CPU whose host holds residuals of packed blocks, with numbers that say which tokens they are of."""

import torch
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from tiered_helpers import ROWS, TokenTable, World, kv_of

from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressors.catalogue import quantizer
from sglang_ext.mem_cache.host_tier.host_pool import HostPool
from sglang_ext.mem_cache.host_tier.page_copies import ResidualPages
from sglang_ext.mem_cache.host_tier.tier import HostTier
from sglang_ext.mem_cache.prefix_cache.host_store import Anchoring
from sglang_ext.mem_cache.prefix_cache.nodes import below
from sglang_ext.mem_cache.prefix_cache.segments import Segment
from sglang_ext.mem_cache.prefix_cache.tiered_radix_cache import TieredRadixCache
from sglang_ext.platforms.torch_kernels import TorchPagedAllocator

PAGE, DIM = 64, 64


def numbers_of(tokens):
    """Of each of ``tokens``, which depend on all tokens before, too: float32 [tokens, 1, DIM], of channels of different sizes."""
    mixed = kv_of(tokens)[:, None] * 0x9E3779B1 + torch.arange(DIM) * 0x85EBCA77
    unit = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D >> 13 & 0xFFFFF).float() / (1 << 20) - 0.5
    return (unit * (1 + torch.arange(DIM)) + torch.arange(DIM) % 7)[:, None]


class ResidualWorld(World):
    """As its base, with pages of 64 tokens of one layer, and with segments of Lynx's blocks."""

    def __init__(self, pages=30, host_pages=20):
        self.page, self.slots = PAGE, pages * PAGE
        keys, values = (torch.zeros(self.slots + PAGE, 1, DIM) for _ in "kv")
        self.kv, self.buffers = keys, KVBuffers((0,), (1.0,), (keys,), (values,))
        self.allocator = TorchPagedAllocator(self.slots, PAGE, torch.float32, "cpu", None, need_sort=False)
        self.table = TokenTable()
        self.table.req_to_token = torch.zeros(ROWS, 2048, dtype=torch.int32)
        self.cache = TieredRadixCache(CacheInitParams(False, self.table, self.allocator, PAGE))
        self.packing = Packing.for_pool(quantizer("lynx", 4), self.buffers, PAGE)
        pool = HostPool.create(self.buffers, PAGE, host_pages * PAGE * self.buffers.bytes_per_slot, frames=True)
        self.tier = HostTier(self.buffers, pool, residuals=ResidualPages(self.buffers, self.packing, PAGE))
        self.cache.use_host(self.tier, anchoring=Anchoring("lynx", PAGE, self.packing))
        self.running = []

    def write(self, slots, kv):
        raise NotImplementedError

    def extend(self, req, length):
        covered = -(-req.length // PAGE) * PAGE
        if length > covered:
            slots = self.allocate(length - covered)
            if slots is None:
                return False
            self.table.req_to_token[req.req_pool_idx, covered : covered + len(slots)] = slots.int()
        new = self.table.req_to_token[req.req_pool_idx, req.length : length].long()
        numbers = numbers_of(req.tokens[:length])[req.length :]
        self.kv[new], self.buffers.values[0][new] = numbers, -numbers
        req.length = req.kv.kv_allocated_len = length
        return True

    def anchor(self, req, end=None, use=True):
        """Pack what a request has in the tree up to ``end``, as its copy; None when the pool is full."""
        end = req.last_node.end if end is None else end
        tokens = end - PAGE
        slots = self.allocate(self.packing.held_slots(tokens))
        if slots is None:
            return None
        row = self.table.req_to_token[req.req_pool_idx, PAGE:end].long()
        self.packing.write(self.buffers, torch.arange(tokens)[None, None], row, slots)
        made = Segment(PAGE, end, slots, tokens=tokens, packed=self.packing.packed_slots(tokens), method="lynx")
        self.cache.nodes.attach(req.last_node, made)
        if use:
            self.cache.segments.use(made)
            req.segments.append(made)
        return made

    def residual_pages(self):
        """Of the nodes on the host, how many pages are residuals."""
        found = 0
        for node in below(self.cache.root_node):
            if node.host_value is not None:
                node.store.synchronize()
                found += int((self.tier.pool.sizes[node.host_value] > 0).sum())
        return found

    def check(self, corrupt=frozenset()):
        """Nothing leaks, and what is on the device is right."""
        self.check_owners()
        for node in below(self.cache.root_node):
            if node.on_device:
                assert torch.equal(self.kv[node.value], numbers_of(self.tokens_to(node))[node.start :])
