"""``sglang-ext-bench longcot``: the paper's operations, pack times of a timeline, the compared servers, and whole runs with fake servers."""

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from launched import LaunchedServer

from sglang_ext.managers.cache_rank.layerwise_client import PackTimeline
from sglang_ext.mem_cache.compressed.rotary import Rotary
from sglang_ext.tools import CommandError
from sglang_ext_bench.__main__ import main
from sglang_ext_bench.baselines import SELECTORS
from sglang_ext_bench.baselines.scoring_inputs import ScoringInputs
from sglang_ext_bench.longcot import command, flops, overlap, packs, serving
from sglang_ext_bench.longcot.arms import make_servers, parse_loads, set_defaults
from sglang_ext_bench.longcot.flops import ModelShape, token_flops
from sglang_ext_bench.options import file_name
from sglang_ext_bench.speed.decode_wave import ResponseStream
from sglang_ext_bench.timelines import PackEvent

CONFIG = {
    "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 12288, "vocab_size": 5000,
}  # fmt: skip
QWEN3_8B = ModelShape.from_config(CONFIG)


@pytest.mark.parametrize(("method", "attention"), [
    ("full", 19_327_352_832), ("tova", 1_207_959_552 + 9_663_676_416), ("true-query", 1_207_959_552 + 9_663_676_416),
    ("quest", 1_207_959_552 + 603_979_776), ("spade", 1_207_959_552), ("spade-between-steps", 1_207_959_552 + 9_663_676_416)])  # fmt: skip
def test_operations_of_a_token_are_those_of_equations_6_to_11(method, attention):
    assert token_flops(QWEN3_8B, method, 32768, 2048) == 13_891_534_848 + attention


@given(st.integers(32, 1 << 17), st.floats(0.01, 1.0))
def test_choosing_elsewhere_takes_least_and_scoring_pages_less_than_scoring_tokens(tokens, share):
    selected = max(1, int(share * tokens))
    spade, quest, tova = (token_flops(QWEN3_8B, method, tokens, selected) for method in ("spade", "quest", "tova"))
    assert spade < quest < tova and spade <= token_flops(QWEN3_8B, "full", tokens, selected)


def events():
    """Two steps of two packs and two requests. The last selection request has no selection."""
    for step in (0, 1):
        at = 10.0 + step
        for first in (0, 6):
            begun = at + first / 60
            yield PackEvent("reached", begun, first, 6)
            for lane in (0, 1):
                yield PackEvent("written", begun + 0.01, first, 6, lane, step + 1, bytes=1000)
            for lane in (0, 1):
                yield PackEvent("asked", begun + 0.05, first, 6, lane, step + 2, bytes=30)
        for first in (0, 6):
            for lane in (0, 1):
                if (step, first, lane) != (1, 6, 1):
                    yield PackEvent("chosen", at + first / 60 + 0.08 + lane / 100, first, 6, lane, step + 2, seconds=0.01, bytes=20)


def test_packs_have_the_models_time_the_ranks_and_the_rest_of_the_cycle():
    steps = packs.parse_steps(events())
    assert [sorted(step) for step in steps] == [[(0, 6), (6, 6)]] * 2
    found = packs.summarize("spade-ranks", "two", steps)
    assert (found.layers, found.steps) == (6, 2)
    assert found.inference == pytest.approx(0.1 - 0.01), "from a pack to the next, without what it waited for"
    assert found.selection == pytest.approx(0.02) and found.transfer == pytest.approx(0.04 - 0.02)
    assert (found.up, found.down, found.gathered, found.missed) == (60, 40, 2000, 0)
    assert found.is_hidden and found.bandwidth == pytest.approx(100 / 0.09) and found.gathered_bandwidth == pytest.approx(2060 / 0.09)


def test_the_model_is_seen_in_all_packs_of_a_step_in_the_last_until_its_last_question():
    steps = packs.parse_steps(events())
    assert [each.known_end for each in steps[0].values()] == pytest.approx([10.1, 10.15])
    assert [each.end for each in steps[0].values()] == [pytest.approx(10.1), None]
    unasked = packs.parse_steps(event for event in events() if event.kind != "asked")
    assert [each.known_end for each in unasked[0].values()] == [pytest.approx(10.1), None]


