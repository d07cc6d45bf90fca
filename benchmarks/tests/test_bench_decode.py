"""The decode benchmark measures only while all requests decode, and its limits are bytes over bandwidth."""

import argparse
import json
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from sglang_ext.config.method_options import resolve_budget
from sglang_ext.core import OptionError
from sglang_ext.tools import CommandError
from sglang_ext_bench import prompts
from sglang_ext_bench.__main__ import main
from sglang_ext_bench.client import SamplingSettings
from sglang_ext_bench.simulating import simulate
from sglang_ext_bench.speed import decode, decode_limit, decode_wave, settings
from sglang_ext_bench.speed.decode import DecodeResult, line
from sglang_ext_bench.speed.decode_limit import ModelBytes
from sglang_ext_bench.speed.decode_wave import ResponseStream, Wave
from sglang_ext_bench.speed.settings import ServerSetting

QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
}


pytestmark = pytest.mark.usefixtures("checked_here")


def stream(chunks, **meta):
    found = ResponseStream()
    for seconds, tokens in chunks:
        found.add(seconds, {"completion_tokens": tokens, **meta})
    return found


def test_the_span_is_that_in_which_all_decode():
    early = stream([(1.0, 1), (2.0, 11), (3.0, 21)])
    late = stream([(2.0, 1), (3.0, 9), (4.0, 17)])
    wave = decode_wave.measure([early, late])
    assert (wave.running, wave.seconds, wave.tokens, wave.first_token) == (2, 1.0, 10 + 8, 2.0)
    assert wave.token_ms == pytest.approx(2000 / 18) and wave.accept_length is None


def test_the_steady_rate_is_between_the_first_and_the_last_verification_of_each():
    often = stream([(1.0, 1), (2.0, 11), (3.0, 21), (4.0, 31), (5.0, 41)])
    seldom = stream([(1.0, 1), (2.5, 41), (4.5, 121), (6.0, 181)])
    wave = decode_wave.measure([often, seldom])
    assert wave.steady == pytest.approx(10 + 40) and wave.tokens_per_second == (40 + 120) / 4
    assert decode_wave.measure([often, stream([(1.0, 1), (5.0, 81)])]).steady == 10, "one chunk alone tells no rate"


def test_tokens_of_a_round_count_from_one_moment_though_each_has_a_chunk_of_its_own():
    rounds = [(1.0, 1), (2.0, 11), (3.0, 21), (4.0, 31), (5.0, 41)]
    apart = [rounds[0], *((begin + place / 1000, tokens - 9 + place) for begin, tokens in rounds[1:] for place in range(10))]
    assert len(apart) == 41 and apart[-1][1] == 41
    assert decode_wave.measure([stream(rounds)]).steady == pytest.approx(10)
    assert decode_wave.measure([stream(apart)]).steady == pytest.approx(10)
    # A burst that has not ended when the span ends is not counted.
    assert decode_wave.measure([stream(apart), stream([(at - 0.0045, tokens) for at, tokens in apart])]).steady == pytest.approx(20)
    assert decode_wave.measure([stream([(token / 10, token) for token in range(1, 42)])]).steady == pytest.approx(10)


def test_the_time_per_token_is_unknown_after_a_single_burst():
    two_rounds = [(1.0, 1), *((2 + place / 1000, 2 + place) for place in range(16)), *((3 + place / 1000, 18 + place) for place in range(16))]
    assert decode_wave.measure([stream(two_rounds)]).steady_ms == pytest.approx(1000 / 16)
    one_round = two_rounds[:17]
    assert decode_wave.measure([stream(one_round)]).steady_ms is None
    other = stream([(token / 10, token) for token in range(1, 42)])
    assert decode_wave.measure([stream(one_round), other]).steady_ms is None, "one of two requests has a single burst"


def test_drafts_and_fallbacks_are_reported():
    drafted = stream([(1, 1), (2, 30)], kv_verifies=2, kv_accepted=27, kv_fallback=None)
    full = stream([(1, 1), (2, 30)], kv_verifies=0, kv_accepted=0, kv_fallback="short-context")
    wave = decode_wave.measure([drafted, full])
    assert wave.accept_length == pytest.approx(29 / 2) and wave.fallbacks == 1


