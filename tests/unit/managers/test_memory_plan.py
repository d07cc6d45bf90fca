"""What lies beside SGLang's KV pool is known before that is sized, and taken off it."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from prefill_checks import Batch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.cuda_graph_config import Backend

from sglang_ext.config.selection_options import EXCHANGE_BUFFER_BYTES, ROW_EXCHANGE_BUFFER_BYTES
from sglang_ext.core import OptionError
from sglang_ext.layers.kernels import quest_pages
from sglang_ext.layers.kernels.packed import integer_prefill, packed_decode
from sglang_ext.layers.kernels.packed.prompt_codes import PromptCodes
from sglang_ext.managers import memory_plan
from sglang_ext.managers.feature import load_features
from sglang_ext.managers.memory_plan import ALLOCATION_GRAIN, ReservedMemory, MemoryPlan, MemoryPlanner, ModelSizes
from sglang_ext.managers.served_methods import ServedMethods
from sglang_ext.mem_cache.compressed.layouts.pointers import PagePointerLayout, Pointers, as_pointers
from sglang_ext.mem_cache.compressed.layouts.ragged_heads import RaggedHeadLayout
from sglang_ext.mem_cache.compressed.key_derived_data import PageExtremes
from sglang_ext.mem_cache.compressed.queries import QueryWindows
from sglang_ext.mem_cache.compressed.key_derived_data import SlotCodes
from sglang_ext.mem_cache.compressed.slot_scores import SlotScores
from sglang_ext.mem_cache.compressors.catalogue import method
from sglang_ext.mem_cache.compressors.step_selectors import Quest, Spade
from sglang_ext.mem_cache.host_tier.tier import staging_bytes
from sglang_ext.mem_cache.scores import FitRecord, Predictor
from sglang_ext.mem_cache.selection.on_gpu import SCRATCH

GB, MIB = 10**9, 1 << 20
LLAMA = ModelSizes(
    layers=32, query_heads=32, kv_heads=8, head_dim=128, value_dim=128, number_bytes=2, vocabulary=128256, context=8192
)
TINY = ModelSizes(layers=2, query_heads=4, kv_heads=2, head_dim=8, value_dim=8, number_bytes=4, vocabulary=50, context=100)
SIZES = [1, 2, 4, *range(8, 257, 8)]
ROLLING = {"kv_full_tier": "host", "kv_host_gb": 64, "kv_offload_draft_length": 240, "speculative_num_draft_tokens": 241}


def planner(model=LLAMA, methods=("snapkv",), backend="flashinfer", on_gpu=True, scores=None, capability=(8, 0), **flags):
    draft = flags.get("speculative_num_draft_tokens", 17)
    args = SimpleNamespace(
        **{
            "kv_mode": "verified", "kv_draft_length": 16, "kv_max_burst": None, "disaggregation_mode": "null",
            "kv_full_tier": "device", "kv_host_gb": 0, "kv_store": None, "kv_compressor": methods[0], "kv_offload_draft_length": 64,
            "kv_budget": None, "kv_more_compressors": ",".join(methods[1:]),
            "kv_head_budgets": "equal", "kv_prefill": "exact", "disable_radix_cache": False, "page_size": 1, "max_total_tokens": None,
            "enable_deterministic_inference": False, "mem_fraction_static": 0.9, "speculative_algorithm": "KV_VERIFIED",
            "speculative_num_draft_tokens": draft, "max_speculative_num_draft_tokens": draft,
            "kv_cache_ranks": 0, "kv_score_bits": 16, "speculative_num_steps": draft - 1, "speculative_eagle_topk": 1,
            "cuda_graph_config": SimpleNamespace(decode=SimpleNamespace(bs=SIZES, backend=Backend.FULL)),
        } | flags,
    )  # fmt: skip
    served = ServedMethods((), tuple(method(name) for name in methods), scores)
    return MemoryPlanner(args, model, served, backend, on_gpu, capability, load_features(args))


def plan(requests=2048, tokens=800_000, **more):
    found = planner(**more)
    return found.plan(requests, tokens, found.rings(requests, tokens))


def test_rings_of_queries_are_a_share_of_the_pool_and_never_more_than_requests():
    assert LLAMA.query_bytes * 49 == int(12.25 * MIB)
    found = plan()
    assert found.rings == 127 and found.query_rings <= LLAMA.slot_bytes * 800_000 / 64 + LLAMA.query_bytes
    assert plan(requests=40).rings == 40
    assert plan(tokens=20_000).rings == 16, "a few, in a small pool"
    assert plan(requests=3, tokens=20_000).rings == 3
    assert plan(**ROLLING).rings == 22, "larger ones"
    lossy = {"methods": ("spade",), "tokens": 20_000, "on_gpu": False, "speculative_num_draft_tokens": 5, "kv_mode": "lossy"}
    lossy["device"] = "cpu"
    few, many = (plan(kv_cache_ranks=ranks, **lossy).rings for ranks in (0, 1))
    assert many == pytest.approx(4 * few, abs=4) and many > 16, "more run at once where ranks have full KV"


def test_without_a_method_that_scores_by_queries_there_are_none():
    for names in (("sink-recent",), ("kivi", "int8"), ("sink-recent", "int4")):
        found = plan(methods=names)
        assert (found.rings, found.query_rings) == (0, 0)
    assert plan(methods=("sink-recent", "snapkv")).rings == 127


@pytest.mark.parametrize("rings", [0, 1, 5])
def test_rings_take_as_many_bytes_as_are_planned(rings):
    windows = QueryWindows(32, (0, 1), extra_queries=17)
    windows.allocate(rings, TINY.query_heads, TINY.head_dim, torch.empty(0))
    assert windows.held_bytes == planner(TINY).plan(8, 1000, rings).query_rings


def test_what_depends_on_a_flag_is_there_with_it_only():
    plain = plan(on_gpu=False)
    assert {name for name, size in vars(plain).items() if size} == {"rings", "query_rings", "draft_rows", "pending_drafts"}
    for flag, expected in (
        ({"kv_host_gb": 8}, {"staging"}),
        (ROLLING, {"staging"}),
        ({"methods": ("snapkv", "kivi")}, {"compressed_tables"}),
        ({"methods": ("verify-guided",)}, {"compressed_tables"}),
        ({"kv_head_budgets": "adaptive"}, {"compressed_tables"}),
    ):
        found = plan(on_gpu=False, **flag)
        assert {name for name, size in vars(found).items() if size and not getattr(plain, name)} == expected, flag


def test_choices_of_steps_take_as_much_as_two_at_once_on_a_gpu_alone():
    spade = {"methods": ("spade",), "kv_cache_ranks": 0}
    assert plan(on_gpu=False, **spade).selection_workspaces == 0
    # Of a query head 128 numbers, four times, in 32 layers of one request.
    copied = SCRATCH + 32 * 32 * 4 * 4 * 128
    assert plan(requests=3, **spade).selection_workspaces == copied + SCRATCH + 3 * (copied - SCRATCH) and plan(**spade).exchange_buffers == 0
    assert plan(**spade).selection_workspaces == copied + SCRATCH + SCRATCH // 2, "of many requests queries are predicted one after the other"
    beside = plan(**spade | {"kv_cache_ranks": 2})
    assert beside.selection_workspaces == copied and beside.exchange_buffers == 2 * EXCHANGE_BUFFER_BYTES, "ranks on other GPUs choose for steps"
    assert plan(methods=("verify-guided",)).selection_workspaces == 0
    lossy = plan(**spade | {"kv_cache_ranks": 2, "kv_mode": "lossy", "device": "cuda"})
    assert lossy.exchange_buffers == 2 * ROW_EXCHANGE_BUFFER_BYTES + 4 * 800_000 * 32 * 8, "records of copies, too"


def test_rings_have_room_for_what_steps_leave_between_two_choices():
    windows = QueryWindows(1, (0, 1), extra_queries=40)
    windows.allocate(3, TINY.query_heads, TINY.head_dim, torch.empty(0))
    every = planner(TINY, methods=("spade",), on_gpu=False)
    rare = replace(every, served=replace(every.served, methods=tuple(replace(m, compressor=Spade(every=40)) for m in every.served.methods)))
    assert windows.held_bytes == rare.plan(8, 1000, 3).query_rings > every.plan(8, 1000, 3).query_rings


def test_draft_rows_are_what_the_wider_token_table_of_twice_the_rows_adds():
    ours, theirs = 2 * 2049 * (8192 + 21 + 34 + 1), 2049 * (8192 + 21)
    assert plan().draft_rows == 4 * (ours - theirs)


def test_tables_scores_and_buffers_take_as_many_bytes_as_are_planned():
    buffers = SimpleNamespace(keys=[torch.zeros(1, TINY.kv_heads, TINY.head_dim)] * TINY.layers)
    bounds = RaggedHeadLayout.of(buffers, 2 * 9).bounds
    assert plan(8, 1000, model=TINY, on_gpu=False, kv_head_budgets="adaptive").compressed_tables == bounds.nbytes
    fitted = FitRecord("key", "{}", 1, 1, (0.0,) * 2, (0.0,) * 2)
    scores = SlotScores(Predictor(torch.zeros(2, 2, 16), torch.zeros(2, 2), fitted), (0, 1))
    planned = plan(8, 1000, model=TINY, on_gpu=False, scores=scores).scores
    scores.allocate(1001, "cpu", torch.float32)
    assert scores.held_bytes == planned
    assert plan(8, 1000, model=TINY, on_gpu=False, kv_host_gb=1).staging == 2 * staging_bytes(1001 * TINY.slot_bytes)


@pytest.mark.parametrize(
    ("flags", "workspaces"),
    [
        ({}, 2 * 256 * 8192 * 5 + (len(SIZES) + 4) * 8 * MIB),
        ({"requests": 4}, 2 * 4 * 8192 * 5 + (3 + 4) * 8 * MIB),
        ({"kv_draft_length": "auto"}, 2 * (2 * 256 * 8192 * 5 + (len(SIZES) + 4) * 8 * MIB)),
        ({"backend": "triton"}, 256 * MIB),
        ({"backend": "fa3"}, 256 * MIB + 3 * 4 * 256 * 8192),
        ({"backend": "fa3", "page_size": 64}, 256 * MIB + 3 * 4 * 256 * 128),
        ({"kv_mode": "lossy"}, 0),
        ({"on_gpu": False}, 0),
    ],
)
def test_workspaces_follow_the_attention_of_verifications_and_what_is_captured(flags, workspaces):
    assert plan(**flags).workspaces == workspaces


def test_exact_verifications_have_a_part_for_each_tile_of_the_longest_context():
    long = replace(LLAMA, context=131072)
    found = plan(model=long, backend="triton", enable_deterministic_inference=True).workspaces
    parts = -(-(131072 + 21 + 34 + 1) // 256)
    assert found == 4 * max(17 * 32 * parts * 129, 64 * MIB)


@pytest.mark.parametrize(
    ("flags", "tokens"),
    [
        ({}, 256 * 17),
        ({"requests": 40}, 40 * 17),
        ({"requests": 8, **ROLLING}, 2 * 241),
        ({"kv_mode": "lossy"}, 0),
        ({"on_gpu": False}, 0),
    ],
)
def test_logits_are_those_of_the_largest_captured_verification(flags, tokens):
    assert plan(**flags).logits == tokens * 128256 * 4


def test_the_plan_reads_as_one_line_with_what_it_is_made_of():
    text = str(MemoryPlan(rings=64, query_rings=int(0.21 * GB), draft_rows=int(0.1 * GB), logits=GB))
    assert text == (
        "1.31 GB of device memory beside the KV pool: query rings 0.21 GB, draft rows of the token table 0.10 GB, logits of "
        "verifications 1.00 GB; queries of 64 requests at once"
    )


def runner(available):
    """A model runner whose weights leave so many bytes for a pool."""
    configurator = SimpleNamespace(_profile_available_bytes=lambda before: available, resolve_max_num_reqs=lambda tokens: 8)
    return SimpleNamespace(
        init_kv_cache_configurator=lambda: None, kv_cache_configurator=configurator, pre_model_load_memory=1.0, device="cpu"
    )


def held(available, limit=None, **more):
    return ReservedMemory(planner(TINY, on_gpu=False, max_total_tokens=limit, **more), runner(available))


@pytest.mark.parametrize(("bits", "share"), [(8, 9 / 32), (4, 5 / 32)])
def test_keys_in_few_bits_are_counted_and_the_pool_is_as_much_smaller_but_no_more(bits, share):
    spade = {"methods": ("spade",), "kv_score_bits": bits}
    assert plan(**spade).key_codes == pytest.approx(800_001 * LLAMA.slot_bytes * share) and "keys in few bits" in str(plan(**spade))
    assert plan(**spade | {"kv_cache_ranks": 1}).key_codes == plan(methods=("snapkv",), kv_score_bits=bits).key_codes == 0
    keys = [torch.zeros(1001, TINY.kv_heads, TINY.head_dim)] * TINY.layers
    stored = SlotCodes(keys, (0, 1), bits).held
    assert stored.nbytes == plan(8, 1000, model=TINY, on_gpu=False, **spade).key_codes
    room = 64 * MIB
    memory = held(room, **spade)
    tokens = (room - memory.held_bytes) // TINY.slot_bytes
    assert memory.release(8, tokens).key_codes + tokens * TINY.slot_bytes > 0.95 * room, "not the codes of a pool without any beside it"


@pytest.mark.parametrize("every", [1, 3])
def test_extremes_of_pages_are_counted_where_attention_chooses_by_them_and_the_pool_is_as_much_smaller(every):
    def paged(found):
        chosen = replace(method("quest"), compressor=Quest(every=every, in_attention=True))
        return replace(found, served=ServedMethods((), (chosen,)))

    flags = {"methods": ("quest",), "page_size": 16, "on_gpu": False}
    plain, found = (made.plan(8, 1000, 0) for made in (planner(TINY, **flags), paged(planner(TINY, **flags))))
    assert plain.extremes == 0 < found.extremes and "extremes of pages" in str(found)
    keys, table = [torch.zeros(1016, TINY.kv_heads, TINY.head_dim)] * TINY.layers, torch.zeros(18, 50, dtype=torch.int32)
    extremes = PageExtremes(keys, (0, 1), 16)
    assert extremes.nbytes == found.extremes
    rows = PagePointerLayout.of_pool(Pointers(8, 16), table, extremes, Quest(every=every, in_attention=True))
    assert sum(part.nbytes for part in (rows.counts, rows.pages, rows.selected_at, rows.finished_parts)) == found.compressed_tables
    room = 64 * MIB
    memory = ReservedMemory(paged(planner(TINY, **flags)), runner(room))
    tokens = (room - memory.held_bytes) // TINY.slot_bytes
    assert memory.release(8, tokens).extremes + tokens * TINY.slot_bytes > 0.95 * room, "not those of a pool without any beside it"


class Launched:
    """In the place of a kernel: keeps the bytes in which it would work."""

    nbytes = 0

    def __getitem__(self, grid):
        return self

    def __call__(self, *given, **named):
        self.nbytes = sum(each.nbytes for each in given[10:12])


@pytest.mark.parametrize(
    ("requests", "backend", "steps"), [(300, Backend.FULL, [300, 256]), (40, Backend.FULL, [40, 40]), (40, Backend.DISABLED, [40])]
)
def test_what_attention_chooses_pages_in_is_counted_in_graphs_and_outside_as_it_is_made(monkeypatch, requests, backend, steps):
    monkeypatch.setattr(quest_pages, "_choose_pages", kernel := Launched())
    flags = {"methods": ("quest",), "page_size": 16, "kv_mode": "lossy"}
    flags["cuda_graph_config"] = SimpleNamespace(decode=SimpleNamespace(bs=SIZES, backend=backend))
    plain = planner(TINY, **flags)
    method_of_gpus = replace(method("quest"), compressor=Quest(in_attention=True))
    paged = replace(plain, served=ServedMethods((), (method_of_gpus,)))
    found = paged.plan(requests, 1000, 0)
    assert plain.plan(requests, 1000, 0).selection_workspaces == replace(paged, on_gpu=False).plan(requests, 1000, 0).selection_workspaces == 0
    width, total = paged.row_tokens, 0
    keys = [torch.zeros(160, TINY.kv_heads, TINY.head_dim)]
    table = torch.zeros(2, width, dtype=torch.int32)
    begins = PagePointerLayout.of_pool(Pointers(8, 16), table, PageExtremes(keys, (0,), 16), Quest(in_attention=True))
    for count in steps:
        numbers = torch.zeros(count, dtype=torch.int64)
        queries = torch.zeros(count, TINY.query_heads, TINY.head_dim)
        quest_pages.point_at_best_pages(begins, 0, queries, as_pointers(keys[0]), table, numbers, numbers)
        total += kernel.nbytes
    assert found.selection_workspaces == total > 0 and "selection of tokens 0.00 GB" in str(found)


def test_while_the_pool_is_sized_as_many_bytes_are_held_as_will_be_taken(caplog):
    room = 64 * MIB
    memory = held(room)
    before = planner(TINY, on_gpu=False).plan(8, room // TINY.slot_bytes, 8)
    assert memory.held_bytes == before.total > 0
    tokens = (room - before.total) // TINY.slot_bytes
    with caplog.at_level(logging.INFO):
        after = memory.release(8, tokens)
    assert memory.held_bytes == 0 and after.rings == 8
    assert after.total <= before.total and after.total + tokens * TINY.slot_bytes <= room, "both fit"
    assert caplog.messages == [f"sglang-ext: {after}"]


def test_a_pool_that_is_limited_to_less_anyway_needs_no_room_made():
    assert held(64 * MIB, limit=1000).held_bytes == 0


def test_a_limit_on_the_pool_is_kept_where_it_fits_and_what_does_not_is_said(caplog):
    room = 64 * MIB
    limit = (room - ALLOCATION_GRAIN - 1000) // TINY.slot_bytes
    memory = held(room, limit)
    assert memory.held_bytes + limit * TINY.slot_bytes <= room
    assert not caplog.messages, "the plan is smaller than a grain"
    limit = (room - 1000) // TINY.slot_bytes
    memory = held(room, limit)
    assert memory.held_bytes == 0 and f"--max-total-tokens {limit} leaves 0.00 GB" in caplog.messages[0]


def test_a_limit_beyond_the_device_is_sglangs_to_lower():
    room = 64 * MIB
    assert held(room, room).held_bytes == held(room).held_bytes > 0


def test_what_does_not_fit_at_all_names_its_parts_and_the_remedy():
    with pytest.raises(OptionError, match="needs 0.00 GB .*query rings.*the weights leave 0.00 GB: lower --max-running-requests"):
        held(20_000)


ON_CODES = {"methods": ("hack",), "kv_mode": "lossy", "kv_prefill": "quantized"}


def test_codes_of_the_longest_prompt_are_counted_where_prompts_attend_to_them():
    found = plan(**ON_CODES)
    assert 8 * 8192 * 350 < found.prompt_codes < 8 * 2 * 8192 * 380 and "codes of prompts" in str(found)
    assert plan(methods=("hack",), kv_mode="lossy").prompt_codes == 0
    assert plan(**ON_CODES, on_gpu=False).prompt_codes == 0


@pytest.mark.parametrize("capability", [(9, 0), (8, 0), (10, 0), None])
@pytest.mark.parametrize(("partition", "group"), [(64, 4), (64, 3), (128, 3), (32, 4)])
def test_what_one_kernel_leaves_another_of_queries_is_counted_where_that_one_is_launched(monkeypatch, capability, partition, group):
    monkeypatch.setattr(packed_decode, "capability", lambda keys: capability)
    batch, launched = Batch(4, partition, 128, 1, group, 1, torch.float16, ((0, 150),), "cpu"), []
    monkeypatch.setattr(integer_prefill, "_launch_tiles", lambda *given: launched.append(given[-1]))
    monkeypatch.setattr(integer_prefill, "attend_to_codes", lambda *given: None)
    codes = PromptCodes.empty(batch.packing, 1, batch.prompts.total, batch.keys.device)
    integer_prefill.attend(batch.prompts, codes, batch.queries, batch.keys, batch.values, 0.1)
    (left,) = launched
    assert (left is not None) == (capability == (9, 0) and (partition, group) in {(64, 4), (128, 3)})
    made = planner(replace(LLAMA, kv_heads=2, query_heads=2 * group), **ON_CODES, capability=capability)
    packed = tuple(replace(each, quantizer=replace(each.quantizer, partition=partition)) for each in made.served.methods)
    made = replace(made, served=replace(made.served, methods=packed))
    of_keys = 2 * PromptCodes.token_bytes(128, 128, partition)
    of_queries = 0 if left is None else 2 * sum(part.nbytes for part in left) // len(batch.queries)
    assert made.plan(8, 1000, 0).prompt_codes == (8192 + 21 + made.ahead) * (of_keys + of_queries)


@pytest.mark.parametrize(("heads", "kv_heads", "specialized"), [(3, 1, False), (12, 2, True)])
def test_heads_of_a_rank_and_its_gpu_are_those_that_count(monkeypatch, heads, kv_heads, specialized):
    model = torch.nn.ModuleList([RadixAttention(heads, 128, 0.1, kv_heads, layer_id=0)])
    monkeypatch.setattr(memory_plan, "capability", lambda keys: (9, 0))
    config = SimpleNamespace(num_attention_heads=12, vocab_size=50, context_len=8192)
    runner = SimpleNamespace(model=model, model_config=config, dtype=torch.float16, device="cpu")
    asked = planner(**ON_CODES)
    asked.args.get_attention_backends = lambda: ("flashinfer", "flashinfer")
    made = MemoryPlanner.of(asked.args, runner, asked.served, asked.features)
    assert made.capability == (9, 0) and not made.on_gpu
    of_keys = kv_heads * PromptCodes.token_bytes(128, 128, 64)
    left = heads * integer_prefill.PrefillQueryCodes.query_bytes(128, 64) if specialized else 0
    assert replace(made, on_gpu=True).plan(8, 1000, 0).prompt_codes == (8192 + 21 + made.ahead) * (of_keys + left)
