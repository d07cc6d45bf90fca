"""Tokens chosen on a second stream of a GPU while steps run in graphs: nothing waits, nothing is read while it is written, and answers
that are verified are stock's."""

from collections import Counter
from itertools import takewhile
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from choose_checks import Asked, check_chosen
from servers import LOGGED, greedy
from test_gpu_decoding import DRAFTS, EXACT, QUICK
from test_gpu_packed import REPLAYS, accept_length, served

from sglang_ext_bench.soaking.soak import server_environment
from sglang_ext.mem_cache.prefix_cache.segments import CompressedKV
from sglang_ext.device import SideStream
from sglang_ext.mem_cache.compressed.async_selector import StreamSelector
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.queries import QueryWindows, RecordedRows
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.mem_cache.compressors.step_selectors import Spade
from sglang_ext.mem_cache.selection.on_gpu import GpuSelector
from sglang_ext.mem_cache.selection.predictors import CurrentQuery, RegressedQuery

LAYERS, HEADS, GROUP, DIM = 3, 2, 2, 16
SPADE = ("--attention-backend", "flashinfer", "--kv-compressor", "spade", "--enable-metrics")
LOSSY = ("--kv-mode", "lossy", *SPADE)
VERIFIED = ("--kv-mode", "verified", "--kv-budget", "0.25", *DRAFTS)
CHOICES = 'sglang_ext:copies_total{compressor="spade"'
PREDICTORS = pytest.mark.parametrize("predictor", [CurrentQuery(), RegressedQuery()], ids=lambda each: each.name)