def test_requests_that_wait_for_room_are_not_among_those_that_decode():
    first = [stream([(1, 1), (2, 11), (3, 31)]), stream([(2, 1), (3, 21), (4, 31)])]
    wave = decode_wave.measure([*first, stream([(3.5, 1), (5, 31)])])
    assert (wave.batch, wave.running, wave.seconds, wave.tokens) == (3, 2, 1.0, 20 + 20)
    assert wave.tokens_per_second == 40 and wave.token_ms == 50


def test_requests_that_hardly_decoded_side_by_side_are_refused():
    with pytest.raises(CommandError, match="2 requests of 2 decoded at the same time for 0.10 s of the 3.00 s.*--output-len"):
        decode_wave.measure([stream([(1, 1), (3, 30)]), stream([(2.9, 1), (4, 30)])])


@pytest.mark.parametrize("events", [[], [{"meta_info": {"completion_tokens": 3}}]])
def test_an_answer_that_breaks_off_is_no_measurement(events):
    server = SimpleNamespace(stream=lambda path, body: iter(events))
    with pytest.raises(CommandError, match="of 8 tokens"):
        decode_wave.run(server, [(1, 2)], SamplingSettings(), 8)


def test_limits_count_weights_and_kv(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    model = ModelBytes.from_folder(tmp_path, 2)
    assert model.kv_token == 147_456
    assert model.weights == pytest.approx(15.1e9, rel=0.01)
    # The limit of stock is 12.8 ms for batch 8 at 32k with 4.24 TB/s.
    stock = decode_limit.stock_ms(model, 4.24e12, 8, 32768)
    assert stock == pytest.approx(12.8, rel=0.02)
    everything = decode_limit.verified_ms(model, 4.24e12, 8, 32768, 1.0, 16, 17.0)
    assert everything == pytest.approx(stock)
    assert decode_limit.verified_ms(model, 4.24e12, 8, 32768, 0.125, 16, 16.0) < stock / 2


def arguments(folder, *flags):
    import argparse

    parser = argparse.ArgumentParser()
    decode.add_arguments(parser)
    return parser.parse_args(["--model", str(folder), *flags])


def test_each_combination_is_a_setting_after_stock_and_baselines(tmp_path):
    args = arguments(
        tmp_path, "--baseline", "--speculative-algorithm NGRAM", "--budget", "0.25,0.125", "--draft-length", "8,auto",
        "--also", "0.0625:24",
    )  # fmt: skip
    found = list(settings.all_settings(args))
    assert [s.name for s in found][:3] == ["stock", "speculative-algorithm-NGRAM", "snapkv-0.25-x8"]
    assert [s.name for s in found][3:] == ["snapkv-0.25-xauto", "snapkv-0.125-x8", "snapkv-0.125-xauto", "snapkv-0.0625-x24"]
    assert [s.draft_length for s in found] == [None, None, 8, None, 8, None, 24]


def test_what_keeps_all_tokens_has_no_budget_and_its_bits_count(tmp_path):
    args = arguments(tmp_path, "--compressor", "snapkv,kivi,snapkv+int8", "--budget", "0.25,0.5")
    found = [(s.name, s.budget, "--kv-budget" in s.arguments) for s in settings.all_settings(args)][1:]
    assert found == [
        ("snapkv-0.25-x15", 0.25, True), ("snapkv-0.5-x15", 0.5, True), ("kivi-x15", 0.25, False),
        ("snapkv+int8-0.25-x15", 0.125, True), ("snapkv+int8-0.5-x15", 0.25, True),
    ]  # fmt: skip
    with pytest.raises(CommandError, match="--compressor is 'zip'"):
        list(settings.all_settings(arguments(tmp_path, "--compressor", "zip")))


def test_the_default_budget_is_the_servers(tmp_path):
    default = resolve_budget("snapkv", None)
    assert [s.budget for s in settings.all_settings(arguments(tmp_path))] == [None, default]
    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    assert parser.parse_args([]).budget == default


@pytest.mark.parametrize(("prefill", "told"), [(0.25, "first token 250 ms"), (None, "")])
def test_a_first_token_that_was_not_measured_is_not_told(prefill, told):
    text = line(DecodeResult("stock", 512, 1, 1, 100.0, 10.0, None, None, [], prefill=prefill))
    assert ("first token" in text) == bool(told) and told in text


def test_tiers_are_settings_of_their_own(tmp_path):
    flags = ("--full-tier", "device,host", "--host-gb", "4", "--offload-draft-length", "32,64")
    stock, device, *host = settings.all_settings(arguments(tmp_path, *flags))
    assert "--kv-full-tier" not in device.arguments
    assert [each.name for each in host] == [f"{device.name}-host-x32", f"{device.name}-host-x64"]
    for each, drafts in zip(host, ("32", "64")):
        asked = dict(zip(each.arguments[::2], each.arguments[1::2]))
        assert asked["--kv-full-tier"] == "host" and asked["--kv-host-gb"] == "4"
        assert asked["--kv-offload-draft-length"] == drafts and each.tier.max_drafts == int(drafts)


def test_acceptance_is_forced_by_a_flag_of_those_servers_alone_that_verify(tmp_path):
    beside = ("--baseline", "--speculative-algorithm NGRAM", "--also", "0.5:8")
    asked = arguments(tmp_path, "--force-acceptance", "0.99,0.9", *beside)
    stock, baseline, *verified = settings.all_settings(asked)
    for each in verified:
        flags = settings.server(asked, each, tmp_path).command
        assert flags[flags.index("--kv-bench-acceptance") + 1] == "0.99"
        assert settings.acceptances(asked, each) == [0.99, 0.9]
    plain = arguments(tmp_path)
    for args, each in ((asked, stock), (asked, baseline), (plain, [*settings.all_settings(plain)][-1])):
        made = settings.server(args, each, tmp_path)
        assert not any("--kv-bench" in flag for flag in made.command) and not made.env
        assert settings.acceptances(args, each) == [None]


@pytest.mark.parametrize(
    "flags",
    [("--full-tier", "disk"), ("--full-tier", "host"), ("--full-tier", "host", "--host-gb", "1", "--offload-draft-length", "0")],
)
def test_a_tier_without_host_memory_or_drafts_is_refused(tmp_path, flags):
    with pytest.raises(CommandError, match="--full-tier|--offload-draft-length"):
        list(settings.all_settings(arguments(tmp_path, *flags)))


def test_a_setting_that_fails_costs_no_other_its_figures(tmp_path, capsys):
    def measure(setting, logs):
        if setting.name == "stock":
            raise CommandError("the server ended")

    args = arguments(tmp_path)
    assert settings.each(args, list(settings.all_settings(args)), measure) == {"stock": "the server ended"}
    assert capsys.readouterr().out.splitlines() == ["stock: starting", "stock: failed: the server ended", "snapkv-0.25-x15: starting"]


def test_a_gain_is_over_stock_at_the_same_context_and_batch(tmp_path):
    args = arguments(tmp_path)
    wave = Wave(batch=8, running=8, seconds=1.0, tokens=800, steady=800.0, first_token=0.1, accept_length=None, fallbacks=0)
    fast = Wave(batch=8, running=8, seconds=1.0, tokens=1600, steady=1600.0, first_token=0.1, accept_length=16.0, fallbacks=1)
    stock = decode.summarize(args, ServerSetting("stock"), 4096, [wave], [], None)
    ours = decode.summarize(args, ServerSetting("s", budget=0.1, draft_length=16), 4096, [fast], [stock], None)
    other = decode.summarize(args, ServerSetting("s", budget=0.1, draft_length=16), 512, [fast], [stock], None)
    assert stock.token_ms == 10 and ours.gain == 2 and other.gain is None
    more = Wave(batch=8, running=4, seconds=1.0, tokens=1200, steady=1200.0, first_token=0.1, accept_length=16.0, fallbacks=0)
    half = decode.summarize(args, ServerSetting("s", budget=0.1, draft_length=16), 4096, [more], [stock], None)
    assert half.gain == 1.5 and "4 at once" in decode.line(half) and "at once" not in decode.line(ours)
    assert "gain  2.00" in decode.line(ours) and "1 requests ended on full KV" in decode.line(ours)


@pytest.mark.parametrize("flags", [("--batch", "0"), ("--context-len", "many"), ("--force-acceptance", "1.5"), ("--also", "0.5"), ("--budget", "3")])
def test_bad_options_are_refused_before_a_server_starts(tmp_path, flags):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    with pytest.raises(CommandError, match=flags[0]):
        decode.run(arguments(tmp_path, *flags))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--draft-length", "100"), "snapkv-0.25-x100 cannot start: --kv-draft-length is 100"),
        (("--server-arg=--nonsense",), "the server stock cannot start: unrecognized arguments: --nonsense"),
        (("--server-arg=--page-size 4 --kv-budget=0.5",), "--server-arg has --kv-budget, which the benchmark sets for the server "),
        (("--baseline=--speculative-algorithm",), "--speculative-algorithm: expected one argument"),
        (("--json", "/proc/x.json"), "--json is '/proc/x.json', which cannot be written"),
        (("--logs", "/proc/x"), "--logs is '/proc/x', to which nothing can be written"),
        (("--prompt-file", "/proc/no-such"), "--prompt-file /proc/no-such cannot be read"),
    ],
)
def test_what_a_server_would_refuse_ends_the_run_before_one_starts(tmp_path, launches, capsys, flags, reason):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    assert main(["decode", "--model", str(tmp_path), *flags]) == 2
    (told,) = capsys.readouterr().err.splitlines()
    assert reason in told and not launches.made