def test_a_choice_that_was_late_counts_and_without_answers_there_are_no_figures():
    told = [PackEvent("missed", 10.02, 0, 6, 0, 2) if event.kind == "written" and event.lane == 0 else event for event in events()]
    assert packs.summarize("late", "two", packs.parse_steps(told)).missed == 4 / 8
    assert packs.summarize("none", "two", packs.parse_steps(event for event in events() if event.kind != "chosen")) is None
    assert packs.summarize("none", "two", []) is None


def test_seconds_a_token_are_of_tokens_from_one_length_to_the_next_however_they_come():
    stream = ResponseStream([0.0, 1.0, 3.0, 7.0], [1, 9, 16, 33])
    assert serving.token_seconds(stream, 1, 9) == pytest.approx(1 / 8)
    assert serving.token_seconds(stream, 9, 12) == pytest.approx(2 / 7), "the burst with the twelfth"
    assert serving.token_seconds(stream, 12, 14) == 0.0, "all of one burst"
    assert serving.token_ms([serving.WaveResult.from_streams([stream])] * 2, (9, 33)) == pytest.approx((125.0, 6000 / 24))
    apart = [(0.0, 1), *((begin + token / 1000, last - 7 + token) for begin, last in ((1.0, 9), (2.0, 17), (3.0, 25)) for token in range(8))]
    each = ResponseStream(*map(list, zip(*apart)))
    assert serving.token_seconds(each, 1, 9) == serving.token_seconds(each, 1, 20) == pytest.approx(1 / 8), "a chunk for each token of a round"


def test_side_by_side_count_the_requests_and_the_time_in_which_all_that_have_room_decode():
    early = ResponseStream([1.0, 2.0, 4.0, 5.0], [1, 2, 4, 5])
    looks = [serving.SelectionReading(10 + at, 10 * at, {}, 0.0, 0.0) for at in range(8)]
    found = serving.WaveResult.from_streams([early, ResponseStream([3.0, 5.0, 7.0], [1, 2, 3])], looks, 10.0)
    assert (found.wave.running, found.wave.token_ms) == (2, pytest.approx(1000)) and found.selections.taken == 20
    # The second request waits for memory until the first has finished. Or both hardly send a token in the same time.
    alone = serving.WaveResult.from_streams([early, ResponseStream([6.0, 7.0], [1, 2])])
    assert (alone.wave.running, alone.wave.token_ms, alone.selections) == (1, pytest.approx(1000), None)
    apart = serving.WaveResult.from_streams([early, ResponseStream([4.9, 7.0], [1, 2])])
    assert apart.wave is None and serving.median_wave([apart, found]) is found and serving.median_wave([]) is None


def options(**given):
    base = {"method": ("stock", "spade", "spade-ranks", "quest", "verify-guided"), "mode": ("lossy", "verified")}
    base |= {"load": "8:32768:2048,16:16384:1024", "output_len": "32,64"}
    base |= {"select_every": "1", "select_by": "current", "ranks": 1, "pack_layers": ("6", "12"), "draft_length": 16, "server_arg": []}
    return SimpleNamespace(**base | given)


def test_each_method_mode_number_and_pack_has_a_server_and_verified_choices_no_lossy_one():
    found = make_servers(options())
    assert [arm.name for arm in found if arm.method == "spade-ranks"] == [
        f"spade-ranks {mode} {select} packs of up to {pack}"
        for mode in ("lossy", "verified") for select in (2048, 1024) for pack in (6, 12)
    ]
    assert {arm.mode for arm in found if arm.method == "verify-guided"} == {"verified"}
    of_ranks = next(arm for arm in found if arm.has_timeline)
    assert of_ranks.method == "spade-ranks"
    assert of_ranks.flags == (
        "--kv-mode", "lossy", "--kv-compressor", "spade", "--kv-select", "2048", "--kv-select-every", "1", "--kv-select-by", "current",
        "--kv-cache-ranks", "1", "--kv-pack-layers", "6",
    )  # fmt: skip
    big, small = parse_loads(options().load)
    assert of_ranks.runs_load(big) and not of_ranks.runs_load(small) and found[0].runs_load(big) and found[0].runs_load(small)
    assert len({arm.name for arm in found}) == len(found)


