"""What a server says when it is ready."""

import logging
import subprocess
from types import SimpleNamespace

import pytest

from sglang_ext.hooks import startup_log


def server(**change: object) -> SimpleNamespace:
    """Resolved arguments of a server."""
    args = SimpleNamespace(
        kv_mode="verified", device="cuda", kv_compressor="snapkv", kv_budget=0.25, kv_more_compressors=None, kv_draft_length=16,
        api_key=None, skip_tokenizer_init=False, disaggregation_mode="null", disaggregation_transfer_backend="mooncake",
        kv_reference="exact", kv_bits=None, kv_partition=None, kv_prefill="exact", url=lambda: "http://127.0.0.1:8000",
        kv_select=None, kv_select_every=1, kv_select_by="current", kv_score_bits=16, kv_cache_ranks=0,
    )  # fmt: skip
    vars(args).update(change)
    return args


def test_three_lines_tell_mode_method_and_address() -> None:
    mode, method, address = startup_log.status_lines(server(kv_more_compressors="kivi"))
    assert mode == "mode verified: drafts on compressed KV, verified on full KV: answers are stock's"
    assert method == "compressor snapkv (budget 0.25), kivi (budget 1, 4 bits), draft length 16"
    assert address.startswith("listening on http://127.0.0.1:8000; try: curl http://127.0.0.1:8000/generate -H ")
    spade = {"kv_compressor": "spade", "kv_budget": 1.0}
    assert startup_log.status_lines(server(kv_select=2048.0, **spade))[1] == "compressor spade (2048 tokens), draft length 16"
    assert startup_log.status_lines(server(kv_select=0.125, **{**spade, "kv_budget": 0.125}))[1].startswith("compressor spade (budget 0.125)")


def test_on_a_cpu_they_say_that_drafting_is_not_faster_there() -> None:
    assert "demonstrates correctness, not speed" in startup_log.status_lines(server(device="cpu"))[0]
    assert "speed" not in startup_log.status_lines(server(device="cpu", kv_mode="lossy"))[0]
    choosing = server(device="cpu", kv_mode="lossy", kv_compressor="spade", kv_select=0.25)
    assert "an answer may take longer than stock's" in startup_log.status_lines(choosing)[0]
    choosing.device = "cuda"
    assert "stock" not in startup_log.status_lines(choosing)[0]


def test_servers_apart_say_which_part_is_theirs_and_whom_to_ask() -> None:
    apart = {"disaggregation_transfer_backend": "progressive", "kv_reference": "int8"}
    for role, word in (("prefill", "it computes prompts"), ("decode", "prompts' KV comes from prefill servers")):
        mode, method, address = startup_log.status_lines(server(disaggregation_mode=role, **apart))
        assert "stock" not in mode and "--kv-reference int8" in mode
        assert word in method and "send requests to SGLang's router" in address and "curl" not in address
    assert "answers are stock's" in startup_log.status_lines(server(disaggregation_mode="decode", **apart | {"kv_reference": "exact"}))[0]
    assert "answers are stock's" in startup_log.status_lines(server(**apart))[0]


def test_in_lossy_nothing_is_drafted() -> None:
    mode, method, _ = startup_log.status_lines(server(kv_mode="lossy"))
    assert "approximate" in mode and "draft" not in method


def test_they_tell_bits_partitions_and_what_prompts_attend_to() -> None:
    codes = {"kv_mode": "lossy", "kv_compressor": "hack", "kv_budget": 1.0}
    assert startup_log.status_lines(server(**codes))[1] == "compressor hack (budget 1, 4 bits, partitions of 64)"
    more = {"kv_bits": 2, "kv_partition": 32, "kv_prefill": "quantized"}
    assert startup_log.status_lines(server(**codes, **more))[1] == "compressor hack (budget 1, 2 bits, partitions of 32), prompts on quantized KV"


@pytest.mark.parametrize(
    ("change", "told"),
    [({}, ""), ({"kv_select_every": 4}, ", every 4 steps"), ({"kv_select_by": "regressed"}, ", by regressed queries"),
     ({"kv_score_bits": 8}, ", keys in 8 bits"), ({"kv_cache_ranks": 1}, ", 1 cache rank"),
     ({"kv_select_every": 2, "kv_score_bits": 4, "kv_cache_ranks": 2}, ", every 2 steps, keys in 4 bits, 2 cache ranks")],
    ids=["defaults", "every", "queries", "bits", "rank", "several"],
)
def test_they_tell_how_tokens_are_chosen_where_that_is_not_the_default(change: dict[str, object], told: str) -> None:
    args = server(kv_mode="lossy", kv_compressor="spade", **change)
    assert startup_log.status_lines(args)[1] == f"compressor spade (budget 0.25{told})"
    args.disaggregation_mode = "prefill"  # it takes no steps
    assert startup_log.status_lines(args)[1].startswith("compressor spade (budget 0.25); ")


def test_flags_that_a_method_does_not_have_are_not_told() -> None:
    flags = {"kv_mode": "lossy", "kv_select_every": 4, "kv_score_bits": 8, "kv_select_by": "regressed", "kv_cache_ranks": 1}
    assert startup_log.status_lines(server(kv_compressor="quest", **flags))[1] == "compressor quest (budget 0.25, every 4 steps)"
    assert startup_log.status_lines(server(kv_compressor="snapkv", **flags))[1] == "compressor snapkv (budget 0.25)"


@pytest.mark.parametrize(
    ("change", "word"),
    [({}, '"text": "'), ({"skip_tokenizer_init": True}, '"input_ids": ['),
     ({"api_key": "secret"}, "Authorization: Bearer $API_KEY")],
    ids=["text", "tokens", "key"],
)
def test_the_request_is_one_that_a_shell_takes(change: dict[str, object], word: str) -> None:
    command = startup_log.status_lines(server(**change))[2].split("try: ")[1]
    assert word in command and "secret" not in command
    assert subprocess.run(["bash", "-n", "-c", command]).returncode == 0


def test_they_follow_sglangs_word_and_precede_the_callers(caplog: pytest.LogCaptureFixture) -> None:
    said = []

    def wait(server_args, launch_callback, execute_warmup_func):
        said.append(execute_warmup_func)
        launch_callback()

    with caplog.at_level(logging.INFO):
        startup_log.log_when_ready(wait, server(), lambda: said.append(len(caplog.messages)), execute_warmup_func="warm")
    assert said == ["warm", 3] and all(text.startswith("sglang-ext: ") for text in caplog.messages)


def test_a_server_that_does_not_get_ready_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        startup_log.log_when_ready(lambda *args, **named: None, server())
    assert not caplog.messages