def test_a_model_without_a_config_is_refused(tmp_path, capsys):
    for command in ("decode", "latency"):
        assert main([command, "--model", str(tmp_path)]) == 2
        assert capsys.readouterr().err == f"{command}: --model {tmp_path}: this folder has no config.json: pass a Hugging Face folder\n"
    with pytest.raises(OptionError, match="has no config.json that can be read"):
        ModelBytes.from_folder(tmp_path, 2)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(OptionError, match="its config.json is no JSON object"):
        ModelBytes.from_folder(tmp_path, 2)


def test_each_wave_of_a_text_has_prompts_of_its_own():
    waves = prompts.Waves([1, 4], repeats=2, fresh=True)
    taken = [list(range(10)[where]) for batch in (1, 4) for where in waves.of(batch)]
    assert taken == [[0], [1], [2, 3, 4, 5], [6, 7, 8, 9]] and waves.prompts == 10
    same = prompts.Waves([1, 4], repeats=2, fresh=False)
    assert same.of(4) == [slice(0, 4)] * 2 and same.prompts == 4


def test_a_text_too_short_for_the_prompts_is_refused(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    (tmp_path / "text").write_text("a b c")
    tokenizer = SimpleNamespace(bos_token=None, encode=lambda text, add_special_tokens: text.split())
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda model: tokenizer)
    with pytest.raises(CommandError, match="has 3 tokens"):
        prompts.make_prompts(arguments(tmp_path, "--prompt-file", str(tmp_path / "text")), 2, [16])


