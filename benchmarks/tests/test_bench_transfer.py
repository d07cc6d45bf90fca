"""``sglang-ext-bench transfer``: times to the k-th token by each clock, summaries, tables, whole runs with fake servers, refused options."""

import argparse
import json
import sys
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import torch
from launched import LaunchedServer

from sglang_ext.managers.kv_transfer.transfer_metrics import TransferTimeline
from sglang_ext.tools import CommandError
from sglang_ext.tools.server_process import free_port, is_taken
from sglang_ext_bench.__main__ import main
from sglang_ext_bench.servers_apart import answer
from sglang_ext_bench.speed.decode_wave import ResponseStream
from sglang_ext_bench.transfer import accuracy, clocks, command, results
from sglang_ext_bench.transfer.methods import METHODS, PACKED, obstacle, parse_method
from sglang_ext_bench.transfer.results import summarize, survival
from sglang_ext_bench.transfer.server_pair import TransferResponse
from sglang_ext_bench.timelines import TransferEvent

PROMPT = 200


def stream(*chunks):
    """A stream of (time, tokens so far)."""
    times, tokens = zip(*chunks, strict=True)
    return ResponseStream([*times], [*tokens])


def lynx(accepted=3):
    """Prefill ends at 10. The anchor arrives at 12, then four drafts. The residual arrives at 14, and the drafts are verified at 15."""
    events = (
        TransferEvent(7, "expected", 9.0), TransferEvent(7, "sending", 9.5), TransferEvent(7, "computed", 10.0), TransferEvent(7, "encoded", 11.0),
        TransferEvent(7, "anchor", 12.0, 600), TransferEvent(7, "drafted", 12.5, 2, 2, True), TransferEvent(7, "drafted", 13.5, 4, 2, True),
        TransferEvent(7, "complete", 14.0, 1000), TransferEvent(7, "verified", 15.0, accepted, 4, True), TransferEvent(7, "answered", 16.0, 2),
    )  # fmt: skip
    return TransferResponse(9.0, stream((12.1, 1), (15.2, accepted + 2), (16.2, accepted + 4)), events, PROMPT - 1)


def plain(complete=14.0, size=1000, cached=PROMPT - 1):
    """Without drafts: a token every half second, once all KV has arrived."""
    events = (TransferEvent(7, "sending", 9.5), TransferEvent(7, "computed", 10.0), TransferEvent(7, "anchor", complete, size), TransferEvent(7, "complete", complete, size))
    return TransferResponse(9.0, stream(*((complete + 0.1 + 0.5 * n, n + 1) for n in range(9))), events, cached)


def test_clocks_count_from_the_end_of_prefill_without_its_token():
    found = clocks.measure(lynx(), PROMPT, 6)
    assert found.generated == (2.5, 2.5, 3.5, 3.5, 6.0, 6.0), "drafts, whether or not they were kept"
    assert found.kept == (2.5, 2.5, 3.5, 5.0, 6.0, 6.0), "the fourth draft was wrong: its place was answered by the verification"
    assert found.visible == pytest.approx((5.2, 5.2, 5.2, 5.2, 6.2, 6.2))
    assert (found.drafted, found.accepted, found.anchor, found.complete) == (4, 3, 2.0, 4.0)
    assert (found.sending, found.encoded, found.cold) == (-0.5, 1.0, False)


def test_drafts_that_are_made_again_where_no_more_fit_count_from_then():
    events = [TransferEvent(7, "drafted", at, 2, 2, True) for at in (1.0, 2.0)] + [TransferEvent(7, "verified", 3.0, 2, 2, True)]
    generated, kept = clocks.drafting_times(events, 9, 0.0)
    assert generated == (1.0, 1.0, 3.0) and kept == (2.0, 2.0, 3.0)


def test_who_does_not_draft_computes_a_token_when_the_client_gets_it():
    found = clocks.measure(plain(), PROMPT, 5)
    assert found.generated == found.kept == found.visible == pytest.approx((4.6, 5.1, 5.6, 6.1, 6.6))
    assert found.step == pytest.approx(0.5) and found.drafted is None
    assert clocks.measure(plain(cached=3), PROMPT, 5).cold


