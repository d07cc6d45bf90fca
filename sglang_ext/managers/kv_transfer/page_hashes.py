"""Hashes that identify a page of KV by the tokens up to its end."""

from collections.abc import Sequence
from hashlib import sha256

import numpy as np

# Bytes of a hash.
HASH_BYTES = 32


def page_hashes(tokens: Sequence[int], page_size: int, before: bytes = b"") -> list[bytes]:
    """Return a hash for each page: SHA-256 of the previous hash and the page's tokens, as 32-bit integers.

    They equal SGLang's names of HiCache pages (``sglang.srt.mem_cache.utils.get_hash_str``).

    Args:
        tokens: Token ids below 2^32.
        page_size: Tokens in a page; the last page may hold fewer.
        before: Hash of the page before the first one, 32 bytes; empty at the start of a request.

    Raises:
        ValueError: ``before`` or ``page_size`` is out of range.
    """
    if len(before) not in (0, HASH_BYTES) or page_size < 1:
        raise ValueError(f"page_hashes of pages of {page_size} tokens after {len(before)} bytes; pass at least 1, and 0 or {HASH_BYTES}")
    return page_hashes_at(tokens, page_ends(page_size, len(tokens)), before)


def page_hashes_at(tokens: Sequence[int], ends: Sequence[int], before: bytes = b"") -> list[bytes]:
    """Return the hashes of pages that end at ``ends``, ascending. Each page begins where the previous one ends."""
    row = np.asarray(tokens, "<u4")
    hashes, start = [], 0
    for end in ends:
        before = sha256(before + row[start:end].tobytes()).digest()
        hashes.append(before)
        start = end
    return hashes


def page_ends(page_size: int, end: int, start: int = 0) -> list[int]:
    """Return the ends of pages of ``page_size`` tokens that cover ``start`` to ``end``. The last page may hold fewer tokens."""
    return [min(begin + page_size, end) for begin in range(start, end, page_size)]
