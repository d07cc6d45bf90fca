"""``sglang-ext-bench jobs``: phases of a job, arrivals and queues, a whole run with fake servers, and refused options."""

import json
import statistics
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launched import LaunchedServer

from sglang_ext.managers.kv_transfer.transfer_metrics import TransferTimeline
from sglang_ext_bench.__main__ import main
from sglang_ext_bench.jobs import sending
from sglang_ext_bench.jobs.results import Job, Phases, job_phases, summarize, tables
from sglang_ext_bench.jobs.sending import ServerQueues, arrival_times
from sglang_ext_bench.timelines import TransferEvent

ROOM = 7
KINDS = ("expected", "computed", "encoded", "anchor", "complete")


def events(**at):
    return [TransferEvent(ROOM, kind, seconds) for kind, seconds in at.items()]


def test_phases_follow_each_other_and_decoding_begins_on_an_anchor_where_there_is_one():
    whole = events(expected=1.0, computed=3.0, encoded=3.5, complete=6.0)
    assert job_phases(whole, 0.5, 8.0) == Phases(waiting=0.5, prefill=2.0, encoding=0.5, transfer=2.5, decode=2.0)
    split = events(expected=1.0, computed=3.0, anchor=4.0, encoded=5.0, complete=6.0)
    assert job_phases(split, 0.5, 8.0) == Phases(waiting=0.5, prefill=2.0, encoding=1.0, transfer=0.0, decode=4.0)
    assert job_phases(events(expected=1.0, computed=2.0), 0.5, 8.0) is None and job_phases([], 0.5, 8.0) is None


@given(st.fixed_dictionaries({}, optional={kind: st.floats(0, 100) for kind in KINDS}), st.floats(0, 50), st.floats(100, 200))
def test_phases_add_up_to_the_completion_time_in_whatever_order_clocks_were_read(at, arrived, ended):
    found = job_phases(events(**at), arrived, ended)
    if found is not None:
        assert min(found) >= 0 and sum(found) == pytest.approx(ended - arrived)


def test_arrivals_are_a_poisson_process_that_a_seed_repeats():
    found = arrival_times(4000, 2.0, 1)
    gaps = [b - a for a, b in zip(found, found[1:])]
    assert found[0] == 0 and min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(0.5, rel=0.1) and statistics.pstdev(gaps) == pytest.approx(0.5, rel=0.1)
    assert found == arrival_times(4000, 2.0, 1) != arrival_times(4000, 2.0, 2) and arrival_times(3, None, 1) == [0, 0, 0]


def test_a_job_goes_to_the_queue_with_the_least_to_do():
    queues = ServerQueues([0, 0, 0])
    assert [queues.assign(size) for size in (5, 1, 1, 1, 1)] == [0, 1, 2, 1, 2]
    queues.release(0, 5)
    assert queues.assign(9) == 0 and queues.loads == [9, 2, 2]


def job(completion, phases=Phases(0, 1, 0, 0, 1), arrived=0.0):
    return Job(100, arrived, completion, 1.0, 0, 0, phases)


def test_figures_are_of_all_jobs_and_phases_of_none_where_one_has_none():
    found = summarize("raw", (1, 1), 10.0, 2.0, [job(1.0), job(3.0, arrived=5.0)], (10, 40))
    assert (found.mean, found.median, found.p99, found.held) == (2.0, 2.0, 3.0, 0.25)
    assert found.phases == Phases(0, 1, 0, 0, 1)
    blind = summarize("mooncake_tcp", (1, 1), 10.0, 2.0, [job(1.0), job(2.0, None)], (0, 0))
    assert blind.phases is None
    lines = [*tables([found, blind])]
    assert sum(line.startswith("| ") for line in lines) == 3 and len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert lines[-1] == "- mooncake_tcp: jobs take 0.75 of raw's time" and "25%" in lines[3]


class FakeServer(LaunchedServer):
    """Responds after a moment, and writes the events of a real server to the timeline. ``breaks`` breaks off its longer responses."""

    used = (30, 120)
    breaks = False

    def flag(self, name):
        return self.flags[self.flags.index(name) + 1]

    def request(self, path):
        assert path == "v1/loads?include=core"
        return {"loads": [{"num_used_tokens": self.used[0], "max_total_num_tokens": self.used[1]}]}

    def post(self, path, body):
        time.sleep(0.02)
        return {}

    def stream(self, path, body):
        line = TransferTimeline(self.flag("--kv-bench-timeline"))
        for kind in KINDS:
            line.add_event(body["bootstrap_room"], kind)
        time.sleep(0.01)
        most = body["sampling_params"]["max_new_tokens"]
        for tokens in (1,) if self.breaks and most == 5 else (1, most):
            yield {"meta_info": {"completion_tokens": tokens}}
        # The usage of pools is read meanwhile.
        time.sleep(2 * sending.POLL_SECONDS)


