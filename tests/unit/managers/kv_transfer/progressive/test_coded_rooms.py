"""Prompts that travel as codes: blocks arrive as the prefill server's copy would hold them, bit for bit, and the rest as it is."""

import random
from types import SimpleNamespace

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from link_helpers import SETTINGS
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError
from transfer_helpers import WatchedPool, make_pool, rows, settled
from waiting import until

from sglang_ext.config.disaggregation_options import quantized_transfer_settings
from sglang_ext.managers.kv_transfer import wire
from sglang_ext.managers.kv_transfer.progressive import handshakes
from sglang_ext.managers.kv_transfer.progressive.page_codec import PlacedPage
from sglang_ext.managers.kv_transfer.progressive.sender import MAX_PACKED_BYTES
from sglang_ext.managers.kv_transfer.quantized_transfer import QuantizedPrompt, QuantizedPromptCodec, QuantizedPromptSlots
from sglang_ext.managers.kv_transfer.wire import LinkError, Stream, settings_mismatch
from sglang_ext.mem_cache.compressed.compression_method import CompressionMethod
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressed.layouts.block_layout import token_seeds
from sglang_ext.mem_cache.compressors.catalogue import method

DIM = 64
METHODS = (("hack", 4, 64), ("hack", 2, 32), ("int4", None, None), ("kivi", 2, None), ("turboquant", None, None))


def pool_of(seed, dtype=torch.float32):
    """A pool, and the same by KV heads."""
    pool = make_pool(dtype, seed=seed, key_dim=DIM, value_dim=DIM, kind=WatchedPool)
    keys, values = (tuple(each.view(len(each), -1, DIM) for each in kind) for kind in (pool.keys, pool.values))
    return pool, KVBuffers((0, 1), (1.0, 1.0), keys, values)


def packing_of(buffers, name="hack", bits=4, partition=None, page_size=1):
    return Packing.for_pool(method(name, bits, partition).quantizer, buffers, page_size)


def some(count, seed, taken=()):
    """So many slots in no order, of the upper half where the lower is taken."""
    return torch.tensor(random.Random(seed).sample(sorted(set(range(64, 1024)) - set(taken)), count))


def copied(packing, buffers, slots, begin, end, seeds):
    """Slots, in the same pool, of the blocks that a copy on one server holds."""
    targets = some(packing.packed_slots(end - begin), 99, slots.tolist())
    kept = torch.arange(begin, end).expand(len(buffers.keys), buffers.keys[0].shape[1], -1)
    packing.write(buffers, kept, slots, targets, seeds)
    return targets


@pytest.mark.parametrize("named", METHODS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_are_those_of_a_copy_on_one_server_and_other_tokens_are_exact(named, dtype):
    source, here = pool_of(1, dtype)
    target, there = pool_of(2, dtype)
    packing, prompt = packing_of(here, *named), list(range(400))
    begin, end = packing.sinks, packing.sinks + 256
    slots, seeds = some(400, 3), token_seeds(prompt, 400, torch.device("cpu")) if packing.stochastic else None
    sent = QuantizedPromptCodec(source, packing, here, begin, end, 64, seeds)
    received = QuantizedPromptCodec(target, packing, there, begin, end, 64)
    blocks, exact = some(packing.packed_slots(end - begin), 4), some(400, 5)
    exact = exact[~torch.isin(exact, blocks)]
    where = QuantizedPromptSlots(packing, there, begin, end, exact[:begin], blocks, exact[begin : begin + 400 - end])
    ends, sizes = sent.ends(400), []
    for start, stop in zip([0, *ends], ends):
        part = sent.encode(PlacedPage(start, slots[start:stop])).anchor
        sizes.append(len(part))
        assert len(part) <= sent.most_bytes(Stream.ANCHOR)
        received.write_anchor(PlacedPage(start, where.slots(start, stop)), part)
    assert torch.equal(rows(target, where.sinks), rows(source, slots[:begin]))
    assert torch.equal(rows(target, where.tail), rows(source, slots[end:]))
    # Last, as it writes to the source.
    assert torch.equal(rows(target, blocks), rows(source, copied(packing, here, slots, begin, end, seeds)))
    # Nothing that fills up cells travels.
    assert sum(sizes) == (400 - 256) * source.bytes_per_token + 4 * 256 // packing.block_tokens * (
        packing.keys.block_bytes + packing.values.block_bytes
    )


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 700), blocks=st.integers(1, 8), begin=st.sampled_from([0, 4, 16, 64, 256]),
    size=st.sampled_from([64, 128, 192, 256]), partition=st.sampled_from([32, 64]),
)
def test_pages_tile_the_prompt_and_none_reaches_over_a_bound_of_the_codes(tokens, blocks, begin, size, partition):
    pool, buffers = pool_of(0)
    packing = packing_of(buffers, partition=partition)
    codec = QuantizedPromptCodec(pool, packing, buffers, begin, begin + blocks * packing.block_tokens, size)
    if tokens < codec.end:
        with pytest.raises(LinkError, match=f"up to {codec.end} are to be quantized, of a prompt of {tokens}"):
            codec.ends(tokens)
        return
    ends = codec.ends(tokens)
    pages = list(zip([0, *ends], ends))
    assert ends[-1] == tokens and all(start < end for start, end in pages)
    for start, end in pages:
        assert end - start <= max(size, packing.block_tokens)
        assert end <= begin or start >= codec.end or begin <= start < end <= codec.end and (end - start) % packing.block_tokens == 0


