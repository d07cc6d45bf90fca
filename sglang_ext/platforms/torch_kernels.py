"""PyTorch versions of the Triton kernels that stock SGLang needs even on a CPU."""

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.utils import get_num_new_pages


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    """SGLang's paged allocator without Triton kernels, for any page size including 1."""

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        """Allocate slots for tokens ``[prefix, seq)`` of each request: int64 [extend_num_tokens]. None if the pool is full.

        ``last_loc``, int [batch], has the slot of the last token before the new ones, -1 for none.
        """
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu)
        if self.need_sort and num_new_pages > len(self.free_pages):
            self.merge_and_sort_free()
        if num_new_pages > len(self.free_pages):
            return None
        out = torch.empty((extend_num_tokens,), dtype=torch.int64, device=self.device)
        alloc_extend_naive(prefix_lens_cpu, seq_lens_cpu, last_loc, self.free_pages, out, self.page_size, self.device)
        self.free_pages = self.free_pages[num_new_pages:]
        return out

    def alloc_decode(self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor) -> torch.Tensor | None:
        """Allocate a slot for the last token of each request: int64 [batch]. None if the pool is full."""
        return self.alloc_extend(seq_lens - 1, seq_lens_cpu - 1, seq_lens, seq_lens_cpu, last_loc, len(seq_lens))


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write new slots, int [sum of lengths], into the token table, int32 [rows, width].

    Row ``req_pool_indices[i]`` gets ``[start_offset[i], end_offset[i])``, in order. All three are int [batch].
    """
    done = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()):
        req_to_token[row, start:end] = out_cache_loc[done : done + end - start].to(req_to_token.dtype)
        done += end - start


def _rotate_left(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & 0xFFFFFFFF


def _times(x: torch.Tensor, factor: int) -> torch.Tensor:
    """``x * factor`` modulo 2**32 without leaving the positive range of int64."""
    low, high = x & 0xFFFF, x >> 16
    return (low * factor + (((high * factor) & 0xFFFF) << 16)) & 0xFFFFFFFF


def _mix(h: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    k = _times(_rotate_left(_times(k, 0xCC9E2D51), 15), 0x1B873593)
    return (_times(_rotate_left(h ^ k, 13), 5) + 0xE6546B64) & 0xFFFFFFFF


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    """MurmurHash3 of (seed, uint64 [n]; position, int [n]; column, int [m]): uint32 [n, m], bit-identical to SGLang's kernel."""
    seed = seed.to(torch.int64)
    h = torch.zeros((len(seed), 1), dtype=torch.int64, device=seed.device)
    for part in (seed[:, None], seed[:, None] >> 32, positions[:, None].to(torch.int64), col_indices[None, :].to(torch.int64)):
        h = _mix(h, part & 0xFFFFFFFF)
    h = h ^ 16
    h = h ^ (h >> 16)
    h = _times(h, 0x85EBCA6B)
    h = h ^ (h >> 13)
    h = _times(h, 0xC2B2AE35)
    h = h ^ (h >> 16)
    return h.to(torch.uint32)


def enable_batch_invariant_mode(enable_bmm: bool = True) -> None:
    """Do nothing: SGLang's batch-invariant operators need an accelerator. Sampling seeds work without them."""
