"""What verifications choose on a GPU: chosen and written without waiting, read in graphs, verified."""

import pytest
import torch
from servers import LOGGED, greedy
from test_gpu_decoding import EXACT, QUICK, VERIFIED
from test_gpu_packed import REPLAYS, accept_length, served
from test_gpu_uneven_heads import KEPT, TOKENS, context

from sglang_ext.mem_cache.compressed.layouts.pointers import Pointers
from sglang_ext.mem_cache.compressors import Part
from sglang_ext.mem_cache.compressors.catalogue import create

GUIDED = ("--kv-compressor", "verify-guided")


def test_choosing_and_writing_pointers_waits_for_no_device():
    method, (given, targets) = create("verify-guided"), context("cuda", 1)
    pointers = Pointers.for_pool(given.buffers, 1)
    held = targets[: pointers.packed_slots(KEPT)]

    def choose():
        (kept,) = method.select(given, [Part(0, TOKENS, KEPT)])
        pointers.write(given.buffers, kept, given.slots, held)
        return kept

    choose()
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 30)
    kept = choose()
    assert not torch.cuda.current_stream().query(), "the host waited for the device"
    expected = torch.stack([method.scores(given.layer(layer)) for layer in range(len(kept))])
    for layer, keys in enumerate(given.buffers.keys):
        assert torch.equal(pointers.read(keys, held, KEPT), given.slots[kept[layer]])
        # What kernel and PyTorch choose differs at most where scores are nearly equal.
        best = expected[layer].topk(KEPT, dim=-1).indices
        agreeing = (kept[layer][:, :, None] == best[:, None]).any(-1).float().mean()
        assert agreeing > 0.99


@pytest.mark.server
def test_drafts_through_pointers_run_in_graphs(launch, prompts):
    flags = ("--attention-backend", "flashinfer", *VERIFIED, *GUIDED)
    server = launch(*QUICK, *LOGGED, *flags, env=REPLAYS)
    assert accept_length(served(server, prompts)) > 2
    log = server.log.read_text(errors="replace")
    assert "capturing steps over compressed KV of --kv-compressor verify-guided" in log
    assert "cuda graph: True" in log and "mode=DECODE" in log


@pytest.mark.server
def test_in_deterministic_mode_answers_are_stocks_token_by_token(launch, prompts):
    expected = [r["output_ids"] for r in launch(*EXACT).ask_all(prompts, 1, **greedy(64))]
    server = launch(*EXACT, *VERIFIED, *GUIDED)
    for workers in (1, 4):
        found = server.ask_all(prompts, workers, **greedy(64))
        assert [r["output_ids"] for r in found] == expected
        assert accept_length(found) > 2