@pytest.mark.parametrize(("begin", "end"), [(4, 4), (4, 60), (68, 4), (4, 69)])
def test_tokens_that_are_no_whole_blocks_are_refused(begin, end):
    pool, buffers = pool_of(0)
    with pytest.raises(LinkError, match=f"tokens {begin} to {end} of a prompt are to be quantized; blocks hold 64 tokens each"):
        QuantizedPromptCodec(pool, packing_of(buffers), buffers, begin, end)


def test_a_page_of_another_length_and_a_residual_are_refused():
    pool, buffers = pool_of(0)
    packing = packing_of(buffers)
    codec = QuantizedPromptCodec(pool, packing, buffers, 4, 68)
    with pytest.raises(LinkError, match="a page of 1 blocks of 64 tokens has 3 bytes; expected are "):
        codec.write_anchor(PlacedPage(4, some(packing.block_slots, 1)), memoryview(b"abc"))
    with pytest.raises(LinkError, match="no residuals"):
        codec.write_residual(PlacedPage(4, some(packing.block_slots, 1)), memoryview(b""), memoryview(b"abc"))


def test_a_prompts_slots_are_those_of_its_copy_and_of_the_tokens_after_it_in_whole_pages():
    _, buffers = pool_of(0)
    packing = packing_of(buffers, page_size=16)
    made = CompressionMethod(method("hack").compressor, 1.0, packing, "hack", "hack")
    prompt = QuantizedPrompt(made, 500, made.covered(500))
    assert prompt.covered == 16 + 7 * 64 and packing.packed_slots(448) == 7 * packing.block_slots
    # Tokens after what is covered: 36, in 3 pages.
    assert prompt.held == 16 + packing.held_slots(448) and prompt.slots == prompt.held + 48
    assert prompt.slots % 16 == 0 and prompt.slots < 500


