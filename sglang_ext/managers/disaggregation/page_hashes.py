"""Names of pages by the tokens up to their end: what a page of KV belongs to."""

from collections.abc import Sequence
from hashlib import sha256

import numpy as np

# Bytes of a hash.
HASH_BYTES = 32


def page_hashes(tokens: Sequence[int], page_size: int, before: bytes = b"") -> list[bytes]:
    """A hash for each page: SHA-256 of the hash before it and of the page's tokens, 32 bits each.

    They equal SGLang's names of HiCache pages (``sglang.srt.mem_cache.utils.get_hash_str``).

    Args:
        tokens: ids below 2^32.
        page_size: tokens in a page; the last one may hold fewer.
        before: the hash of the page before the first, 32 bytes; empty at the start of a request.

    Raises:
        ValueError: ``before`` or ``page_size`` is none of these.
    """
    if len(before) not in (0, HASH_BYTES) or page_size < 1:
        raise ValueError(f"page_hashes of pages of {page_size} tokens after {len(before)} bytes; pass at least 1, and 0 or {HASH_BYTES}")
    row = np.asarray(tokens, "<u4")
    hashes = []
    for start in range(0, len(row), page_size):
        before = sha256(before + row[start : start + page_size].tobytes()).digest()
        hashes.append(before)
    return hashes