def test_servers_of_baselines_load_their_classes():
    found = make_servers(options(method=("tova", "true-query"), mode=("lossy",), load="8:32768:2048"))
    assert [(arm.name, arm.flags[:4]) for arm in found] == [
        (f"{name} lossy 2048", ("--kv-mode", "lossy", "--kv-compressor", SELECTORS[name])) for name in ("tova", "true-query")
    ]


def test_on_gpus_quest_takes_pages_of_the_pool(monkeypatch):
    for on_gpu in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
        (arm,) = make_servers(options(method=("quest",), mode=("lossy",), load="8:32768:2048", pack_layers=("auto",)))
        assert arm.flags[-2:] == (("--page-size", "16") if on_gpu else ("--kv-select-every", "1"))


def test_what_the_command_line_leaves_open_is_set_by_where_servers_run(monkeypatch):
    on_cpu, named = "--dtype float32 --device cpu", ("stock", "spade-ranks")
    for gpus, flags, given, methods, packs, timed in (
        (0, "", {"method": None}, ("stock", "spade", "spade-ranks", "quest", "tova", "true-query", "verify-guided"), ("6", "12"), True),
        (0, "--device cuda", {"method": named}, named, ("auto",), False),
        (2, "", {"method": None}, ("stock", "spade", "spade-ranks", "quest", "verify-guided"), ("auto",), False),
        (1, "", {"method": None}, ("stock", "spade", "quest", "verify-guided"), ("auto",), False),
        (2, "", {"method": named, "pack_layers": ("auto",)}, named, ("auto",), False),
        (2, on_cpu, {"method": named}, named, ("6", "12"), True),
        (2, on_cpu, {"method": named, "pack_layers": ("3",)}, named, ("3",), True),
        (2, "", {"method": ("spade",), "pack_layers": ("3",)}, ("spade",), ("3",), False),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        args = options(**{"pack_layers": None, "server_arg": [flags], **given})
        set_defaults(args)
        assert (args.method, args.pack_layers) == (methods, packs)
        assert any(arm.has_timeline for arm in make_servers(args)) == timed
        for arm in make_servers(args):
            assert command.make_setting(arm, "file").arguments == (*arm.flags, *(("--kv-bench-timeline", "file") if arm.has_timeline else ()))
    with pytest.raises(CommandError, match="--pack-layers '6': cache ranks on GPUs .* at once: pass auto, or leave it out"):
        set_defaults(options(server_arg=["--device=cuda"]))


@pytest.mark.parametrize(("option", "value", "told"), [
    ("--load", "8:100", "--load '8:100': pass BATCH:CONTEXT:SELECT"), ("--load", "8:100:100", "from 2 to below"),
    ("--method", "spade,snapkv", "--method 'snapkv': pass some of stock, spade"), ("--mode", "full", "--mode 'full': pass some of lossy"),
    ("--pack-layers", "six", "--pack-layers 'six'"), ("--output-len", "1", "--output-len 1: times are those of tokens after"),
    ("--output-len", "4,8", "--output-len 4: a round of spade verified 256 has up to 17 tokens"),
    ("--overlap-share", "1", "--overlap-share 1: pass a share"),
    ("--method", "", "there is nothing to measure: pass a method, --pages or --overlap-prompts")])  # fmt: skip
def test_wrong_options_are_named(tmp_path, capsys, option, value, told):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert main(["longcot", "--model", str(tmp_path), option, value]) == 2
    assert told in capsys.readouterr().err


def page(taken, late, waited, gone=0):
    """The metrics page of a server with cache ranks."""
    reasons = ("late", late), ("no-lane", gone)
    missed = "".join(f'sglang_ext:missed_selections_total{{model_name="m",reason="{name}"}} {count}\n' for name, count in reasons)
    return (
        f'sglang_ext:selections_total{{model_name="m"}} {taken}.0\n{missed}'
        f'sglang_ext:selection_wait_seconds_total{{model_name="m"}} {waited}\nsglang_ext:rank_alone_tokens{{model_name="m"}} 300.0\n'
        'sglang_ext:selection_steps{model_name="m"} 2.0\n'
    )


def test_choices_of_a_span_are_what_metrics_grew_by_within_it():
    counts = enumerate([(5, 0), (10, 1), (40, 4), (90, 4)])
    looks = [serving.SelectionReading.from_metrics(page(taken, late, taken / 10, 7), at) for at, (taken, late) in counts]
    found = serving.count_selections(looks, 0.5, 2.5)
    assert (found.taken, found.missed, found.alone, found.seconds) == (30, {"late": 3}, 300, 1) and found.waited == pytest.approx(3)
    assert str(found) == "30 of 33 (late), every 2 steps, waited 300%"
    assert serving.count_selections(looks, 1.5, 2.5) is None and serving.count_selections([], 0, 9) is None
    assert str(serving.count_selections(looks, 2, 3)) == "50 of 50, every 2 steps, waited 500%"
    assert str(serving.count_selections([serving.SelectionReading(at, at, {}, 0.0, 0.0, 1.0) for at in (2, 3)], 2, 3)) == "1 of 1, waited 0%"


def test_looks_go_on_while_a_server_answers_and_over_what_it_refuses():
    pages = iter([OSError("not yet"), page(1, 0, 0), page(2, 0, 0)])

    class Server:
        def request(self, path):
            told = next(pages, page(3, 0, 0))
            if isinstance(told, OSError):
                raise told
            return told

    with serving.poll_selections(Server(), 0.001) as looks:
        while len(looks) < 3:
            pass
    assert [look.taken for look in looks[:3]] == [1, 2, 3] and looks[0].at < looks[1].at


@pytest.mark.parametrize("mode", ["lossy", "verified"])
def test_times_are_those_of_a_token_where_rounds_come_late_and_the_last_at_once(tmp_path, monkeypatch, launches, checked_here, mode):
    """As in SGLang's overlap scheduler: a round's tokens are sent when the next round has run, the last round's with those before."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    step, drafts = 0.01, 7

    def streams(server, prompts, sampling, tokens, *more):
        size = 1 if "--kv-mode" not in server.command else 4 if mode == "lossy" else drafts + 1
        ends = [1, *range(1 + size, tokens, size), tokens]
        return [ResponseStream([step * ends[min(place + 1, len(ends) - 1)] for place in range(len(ends))], ends) for _ in prompts]

    monkeypatch.setattr(serving.decode_wave, "run", streams)
    asked = ["longcot", "--model", str(tmp_path), "--method", "stock,quest", "--mode", mode, "--draft-length", str(drafts), "--load", "2:128:48"]
    assert main([*asked, "--output-len", "9,17", "--json", str(tmp_path / "out.json")]) == 0
    for each in json.loads((tmp_path / "out.json").read_text())["results"]:
        assert each["token_ms"] == pytest.approx([1000 * step] * 2), each["name"]


class FakeServer(LaunchedServer):
    """Sends 4 tokens at a time. With a timeline, it writes the events of an inference rank."""

    def __init__(self, flags, env, log):
        super().__init__(flags, env, log)
        self.file = flags[flags.index("--kv-bench-timeline") + 1] if "--kv-bench-timeline" in flags else None
        self.drafts = "verified" in flags

    def request(self, path):
        assert path == "metrics"
        return page(2, 1, 0.5)

    def stream(self, path, body):
        if self.file is not None:
            told = PackTimeline(self.file)
            for event in events():
                told.add_event(event.kind, (event.first, event.count), event.lane, event.sequence, event.at, event.seconds, event.bytes)
        meta = {"kv_drafts": 20, "kv_accepted": 15} if self.drafts else {}
        most = body["sampling_params"]["max_new_tokens"]
        for tokens in (*range(1, most, 4), most):
            yield {"meta_info": {"completion_tokens": tokens, **meta}}


def test_a_whole_run_prints_tables_and_writes_its_measurements(tmp_path, capsys, launches, checked_here):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 64, "intermediate_size": 64}))
    launches.make = FakeServer
    found = main([
        "longcot", "--model", str(tmp_path), "--method", "stock,spade-ranks", "--mode", "verified", "--load", "2:128:48",
        "--output-len", "8,16", "--draft-length", "4", "--pack-layers", "10", "--pages", "--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png"),
    ])  # fmt: skip
    out = capsys.readouterr().out
    assert found == 0 and "batch 2, 128 tokens, 48 selected" in out
    assert "30 of 40, 0.75" in out and all(f"| {part} | " in out for part in ("scoring pages", "attention", "linear layers"))
    # Packs of 12 layers by 10 at most have 6.
    assert "| server | load | layers served |" in out
    assert "| spade-ranks verified 48 packs of up to 10 | batch 2, 128 tokens, 48 selected | 6 |" in out
    measured = json.loads((tmp_path / "out.json").read_text())
    assert [each["method"] for each in measured["results"]] == ["stock", "spade-ranks"] and len(measured["packs"]) == 1
    assert measured["results"][1]["flops"] < measured["results"][0]["flops"] and (tmp_path / "out.png").stat().st_size > 5000


def test_a_run_on_gpus_has_no_timelines_and_no_table_of_packs(tmp_path, capsys, launches, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    checked = {}
    monkeypatch.setattr(command, "check_servers", lambda model, servers, tokens, prompts: checked.update(servers))
    launches.make = FakeServer
    asked = ["longcot", "--model", str(tmp_path), "--method", "stock,spade-ranks", "--load", "2:64:16", "--output-len", "8", "--draft-length", "4"]
    assert main([*asked, "--server-arg=--device cuda"]) == 0
    out = capsys.readouterr().out
    assert "| spade-ranks lossy |" in out and "Per pack of layers" not in out
    started = [(server.log.stem, server.flags) for server in launches.made]
    assert [(file_name(name), flags) for name, flags in checked.items()] == started and len(started) == 3, "what is checked is what starts"
    assert main([*asked, "--server-arg=--device cpu"]) == 0
    assert "Per pack of layers" in capsys.readouterr().out


def test_parts_of_a_page_level_step_are_all_timed():
    shape = ModelShape(layers=2, hidden=32, heads=4, kv_heads=2, dim=8, inner=64)
    found = list(flops.time_step_parts(shape, parse_loads("2:256:64")[0], torch.device("cpu")))
    assert [each.part for each in found] == ["scoring pages", "selecting pages", "gathering KV", "attention", "linear layers"]
    assert all(each.seconds > 0 for each in found)


def test_the_regression_without_its_shift_reads_the_steps_own_query_and_mixes_those_before_it():
    steps, dim, window = 3, 8, 18
    noise = torch.Generator().manual_seed(0)
    # All queries but the step's own are one vector, in plain coordinates: whatever the weights are, so is their mixture.
    plain = torch.randn(1, 1, 1, 1, dim, generator=noise).expand(steps, 1, 1, window, dim).clone()
    plain[..., -1, :] = torch.randn(steps, 1, 1, dim, generator=noise)
    positions = torch.arange(50, 50 + window).expand(steps, -1)
    rotary = Rotary(1 / 10 ** torch.arange(dim // 2))
    queries = rotary.rotate(plain, positions[:, None, None])
    keys = torch.randn(steps, 1, 1, 40, dim, generator=noise)
    seen = ScoringInputs(queries, positions, keys, 0.3, rotary)
    mixed = rotary.rotate(plain[..., :1, :], positions[:, None, None, -1:]).squeeze(-2)
    expected = overlap.group_attention(mixed, keys, 0.3)
    assert torch.allclose(overlap.Unshifted().scores(seen), expected, atol=1e-5)


def test_overlaps_are_of_each_way_and_distance_and_the_query_before_is_that_of_distance_one():
    steps, tokens, dim = 4, 160, 8
    noise = torch.Generator().manual_seed(0)
    queries = torch.randn(steps, 1, 4, overlap.WINDOW + 1, dim, generator=noise)
    keys = torch.randn(1, 1, 2, tokens, dim, generator=noise).expand(steps, -1, -1, -1, -1)
    lengths = torch.arange(tokens - steps, tokens)
    positions = lengths[:, None] + torch.arange(-overlap.WINDOW, 1)
    found = dict(overlap.measure_layer(ScoringInputs(queries, positions, keys, 0.3, Rotary(1 / 10 ** torch.arange(dim // 2)), lengths), 0.25))
    assert found["current"] == pytest.approx(found["distance 1"])
    assert found["current, unrotated"] == found["distance, unrotated 1"]
    # Of queries that have nothing to do with each other, chance is a share of a quarter and a little; codes hardly differ.
    assert 0.15 < found["distance 64"] < 0.4 and abs(found["current, keys of 8 bits"] - found["current"]) < 0.03
    assert {"regressed", "regressed, without the shift", "quest", "tova", "recent", "current, keys of 4 bits"} < set(found)
    assert all(0 <= each <= 1 for each in found.values())