def test_of_stocks_transfers_the_stream_alone_is_known():
    alone = TransferResponse(9.0, stream((12.0, 1), (12.5, 2), (13.0, 3)), (), PROMPT - 1)
    found = clocks.measure(alone, PROMPT, 2, prefill_seconds=1.0)
    assert found.visible == (2.5, 3.0) and found.complete == 2.0 and found.bytes_all == 0


def test_figures_of_a_link():
    found = summarize("lynx", 1e-6, [clocks.measure(lynx(accepted), PROMPT, 5) for accepted in (1, 3, 3)], numbers_per_token=10)
    assert (found.bits_anchor, found.bits) == (8 * 600 / 2000, 8 * 1000 / 2000)
    # 8,000 bits over 1,000 a second take 8 s; the span from the first page on was 4.5.
    assert found.efficiency == pytest.approx(8 / 4.5) and found.rate == pytest.approx(1000 / 4.5)
    assert found.step == 0.5 and found.residual_steps == 4
    assert found.drafted == 4 and found.accepted == pytest.approx(7 / 3) and found.survival == pytest.approx((1, 2 / 3, 2 / 3, 0))
    assert found.token_time("kept", 3) == 3.5 and found.token_time("kept", 9) is None
    assert summarize("int8", None, [clocks.measure(plain(), PROMPT, 5)], 10).efficiency is None
    assert survival([]) == ()


def shown(**requests):
    found = [summarize(name, 1.0, [clocks.measure(passed, PROMPT, 8)], 10) for name, passed in requests.items()]
    return "\n".join(results.tables(found))


def test_a_table_says_for_each_method_token_and_clock_whether_lynx_is_faster_or_slower():
    said = shown(int4=plain(12.5), int8=plain(14.0), lynx=lynx())
    assert "200 tokens, 1 Gbit/s, prompts cached on the prefill server" in said
    assert "| lynx | 2.40 + 1.60 | 2.50 | " in said
    assert "| int8 | 4.00 | 4.60 |" in said and "| kept: 1 | kept: 32 | visible: 1 | visible: 32 |" in said
    # Drafts are computed early, and the client receives them late.
    assert "| lynx over int8 | 1 | 0.543 | 0.543 | 1.130 | SLOWER on visible; faster on generated, kept |" in said
    assert "| lynx over int4 | 1 | 0.806 | 0.806 | 1.677 | SLOWER on visible; faster on generated, kept |" in said
    assert "| lynx over int8 | 1 | 1.563 | 1.563 | 3.250 | SLOWER on generated, kept, visible |" in shown(int8=plain(11.0), lynx=lynx())
    assert " over " not in shown(raw=plain(), int8=plain())


def test_times_within_noise_are_equal():
    assert results.verdict({"kept": 1.01, "visible": 0.99}) == "equal"
    assert results.verdict({"kept": 0.9, "visible": 1.01}) == "faster on kept"


def test_a_rejected_first_draft_counts_as_generated_and_not_as_kept():
    (found,) = [line for line in shown(lynx=lynx(0)).splitlines() if line.startswith("| lynx |")]
    told = dict(zip(results.HEAD, (cell.strip() for cell in found.strip("|").split("|"))))
    assert (told["generated: 1"], told["kept: 1"], told["visible: 1"]) == ("2.50", "5.00", "5.20")


def test_cold_prompts_and_other_links_have_tables_of_their_own(tmp_path):
    cold, warm = (clocks.measure(plain(cached=cached), PROMPT, 5) for cached in (0, PROMPT - 1))
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 5}))
    args = SimpleNamespace(model=tmp_path)
    found = [*command.summarize_groups(args, "int8", 1.0, [cold, warm, warm]), *command.summarize_groups(args, "int8", None, [warm])]
    assert [(each.cold, each.requests, each.gbps) for each in found] == [(True, 1, 1.0), (False, 2, 1.0), (False, 1, None)]
    titles = [line for line in results.tables(found) if "seconds from" in line]
    assert len(titles) == 3 and "not cached" in titles[0] and "no limit" in titles[2]


