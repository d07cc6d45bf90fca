"""The flags: checked, refused with value, allowed set and remedy, and carried to other processes."""

import argparse
import dataclasses
import json
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_ext.arguments import CheckedServerArgs, prepare
from sglang_ext.config import method_options, options
from sglang_ext.config.model_options import unsupported_model_reason
from sglang_ext.core import RADIX_CACHE_BACKEND, OptionError
from sglang_ext_bench.baselines import CODECS

CODEC = CODECS["int4"]
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 256, "max_position_embeddings": 512, "torch_dtype": "float32",
}


@pytest.fixture
def folder(tmp_path):
    """A model folder that holds a config alone."""

    def write(**changes):
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
        return str(tmp_path)

    return write


def build(path, **flags):
    return CheckedServerArgs(model_path=path, device="cpu", **{"attention_backend": "torch_native", **flags})


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"kv_mode": "fast"}, ["--kv-mode is 'fast'", "full, lossy or verified"]),
        ({"kv_compressor": "zip"}, ["--kv-compressor", "'zip'", "snapkv", "sink-recent"]),
        ({"kv_compressor": "kvzip"}, ["--kv-compressor is 'kvzip'", "--kv-scores FOLDER", "sglang_ext.precompress", "snapkv"]),
        ({"kv_compressor": "kvzap"}, ["--kv-compressor is 'kvzap'", "--kv-predictor FOLDER", "sglang_ext.fit kvzap", "snapkv"]),
        ({"kv_predictor": "/"}, ["--kv-predictor is '/'", "--kv-compressor snapkv", "pass --kv-compressor kvzap"]),
        ({"kv_compressor": "kvzap", "kv_predictor": "/proc/no-such"}, ["--kv-predictor is '/proc/no-such'", "no folder"]),
        ({"kv_scores": "/"}, ["--kv-scores is '/'", "--kv-compressor snapkv", "pass --kv-compressor kvzip"]),
        (
            {"kv_compressor": "kvzip", "kv_scores": "/proc/no-such/folder"},
            ["--kv-scores is '/proc/no-such/folder'", "no folder", "sglang_ext.precompress"],
        ),
        ({"kv_compressor": "kvzip", "kv_scores": ""}, ["--kv-scores is ''", "no folder", "sglang_ext.precompress"]),
        ({"kv_compressor": "kvzap", "kv_predictor": ""}, ["--kv-predictor is ''", "no folder", "sglang_ext.fit"]),
        ({"kv_budget": 1.5}, ["--kv-budget is 1.5", "above 0 and at most 1"]),
        ({"kv_compressor": "kivi+snapkv"}, ["--kv-compressor", "'kivi+snapkv'", "sink-recent", "int8", "snapkv+kivi"]),
        ({"kv_compressor": "kivi", "kv_budget": 0.5}, ["--kv-budget is 0.5", "keeps all tokens", "--kv-compressor snapkv+kivi"]),
        ({"kv_compressor": "kivi", "kv_bits": 3}, ["--kv-bits is 3", "4 or 2 bits"]),
        ({"kv_compressor": "snapkv+int8", "kv_bits": 4}, ["--kv-bits is 4", "int8 has codes of 8 bits"]),
        ({"kv_compressor": "hack", "kv_partition": 48}, ["--kv-partition is 48", "partitions of 64 or 32 or 128 numbers"]),
        ({"kv_compressor": "kivi", "kv_partition": 64}, ["--kv-partition is 64", "kivi has none to choose", "hack"]),
        (
            {"kv_compressor": "verify-guided+kivi"},
            ["'verify-guided+kivi'", "stores none that could be packed", "pass verify-guided alone, or one of snapkv, "],
        ),
        ({"kv_compressor": "spade+kivi"}, ["'spade+kivi'", "stores none that could be packed", "pass spade alone"]),
        ({"kv_compressor": "verify-guided", "kv_head_budgets": "adaptive"}, ["--kv-compressor verify-guided", "do not compare"]),
        ({"kv_sparse_from": 100}, ["--kv-sparse-from is 100", "tokens from 128"]),
        ({"kv_draft_length": 65}, ["--kv-draft-length", "65", "1 to 64, or auto"]),
        ({"kv_max_burst": 1}, ["--kv-max-burst is 1", "from 2"]),
        ({"kv_offload_draft_length": 257}, ["--kv-offload-draft-length is 257", "1 to 256"]),
        ({"kv_host_gb": 1e-9}, ["--kv-host-gb is 1e-09", "full KV of 128 tokens", "at least 3.3e-05", "or 0 for no host memory"]),
        ({"kv_host_gb": 1e-9, "page_size": 256}, ["full KV of 256 tokens", "at least 6.6e-05"]),
        ({"kv_full_tier": "host"}, ["--kv-full-tier host cannot", "no host memory", "pass --kv-host-gb"]),
        ({"kv_bench_acceptance": "0.9"}, ["--kv-bench-acceptance is '0.9'", "pass a number from 0 to 1"]),
        ({"kv_bench_acceptance": 0.0, "kv_mode": "lossy"}, ["--kv-bench-acceptance 0.0 cannot", "--kv-mode lossy", "pass --kv-mode verified"]),
    ],
)
def test_a_value_out_of_range_is_refused(folder, flags, words):
    with pytest.raises(OptionError) as raised:
        build(folder(), **{"kv_mode": "verified", **flags})
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize(("compressor", "budget"), [("snapkv", 0.25), ("snapkv+kivi", 0.25), ("kivi", 1.0), ("int8", 1.0)])
def test_what_only_packs_tokens_keeps_all_of_them_unless_told(folder, compressor, budget):
    args = build(folder(), kv_mode="verified", kv_compressor=compressor)
    assert args.kv_budget == budget and args.kv_bits is None
    assert build(folder(), kv_mode="verified", kv_compressor=compressor, kv_budget=1).kv_budget == 1


