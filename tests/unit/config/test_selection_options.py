"""How many tokens are selected for each step, how often and by which query: what the flags may be, and where they say nothing."""

import re
from types import SimpleNamespace

import pytest
import torch
from argument_helpers import arguments

from sglang_ext import flag_checks
from sglang_ext.config import selection_options
from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressors.step_selectors import Quest
from sglang_ext_bench.baselines import SELECTORS


def spade(**given):
    """Arguments of a server with the method, as they are before anything is resolved."""
    return arguments(kv_compressor="spade", **given)


@pytest.mark.parametrize("mode", ["lossy", "verified"])
@pytest.mark.parametrize(("select", "budget", "most"), [(None, 0.25, 0), (0.125, 0.125, 0), (1, 1.0, 0), (2048.0, 1.0, 2048)])
def test_spade_takes_a_share_or_a_number_of_tokens_in_both_modes(mode, select, budget, most):
    args = spade(kv_mode=mode, kv_select=select, kv_select_every=4, kv_select_by="regressed")
    flag_checks.check_flags(args)
    made = selection_options.step_method(args)
    assert args.kv_budget == budget
    assert (made.most, made.every, made.predictor.name, made.window) == (most, 4, "regressed", 17)
    assert made.each_round == (mode == "verified"), "where nothing is verified, steps alone count"


@pytest.mark.parametrize(
    ("flags", "always"),
    [({}, 36), ({"kv_compressor": "quest", "kv_mode": "lossy"}, 36), ({"kv_compressor": "quest", "kv_mode": "lossy", "device": "cuda"}, 48)],
)
def test_numbers_of_tokens_of_which_queries_choose_none_are_refused(flags, always):
    for select in (2.0, float(always)):
        args = arguments(**{"kv_compressor": "spade", "kv_select": select} | flags)
        with pytest.raises(OptionError, match=f"--kv-select is {select:g}.* the first and the newest tokens, {always} .* for example 0.125"):
            selection_options.resolve_selection(args)
    selection_options.resolve_selection(arguments(**{"kv_compressor": "spade", "kv_select": always + 1.0} | flags))


@pytest.mark.parametrize(
    ("share", "told"),
    [(0.01, "--kv-select is 0.01, which is 20 tokens of the longest context.* newest tokens, 36 .* now 2000"), (1e-9, "1e-09")],
)
def test_a_share_of_which_queries_choose_none_anywhere_is_refused(share, told):
    args = spade(kv_select=share, device="cpu")
    selection_options.resolve_selection(args)
    args.get_model_config = lambda: SimpleNamespace(context_len=2000)
    with pytest.raises(OptionError, match=told):
        selection_options.check_selection(args)


@pytest.mark.parametrize(("flags", "told"), [({}, True), ({"kv_sparse_from": 289}, False), ({"kv_select": 0.25}, False), ({"kv_select": 64.0}, False)])
def test_where_queries_choose_none_of_a_share_is_told(caplog, flags, told):
    args = spade(**{"kv_select": 0.125, "device": "cpu"} | flags)
    selection_options.resolve_selection(args)
    args.get_model_config = lambda: SimpleNamespace(context_len=2000)
    selection_options.check_selection(args)
    expected = "in contexts of fewer than 289 tokens queries select none of the share 0.125 of --kv-select, .* pass --kv-sparse-from 289 "
    assert bool(re.search(expected, caplog.text)) == told == bool(caplog.records)


def test_more_tokens_than_a_context_and_ranks_beside_a_gpu_are_refused():
    args = spade(kv_select=4096.0, device="cpu")
    args.get_model_config = lambda: SimpleNamespace(context_len=4097)
    selection_options.check_selection(args)
    args.get_model_config = lambda: SimpleNamespace(context_len=4096)
    with pytest.raises(OptionError, match="--kv-select is 4096, .* has 4096 tokens: pass a number below that, a share, .*-context-length"):
        selection_options.check_selection(args)
    args = spade(kv_select=4095, device="cuda")
    args.get_model_config = lambda: SimpleNamespace(context_len=4096)
    selection_options.check_selection(args)
    for every in (4095, 4096):
        args.kv_select_every = every
        if every < 4096:
            selection_options.check_selection(args)
    with pytest.raises(OptionError, match="--kv-select-every is 4096, .* has 4096 tokens: pass a number below that, for example 4"):
        selection_options.check_selection(args)
    args.kv_compressor = "verify-guided"
    selection_options.check_selection(args)


