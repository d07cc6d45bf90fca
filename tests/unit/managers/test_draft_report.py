"""The log line and the metrics of drafting: what it gains, and why it is off."""

import logging
import re

import pytest

from sglang_ext.core import SHORT_CONTEXT, SLOWER, RequestState
from sglang_ext.managers.metrics import KVMetrics
from sglang_ext.managers.spec_decode.round_timer import DraftLength
from sglang_ext.managers.spec_decode.round_report import RoundReport
from sglang_ext.managers.spec_decode.planner import RoundPlan
from sglang_ext.managers.spec_decode.cost_model import BatchLoad, RoundCosts, RoundTimes

LENGTHS = [1000, 1000]


class Clock:
    """Seconds that the test sets."""

    now = 0.0

    def __call__(self):
        return self.now


class Told(KVMetrics):
    """Metrics that keep the last figures."""

    def observe(self, values):
        self.last = {name: value for name, value, *_ in values}


def round_of(drafts, reason=0):
    states, rows = [RequestState(rid=str(i), row=i, seed=0) for i in range(2)], [0, 1]
    full_kv_reqs = [] if drafts else rows
    return RoundPlan(states, drafts or 4, LENGTHS, [0, 0], rows, rows, [reason] * 2, full_kv_reqs, [99, 99], [rows] if drafts else [])


def report_of(lengths, plain=True):
    costs, clock = RoundCosts(), Clock()
    for _ in range(2 * plain):
        costs.observe(BatchLoad.of(LENGTHS), RoundTimes(0, 4, 0.0, 0.0, 4.0))
    return RoundReport(lengths, costs, Told("model"), None, clock=clock), clock


def draft(report, rounds=4):
    """Rounds of 5 drafts that take 2 s each; of the requests' drafts 5 and 3 are accepted."""
    for _ in range(rounds):
        report.on_round_timed(round_of(5), RoundTimes(5, 0, 0.0, 0.0, 2.0))
        report.count_verify(5, 5)
        report.count_verify(5, 3)
        report.on_round_end(round_of(5), 10)


@pytest.mark.parametrize("lengths", [DraftLength(8), DraftLength(5, is_fixed=True)], ids=["auto", "fixed"])
def test_each_minute_a_line_says_what_drafting_gains(lengths, caplog):
    report, clock = report_of(lengths)
    with caplog.at_level(logging.INFO):
        draft(report)
        clock.now = 59.0
        draft(report)
        assert not caplog.records
        clock.now = 61.0
        draft(report)
    # 5 tokens of each request in 2 s, where a plain step takes 1 s.
    assert [*report.metrics.last.values()][:4] == [5.0, 0.8, 5.0, 2.5]
    report.on_round_end(round_of(0, SLOWER), 8)
    assert report.metrics.last["draft_length"] == 5.0, "as of the last line, until rounds draft again"
    assert len(caplog.records) == 1
    assert re.search(r"9 rounds, draft length 5.0, acceptance rate 0.80, accept length 5.00, gain 2.50 ", caplog.text)


def test_a_gain_that_nothing_was_measured_for_is_not_made_up(caplog):
    report, clock = report_of(DraftLength(5, is_fixed=True), plain=False)
    with caplog.at_level(logging.INFO):
        draft(report)
        clock.now = 61.0
        draft(report)
    assert report.metrics.last["draft_gain"] == 0.0 and "gain not known" in caplog.text


@pytest.mark.parametrize(
    ("reason", "predicted", "words"),
    [(SLOWER, 0.75, "slower (0.75 of plain steps predicted)"), (SLOWER, 1.5, "plain steps were measured"), (SHORT_CONTEXT, 0.75, "too short to compress")],
)
def test_where_drafting_is_off_the_line_says_why(reason, predicted, words, caplog):
    lengths = DraftLength(8)
    lengths.predicted_gain = predicted
    report, clock = report_of(lengths)
    with caplog.at_level(logging.INFO):
        for clock.now in (0.0, 61.0):
            report.count_fallback(reason, 8)
            report.on_round_end(round_of(0, reason), 8)
    assert "drafting is off" in caplog.text and words in caplog.text