ON_GPU = {"device": "cuda", "attention_backend": "flashinfer"}


def packed_args(**change):
    """Resolved arguments for packed copies on a CPU, ."""
    args = SimpleNamespace(
        device="cpu", attention_backend="torch_native", prefill_attention_backend=None, decode_attention_backend=None,
        kv_compressor="snapkv+kivi", kv_mode="verified", kv_full_tier="device",
        kv_host_gb=0, disable_radix_cache=False, enable_deterministic_inference=False, kv_budget=0.25, kv_more_compressors=None,
        kv_partition=None,
    )
    vars(args).update(change)
    return args


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"attention_backend": "flashinfer"}, "--device is cpu and --attention-backend flashinfer; .* cuda with flashinfer, triton"),
        ({"decode_attention_backend": "triton"}, "--attention-backend torch_native, triton; .* cpu with torch_native"),
        ({"device": "cuda"}, "--device is cuda and --attention-backend torch_native; "),
        ({**ON_GPU, "device": "xpu"}, "--device is xpu and --attention-backend flashinfer; "),
        (
            {**ON_GPU, "kv_full_tier": "host", "kv_host_gb": 1, "enable_deterministic_inference": True},
            "--kv-full-tier is 'host' with --enable-deterministic-inference; .* Pass --kv-full-tier device",
        ),
    ],
)
def test_packed_copies_are_refused_where_attention_cannot_read_them(change, found):
    args = packed_args()
    method_options.check_methods(args)
    vars(args).update(change)
    with pytest.raises(OptionError, match=f"{found}.* only drops tokens: snapkv, expected-attention"):
        method_options.check_methods(args)
    args.kv_compressor = "snapkv"
    method_options.check_methods(args)


