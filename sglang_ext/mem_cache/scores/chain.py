"""Names of token sequences by pages: the hash of each page covers all tokens before its end."""

from collections.abc import Iterator, Sequence
from hashlib import blake2b

import numpy as np

# Tokens of a page; a document is known to its last whole page.
PAGE = 16
# Bytes of a hash.
HASH_BYTES = 16


def chain(tokens: Sequence[int]) -> Iterator[bytes]:
    """Hashes of the whole pages of ``tokens``, the first page first; each is made when it is asked for."""
    digest = b""
    for end in range(PAGE, len(tokens) + 1, PAGE):
        page = np.asarray(tokens[end - PAGE : end], dtype="<i8")
        digest = blake2b(digest + page.tobytes(), digest_size=HASH_BYTES).digest()
        yield digest