@pytest.mark.parametrize("option", ["server_arg", "decode_arg"])
@pytest.mark.parametrize("given", ["--kv-bits 2", "--kv-bits=2", "--sleep-on-idle --kv-partition 32", "--kv-prefill quantized"])
def test_what_makes_a_method_is_not_given_again(option, given):
    args = SimpleNamespace(**{"dtype": "float32", "server_arg": [], "decode_arg": [], option: [given]})
    with pytest.raises(CommandError, match=f"--{option.replace('_', '-')} has --kv-(bits|partition|prefill), which --method hack4 sets: leave it out, or pass another method"):
        command.make_flags(args, parse_method("hack4"), 0.1, command.Path("logs"))
    command.make_flags(args, parse_method("raw"), 0.1, command.Path("logs"))


@pytest.mark.parametrize(("name", "flags"), [
    ("hack4:32", ("--kv-bits", "4", "--kv-partition", "32")), ("hack2:quantized", ("--kv-bits", "2", "--kv-prefill", "quantized")),
    ("hack4:quantized:128", ("--kv-bits", "4", "--kv-partition", "128", "--kv-prefill", "quantized"))])  # fmt: skip
def test_hack_is_named_with_its_partition_and_with_prompts_on_codes(name, flags):
    assert parse_method(name).both == (*parse_method("hack4").both[:-2], *flags) and parse_method(name).name == name


@pytest.mark.parametrize(("name", "told"), [
    ("hack4:33", "one of lynx"), ("hack4:", "one of lynx"), ("hack4:32:64", "hack4:32 for a partition"), ("hack8", "one of lynx"),
    ("raw:32", "raw has no partitions"), ("int4-lossy:quantized", "pass int4-lossy")])  # fmt: skip
def test_other_names_are_refused(name, told):
    with pytest.raises(CommandError, match=f"--method '{name}': .*{told}"):
        parse_method(name)


def test_methods_differ_in_how_kv_travels_alone():
    args = SimpleNamespace(dtype="float32", server_arg=["--sleep-on-idle"], decode_arg=["--base-gpu-id 1"])
    seen = set()
    for name in METHODS:
        flags = command.make_flags(args, parse_method(name, ("--kv-compressor", "kivi")), 0.1, command.Path("logs"))
        prefill, decode = (" ".join(flags[role]) for role in ("prefill", "decode"))
        assert ("--kv-mode verified --kv-compressor kivi" in decode) == name.startswith("lynx") * (name in ("lynx", "lynx-exact"))
        assert ("--kv-mode lossy" in prefill and "--kv-mode lossy" in decode) == (name in PACKED)
        assert ("--kv-mode" not in prefill) == (name not in PACKED) and "--sleep-on-idle" in prefill and "--sleep-on-idle" in decode
        assert "--base-gpu-id 1" in decode and "--base-gpu-id" not in prefill
        assert ("--kv-link-gbps 0.1" in prefill) == (name != "mooncake_tcp") and "--kv-link-gbps" not in decode
        seen.add(prefill.replace(f"logs/{name}-0.1-timeline.jsonl", ""))
    assert len(seen) == len(METHODS)
    with pytest.raises(CommandError, match="--method 'zip': pass one of lynx"):
        parse_method("zip")


def test_stocks_transfer_is_left_out_with_a_line_where_it_cannot_be_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "mooncake", None)
    asked = command.possible_pairs([parse_method("mooncake_tcp"), parse_method("int8")], [None])
    assert [each.name for each, _ in asked] == ["int8"]
    assert "mooncake_tcp-unlimited: skipped: the package mooncake is not installed: pip install" in capsys.readouterr().out
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake/engine.py").touch()
    monkeypatch.delitem(sys.modules, "mooncake")
    monkeypatch.syspath_prepend(tmp_path)
    assert "cannot be limited to 0.1 Gbit/s" in obstacle(parse_method("mooncake_tcp"), 0.1) and obstacle(parse_method("mooncake_tcp"), None) is None