@pytest.mark.parametrize(
    ("dim", "change", "remedy"),
    [
        (96, {}, "--kv-partition 32"), (64, {"kv_partition": 128}, "--kv-partition 32 or 64"), (80, {}, "--kv-compressor kivi"),
        (80, {"kv_compressor": "snapkv", "kv_more_compressors": "snapkv+hack:0.5"}, "--kv-more-compressors snapkv+kivi:0.5"),
    ],
)  # fmt: skip
def test_partitions_divide_the_models_heads(dim, change, remedy):
    args = packed_args(kv_compressor="hack", get_model_config=lambda: SimpleNamespace(head_dim=dim))
    vars(args).update(change)
    with pytest.raises(OptionError, match=f"which does not divide the {dim} channels of the model's heads.*: pass {re.escape(remedy)}$"):
        method_options.check_methods(args)
    args.get_model_config = lambda: SimpleNamespace(head_dim=256)
    method_options.check_methods(args)


@pytest.mark.parametrize(("backend", "packs"), [("flashinfer", "kivi"), ("triton", "int8"), ("fa3", "snapkv+turboquant")])
def test_on_a_gpu_packed_copies_are_served(backend, packs):
    args = packed_args(**{**ON_GPU, "attention_backend": backend, "kv_compressor": packs})
    method_options.check_methods(args)
    vars(args).update(kv_full_tier="host", kv_host_gb=1)
    method_options.check_methods(args)


@pytest.mark.parametrize("device", ["cuda", "xpu"])
@pytest.mark.parametrize(
    ("flags", "named", "instead"),
    [
        ({"kv_compressor": "kvquant"}, "--kv-compressor kvquant", "--kv-compressor kivi"),
        ({"kv_compressor": "snapkv+kvquant"}, "--kv-compressor snapkv+kvquant", "--kv-compressor snapkv+kivi"),
        (
            {"kv_compressor": "snapkv", "kv_more_compressors": "sink-recent,snapkv+kvquant:0.5"},
            "--kv-more-compressors snapkv+kvquant:0.5", "--kv-more-compressors snapkv+kivi:0.5",
        ),
    ],
)  # fmt: skip
def test_what_has_no_kernels_is_served_on_a_cpu_alone(flags, named, instead, device):
    args = packed_args(**flags)
    method_options.check_methods(args)
    vars(args).update({**ON_GPU, "device": device})
    with pytest.raises(OptionError) as raised:
        method_options.check_methods(args)
    assert str(raised.value) == (
        f"--device is {device} with {named}; kvquant packs tokens on a CPU only, on a GPU hack, int4, int8, kivi, lynx, "
        f"rotatekv, turboquant do. Pass {instead}, or --device cpu."
    )


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"attention_backend": "triton"}, "--device is cpu and --attention-backend triton; .* cpu with torch_native"),
    ],
)
def test_pointers_into_full_kv_are_refused_where_attention_cannot_follow_them(change, found):
    args = packed_args(kv_compressor="verify-guided")
    method_options.check_methods(args)
    vars(args).update(change)
    with pytest.raises(OptionError, match=f"{found}.* one that copies tokens: snapkv, expected-attention"):
        method_options.check_methods(args)
    vars(args).update(ON_GPU)
    method_options.check_methods(args)


@pytest.mark.parametrize(
    ("flags", "option"),
    [
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm"),
        ({"dp_size": 2}, "--dp-size"),
        ({"pp_size": 2}, "--pp-size"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"enable_mixed_chunk": True}, "--enable-mixed-chunk"),
        ({"disaggregation_mode": "decode", "kv_host_gb": 1.0}, "--disaggregation-mode decode"),
        ({"torchao_config": "int8wo"}, "--torchao-config"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype"),
    ],
)
def test_an_option_that_cannot_be_combined_is_refused_with_a_remedy(folder, flags, option):
    with pytest.raises(OptionError, match=f"cannot be combined with {option}.*; .*\\."):
        build(folder(), kv_mode="verified", **flags)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 128}, "sliding-window"),
        ({"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "kv_lora_rank": 16,
          "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}, "MLA"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}},
         "quantized .awq."),
    ],
)
def test_a_model_that_is_not_supported_is_refused(folder, changes, reason):
    with pytest.raises(OptionError, match=f"{reason}.*--kv-mode full"):
        build(folder(**changes), kv_mode="verified")


