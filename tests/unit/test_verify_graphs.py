"""Which captured verification a batch replays."""

from types import SimpleNamespace

import pytest

from sglang_ext.layers.attention.verify_graphs import VerifyGraphSet


@pytest.mark.parametrize(
    ("requests", "width", "expected"), [(4, 3, 5), (4, 5, 5), (4, 6, 17), (8, 17, 17), (4, 18, None), (9, 3, None)]
)
def test_the_narrowest_that_holds_the_batch_is_taken(requests, width, expected):
    graphs = [SimpleNamespace(width=w, fits=lambda requests: requests <= 8) for w in (17, 5)]
    found = VerifyGraphSet(graphs).fit(requests, width)
    assert (found and found.width) == expected