def test_wrong_options_end_in_one_line(tmp_path, capsys):
    for options, said in (
        (["--method", "lynx,zip"], "--method 'zip'"),
        (["--link-gbps", "-1"], "--link-gbps '-1'"),
        (["--context-len", "0"], "--context-len '0'"),
        (["--prompts", "0"], "--prompts 0"),
        (["--port", "65535"], "--port 65535"),
    ):
        assert main(["transfer", "--model", str(tmp_path), *options]) == 2
        assert capsys.readouterr().err.startswith(f"transfer: {said}")


class FakeHalf(LaunchedServer):
    """The prefill or the decode server of a pair. The decode server writes the events of both, and drafts in mode verified."""

    def __init__(self, flags, env, log):
        super().__init__(flags, env, log)
        self.cached = set()

    def flush_cache(self):
        self.cached.clear()

    def post(self, path, body):
        prompt = tuple(body["input_ids"])
        found = len(prompt) - 1 if prompt in self.cached else 0
        self.cached.add(prompt)
        return {"meta_info": {"cached_tokens": found}}

    def stream(self, path, body):
        line, begun, most = TransferTimeline(self.flags[self.flags.index("--kv-bench-timeline") + 1]), time.monotonic(), body["sampling_params"]["max_new_tokens"]
        events = [("expected", -0.5), ("sending", -0.25), ("computed", 0.0), ("encoded", 0.001), ("anchor", 0.002, 600)]
        if "verified" in self.flags:
            events += [("drafted", 0.003, 2, 2, True), ("drafted", 0.004, 4, 2, True), ("complete", 0.005, 1000), ("verified", 0.006, 3, 4, True), ("answered", 0.007, 2)]
        else:
            events += [("complete", 0.005, 1000)]
        for kind, after, *rest in events:
            line.add_event(body["bootstrap_room"], kind, begun + after, *rest)
        for tokens in range(1, most + 1):
            time.sleep(0.01)
            yield {"meta_info": {"completion_tokens": tokens}}


def test_a_run_writes_all_requests_with_their_timelines_and_a_picture(tmp_path, launches, capsys, checked_here):
    shapes = {"vocab_size": 500, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(shapes))
    launches.make = FakeHalf
    wanted = ["--method", "int8,lynx", "--context-len", str(PROMPT), "--prompts", "2", "--repeats", "1", "--output-len", "5"]
    files = ["--json", str(tmp_path / "out.json"), "--plot", str(tmp_path / "out.png")]
    assert main(["transfer", "--model", str(tmp_path), *wanted, *files]) == 0
    assert "| lynx |" in capsys.readouterr().out
    report = json.loads((tmp_path / "out.json").read_text())
    assert len(report["requests"]) == 8 and report["requests"][-1]["events"][0] == ["expected", pytest.approx(-0.5), 0, 0]
    assert {(each["method"], each["cold"]) for each in report["figures"]} == {(name, cold) for name in ("int8", "lynx") for cold in (True, False)}
    assert (tmp_path / "out.png").stat().st_size > 10000 and report["left"] == []


def test_a_run_that_is_ended_leaves_what_it_measured(tmp_path, launches, checked_here):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 500, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}))

    def make(flags, env, log):
        if log.name.startswith("lynx"):
            raise KeyboardInterrupt
        return FakeHalf(flags, env, log)

    launches.make = make
    wanted = ["--method", "int8,lynx,int4", "--context-len", str(PROMPT), "--prompts", "2", "--repeats", "1", "--output-len", "5"]
    with pytest.raises(KeyboardInterrupt):
        main(["transfer", "--model", str(tmp_path), *wanted, "--json", str(tmp_path / "out.json")])
    report = json.loads((tmp_path / "out.json").read_text())
    assert {each["method"] for each in report["requests"]} == {each["method"] for each in report["figures"]} == {"int8"}
    assert report["left"] == ["lynx-0.1", "int4-0.1"] and not (tmp_path / "out.json.part").exists()