def test_scores_none_of_which_are_of_the_model_are_refused(folder, tmp_path):
    scores = tmp_path / "scores"
    scores.mkdir()
    with pytest.raises(OptionError) as raised:
        build(folder(), kv_mode="verified", kv_compressor="kvzip", kv_scores=str(scores))
    words = [f"--kv-scores is '{scores}'", "no scores of the model", "sglang_ext.precompress --model", "--kv-compressor snapkv"]
    assert all(word in str(raised.value) for word in words)


def test_full_mode_leaves_sglangs_arguments_alone(folder):
    args = build(folder())
    assert args.kv_mode == "full"
    assert args.speculative_algorithm is None and args.radix_cache_backend is None


def test_full_mode_with_host_memory_gets_our_tree_and_nothing_else(folder, tmp_path):
    stock, args = build(folder()), build(folder(), kv_host_gb=0.01)
    assert args.radix_cache_backend == RADIX_CACHE_BACKEND and args.hicache_storage_backend is None
    stored = build(folder(), kv_host_gb=0.01, kv_store=f"file:{tmp_path}")
    assert stored.hicache_storage_backend == options.STORAGE_BACKEND
    for name in ("speculative_algorithm", "attention_backend", "disable_cuda_graph", "disable_overlap_schedule", "sampling_backend"):
        assert getattr(stored, name) == getattr(args, name) == getattr(stock, name)


@pytest.mark.parametrize(
    ("changes", "flags", "reason"),
    [
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 128}, {}, "sliding-window"),
        ({}, {"enable_deterministic_inference": True, "attention_backend": "flashinfer"}, "SGLang has disabled the prefix cache"),
        ({}, {"kv_host_gb": 1e-9}, "full KV of 128 tokens"),
        ({}, {"page_size": 48, "chunked_prefill_size": 480, "kv_store": "file:/store"}, "--page-size is 48"),
        ({}, {"kv_store": "ftp://host"}, "--kv-store"),
    ],
)
def test_full_mode_refuses_host_memory_for_what_it_cannot_store(folder, changes, flags, reason):
    with pytest.raises(OptionError, match=reason):
        build(folder(**changes), **{"kv_host_gb": 0.01, **flags})


def test_verified_mode_enters_by_sglangs_registries(folder):
    args = build(folder(), kv_mode="verified", kv_draft_length=8)
    assert args.speculative_algorithm == "KV_VERIFIED"
    assert args.speculative_num_draft_tokens == 9
    assert unsupported_model_reason(args.get_model_config()) is None


@pytest.mark.parametrize(("flags", "graphs"), [({}, True), ({"lora_paths": ["name=/some/adapter"]}, False)], ids=["plain", "lora"])
def test_the_overlapped_loop_runs_with_graphs_where_there_are_no_adapters(monkeypatch, flags, graphs):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    args = CheckedServerArgs.__new__(CheckedServerArgs)
    vars(args).update({field.name: field.default for field in dataclasses.fields(CheckedServerArgs)}, kv_mode="verified", **flags)
    prepare(args)
    assert not args.disable_overlap_schedule and args.disable_cuda_graph is not graphs


def test_adapters_pass_sglangs_check_and_the_mode_stays(folder):
    args = build(folder(), kv_mode="verified", lora_paths=["name=/some/adapter"])
    args.check_lora_server_args()
    assert args.enable_lora and args.lora_paths[0].lora_name == "name"
    assert args.speculative_algorithm == "KV_VERIFIED"


