"""Pages are named as SGLang names them, each over all tokens up to its end."""

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.utils import get_hash_str

from sglang_ext.managers.kv_transfer.progressive import page_codec
from sglang_ext.managers.kv_transfer.progressive.page_codec import page_ends


def page_hashes(tokens, page_size):
    return page_codec.page_hashes(tokens, page_ends(page_size, len(tokens)))


TOKENS = st.lists(st.integers(0, (1 << 32) - 1), max_size=40)


def test_hashes_are_sglangs():
    tokens = list(range(1000, 1010))
    try:
        named = get_hash_str(tokens, None, page_size=4)
    except RuntimeError as error:
        pytest.skip(f"SGLang's extension cannot be built here: {error}")
    assert [one.hex() for one in page_hashes(tokens, 4)] == named


def test_a_hash_chains_the_one_before():
    first, second = page_hashes([1, 2, 3], 2)
    assert first == sha256(bytes([1, 0, 0, 0, 2, 0, 0, 0])).digest() and second == sha256(first + bytes([3, 0, 0, 0])).digest()


@given(TOKENS, st.integers(1, 8), st.integers(0, 5))
def test_a_request_may_be_hashed_in_pieces(tokens, page_size, pages):
    whole, cut = page_hashes(tokens, page_size), pages * page_size
    if cut <= len(tokens):
        rest = page_codec.page_hashes(tokens, page_ends(page_size, len(tokens), cut), cut, page_size)
        assert page_hashes(tokens[:cut], page_size) + rest == whole


@given(TOKENS, st.integers(1, 8), st.data())
def test_another_token_changes_all_hashes_from_its_page_on(tokens, page_size, data):
    if tokens:
        place = data.draw(st.integers(0, len(tokens) - 1))
        changed = [*tokens[:place], tokens[place] ^ 1, *tokens[place + 1 :]]
        pairs = list(zip(page_hashes(tokens, page_size), page_hashes(changed, page_size)))
        assert [a == b for a, b in pairs] == [page < place // page_size for page in range(len(pairs))]
