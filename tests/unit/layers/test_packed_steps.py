"""Which attention a forward takes where copies hold no plain tokens, and what of it exists before graphs are captured."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from packed_helpers import record_launches
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from sglang_ext.core import OptionError
from sglang_ext.layers import forward
from sglang_ext.layers.attention import decode_graphs
from sglang_ext.layers.attention.decode_backend import CompressedDecode, check_heads
from sglang_ext.layers.attention.decode_graphs import LAYOUT_READERS, create_attention
from sglang_ext.layers.attention.packed import PackedDecode
from sglang_ext.layers.attention.per_head import PagesDecode, PointerDecode, RaggedHeadsDecode
from sglang_ext.layers.forward import AttentionOverride, AttentionOverrides
from sglang_ext.managers.graph_capture import create_compressed_attention
from sglang_ext.managers.memory_plan import MemoryPlan
from sglang_ext.managers.served_methods import ServedMethods
from sglang_ext.managers.spec_decode.draft import StepRunner
from sglang_ext.managers.spec_decode.planner import RoundPlan
from sglang_ext.managers.worker import KVWorker
from sglang_ext.mem_cache.compressed import queries
from sglang_ext.mem_cache.compressed.layouts.base import PlainLayout
from sglang_ext.mem_cache.compressed.layouts.pointers import PagePointerLayout, PointerLayout
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import QuantizedLayout
from sglang_ext.mem_cache.compressed.layouts.ragged_heads import RaggedHeadLayout
from sglang_ext.mem_cache.compressed.queries import QueryWindows, set_key_write_callback
from sglang_ext.mem_cache.compressors.catalogue import method

VERIFIER, COPIES = AttentionOverride("verifier"), AttentionOverride("copies", graphs="over copies")


@pytest.mark.parametrize(
    ("counts", "on_full_kv", "expected"),
    [([1, 1], False, COPIES), ([1, 1], True, None), ([5, 5], True, VERIFIER), ([1, 5], False, VERIFIER)],
)
def test_one_token_over_copies_takes_the_attention_that_reads_them(counts, on_full_kv, expected):
    assert AttentionOverrides(VERIFIER, COPIES).select(counts, on_full_kv) is expected
    assert AttentionOverrides().select(counts, on_full_kv) is None


def runner():
    return SimpleNamespace(attn_backend="own", decode_cuda_graph_runner="own graphs")


def test_a_forward_replays_what_was_captured_with_its_attention():
    model = runner()
    with forward.use_attention(model, COPIES):
        assert (model.attn_backend, model.decode_cuda_graph_runner) == ("copies", "over copies")
    with pytest.raises(RuntimeError), forward.use_attention(model, VERIFIER):
        assert (model.attn_backend, model.decode_cuda_graph_runner) == ("verifier", None)
        raise RuntimeError
    with forward.use_attention(model, None):
        assert (model.attn_backend, model.decode_cuda_graph_runner) == ("own", "own graphs")
    assert vars(model) == vars(runner())


@pytest.mark.parametrize(("rows", "expected"), [([1, 10], COPIES), ([1, 2], None)], ids=["a copy", "none"])
@pytest.mark.parametrize("every", [0, 2])
@pytest.mark.parametrize("drafts", [3, 0], ids=["drafts", "plain steps"])
def test_all_steps_of_a_round_in_which_one_request_reads_a_copy_read_copies(rows, expected, drafts, every):
    taken, chosen, model = [], [], runner()
    output = SimpleNamespace(next_token_logits=None)
    model.server_args = SimpleNamespace(enable_lora=False)
    model.forward = lambda batch: taken.append((model.attn_backend, model.decode_cuda_graph_runner)) or SimpleNamespace(logits_output=output)
    without_queries = SimpleNamespace(compressor=SimpleNamespace(window=0, every=every, synchronous=False))
    compressed_kv = SimpleNamespace(
        token_table=torch.zeros(16, 40, dtype=torch.int32), mark_tail_written=lambda row, end: None, method=lambda row: without_queries,
        get=lambda row: None, reselect=lambda *asked: chosen.append(asked), async_selector=None, layout=PlainLayout(),
    )
    worker = SimpleNamespace(
        lossy=False,
        compressed_kv=compressed_kv, model_runner=model, attentions=AttentionOverrides(VERIFIER, COPIES), queries=QueryWindows(0, (0,), 0)
    )
    steps = StepRunner(worker)
    steps._step_sampler = lambda *_: SimpleNamespace(draw=lambda *_: SimpleNamespace(tokens=torch.zeros(2, dtype=torch.int64)))
    states = [SimpleNamespace(row=row, fallback=0) for row in (1, 2)]
    round_ = RoundPlan(states, 3, [20, 20], [0, 0], rows, [20, 5], [0, 0], full_kv_reqs=[] if drafts else [0, 1], remaining=[40, 40])
    lengths = torch.tensor([20, 20])
    batch = SimpleNamespace(
        seq_lens=lengths, req_pool_indices=torch.tensor([1, 2]), return_logprob=False, return_hidden_states=False, spec_algorithm=None,
        sampling_info=None, reqs=[SimpleNamespace(lora_id=None, rid=row) for row in (1, 2)],
    )  # fmt: skip
    steps.run(batch, round_, torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64), lengths, None, lambda: None)
    assert taken == [(expected.backend, expected.graphs) if expected else ("own", "own graphs")] * 3
    # Of the request that reads a copy, after each step but the last: that is the next round's.
    assert chosen == [(2, 20 + step, 1) for step in (1, 2) if expected and every]


SCALING = {0: 0.1, 2: 0.1}


class Worker(KVWorker):
    """A worker with a pool and no model."""

    def __init__(self, name, head_budgets="equal"):
        self.server_args = SimpleNamespace(page_size=1, kv_head_budgets=head_budgets, kv_compressor=name, kv_cache_ranks=0, kv_store=None)
        pool = torch.zeros(50, 2, 64)
        kv = SimpleNamespace(get_key_buffer=lambda layer: pool, get_value_buffer=lambda layer: pool)
        self.model_runner = SimpleNamespace(token_to_kv_pool=kv, attn_backend=SimpleNamespace(), dtype=torch.float32)
        model = SimpleNamespace(query_heads=2, head_dim=64)
        self.memory = SimpleNamespace(ahead=5, model=model, release=lambda requests, tokens: MemoryPlan(rings=requests))
        self.queries = QueryWindows(2, (0, 2), 1)
        self.methods = ServedMethods((), (method("snapkv"), method(name)), scaling=SCALING)

    def compressed_attention(self):
        return create_compressed_attention(self.server_args, self.model_runner, self.queries, self.methods.selection_interval, self.layout, self.buffers.on_gpu)

    def allocate(self):
        table = SimpleNamespace(req_to_token=torch.zeros(4, 30, dtype=torch.int32), size=3)
        self.alloc_memory_pool(req_to_token_pool=table, token_to_kv_pool_allocator=SimpleNamespace(page_size=1, size=50))
        assert table.req_to_token.shape == (8, 35)
        assert self.queries.held_bytes == 2 * (1 + 3 * 3) * 2 * 64 * 4, "rings as planned"


def test_what_rows_begin_with_has_its_place_before_graphs_are_captured():
    packed, uneven, plain = Worker("snapkv+kivi"), Worker("snapkv", "adaptive"), Worker("snapkv")
    pointing = Worker("verify-guided")
    for worker in (packed, uneven, plain, pointing):
        worker.allocate()
        assert worker.compressed_attention() is None, "on a CPU the model's own attention reads copies"
        assert worker.model_runner.attn_backend.layout is worker.layout
    packed, uneven, plain, pointing = (worker.layout for worker in (packed, uneven, plain, pointing))
    assert isinstance(plain, PlainLayout)
    assert isinstance(pointing, PointerLayout) and pointing.counts.tolist() == [0] * 8 and pointing.layout.per_slot == 64
    assert isinstance(packed, QuantizedLayout) and packed.counts.tolist() == [0] * 8 and packed.counts.dtype == torch.int32
    # Of two layers with two heads.
    assert isinstance(uneven, RaggedHeadLayout) and uneven.bounds.tolist() == [[0] * 5] * 8 and uneven.bounds.dtype == torch.int32


@pytest.mark.parametrize("name", ["quest", "verify-guided"])
def test_extremes_of_pages_lie_beside_the_pool_where_attention_chooses_and_forwards_bring_them_up_to_date(name):
    worker = Worker(name)
    made = method(name)
    chooser = replace(made.compressor, in_attention=True) if name == "quest" else made.compressor
    worker.methods = ServedMethods((), (replace(made, compressor=chooser),), scaling=SCALING)
    try:
        worker.allocate()
        assert type(worker.layout) is (PagePointerLayout if name == "quest" else PointerLayout)
        assert (worker.key_derived_data is not None) == (queries._key_write_callback is not None) == (name == "quest")
        if name == "quest":
            keys = worker.model_runner.token_to_kv_pool.get_key_buffer(0)
            keys[20] = 7.0
            for layer_id in (0, 2):
                queries._key_write_callback(layer_id, torch.tensor([20]))
            assert worker.layout.extremes.held[0, 1, :, 1].unique().tolist() == [7.0] and LAYOUT_READERS[PagePointerLayout].decode is PagesDecode
    finally:
        set_key_write_callback(None)


def served(name, *budgets, captures):
    """A worker with its layout, whose model has graphs of its own if it ``captures``."""
    worker = Worker(name, *budgets)
    if name == "quest":
        made = method(name)
        worker.methods = ServedMethods((), (replace(made, compressor=replace(made.compressor, in_attention=True)),), scaling=SCALING)
    worker.allocate()
    model = worker.model_runner
    model.req_to_token_pool = SimpleNamespace(req_to_token=torch.zeros(8, 35, dtype=torch.int32))
    model.model_config, model.server_args = SimpleNamespace(num_attention_heads=2), SimpleNamespace(tp_size=1)
    model.decode_cuda_graph_runner = "own graphs" if captures else None
    model.device = "cpu"
    return worker


@pytest.mark.parametrize("captures", [True, False])
@pytest.mark.parametrize(
    ("given", "decode", "kernel"),
    [
        (["snapkv+kivi"], PackedDecode, "packed_splits"), (["snapkv", "adaptive"], RaggedHeadsDecode, "_splits"),
        (["verify-guided"], PointerDecode, "pointer_splits"), (["quest"], PagesDecode, "_choose_pages"),
    ],
)  # fmt: skip
def test_on_a_gpu_steps_over_copies_have_an_attention_and_graphs_of_their_own_where_sglang_has_some(monkeypatch, captures, given, decode, kernel):
    launched, replayed = record_launches(monkeypatch), []

    def capture(self, model_runner, attn_backend):
        self.model_runner, self.attn_backend, self.capture_bs = model_runner, attn_backend, [1, 3]

    monkeypatch.setattr(DecodeCudaGraphRunner, "__init__", capture)
    monkeypatch.setattr(DecodeCudaGraphRunner, "execute", lambda self, batch, *_: replayed.append(batch.batch_size))
    monkeypatch.setattr(GraphSharedOutput, "create_for_model_runner", lambda model: "logits")
    try:
        worker = served(*given, captures=captures)
        found = create_attention(worker.model_runner, worker.layout)
    finally:
        set_key_write_callback(None)
    assert type(found.backend) is decode and found.backend.layout is worker.layout
    if captures:
        assert found.graphs.attn_backend is found.backend and replayed == [1, 3]
        assert worker.model_runner.graph_shared_output == "logits" and not launched
    else:
        assert found.graphs is None and kernel in {name for name, _ in launched} and not replayed, "compiled"


def test_on_a_gpu_the_models_own_attention_reads_no_copies(monkeypatch):
    record_launches(monkeypatch)
    worker = served("kivi", captures=False)
    worker.model_runner.attn_backend = SimpleNamespace()
    worker.buffers = SimpleNamespace(on_gpu=True)
    assert type(worker.compressed_attention().backend) is PackedDecode
    assert not vars(worker.model_runner.attn_backend)
    worker.layout = PlainLayout()
    assert worker.compressed_attention() is None, "it reads plain tokens"


def test_heads_of_different_budgets_are_split_as_finely_as_blocks():
    assert RaggedHeadsDecode.min_parts == PackedDecode.min_parts == 8 * CompressedDecode.min_parts


def test_the_scheduler_waits_for_the_end_of_a_replay_that_reads_the_token_table(monkeypatch):
    def execute(self, forward_batch, pp_proxy_tensors):
        self.model_runner.war_fastpath_read_done_event = "before the replay"
        return "logits"

    monkeypatch.setattr(DecodeCudaGraphRunner, "execute", execute)
    graphs = object.__new__(decode_graphs.CompressedDecodeGraphs)
    graphs.model_runner = SimpleNamespace()
    assert graphs.execute("batch") == "logits" and graphs.model_runner.war_fastpath_read_done_event is None


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((4, 2, 64), torch.float8_e4m3fn, "keys as torch.float8_e4m3fn; .* torch.bfloat16, .* snapkv"),
        ((4, 2, 8), torch.bfloat16, "keys have 8 channels a head; .* 16 to 256: .* snapkv"),
        ((4, 2, 512), torch.bfloat16, "keys have 512 channels a head"),
    ],
)
def test_heads_that_the_kernel_does_not_take_are_refused(shape, dtype, words):
    with pytest.raises(OptionError, match=words):
        check_heads(torch.empty(shape, dtype=dtype), torch.empty(4, 2, 64), "copies", "use snapkv")
    check_heads(torch.empty(4, 2, 80), torch.empty(4, 2, 256, dtype=torch.float16), "copies", "use snapkv")