class OnGpu:
    """Two requests with copies, each with its choices beside steps, and what its steps' queries choose."""

    def __init__(self, predictor, every):
        # Half of the targets are spare.
        self.asked = Asked(LAYERS, HEADS, GROUP, DIM, torch.float32, (130, 150), (96, 128), (4, 32))
        self.counts, self.predictor, self.every, self.windows = (48, 64), predictor, every, {}
        there = self.asked.buffers
        keys, values = (tuple(part.cuda() for part in kind) for kind in (there.keys, there.values))
        self.buffers = KVBuffers(there.layer_ids, there.scaling, keys, values)
        self.rotary = Rotary(1 / 10 ** torch.arange(DIM // 2))
        table = torch.cat([self.asked.table, torch.zeros_like(self.asked.table)]).cuda()
        self.rows, copies = self.asked.rows.tolist(), {}
        for row, count, length, slots in zip(self.rows, self.counts, self.asked.lengths, self.asked.targets.split(self.asked.held)):
            own, spare = slots.cuda().chunk(2)
            view = CompressedKV(own, length, own_tokens=count, own_packed=len(own), back_slots=spare, method="spade")
            copies[row] = view
        self.compressed_kv = SimpleNamespace(get=copies.get, draft_row=lambda row: row + 4, num_compressions=Counter())
        spade = Spade(predictor, every=every, each_round=False)
        self.queries = QueryWindows(spade.window, range(LAYERS), every)
        self.queries.allocate(2, HEADS * GROUP, DIM, keys[0][:0])
        choice = GpuSelector(predictor, self.buffers, HEADS * GROUP, Rotary(self.rotary.frequencies.cuda()))
        self.beside = StreamSelector(SimpleNamespace(compressor=spade, packing=self.asked.pointers), table, choice, self.queries)
        self.table = table

    def step(self, number):
        """Of both requests; some time later its queries are there."""
        queries = torch.randn(LAYERS, 2, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(number)) * 3
        torch.cuda._sleep(2_000_000)
        rows = tuple(RecordedRows(row, i, i + 1, length + number) for i, (row, length) in enumerate(zip(self.rows, self.asked.lengths)))
        with self.queries.recording(rows):
            for layer in range(LAYERS):
                self.queries.record(layer, queries[layer].cuda(non_blocking=True))
        for i, row in enumerate(self.rows):
            self.windows.setdefault(row, []).append(queries[:, i])
        self.beside.on_step_end(self.compressed_kv, {row: length + number + 1 for row, length in zip(self.rows, self.asked.lengths)}, None)

    def check(self, taken):
        """Copies lead to what the queries of the first ``taken`` steps choose."""
        for i, (row, count, length) in enumerate(zip(self.rows, self.counts, self.asked.lengths)):
            window = torch.stack(self.windows[row][:taken][-self.predictor.window :])
            positions = torch.arange(length + taken - len(window), length + taken)[None]
            self.asked.queries[i] = self.predictor.predict(window.permute(1, 2, 0, 3)[None], positions, self.rotary, self.every + 1)[0]
            own = self.compressed_kv.get(row).own
            assert torch.equal(self.table[row + 4, : len(own)].long(), own)
            for layer in range(LAYERS):
                led = self.asked.pointers.read(self.buffers.keys[layer], own, count).cpu()
                context, scores = self.asked.table[row, :length].long(), self.asked.scores(i, layer)
                for head in range(HEADS):
                    kept = (led[head][:, None] == context).int().argmax(1)
                    assert torch.equal(context[kept], led[head])
                    check_chosen(kept, scores[head], count, 2e-2, (row, layer, head))


@PREDICTORS
@pytest.mark.parametrize("every", [1, 3])
def test_steps_and_choices_run_beside_each_other_and_each_reads_what_was_there(predictor, every):
    there = OnGpu(predictor, every)
    for number in range(8 * every):
        there.step(number)
    torch.cuda.synchronize()
    there.check(7 * every)
    assert there.compressed_kv.num_compressions["spade"] == 2 * 7


@PREDICTORS
def test_the_host_waits_for_no_choice(predictor):
    there = OnGpu(predictor, 1)
    for number in range(20):
        there.step(number)
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 30)
    for number in range(20, 24):
        there.step(number)
    assert not torch.cuda.current_stream().query(), "the host waited for the device"
    torch.cuda.synchronize()
    there.check(23)


def test_what_a_second_stream_reads_is_nobody_elses_until_it_is_done():
    side, read = SideStream(torch.device("cuda")), torch.full((1 << 20,), 7, device="cuda")
    seen = torch.zeros_like(read)

    def work(given=read):
        torch.cuda._sleep(1 << 28)
        seen.copy_(given)

    done = side.launch(work, (read, seen))
    del read, work
    # As large as what was dropped, of which nobody waited for the end.
    others = [torch.full((1 << 20,), 9, device="cuda") for _ in range(8)]
    side.wait(done)
    assert seen.unique().tolist() == [7] and all(bool((other == 9).all()) for other in others)


@pytest.mark.server
@pytest.mark.parametrize("select_by", ["current", "regressed"])
def test_lossy_steps_in_graphs_leave_queries_that_choose(launch, prompts, select_by):
    flags = *QUICK, *LOGGED, *LOSSY, "--kv-select", "0.25", "--kv-select-by", select_by
    server = launch(*flags, env=REPLAYS | server_environment(None))
    answers = served(server, prompts)
    log = server.log.read_text(errors="replace")
    assert "capturing steps over compressed KV of --kv-compressor verify-guided or spade" in log
    assert "cuda graph: True" in log and "mode=DECODE" in log
    # One when a copy is made, and one after each step but those of the first rounds, whose copies the prefix tree's prompts replace.
    assert server.metric(CHOICES) > len(answers) * 40


@pytest.mark.server
def test_a_short_prompt_is_read_sparsely_once_its_answer_is_long(launch, prompts):
    server = launch(*QUICK, *LOSSY, "--kv-select", "64", "--kv-select-every", "2", "--kv-sparse-from", "200", env=server_environment(None))
    (answer,) = server.ask_all([prompts[0][:50]], 1, **greedy(260))
    assert answer["meta_info"]["kv_fallback"] is None and answer["meta_info"]["kv_compressor"] == "spade"
    # Of the last 110 tokens, one of two has a choice.
    assert 40 < server.metric(CHOICES) < 60


def apart(found, expected):
    """By how much log-probabilities of tokens differ in the mean, from each answer's second token, which a step gives, to the first that
    is another; those of few tokens would say nothing."""
    differences = []
    for one, other in zip(found, expected):
        pairs = zip(one["meta_info"]["output_token_logprobs"], other["meta_info"]["output_token_logprobs"])
        alike = list(takewhile(lambda pair: pair[0][1] == pair[1][1], pairs))
        differences += [abs(a[0] - b[0]) for a, b in alike[1:]]
    assert len(differences) >= len(expected)
    return fmean(differences)


@pytest.mark.server
def test_who_reads_all_tokens_answers_as_full_kv_does_beside_who_reads_few(launch, prompts):
    # In bfloat16 no answer need be stock's to its end: softmax is added up in another order, and batches are others.
    texts, asked = [prompt[: len(prompt) - cut] for prompt in prompts for cut in (0, 9, 18, 27)], {"return_logprob": True, **greedy(8)}
    stock = launch(*QUICK, "--attention-backend", "flashinfer")
    expected, again = (stock.ask_all(texts, workers, **asked) for workers in (1, 4))
    near = 2 * apart(again, expected) + 0.02
    every_token = launch(*QUICK, *LOSSY, "--kv-select", "1.0", env=server_environment(None))
    for workers in (1, 4):
        found = every_token.ask_all(texts, workers, **asked)
        assert {(r["meta_info"]["kv_fallback"], r["meta_info"]["kv_compressor"]) for r in found} == {(None, "spade")}
        assert apart(found, expected) <= near
    mixed = launch(*QUICK, *LOSSY, "--kv-select", "48", "--kv-sparse-from", "500", env=server_environment(None))
    found = mixed.ask_all(texts, 4, **asked)
    dense, sparse = ([i for i, text in enumerate(texts) if (len(text) < 490) == short] for short in (True, False))
    assert {found[i]["meta_info"]["kv_fallback"] for i in dense} == {"short-context"}
    assert {found[i]["meta_info"]["kv_fallback"] for i in sparse} == {None}
    of_dense, of_sparse = (apart([found[i] for i in some], [expected[i] for i in some]) for some in (dense, sparse))
    # In float32 64 tokens differ by .14 to .19, where nothing else does.
    assert of_dense <= near < of_sparse


@pytest.mark.server
@pytest.mark.parametrize("bits", ["8", "4"])
def test_steps_choose_by_codes_that_forwards_make(launch, prompts, bits):
    texts, asked = [prompt[: len(prompt) - cut] for prompt in prompts for cut in (0, 9, 18, 27)], {"return_logprob": True, **greedy(24)}
    stock = launch(*QUICK, "--attention-backend", "flashinfer")
    expected, again = (stock.ask_all(texts, workers, **asked) for workers in (1, 4))
    noise = apart(again, expected) + 0.01
    flags = *QUICK, *LOGGED, *LOSSY, "--kv-select", "64"
    exact = launch(*flags, env=REPLAYS | server_environment(None)).ask_all(texts, 4, **asked)
    server = launch(*flags, "--kv-score-bits", bits, env=REPLAYS | server_environment(None))
    assert "keys in few bits" in server.log.read_text(errors="replace") and server.metric("sglang_ext:key_code_bytes") > 0
    # From an empty prefix cache, then by its hits, whose codes others made, beside slots that are used again.
    for cold in (True, False):
        found = server.ask_all(texts, 4, cold=cold, **asked)
        assert {(r["meta_info"]["kv_fallback"], r["meta_info"]["kv_compressor"]) for r in found} == {(None, "spade")}
        # Nearer to what is chosen by the keys themselves than that is to all tokens: codes of others would choose anything.
        assert apart(found, exact) < max(0.75 * apart(exact, expected), 2 * noise)


@pytest.mark.server
def test_verified_answers_in_deterministic_mode_are_stocks_token_by_token(launch, prompts):
    expected = [r["output_ids"] for r in launch(*EXACT).ask_all(prompts, 1, **greedy(64))]
    server = launch(*EXACT, *VERIFIED, "--kv-compressor", "spade", "--kv-select-every", "1", "--enable-metrics", env=server_environment(None))
    for workers in (1, 4):
        found = server.ask_all(prompts, workers, **greedy(64))
        assert [r["output_ids"] for r in found] == expected
        assert accept_length(found) > 2
    # More than one for each round.
    assert server.metric(CHOICES) > 4 * sum(r["meta_info"]["kv_verifies"] for r in found)


@pytest.mark.server
def test_requests_come_and_go_and_are_retracted_while_choices_are_under_way(launch, prompts):
    flags = *QUICK, *LOSSY, "--kv-select", "0.25", "--kv-select-every", "2"
    server = launch(*flags, env=server_environment(retraction_steps=5))
    for _ in range(2):
        found = server.ask_all(prompts * 6, 12, **greedy(40))
        assert all(len(r["output_ids"]) == 40 for r in found)
    assert sum(r["meta_info"]["num_retractions"] for r in found) > 0