@pytest.mark.parametrize(
    ("text", "value", "most", "widths"), [("8", 8, 9, (9,)), ("auto", "auto", 16, (5, 16))], ids=["8", "auto"]
)
def test_the_draft_length_is_a_number_or_auto(folder, text, value, most, widths):
    parser = argparse.ArgumentParser()
    CheckedServerArgs.add_cli_args(parser)
    argv = ["--model-path", folder(), "--device", "cpu", "--attention-backend", "torch_native", "--kv-mode", "verified"]
    args = CheckedServerArgs.from_cli_args(parser.parse_args([*argv, "--kv-draft-length", text]))
    assert (args.kv_draft_length, args.speculative_num_draft_tokens) == (value, most)
    assert options.verify_widths(args) == widths


@pytest.mark.parametrize(
    ("flags", "offloads", "drafts"),
    [
        ({"kv_full_tier": "host", "kv_host_gb": 1, "kv_draft_length": 10}, True, 60),
        ({"kv_full_tier": "host", "kv_host_gb": 1, "kv_draft_length": 10, "kv_max_burst": 32}, True, 30),
        ({"kv_full_tier": "auto", "kv_host_gb": 1, "kv_offload_draft_length": 8}, True, 15),
        ({"kv_full_tier": "auto", "kv_host_gb": 1, "kv_draft_length": 16}, True, 64),
        ({"kv_full_tier": "auto"}, False, 15),
        ({"kv_full_tier": "auto", "kv_host_gb": 1, "kv_draft_length": "auto"}, True, 60),
        ({"kv_host_gb": 1}, False, 15),
        ({"kv_host_gb": 1, "kv_store": "file:store", "kv_store_form": "raw"}, False, 15),
        # Requests draft while they wait for residuals.
        ({"kv_host_gb": 1, "kv_store": "file:store", "kv_store_form": "anchored"}, False, 64),
        ({"kv_host_gb": 1, "kv_store": "file:store", "kv_store_form": "anchored", "kv_max_burst": 32}, False, 31),
        ({"kv_full_tier": "auto", "kv_host_gb": 1, "kv_store": "file:store", "kv_store_form": "anchored"}, True, 60),
    ],
)
def test_where_full_kv_leaves_the_device_drafts_gather_over_whole_rounds(folder, flags, offloads, drafts):
    args = build(folder(), kv_mode="verified", **flags)
    assert options.can_offload_full_kv(args) == offloads and args.speculative_num_steps == drafts


@pytest.mark.parametrize("flags", [{}, {"kv_draft_length": 2}, {"kv_max_burst": 2}])
def test_rounds_of_lossy_are_as_long_whatever_flags_of_drafts_say(folder, flags):
    args = build(folder(), kv_mode="lossy", **flags)
    assert args.speculative_num_steps == options.max_draft_length(args) == options.PLAIN_STEPS


def test_full_kv_that_drafts_read_stays_on_the_device(folder, caplog):
    args = build(folder(), kv_mode="verified", kv_compressor="verify-guided", kv_full_tier="auto", kv_host_gb=1)
    assert not options.can_offload_full_kv(args) and "drafts of --kv-compressor verify-guided read full KV on the device" in caplog.text


def test_auto_says_why_all_full_kv_stays_on_the_device(folder, caplog):
    build(folder(), kv_mode="verified", kv_full_tier="auto")
    assert "--kv-full-tier has no effect: all full KV stays on the device, as there is no host memory" in caplog.text
    caplog.clear()
    build(folder(), kv_mode="verified", kv_full_tier="auto", kv_host_gb=1)
    assert "no effect" not in caplog.text


FOR_BENCHMARKS = {"kv_bench_acceptance": 0.9, "kv_bench_corrupt_loads": 7}


