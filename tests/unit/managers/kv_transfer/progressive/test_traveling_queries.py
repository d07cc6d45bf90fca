"""The newest queries of a prompt go to the decode server, where compressors choose by them as if the prompt had been prefilled there."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.disaggregation.base.conn import KVPoll
from transfer_helpers import ROW, settled, transfer
from waiting import until

from sglang_ext.managers.kv_transfer.progressive.rooms import PromptQueries
from sglang_ext.managers.kv_transfer.wire import LinkError
from sglang_ext.mem_cache.compressed.queries import QueryWindows, RecordedRows

LAYERS, HEADS, DIM = (4, 9), 2, 8


def traveling(window=6, dtype=torch.float32, heads=HEADS, rings=2):
    windows = QueryWindows(window, LAYERS, extra_queries=3)
    windows.allocate(rings, heads, DIM, torch.empty(0, dtype=dtype))
    return PromptQueries(windows, (len(LAYERS), heads, DIM), dtype)


def prefilled(made, tokens, row=1, seed=0):
    """What a prefill of so many tokens leaves in a row's ring; the queries, [layers, tokens, heads, dim]."""
    pool_dtype = made.dtype
    queries = torch.randn(len(LAYERS), tokens, made.shape[1], DIM, generator=torch.Generator().manual_seed(seed)).to(pool_dtype)
    with made.windows.recording((RecordedRows(row, 0, tokens, 0),)):
        for layer, values in zip(LAYERS, queries):
            made.windows.record(layer, values)
    return queries


@given(st.integers(1, 600), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 9), st.integers(1, 9))
def test_what_was_read_is_kept_as_far_as_both_sides_want(tokens, dtype, theirs, ours):
    sent, kept = traveling(theirs, dtype), traveling(ours, dtype)
    queries = prefilled(sent, tokens)
    kept.write(ROW, sent.read(1, tokens, kept.most_bytes))
    found, positions = kept.windows.get(ROW, tokens, 100)
    count = min(tokens, theirs, ours)
    assert positions.tolist() == list(range(tokens - count, tokens))
    assert torch.equal(found, queries[:, -count:])


def test_what_a_former_request_in_the_row_left_is_forgotten():
    sent, kept = traveling(window=2), traveling(window=6)
    prefilled(kept, 5, row=ROW)
    prefilled(sent, 30)
    kept.write(ROW, sent.read(1, 30, kept.most_bytes))
    assert kept.windows.get(ROW, 30, 6)[1].tolist() == [28, 29] and kept.windows.taken == 1


def test_nothing_travels_where_nothing_is_kept_wanted_or_of_the_newest_token():
    sent, none = traveling(), traveling(window=0)
    assert none.most_bytes == 0 and sent.read(1, 10, sent.most_bytes) == b""
    prefilled(sent, 10)
    assert sent.read(1, 11, sent.most_bytes) == sent.read(1, 10, 0) == b""
    none.write(ROW, sent.read(1, 10, sent.most_bytes))
    assert none.windows.newest(ROW) is None
    # No ring is left: the request waits for queries of its own.
    full = traveling(rings=0)
    full.write(ROW, sent.read(1, 10, sent.most_bytes))
    assert full.windows.newest(ROW) is None


def test_queries_of_another_model_dtype_or_length_are_refused_by_name():
    sent = traveling()
    prefilled(sent, 10)
    data = sent.read(1, 10, sent.most_bytes)
    for other in (traveling(dtype=torch.bfloat16), traveling(heads=1)):
        with pytest.raises(LinkError, match="at the sender and .* at the receiver; give both servers the same --dtype"):
            other.parse(data)
    with pytest.raises(LinkError, match="have 383 bytes; expected are 128 per token, of 6 at most"):
        sent.parse(data[:-385])
    with pytest.raises(LinkError, match="not of this version"):
        sent.parse(b"\xff" * len(data))


@pytest.mark.parametrize("wanted", [True, False])
def test_they_arrive_with_the_record_and_are_there_when_the_request_begins(servers, wanted):
    both, sent, kept = servers("exact"), traveling(), traveling()
    queries = prefilled(sent, 200)
    both.read = lambda most: sent.read(1, 200, most)
    both.traveling = kept if wanted else None
    sender, receiver, _, _ = transfer(both, 7, list(range(200)))
    until(lambda: settled(sender) and settled(receiver))
    assert (sender.poll(), receiver.poll()) == (KVPoll.Success, KVPoll.Success)
    assert torch.equal(both.decode.pool.args.aux[0][5], both.prefill.pool.args.aux[0][3])
    receiver.clear()
    found = kept.windows.get(ROW, 200, 6)
    assert (found is not None) == wanted
    if wanted:
        assert torch.equal(found[0], queries[:, -6:])


def test_a_room_whose_queries_are_of_another_model_fails_on_both_sides(servers):
    both, sent = servers("exact"), traveling(dtype=torch.bfloat16)
    prefilled(sent, 200)
    both.read, both.traveling = lambda most: sent.read(1, 200, most), traveling()
    sender, receiver, _, _ = transfer(both, 7, list(range(200)))
    until(lambda: settled(receiver))
    assert receiver.poll() == KVPoll.Failed and both.decode.prefill is both.prefill
    assert "same --dtype" in both.decode.failure_records[receiver.bootstrap_room]
