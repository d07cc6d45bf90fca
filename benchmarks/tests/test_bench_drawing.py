"""Plots have a heading with machine and settings, a legend of all lines, and bars if there is only one position."""

from types import SimpleNamespace

import pytest
from bench_helpers import SETTING

from sglang_ext_bench import drawing, report
from sglang_ext_bench.comparing import identity_report
from sglang_ext_bench.drawing import Curve, Heading
from sglang_ext_bench.longcot import packs
from sglang_ext_bench.longcot import results as longcot_results
from sglang_ext_bench.quality.reporting import plots
from sglang_ext_bench.simulating import simulate
from sglang_ext_bench.speed import decode, latency
from sglang_ext_bench.speed.decode import DecodeResult
from sglang_ext_bench.timelines import PackEvent


@pytest.fixture
def drawn(monkeypatch):
    """Collects the figures that are written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    yield figures
    monkeypatch.undo()
    for figure in figures:
        pyplot.close(figure)


def words(figure):
    title, *rest = figure.texts if figure._suptitle is None else (figure._suptitle, *figure.texts)
    return title.get_text(), " ".join(text.get_text() for text in rest)


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def decoded(name, context, batch):
    return DecodeResult(name, context, batch, batch, 100.0, 10.0, None, None, [])


def test_bars_stand_around_the_label_of_their_group(tmp_path, drawn):
    results = [decoded(name, context, 8) for name in ("stock", "snapkv", "kivi") for context in (512, 4096)]
    decode.write_plot(tmp_path / "d.png", results, "a-model, float32")
    (axes,) = drawn[0].axes
    for tick in axes.get_xticks():
        middles = [bar.get_x() + bar.get_width() / 2 for bar in axes.patches]
        mine = [middle for middle in middles if abs(middle - tick) < 0.5]
        assert len(mine) == 3 and sum(mine) / 3 == pytest.approx(tick)
    assert legend(axes) == ["stock", "snapkv", "kivi"]
    assert words(drawn[0])[0] == "Time per output token of each request"
    assert "a-model, float32" in words(drawn[0])[1] and report.hardware() in words(drawn[0])[1]


def test_all_packs_of_a_step_are_drawn_the_last_until_its_last_layer_begins(tmp_path, drawn):
    told = []
    for first in (0, 6, 12):
        at = 1.0 + first / 60
        told.append(PackEvent("reached", at, first, 6))
        told.append(PackEvent("asked", at + 0.08, first, 6, 0, 2))
        told.append(PackEvent("chosen", at + 0.15, first, 6, 0, 2, seconds=0.03))
    longcot_results.write_plot(tmp_path / "s.png", [], packs.parse_steps(told), [], "a-model")
    (axes,) = drawn[0].axes
    bars = [path.get_extents() for each in axes.collections for path in each.get_paths()]
    computed = [(bar.x0, bar.width) for bar in bars if bar.y0 > 1]
    assert computed == [pytest.approx(each) for each in ((0, 100), (100, 100), (200, 80))]
    assert [(bar.x0, bar.width) for bar in bars if bar.y0 < 1] == [pytest.approx(each) for each in ((120, 30), (220, 30), (320, 30))]
    assert "a step's last pack until its last layer begins" in axes.get_title()


@pytest.mark.parametrize(("rates", "bars"), [((1.0, 2.0), 0), ((2.0,), 4)])
def test_one_rate_is_no_axis(tmp_path, drawn, rates, bars):
    both = {50: 100.0, 99: 200.0}
    results = [latency.Latency(name, None, rate, 1.0, both, both, both, both) for name in ("stock", "snapkv") for rate in rates]
    latency.write_plot(tmp_path / "l.png", results, "a-model")
    (axes,) = drawn[0].axes
    assert len(axes.patches) == bars and len(axes.lines) == (0 if bars else 4)
    assert legend(axes) == [f"{name}, {which}" for name in ("stock", "snapkv") for which in ("median", "99th percentile")]
    assert axes.get_xlabel() == ("requests per second: 2" if bars else "requests per second")
    assert len(axes.get_xticks()) == 0 if bars else True


def test_what_the_equations_allow_is_in_the_legend(tmp_path, drawn):
    results = [
        SimpleNamespace(policy=policy, schedule="staggered", memory_tokens=1.0, link_bandwidth=1.0, acceptance=p, tokens_per_second=5.0, allowed=6.0)
        for policy, ps in (("stock", (0.9,)), ("host", (0.9, 0.99)), ("auto", (0.9, 0.99)))
        for p in ps
    ]
    simulate.write_plot(tmp_path / "s.png", results, Heading("t", "s", "m"))
    (axes,) = drawn[0].axes
    assert len(legend(axes)) == len(axes.lines) == 5 and "host, staggered, allowed" in legend(axes)


def test_the_simulated_machine_stands_above_its_plot_not_this_one():
    import argparse

    parser = argparse.ArgumentParser()
    simulate.add_arguments(parser)
    title, small = simulate.plot_heading(parser.parse_args([])).lines
    assert "simulated machine: 4.35 TB/s" in small and report.hardware() not in small and title


def test_a_draft_length_of_one_is_a_bar_and_no_drafts_no_plot(tmp_path, drawn):
    def compared(*shares):
        return SimpleNamespace(setting=SETTING, acceptance=SimpleNamespace(by_position=shares))

    identity_report.write_plot(tmp_path / "none.png", [compared()], "m")
    assert not drawn and not (tmp_path / "none.png").exists()
    identity_report.write_plot(tmp_path / "i.png", [compared(0.9)], "m")
    (axes,) = drawn[0].axes
    assert len(axes.patches) == 1 and legend(axes) == [SETTING.label]


@pytest.mark.parametrize(("budgets", "bars"), [((0.25,), 2), ((0.25, 0.5), 0)])
def test_one_budget_is_no_axis_of_bytes(drawn, tmp_path, budgets, bars):
    lines = tuple(plots.Line(name, tuple((budget, 0.5) for budget in budgets)) for name in ("verified snapkv", "lossy snapkv"))
    with drawing.png(tmp_path / "q.png", (7, 5), Heading("t", "s")) as axes:
        plots.draw_panel(axes, plots.Panel("p", lines, level=0.6))
    assert len(axes.patches) == bars and set(legend(axes)) == {"verified snapkv", "lossy snapkv", "stock"}


def test_curves_of_different_places_share_one_axis(drawn, tmp_path):
    with drawing.png(tmp_path / "c.png", (7, 5), Heading("t", "s")) as axes:
        assert drawing.draw(axes, [Curve("a", [1], [1]), Curve("b", [2], [1])], "x")