class Coded:
    """A prefill and a decode side, and a prompt of which tokens travel as codes."""

    def __init__(self, servers, tokens, blocks=4):
        (source, self.here), (target, there) = pool_of(1), pool_of(2)
        self.packing = packing = packing_of(self.here)
        self.prompt, begin, end = list(range(tokens)), packing.sinks, packing.sinks + blocks * packing.block_tokens
        taken = some(tokens + packing.packed_slots(end - begin), 6)
        where = taken.split([begin, packing.packed_slots(end - begin), len(taken) - begin - packing.packed_slots(end - begin)])
        self.where = QuantizedPromptSlots(packing, there, begin, end, *where)
        self.both = servers("raw", pools=(source, target))
        self.both.packs, self.both.coded = (packing, self.here), self.where

        pages = random.Random(3).sample(range(4, 64), -(-tokens // 16))
        self.slots = (torch.tensor(pages)[:, None] * 16 + torch.arange(16)).flatten()[:tokens]

    def receiver(self):
        """That of a request that has slots."""
        receiver = self.both.receiver(7, self.prompt)
        receiver.send_metadata(torch.arange(-(-len(self.prompt) // 16)).numpy(), 5)
        return receiver

    def begin(self, chunks=(), sender=None):
        """Sends the prompt, page by page of SGLang's 16 tokens; both ends."""
        tokens, pages = len(self.prompt), -(-len(self.prompt) // 16)
        receiver, sender = self.receiver(), sender or self.both.sender(7, self.prompt)
        sender.poll()
        sender.init(pages, 3)
        before = 0
        for after in (*chunks, pages):
            last = after == pages
            those = (self.slots[before * 16 : after * 16 : 16] // 16).numpy()
            sender.send(those, num_kv_tokens=(tokens if last else after * 16) - before * 16)
            before = after
        return sender, receiver


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=st.integers(260, 500), chunks=st.sets(st.integers(1, 16), max_size=4))
def test_a_prompt_arrives_as_codes_in_any_chunks(servers, tokens, chunks):
    made, received = Coded(servers, tokens), {}
    made.both.decode.timeline = SimpleNamespace(add_event=lambda room, kind, number: received.update({kind: number}))
    sender, receiver = made.begin(sorted(chunks))
    until(lambda: settled(sender) and settled(receiver))
    assert (sender.poll(), receiver.poll()) == (KVPoll.Success, KVPoll.Success)
    source, target, where = made.both.prefill.pool, made.both.decode.pool, made.where
    tail = where.tail[: tokens - where.end]
    assert torch.equal(rows(target, where.sinks), rows(source, made.slots[: where.begin]))
    assert torch.equal(rows(target, tail), rows(source, made.slots[where.end :]))
    seeds = token_seeds(made.prompt, tokens, torch.device("cpu"))
    targets = copied(made.packing, made.here, made.slots, where.begin, where.end, seeds)
    assert torch.equal(rows(target, where.blocks), rows(source, targets))
    # Of 2 layers with 2 heads of 64 channels in float32, some 5 numbers to one.
    assert received["complete"] < 0.2 * 256 * source.bytes_per_token + (tokens - 256) * source.bytes_per_token
    made.both.close()


def test_slots_for_codes_are_there_before_the_prefill_server_is_asked(servers):
    made, waits = Coded(servers, 300), []
    made.both.prefill.pool.watch(waits.append)
    made.both.decode.pool.watch(lambda kind: waits.append((kind, len(made.both.decode.said))))
    made.receiver()
    assert waits == [("all", 0)] and made.both.decode.said, "threads of links read them on another stream"


def test_a_prefill_server_that_packs_nothing_says_so(servers):
    made = Coded(servers, 300)
    made.both.packs = None
    sender, receiver = made.begin()
    until(lambda: settled(sender) and settled(receiver))
    for end in (sender, receiver):
        with pytest.raises(KVTransferError, match="tokens 4 to 260 as quantized KV, which this server cannot send"):
            end.failure_exception()


def test_a_prompt_that_was_packed_before_its_decode_side_had_room_arrives_though_its_slots_are_others_now(servers):
    made = Coded(servers, 300)
    source = made.both.prefill.pool
    sender = made.both.sender(7, made.prompt)
    assert sender.pack_early(made.where.begin, made.where.end, made.slots) and sender.is_waiting_packed
    assert made.both.prefill.packed_bytes > 0
    tail, seeds = rows(source, made.slots[made.where.end :]), token_seeds(made.prompt, 300, torch.device("cpu"))
    blocks = rows(source, copied(made.packing, made.here, made.slots, made.where.begin, made.where.end, seeds))
    for each in source.tensors:
        each.zero_()
    sender, receiver = made.begin(sender=sender)
    until(lambda: settled(sender) and settled(receiver))
    assert (sender.poll(), receiver.poll()) == (KVPoll.Success, KVPoll.Success)
    target = made.both.decode.pool
    assert torch.equal(rows(target, made.where.blocks), blocks) and torch.equal(rows(target, made.where.tail[: len(tail)]), tail)
    assert made.both.prefill.packed_bytes == 0 and not sender.is_waiting_packed


def test_a_prompt_that_was_packed_otherwise_than_asked_for_fails_by_name_and_waits_no_more(servers):
    made = Coded(servers, 300)
    sender = made.both.sender(7, made.prompt)
    assert sender.pack_early(made.where.begin, made.where.end - 64, made.slots)
    sender, receiver = made.begin(sender=sender)
    until(lambda: settled(sender) and settled(receiver))
    with pytest.raises(KVTransferError, match="tokens 4 to 196 of the prompt are packed, and .* asks for 4 to 260: give both"):
        sender.failure_exception()
    assert receiver.poll() == KVPoll.Failed and made.both.prefill.packed_bytes == 0


def test_no_more_is_packed_ahead_than_may_wait_and_an_abort_gives_it_back(servers):
    made = Coded(servers, 300)
    sender, other = (made.both.sender(room, made.prompt) for room in (7, 8))
    assert sender.pack_early(made.where.begin, made.where.end, made.slots)
    # Prompts of other requests take the rest of what may wait.
    others = MAX_PACKED_BYTES - made.both.prefill.packed_bytes
    made.both.prefill.packed_bytes += others
    assert not other.pack_early(made.where.begin, made.where.end, made.slots) and not other.is_waiting_packed
    sender.abort()
    # SGLang looks at aborted requests once more.
    assert not sender.pack_early(made.where.begin, made.where.end, made.slots)
    assert made.both.prefill.packed_bytes == others and other.pack_early(made.where.begin, made.where.end, made.slots)


def test_codes_beyond_the_prompt_are_refused_by_the_prefill_server(servers):
    made = Coded(servers, 300)
    decode, sender = made.both.decode, made.both.sender(7, made.prompt)
    here = decode.links.endpoint, wire.encode(decode.settings), (*decode.aux.sizes, 0)
    sender.on_metadata(handshakes.RoomMetadata(handshakes.CONTROL_VERSION, 7, "h", 4, *here, 0, 300, 1, (4, 4 + 64 * 9)))
    sender.init(19, 3)
    with pytest.raises(KVTransferError, match="up to 580 are to be quantized, of a prompt of 300"):
        sender.failure_exception()


def flags(**changed):
    """Of a server whose prompts travel as codes."""
    given = {
        "disaggregation_mode": "decode", "disaggregation_transfer_backend": "progressive", "kv_mode": "lossy", "kv_compressor": "hack",
        "kv_more_compressors": None, "kv_budget": 1, "kv_bits": None, "kv_partition": None, "kv_prefill": "exact", "kv_bench_codec": None,
        "enable_deterministic_inference": False, "device": "cpu",
    }  # fmt: skip
    return SimpleNamespace(**given | changed)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"kv_partition": 32}, "codes.partition: "), ({"kv_bits": 2}, "codes.bits: "), ({"kv_prefill": "quantized"}, "codes.prefill: "),
        ({"kv_compressor": "int4"}, "codes.method, codes.partition: "), ({"kv_mode": "verified"}, "codes.bits, codes.block, codes.method"),
    ],
    ids=str,
)  # fmt: skip
def test_a_peer_that_packs_otherwise_is_refused_by_name(changed, named):
    ours, theirs = (msgspec.structs.replace(SETTINGS, codec_options=quantized_transfer_settings(each)) for each in (flags(), flags(**changed)))
    told = settings_mismatch(ours, theirs)
    first = named.rstrip(": ").split(", ")[0]
    assert f"'{first}': {quantized_transfer_settings(flags())[first]!r}" in told and named in told and "--kv-partition" in told
    assert settings_mismatch(ours, ours) is None


def test_an_unknown_partition_is_refused_by_name():
    ours = msgspec.structs.replace(SETTINGS, codec_options=quantized_transfer_settings(flags()))
    theirs = msgspec.structs.replace(ours, codec_options=ours.codec_options | {"codes.partition": 48})
    assert "'codes.partition': 48" in settings_mismatch(ours, theirs) and "; codes.partition: give both servers" in settings_mismatch(ours, theirs)


@pytest.mark.parametrize(
    "changed",
    [
        {"kv_mode": "verified"}, {"kv_compressor": "snapkv", "kv_budget": 0.25}, {"kv_compressor": "snapkv+hack", "kv_budget": 0.25},
        {"disaggregation_transfer_backend": "mooncake"}, {"disaggregation_mode": "null"}, {"kv_bench_codec": "package.module:Codec"},
        {"enable_deterministic_inference": True, "device": "cuda"},
    ],
    ids=str,
)  # fmt: skip
def test_other_servers_prompts_travel_as_they_are(changed):
    assert quantized_transfer_settings(flags()) and not quantized_transfer_settings(flags(**changed))
