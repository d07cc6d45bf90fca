"""Ragged attention over rows of the token table equals a dense float64 computation."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.layers.attention.torch_native import RaggedTorchNativeBackend
from sglang_ext.layers.forward import RaggedVerifyInput
from sglang_ext.platforms.torch_kernels import assign_req_to_token_pool, murmur_hash32


def dense(query, keys, values, scaling):
    """float64 causal attention of the last queries: [count, heads, dim]."""
    count, heads, _ = query.shape
    group = heads // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
    logits = torch.einsum("qhd,thd->hqt", query.double(), keys) * scaling
    length = keys.shape[0]
    visible = torch.arange(length)[None, :] <= torch.arange(length - count, length)[:, None]
    weights = logits.masked_fill(~visible, float("-inf")).softmax(-1)
    return torch.einsum("hqt,thd->qhd", weights, values)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=4),
    st.sampled_from([(4, 4), (4, 2), (4, 1)]),
)
@settings(max_examples=40, deadline=None)
def test_each_query_sees_its_prefix_and_itself(requests, heads):
    generator = torch.Generator().manual_seed(len(requests))
    query_heads, kv_heads = heads
    keys, values = (torch.randn(200, kv_heads, 8, generator=generator) for _ in "kv")
    table = torch.stack([torch.randperm(200, generator=generator) for _ in requests]).to(torch.int32)
    counts = torch.tensor([count for count, _ in requests])
    lengths = torch.tensor([count + prefix for count, prefix in requests])
    query = torch.randn(int(counts.sum()), query_heads, 8, generator=generator)
    output = torch.empty_like(query)
    backend = object.__new__(RaggedTorchNativeBackend)
    backend._run_sdpa_forward_extend(
        query, output, keys, values, table, torch.arange(len(requests)), lengths, lengths - counts,
        counts, scaling=0.3, enable_gqa=query_heads != kv_heads, causal=True,
    )
    start = 0
    for row, (count, prefix) in enumerate(requests):
        slots = table[row, : count + prefix].long()
        expected = dense(query[start : start + count], keys[slots], values[slots], 0.3)
        assert torch.allclose(output[start : start + count].double(), expected, atol=1e-5)
        start += count


def test_flashinfer_pointers_are_ragged():
    table = torch.arange(40, dtype=torch.int32).view(4, 10)
    views = RaggedVerifyInput(torch.tensor([3, 5]), torch.tensor([1, 4]), [1, 4])
    indices, kv, qo, mask = views.generate_attn_arg_prefill(torch.tensor([2, 0]), None, 0, table)
    assert indices.tolist() == [20, 21, 22, 0, 1, 2, 3, 4]
    assert kv.tolist() == [0, 3, 8] and qo.tolist() == [0, 1, 5] and mask is None


@given(
    st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=5), st.integers(0, 2**31 - 1)
)
@settings(deadline=None)
def test_hash_is_murmur3_of_seed_position_and_column(seeds, position):
    columns = torch.tensor([0, 1, 7, 49151])
    positions = torch.full((len(seeds),), position)
    found = murmur_hash32(torch.tensor(seeds, dtype=torch.uint64), positions, columns)
    for row, seed in enumerate(seeds):
        for column, value in zip(columns.tolist(), found[row].tolist()):
            words = (seed & 0xFFFFFFFF, seed >> 32, position, column)
            assert value == murmur3(b"".join(word.to_bytes(4, "little") for word in words))


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, after its public description."""
    mask, h = 0xFFFFFFFF, 0
    rotate = lambda x, r: ((x << r) | (x >> (32 - r))) & mask  # noqa: E731
    for i in range(0, len(data), 4):
        k = int.from_bytes(data[i : i + 4], "little") * 0xCC9E2D51 & mask
        h = (rotate(h ^ (rotate(k, 15) * 0x1B873593 & mask), 13) * 5 + 0xE6546B64) & mask
    h ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> shift)) * factor & mask
    return h ^ (h >> 16)


def test_new_slots_are_written_to_their_rows():
    table = torch.zeros(3, 6, dtype=torch.int32)
    rows, starts, ends = (torch.tensor(x) for x in ([2, 0], [1, 0], [3, 3]))
    assign_req_to_token_pool(rows, table, starts, ends, torch.tensor([7, 8, 1, 2, 3]), 2)
    assert table.tolist() == [[1, 2, 3, 0, 0, 0], [0] * 6, [0, 7, 8, 0, 0, 0]]


@pytest.mark.parametrize(("top_k", "top_p", "expected"), [(1, 1.0, "greedy"), (1 << 30, 1.0, "plain"), (9, 1.0, "sorted"), (1 << 30, 0.9, "sorted")])
def test_each_request_takes_the_samplers_route_it_takes_alone(top_k, top_p, expected):
    from sglang_ext.managers.spec_decode.sampling import sampling_route

    params = SimpleNamespace(top_k=top_k, top_p=top_p, min_p=0)
    assert sampling_route(SimpleNamespace(sampling_params=params)) == expected
