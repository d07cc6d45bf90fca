"""Host memory that loses bits, for tests: what comes back changed has to be noticed, and computed again.

With ``--kv-bench-corrupt-loads 7`` a bit of the first page is flipped before every seventh load of full KV from the host.
"""

from dataclasses import dataclass

import torch

from sglang_ext.mem_cache.host_tier.host_pool import HostPool


@dataclass
class Faults:
    """Flips bits on the host.

    Attributes:
        every: of so many loads one finds a changed page.
        loads: so far, and its start: the tensor-parallel rank, so that each loses a page in another load.
    """

    every: int
    loads: int = 0

    @torch.inference_mode()
    def strike(self, pool: HostPool, pages: torch.Tensor) -> None:
        """A load of ``pages``, whose stores are done, is about to begin."""
        self.loads += 1
        if self.loads % self.every == 0:
            pool.words[0, int(pages[0]) * pool.page_size, :1].bitwise_xor_(1)