def test_flags_for_benchmarks_parse_and_the_log_says_what_they_do(folder, caplog):
    parser = argparse.ArgumentParser()
    CheckedServerArgs.add_cli_args(parser)
    argv = ["--model-path", folder(), "--device", "cpu", "--attention-backend", "torch_native", "--kv-mode", "verified"]
    argv += ["--kv-full-tier", "auto", "--kv-host-gb", "1", "--kv-bench-acceptance", "0.9", "--kv-bench-corrupt-loads", "7"]
    args = CheckedServerArgs.from_cli_args(parser.parse_args(argv))
    assert {name: getattr(args, name) for name in FOR_BENCHMARKS} == FOR_BENCHMARKS
    assert options.can_offload_full_kv(args)
    assert "--kv-bench-acceptance is 0.9: drafts are accepted by chance, so answers are of no use" in caplog.text
    assert "--kv-bench-corrupt-loads is 7: host memory loses bits" in caplog.text
    assert build(folder(), kv_mode="verified", kv_bench_acceptance=0).kv_bench_acceptance == 0, "it is a probability, too"


@pytest.mark.parametrize("method", ["kivi", "snapkv"])
def test_a_benchmarks_codec_is_refused_where_prompts_would_travel_as_codes(folder, method):
    over = {"disaggregation_mode": "prefill", "disaggregation_transfer_backend": "progressive", "kv_mode": "lossy", "kv_bench_codec": CODEC}
    if method == "snapkv":
        assert build(folder(), kv_compressor=method, **over).kv_bench_codec == CODEC
        return
    with pytest.raises(OptionError, match="--kv-bench-codec .* cannot .* --kv-mode lossy .*: prompts are transferred as quantized KV .* --kv-mode verified on both servers"):
        build(folder(), kv_compressor=method, **over)


@pytest.mark.parametrize("mode", ["full", "verified"])
def test_flags_that_benchmarks_of_transfers_need_are_told_in_any_mode_and_nobody_begins_on_a_lossy_codec(folder, caplog, tmp_path, mode):
    over = {"disaggregation_mode": "decode", "disaggregation_transfer_backend": "progressive", "kv_mode": mode}
    assert options.has_early_decoding(build(folder(), **over)) == (mode == "verified")
    args = build(folder(), kv_bench_codec=CODEC, kv_bench_timeline=str(tmp_path / "times"), **over)
    assert not options.has_early_decoding(args)
    assert f"--kv-bench-codec is {CODEC}: KV arrives as a lossy codec leaves it, so answers are of no use" in caplog.text
    assert "--kv-bench-timeline is" in caplog.text and "no effect" not in caplog.text
    with pytest.raises(OptionError, match="--kv-bench-timeline is .*, a folder: name a file in it"):
        build(folder(), kv_bench_timeline=str(tmp_path), **over)


def test_a_variable_that_a_shell_has_left_changes_nothing(folder, monkeypatch, caplog):
    flags = {"kv_mode": "verified", "kv_full_tier": "host", "kv_host_gb": 1, "random_seed": 1}
    plain = build(folder(), **flags)
    for name, value in {"SIMULATE_ACCEPTANCE": "0.9", "CORRUPT_LOADS": "7", "LOCK_STEP": "1"}.items():
        monkeypatch.setenv(f"SGLANG_EXT_{name}", value)
    assert build(folder(), **flags) == plain and "kv-bench" not in caplog.text
    source = "".join(path.read_text() for path in Path(options.__file__).parents[1].rglob("*.py"))
    assert "SGLANG_EXT_" not in source, "what changes answers or schedules is a flag"


def test_flags_parse_show_in_help_and_survive_pickling(folder):
    parser = argparse.ArgumentParser()
    CheckedServerArgs.add_cli_args(parser)
    assert "--kv-compressor" in parser.format_help()
    argv = ["--model-path", folder(), "--device", "cpu", "--kv-mode", "verified", "--kv-budget", "0.5"]
    args = CheckedServerArgs.from_cli_args(parser.parse_args([*argv, "--attention-backend", "torch_native"]))
    copy = pickle.loads(pickle.dumps(args))
    assert (copy.kv_mode, copy.kv_budget, copy.kv_compressor) == ("verified", 0.5, "snapkv")