def test_accuracy_orders_codecs_and_counts_their_bits():
    made = torch.Generator().manual_seed(0)

    def kv():
        return torch.randn(1, 80, 2, 64, generator=made) + 2 * torch.randn(1, 1, 2, 64, generator=made)

    keys, values = kv(), kv()
    layers = [SimpleNamespace(queries=torch.randn(80, 4, 64, generator=made), scaling=0.125)]
    found = {name: accuracy.measure_codec(name, layers, keys, values) for name in accuracy.CODED}
    assert found["bf16"].anchor < found["int8"].anchor < found["int4"].anchor
    assert found["int8"].anchor < found["int8-tensor"].anchor
    split = found["lynx"]
    assert 10 * split.all < split.anchor < 0.05
    assert (split.anchor, split.all) == (found["lynx-int4"].anchor, found["lynx-int8"].anchor)
    assert found["int8"].all is None and 8.25 <= found["int8"].bits_all < 8.27 and 5 <= found["int4"].bits_all < 5.02
    assert "| lynx | " in "\n".join(results.accuracy_table([*found.values()]))


def test_pairs_that_start_together_are_measured_one_after_another(launches, tmp_path):
    """Two pairs wait for each other's start. One breaks off, a third one does not start, and all started pairs are stopped."""
    together = threading.Barrier(2)

    class Half(FakeHalf):
        def can_start(self):
            if "-prefill" in self.log.name and not self.log.name.startswith("int4"):
                together.wait(10)
            return not self.log.name.startswith("int4")

        def stream(self, path, body):
            chunks = super().stream(path, body)
            yield from [next(chunks)] if self.log.name.startswith("lynx") else chunks

    launches.make = Half
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    port = next(port for port in iter(free_port, None) if not any(is_taken(port + after) for after in range(9)))
    args = parser.parse_args(["--model", str(tmp_path), "--at-once", "3", "--port", str(port), "--output-len", "4"])
    asked = [(parse_method(name), 10.0) for name in ("lynx", "int4", "int8")]
    found = {each.name: said for (each, _), said in command.measure_together(args, asked, {PROMPT: [tuple(range(PROMPT))]}, tmp_path)}
    assert {server.port for server in launches.made} == {port, port + 1, port + 6, port + 7} and all(server.ended for server in launches.made)
    assert "a request ended after 1 of 4 tokens" in str(found["lynx"]) and "the server ended with code 1" in str(found["int4"])
    assert len(found["int8"]) == 1 + args.repeats


def test_an_answer_that_breaks_off_is_told_with_what_both_servers_say():
    class Server:
        def stream(self, path, body):
            yield {"meta_info": {"completion_tokens": 2}}

        def describe_log(self):
            return "the decode server's log"

    ended: Future = Future()
    ended.set_result({})
    with pytest.raises(CommandError, match=r"a request ended after 2 of 9 tokens \(prefill server: it has ended\)\nthe decode server's log"):
        answer(Server(), {}, 9, ended, 1.0)


def test_a_request_that_a_server_refuses_in_its_stream_is_told_in_its_words():
    """For example a prompt that is longer than the model's context."""

    class Server:
        def stream(self, path, body):
            yield {"error": {"message": "The input (9000 tokens) is longer than the model's context length (8192 tokens)."}}

    with pytest.raises(CommandError, match="the decode server: .*longer than the model's context length"):
        answer(Server(), {}, 9, Future(), 1.0)


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--repeats", "-1", "--repeats -1: must be at least 0"),
        ("--accuracy-tokens", "-1", "--accuracy-tokens -1: must be at least 0"),
        ("--server-arg", "'a", "flags \"'a\": No closing quotation; close it as for a shell"),
        ("--draft-arg", "'a", "flags \"'a\": No closing quotation; close it as for a shell"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(option, value, why, tmp_path, capsys):
    assert main(["transfer", "--model", str(tmp_path), option, value]) == 2
    assert f"transfer: {why}" in capsys.readouterr().err
