"""Copies whose heads keep different numbers of tokens on a GPU: chosen and written without waiting, read in graphs, verified."""

from types import SimpleNamespace

import pytest
import torch
from servers import LOGGED, greedy
from test_gpu_decoding import DRAFTS, EXACT, QUICK, VERIFIED
from test_gpu_packed import REPLAYS, accept_length, served

from sglang_ext.mem_cache.compressed.layouts.ragged_heads import RaggedHeadLayout
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressors import ContextKV, Part
from sglang_ext.mem_cache.compressors.catalogue import create
from sglang_ext.mem_cache.compressors.kvzip import KVzap, StoredScores

ADAPTIVE = ("--kv-compressor", "snapkv", "--kv-head-budgets", "adaptive")
LAYERS, HEADS, TOKENS, KEPT = 3, 2, 4096, 1024


def context(device, seed):
    """A context of random KV, and slots for a copy of it."""
    noise = torch.Generator().manual_seed(seed)
    keys, values = (
        tuple(torch.randn(6000, HEADS, 64, generator=noise).to(device, torch.bfloat16) for _ in range(LAYERS)) for _ in "kv"
    )
    queries = torch.randn(LAYERS, 32, 2 * HEADS, 64, generator=noise).to(device, torch.bfloat16)
    slots = torch.randperm(6000, generator=noise).to(device)
    buffers = KVBuffers(tuple(range(LAYERS)), (0.1,) * LAYERS, keys, values)
    positions = torch.arange(TOKENS - 32, TOKENS, device=device)
    return ContextKV(buffers, slots[:TOKENS], queries, positions), slots[TOKENS : TOKENS + KEPT]


def methods():
    """One of each that may keep different numbers; the document of the last ends within the context."""
    scores = torch.rand(LAYERS, HEADS, TOKENS, generator=torch.Generator().manual_seed(5))
    on_device = scores.cuda()
    predicted = KVzap(SimpleNamespace(read=lambda slots: on_device[..., : len(slots)].clone()))
    return create("snapkv"), predicted, StoredScores(scores[..., :3000].half(), create("snapkv"))


@pytest.mark.parametrize("kind", range(3), ids=["snapkv", "kvzap", "kvzip"])
def test_choosing_and_writing_a_copy_waits_for_no_device(kind):
    method, (given, targets) = methods()[kind], context("cuda", kind)
    cells, before = RaggedHeadLayout.of(given.buffers, 4), [buffer.clone() for buffer in (*given.buffers.keys, *given.buffers.values)]

    def compress():
        kept = method.select_ragged(given, Part(0, TOKENS, KEPT))
        cells.write(1, kept, given.slots, targets)
        return kept

    compress()
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 30)
    kept = compress()
    assert not torch.cuda.current_stream().query(), "the host waited for the device"
    bounds = cells.bounds[1].tolist()
    assert bounds == kept.bounds.tolist() and bounds[-1] == LAYERS * HEADS * KEPT
    assert len({last - first for first, last in zip(bounds, bounds[1:])}) > 1, "heads keep different numbers"
    for number, buffer in enumerate(before):
        layer, all_of = number % LAYERS, given.buffers.keys if number < LAYERS else given.buffers.values
        for head in range(HEADS):
            first, last = bounds[layer * HEADS + head :][:2]
            expected = buffer[given.slots[kept.tokens[first:last]], head]
            assert torch.equal(cells.read(all_of, targets, first, last), expected), (number, head)


@pytest.mark.server
@pytest.mark.parametrize("mode", ["verified", "lossy"])
def test_drafts_on_uneven_heads_run_in_graphs(launch, prompts, mode):
    flags = ("--attention-backend", "flashinfer", "--kv-mode", mode, "--kv-budget", "0.25", *DRAFTS, *ADAPTIVE)
    server = launch(*QUICK, *LOGGED, *flags, env=REPLAYS)
    answers = served(server, prompts)
    if mode == "verified":
        assert accept_length(answers) > 1.5
    log = server.log.read_text(errors="replace")
    assert "capturing steps over compressed KV of --kv-head-budgets adaptive" in log
    assert "cuda graph: True" in log and "mode=DECODE" in log


@pytest.mark.server
def test_in_deterministic_mode_answers_are_stocks_token_by_token(launch, prompts):
    expected = [r["output_ids"] for r in launch(*EXACT).ask_all(prompts, 1, **greedy(64))]
    server = launch(*EXACT, *VERIFIED, *ADAPTIVE)
    for workers in (1, 4):
        found = server.ask_all(prompts, workers, **greedy(64))
        assert [r["output_ids"] for r in found] == expected
        assert accept_length(found) > 1.5
