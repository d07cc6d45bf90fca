"""A paged slot allocator in plain PyTorch. SGLang's own runs Triton kernels, which need a GPU."""

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.utils import get_num_new_pages


class TorchPagedAllocator(PagedTokenToKVPoolAllocator):
    """Same contract as SGLang's paged allocator, for any page size including 1."""

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
        """Allocate slots for tokens ``[prefix, seq)`` of each request, in order. None if the pool is full.

        Args:
            prefix_lens: int [batch], tokens that have slots already.
            seq_lens: int [batch], tokens that must have slots.
            last_loc: int [batch], slot of the last token before the new ones, -1 for none.
            extend_num_tokens: Sum of ``seq_lens - prefix_lens``.

        Returns:
            int64 [extend_num_tokens]
        """
        if num_new_pages is None:
            num_new_pages = get_num_new_pages(
                seq_lens=seq_lens_cpu, page_size=self.page_size, prefix_lens=prefix_lens_cpu
            )
        if self.need_sort and num_new_pages > len(self.free_pages):
            self.merge_and_sort_free()
        if num_new_pages > len(self.free_pages):
            return None
        out = torch.empty((extend_num_tokens,), dtype=torch.int64, device=self.device)
        alloc_extend_naive(
            prefix_lens_cpu, seq_lens_cpu, last_loc, self.free_pages, out, self.page_size, self.device
        )
        self.free_pages = self.free_pages[num_new_pages:]
        return out

    def alloc_decode(self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor) -> torch.Tensor | None:
        """Allocate a slot for the last token of each request: int64 [batch]. None if the pool is full."""
        return self.alloc_extend(
            seq_lens - 1, seq_lens_cpu - 1, seq_lens, seq_lens_cpu, last_loc, len(seq_lens)
        )
