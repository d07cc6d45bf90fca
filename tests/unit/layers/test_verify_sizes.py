"""How verifications are divided: requests whose partial results fit the workspace, and tiles for GPUs with little shared memory."""

from dataclasses import replace

import pytest
import torch
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from sglang_ext.core import OptionError
from sglang_ext.layers.kernels import verify_attention as verifying
from sglang_ext.layers.kernels.verify_attention import EXACT, ContextSplits, VerifyTokens, tile_choices, fast_tile, request_groups, partial_buffers


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (99, [(0, 3, 0, 39)]),
        (39, [(0, 3, 0, 39)]),
        (38, [(0, 2, 0, 34), (2, 3, 34, 39)]),
        (33, [(0, 1, 0, 17), (1, 3, 17, 39)]),
        (17, [(0, 1, 0, 17), (1, 2, 17, 34), (2, 3, 34, 39)]),
    ],
)
def test_requests_go_together_as_long_as_all_of_their_tokens_fit(room, expected):
    assert list(request_groups((17, 17, 5), room)) == expected


def test_nobody_makes_no_group():
    assert list(request_groups((), 5)) == []


def test_smaller_tiles_of_a_decodes_arithmetic_differ_in_loads_ahead_alone():
    assert tile_choices(EXACT) == tuple(replace(EXACT, stages=stages) for stages in (2, 1))


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 48, 68, 129, 1000])
def test_others_end_with_the_smallest_tile_and_all_rows_are_computed_by_each(rows):
    tiles = tile_choices(fast_tile(rows, 256))
    assert (tiles[-1].rows, tiles[-1].more_rows, tiles[-1].tokens, tiles[-1].stages) == (16, 0, 16, 1)
    assert all(tile.rows >= 16 and tile.more_rows in (0, 16) for tile in tiles)


@pytest.mark.parametrize(
    ("blocks", "remedy"),
    [(EXACT, "leave --enable-deterministic-inference out"), (fast_tile(4, 128), "use --attention-backend flashinfer")],
)
def test_what_fits_no_gpu_is_refused_with_what_would_be_served(monkeypatch, blocks, remedy):
    def run(self, *given, **options):
        raise OutOfResources(120_000, 101_376, "shared memory")

    monkeypatch.setattr(JITFunction, "run", run)
    one, splits = torch.zeros(1, dtype=torch.int64), ContextSplits(1)
    tokens = VerifyTokens(one, one, torch.tensor([0, 1]), [1], torch.tensor([0, 1]), splits.count_for(one + 1))
    queries, buffer = torch.zeros(1, 4, 64), torch.zeros(2, 1, 64)
    table, room = torch.zeros(1, 2, dtype=torch.int32), partial_buffers(torch.zeros(4 * 65), 4, 64, splits)
    with pytest.raises(OptionError, match=f"verification with 64 channels .* takes 120000 of shared memory.*: {remedy}$"):
        verifying.verify_attention(queries, buffer, buffer, torch.zeros_like(queries), table, tokens, splits, blocks, room, 0.1)