def test_times_of_a_round_are_read_from_the_metrics_page():
    page = """# HELP sglang_ext:round_seconds Seconds
sglang_ext:round_seconds{model_name="m",part="draft"} 0.0065
sglang_ext:round_seconds{model_name="m",part="rest"} 0.025
sglang_ext:drafts_total{model_name="m"} 16.0
"""
    assert decode.read_parts(page) == {"draft": 6.5, "rest": 25.0}


def test_what_tiers_allow_grows_with_the_link_and_with_the_memory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    flags = ("--full-tier", "host", "--host-gb", "130", "--offload-draft-length", "256", "--budget", "0.125")
    args = arguments(tmp_path, "--output-len", "2048", *flags)
    *_, host = settings.all_settings(args)
    page = 'sglang_ext:host_load_bytes_per_second{model_name="m"} '

    def allowed(link, pool, acceptance=0.99):
        return decode.allowed(args, host, 30720, 24, acceptance, 4.35e12, pool, f"{page}{link}\n")

    # docs/benchmarks.md has 1,080 for these values.
    assert allowed(53.7e9, 262144) == pytest.approx(1080, rel=0.03)
    assert allowed(53.7e9, 262144) < allowed(107e9, 262144) and allowed(53.7e9, 131072) < allowed(53.7e9, 262144)
    assert allowed(53.7e9, 262144, None) is None and decode.allowed(args, host, 30720, 24, 0.9, 4e12, 262144, "") is None