def test_ranks_beside_a_gpu_are_on_those_after_it_and_refused_where_these_are_missing(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    args = spade(kv_cache_ranks=2, device="cuda", base_gpu_id=1)
    sizes = {"context_len": 4096, "num_hidden_layers": 5, "head_dim": 64, "dtype": torch.float32}
    args.get_model_config = lambda: SimpleNamespace(get_num_kv_heads=lambda ranks: 3, **sizes)
    selection_options.check_selection(args)
    assert selection_options.cache_rank_gpus(args) == [2, 3] and not caplog.text
    # Ranks beside a GPU choose by keys in 8 bits, where nobody says.
    assert args.kv_score_bits is None
    for mode in ("lossy", "verified"):
        args.kv_mode = mode
        assert selection_options.score_bits(args) == 8
    # 1,128 tokens of 5 layers, 3 heads, 64 numbers in 9 bits of 32.
    args.kv_cache_rank_gb = 0.0012
    with pytest.raises(OptionError, match="--kv-cache-rank-gb is 0.0012, less than keys of 1000 tokens"):
        args.kv_sparse_from = 1000
        selection_options.check_selection(args)
    args.kv_cache_rank_gb = 0.00123
    selection_options.check_selection(args)
    args.kv_cache_rank_gb = None
    for name, value in (("device", "cpu"), ("kv_cache_ranks", 0), ("kv_score_bits", 16)):
        before = getattr(args, name)
        setattr(args, name, value)
        assert selection_options.score_bits(args) == 16, (name, value)
        setattr(args, name, before)
    args.kv_score_bits = 8
    selection_options.check_selection(args)
    assert selection_options.slot_code_bits(args) == 0, "ranks hold the codes"
    args.kv_score_bits = 16
    # Full KV goes to ranks where nothing is verified, and nothing else reads it.
    args.kv_mode = "lossy"
    assert selection_options.has_remote_values(args) and selection_options.exchange_buffer_bytes(args) == selection_options.ROW_EXCHANGE_BUFFER_BYTES
    for name, value in (("enable_deterministic_inference", True), ("disaggregation_mode", "decode"), ("disable_radix_cache", True)):
        before = getattr(args, name)
        setattr(args, name, value)
        assert not selection_options.has_remote_values(args) and selection_options.exchange_buffer_bytes(args) == selection_options.EXCHANGE_BUFFER_BYTES
        setattr(args, name, before)
    args.kv_mode = "verified"
    assert not selection_options.has_remote_values(args)
    # Copies are made anew when many tokens follow them.
    assert not selection_options.step_method(args).each_round
    args.base_gpu_id = 2
    with pytest.raises(OptionError, match="from GPU 3 to GPU 4, the model being on GPU 2; there are 4 GPUs: pass fewer ranks, a lower --kv-cache"):
        flag_checks.check_device(args)
    args.base_gpu_id, args.kv_cache_rank_gpu = 1, 0
    flag_checks.check_device(args)
    assert selection_options.cache_rank_gpus(args) == [0, 1] and "a cache rank shares GPU 1 with the model" in caplog.text


def test_more_cache_ranks_than_cores_are_refused(monkeypatch):
    monkeypatch.setattr(selection_options.os, "sched_getaffinity", lambda process: {0, 1})
    with pytest.raises(OptionError, match="--kv-cache-ranks is 3; .* there are 2 cores: pass a whole number from 0, for none, to 2"):
        flag_checks.check_flags(spade(kv_cache_ranks=3))
    flag_checks.check_flags(spade(kv_cache_ranks=2, kv_pack_layers="auto"))


@pytest.mark.parametrize("mode", ["lossy", "verified"])
def test_codes_lie_beside_the_pool_where_tokens_are_chosen_by_few_bits_and_not_by_ranks(mode, caplog):
    for given, bits in (
        ({}, 0), ({"kv_score_bits": 8}, 8), ({"kv_score_bits": 4}, 4), ({"kv_score_bits": 8, "kv_cache_ranks": 1}, 0),
        ({"kv_score_bits": 8, "kv_host_gb": 4}, 8),
    ):  # fmt: skip
        args = spade(kv_mode=mode, **given)
        flag_checks.check_flags(args)
        assert selection_options.slot_code_bits(args) == bits and "--kv-score-bits" not in caplog.text, given
    args = spade(kv_mode=mode, kv_score_bits=8, disaggregation_mode="prefill")
    assert selection_options.slot_code_bits(args) == 0
    assert selection_options.slot_code_bits(arguments(kv_compressor="verify-guided", kv_score_bits=8)) == 0


def test_packs_of_more_layers_than_there_are_and_too_little_memory_for_a_request_are_refused():
    args = spade(kv_cache_ranks=1, kv_pack_layers=6, kv_sparse_from=1000, device="cpu")
    sizes = {"context_len": 4096, "num_hidden_layers": 5, "head_dim": 64, "dtype": torch.float32}
    args.get_model_config = lambda: SimpleNamespace(get_num_kv_heads=lambda ranks: 3, **sizes)
    with pytest.raises(OptionError, match="--kv-pack-layers is 6, and the model has 5 layers: pass a number up to that, or auto"):
        selection_options.check_selection(args)
    args.kv_pack_layers, args.kv_cache_rank_gb = 5, 0.004
    # 1,128 tokens of 5 layers, 3 heads, 64 numbers in 4 bytes.
    with pytest.raises(OptionError, match=r"--kv-cache-rank-gb is 0.004, less than keys of 1000 tokens .*: pass at least 0.0044, or better"):
        selection_options.check_selection(args)
    # What is advised is taken: three digits of 0.00433152 were less.
    args.kv_cache_rank_gb = 0.0044
    selection_options.check_selection(args)
    with pytest.raises(OptionError, match="--kv-cache-rank-gb asks for 1000000.0 GB of host memory for keys; .* available .*: pass at"):
        args.kv_cache_rank_gb = 1e6
        selection_options.check_selection(args)
    # 9 of 32 bits.
    args.kv_cache_rank_gb, args.kv_score_bits = 0.00123, 8
    selection_options.check_selection(args)
    # Exact keys and values beside these.
    args.kv_mode = "lossy"
    assert selection_options.has_remote_values(args)
    said = "less than keys and values, and keys in 8 bits, of 1000 tokens .*: pass at least 0.0099, or better .*, or --kv-score-bits 16$"
    with pytest.raises(OptionError, match=said):
        selection_options.check_selection(args)
    args.kv_cache_rank_gb = 0.0099
    selection_options.check_selection(args)


def test_a_server_that_only_prefills_has_no_cache_ranks():
    args = spade(kv_cache_ranks=1, disaggregation_mode="prefill")
    assert selection_options.num_cache_ranks(args) == 0
    args.disaggregation_mode = "decode"
    assert selection_options.num_cache_ranks(args) == 1


@pytest.mark.usefixtures("own_methods")
def test_methods_that_choose_for_each_step_take_their_number_and_pace_and_no_predictor_or_ranks(caplog):
    for value, name in (("quest", "quest"), (SELECTORS["tova"], "Tova"), (SELECTORS["true-query"], "TrueQuery")):
        args = arguments(kv_compressor=value, kv_mode="lossy", kv_select=2048.0, kv_select_every=2, device="cpu")
        flag_checks.check_flags(args)
        made = selection_options.step_method(args)
        assert (made.name, made.every, made.each_round, made.most) == (name, 2, False, 2048)
        assert selection_options.num_cache_ranks(args) == 0 and "no effect" not in caplog.text
    args.device = "cuda"
    with pytest.raises(OptionError, match="--kv-compressor .*:TrueQuery .* --device cuda: .*verify-guided or, on an NVIDIA GPU, quest"):
        flag_checks.check_device(args)


def test_on_a_gpu_quest_chooses_in_attention_pages_of_the_pool():
    args = arguments(kv_compressor="quest", kv_mode="lossy", kv_select=2048.0, device="cuda", page_size=1)
    args.get_model_config = lambda: SimpleNamespace(context_len=4096)
    flag_checks.check_flags(args)
    for size in (None, 1, 8, 24):
        args.page_size = size
        with pytest.raises(OptionError, match=f"--kv-compressor quest cannot be combined with --page-size {size}: .*; pass --page-size 16"):
            flag_checks.check_device(args)
    for size in (16, 64):
        args.page_size = size
        flag_checks.check_device(args)
        assert selection_options.step_method(args) == Quest(every=1, each_round=False, most=2048, in_attention=True)
    for mode in ("prefill", "decode"):
        args.disaggregation_mode = mode
        with pytest.raises(OptionError, match=f"quest cannot be combined with --disaggregation-mode {mode}: .*; pass .* spade"):
            flag_checks.check_device(args)
    args.device, args.page_size = "cpu", 1
    flag_checks.check_device(args)
    assert not selection_options.step_method(args).in_attention
    args.device = "xpu"
    with pytest.raises(OptionError, match="quest cannot be combined with --device xpu: .* on a CPU alone"):
        flag_checks.check_device(args)