class FailingServer(FakeServer):
    """Those with int8 break off."""

    @property
    def breaks(self):
        return "int8" in self.log.name


@pytest.fixture
def faked(tmp_path, launches, checked_here):
    shapes = {"vocab_size": 500, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(shapes))
    launches.make = FakeServer
    return ["jobs", "--model", str(tmp_path)]


def test_the_first_method_says_which_rate_all_are_sent_at(faked, launches, tmp_path, capsys):
    out = tmp_path / "out.json"
    wanted = ["--method", "raw,int8", "--servers", "2:1", "--jobs", "6", "--context-len", "64,128", "--output-len", "5"]
    assert main([*faked, *wanted, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    rates = [each["rate"] for each in report["figures"]]
    assert len(rates) == 2 and rates[0] == rates[1] > 0
    # One run of the first method with all jobs at once, to measure its rate. Then one run of each method at that rate.
    assert len(report["jobs"]) == 18 and {each["tokens"] for each in report["jobs"]} == {64, 128}
    assert {each["prefill_server"] for each in report["jobs"]} == {0, 1}
    assert all(len(each["phases"]) == len(Phases._fields) for each in report["jobs"]) and report["figures"][0]["peak"] == [30, 120]
    shown = capsys.readouterr().out
    assert "2 prefill and 1 decode servers, 10 Gbit/s, 6 jobs" in shown and "- int8: jobs take" in shown
    made = [server for server in launches.made if server.log.name.startswith("int8-2-1-10-")]
    flags = {role: [server.flags for server in made if server.flag("--disaggregation-mode") == role] for role in ("prefill", "decode")}
    assert len(flags["prefill"]) == 2 and "--kv-link-gbps" in flags["prefill"][0] and "--kv-link-gbps" not in flags["decode"][0]
    assert all(server.ended for server in launches.made)
    # Decode servers publish the usage of their pool in each round.
    interval = "--load-snapshot-publish-interval"
    assert flags["decode"][0][flags["decode"][0].index(interval) + 1] == "1" and interval not in flags["prefill"][0]


def test_a_server_that_tells_nothing_of_its_pool_yet_uses_none():
    looks = []

    class Silent:
        def request(self, path, timeout):
            looks.append(path)
            return {"loads": []}

    with sending.PoolUsageMonitor([Silent()]) as used:
        ends = time.monotonic() + 5
        while len(looks) < 3 and time.monotonic() < ends:
            time.sleep(0.001)
    assert len(looks) >= 3 and used.peak == (0, 0)


def test_a_job_that_breaks_off_fails_its_method_and_others_go_on(faked, launches, capsys, tmp_path):
    launches.make = FailingServer
    wanted = ["--method", "raw,int8,int4", "--rate", "0", "--jobs", "2", "--context-len", "64", "--output-len", "5"]
    assert main([*faked, *wanted, "--json", str(tmp_path / "out.json")]) == 1
    assert "a job ended after 1 of 5 tokens" in capsys.readouterr().out
    report = json.loads((tmp_path / "out.json").read_text())
    assert [each["method"] for each in report["figures"]] == ["raw", "int4"] and [*report["failed"]] == ["int8-1-1-10"]
    assert report["left"] == []


def test_a_run_that_is_ended_leaves_what_it_measured(faked, launches, tmp_path):
    def make(flags, env, log):
        if log.name.startswith("int4"):
            raise KeyboardInterrupt
        return FakeServer(flags, env, log)

    launches.make = make
    wanted = ["--method", "raw,int8,int4,bf16", "--rate", "0", "--jobs", "2", "--context-len", "64", "--output-len", "5"]
    with pytest.raises(KeyboardInterrupt):
        main([*faked, *wanted, "--json", str(tmp_path / "out.json")])
    report = json.loads((tmp_path / "out.json").read_text())
    assert [each["method"] for each in report["figures"]] == ["raw", "int8"] and len(report["jobs"]) == 4
    assert report["left"] == ["int4-1-1-10", "bf16-1-1-10"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--servers", "2"], "--servers '2'"),
        (["--servers", "0:1"], "--servers '0:1'"),
        (["--jobs", "0"], "--jobs 0"),
        (["--share", "1.5"], "--share 1.5"),
        (["--rate", "fast"], "--rate 'fast'"),
        (["--servers", "3:1", "--port", "65530"], "--port 65530: the next 6"),
        (["--method", "zip"], "--method 'zip'"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
def test_what_cannot_be_measured_is_refused_by_name(faked, words, named, capsys):
    assert main([*faked, *words]) == 2
    assert named in capsys.readouterr().err
