"""Host memory that loses bits, for tests: what comes back changed has to be noticed, and computed again.

With ``SGLANG_EXT_CORRUPT_LOADS=7`` a bit of the first page is flipped before every seventh load of full KV from the host.
"""

import logging
import os
from dataclasses import dataclass

import torch

from sglang_ext.mem_cache.host_pool import HostPool
from sglang_ext.options import OptionError

logger = logging.getLogger(__name__)

VARIABLE = "SGLANG_EXT_CORRUPT_LOADS"


@dataclass
class Faults:
    """Flips bits on the host.

    Attributes:
        every: of so many loads one finds a changed page.
        loads: so far, and its start.
    """

    every: int
    loads: int = 0

    @classmethod
    def from_environment(cls, rank: int = 0) -> "Faults | None":
        """What :data:`VARIABLE` asks for, on each tensor-parallel ``rank`` for other loads; None when it is not set.

        Raises:
            OptionError: it is no whole number from 1.
        """
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        if not text.isdigit() or int(text) < 1:
            raise OptionError(f"{VARIABLE} is {text!r}; pass a whole number from 1, for example 7, or leave it out")
        logger.warning("sglang-ext: %s=%s: host memory loses bits on purpose", VARIABLE, text)
        return cls(int(text), loads=rank)

    @torch.inference_mode()
    def strike(self, pool: HostPool, pages: torch.Tensor) -> None:
        """A load of ``pages``, whose stores are done, is about to begin."""
        self.loads += 1
        if self.loads % self.every == 0:
            pool.words[0, int(pages[0]) * pool.page_size, :1].bitwise_xor_(1)
