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
    return page_hashes_at(tokens, page_ends(page_size, len(tokens)), before)


def page_hashes_at(tokens: Sequence[int], ends: Sequence[int], before: bytes = b"") -> list[bytes]:
    """The same for pages that end at ``ends``, ascending, each of them where the next begins."""
    row = np.asarray(tokens, "<u4")
    hashes, start = [], 0
    for end in ends:
        before = sha256(before + row[start:end].tobytes()).digest()
        hashes.append(before)
        start = end
    return hashes


def page_ends(page_size: int, end: int, start: int = 0) -> list[int]:
    """Where pages of ``page_size`` tokens end that hold tokens from ``start`` to ``end``; the last one may hold fewer."""
    return [min(begin + page_size, end) for begin in range(start, end, page_size)]
