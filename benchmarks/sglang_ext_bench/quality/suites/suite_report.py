"""Reports of a suite: Markdown tables, JSON values and a plot."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sglang_ext_bench import drawing
from sglang_ext_bench.quality.suites.comparison import MARGIN, NOISE, ArmScores, Estimate, SuiteScore
from sglang_ext_bench.quality.suites.options import FULL
from sglang_ext_bench.report import markdown_table

MARKERS = "o", "s", "^"


def tables(arms: Sequence[ArmScores], settings: str, machine: str) -> str:
    """Markdown text: the arms that stay close to full KV, a table of arms, and a table of scores by task and length.

    Args:
        arms: The arms, in the order of the rows.
        settings: Model and sizes, in one line.
        machine: Hardware and date.
    """
    below = f"{settings}. {machine}. Points are means ± standard errors."
    return "\n\n".join((*conclusions(arms), _summary(arms), below, _cells(arms)))


def conclusions(arms: Sequence[ArmScores]) -> list[str]:
    """A sentence for each suite, with the arms within two points of full KV."""
    if not any(arm.name == FULL for arm in arms):
        return [f"Not compared with full KV: add `{FULL}` to --arms."]
    found = []
    for suite in _suites(arms):
        close, unsure = [
            [f"`{arm.name}`" for arm in arms if suite in arm.suites and arm.suites[suite].verdict == verdict]
            for verdict in ("yes", "yes, within noise")
        ]
        text = f"**{suite}**: within {MARGIN:g} points of full KV: {', '.join(close) or 'no arm beyond noise'}."
        if unsure:
            text += f" Within {MARGIN:g} points, but not beyond noise: {', '.join(unsure)}."
        found.append(text)
    return found


def _suites(arms: Sequence[ArmScores]) -> list[str]:
    return list(dict.fromkeys(suite for arm in arms for suite in arm.suites))


def _summary(arms: Sequence[ArmScores]) -> str:
    suites = _suites(arms)
    header = ["arm", "KV bytes read a step"]
    for suite in suites:
        header += [f"{suite}, points", "less full KV", f"within {MARGIN:g} points"]
    header += ["answers on full KV"]
    rows = []
    for arm in arms:
        row = [f"`{arm.name}`", "" if arm.bytes_share is None else f"{arm.bytes_share:.3f}"]
        for suite in suites:
            score = arm.suites.get(suite)
            row += ["", "", ""] if score is None else [str(score.score), f"{score.difference or ''}", score.verdict]
        rows.append([*row, "" if arm.name == FULL else str(arm.on_full_kv)])
    return _table(header, rows)


def _cells(arms: Sequence[ArmScores]) -> str:
    cells = dict.fromkeys(cell for arm in arms for cell in arm.cells)
    rows = []
    for task, length in cells:
        found = [arm.cells.get((task, length)) for arm in arms]
        rows.append([task, f"{length:,}" if length else "", *("" if each is None else str(each) for each in found)])
    return _table(["task", "tokens", *(f"`{arm.name}`" for arm in arms)], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(markdown_table(header, rows))


def as_json(arms: Sequence[ArmScores]) -> list[dict[str, Any]]:
    """The scores of all arms as JSON values."""
    found = []
    for arm in arms:
        suites = {suite: {**asdict(score), "verdict": score.verdict} for suite, score in arm.suites.items()}
        cells = [{"task": task, "length": length, **asdict(each)} for (task, length), each in arm.cells.items()]
        found.append({**asdict(arm), "suites": suites, "cells": cells})
    return found


def from_json(found: Iterable[Mapping[str, Any]]) -> list[ArmScores]:
    """The scores that :func:`as_json` returned."""
    arms = []
    for arm in found:
        suites = {
            suite: SuiteScore(_estimate(each["score"]), None if each["difference"] is None else _estimate(each["difference"]))
            for suite, each in arm["suites"].items()
        }
        cells = {(each["task"], each["length"]): _estimate(each) for each in arm["cells"]}
        arms.append(ArmScores(arm["name"], arm["bytes_share"], suites, cells, arm["on_full_kv"], arm["missing"]))
    return arms


def _estimate(found: Mapping[str, Any]) -> Estimate:
    return Estimate(found["mean"], found["error"], found["count"])


def plot(path: Path, arms: Sequence[ArmScores], settings: str, machine: str) -> None:
    """Plot scores against bytes read: a color for each arm, a marker for each suite, and the 95% confidence intervals.

    Args:
        path: The PNG.
        arms: The arms. Those without bytes are left out.
        settings: Model and sizes, in one line.
        machine: Hardware of the measurements.
    """
    shown = [arm for arm in arms if arm.bytes_share is not None]
    heading = drawing.Heading("Scores against the KV bytes that a decode step reads", settings, machine)
    with drawing.png(path, (8.5, 8), heading) as axes:
        for suite, marker in zip(_suites(shown), MARKERS):
            for index, arm in enumerate(shown):
                score = arm.suites.get(suite)
                if score is None:
                    continue
                color, label = f"C{index % 10}", f"{suite}: {arm.name}"
                mean, noise = score.score.mean, NOISE * score.score.error
                axes.errorbar(arm.bytes_share, mean, noise, fmt=marker, color=color, label=label, capsize=2)
                if arm.name == FULL:
                    axes.axhspan(mean - MARGIN, mean, color="black", alpha=0.08)
        axes.set_xscale("log", base=2)
        axes.set_xlabel("KV bytes that a decode step reads, as a share of the full KV (grey: two points below full KV)")
        axes.set_ylabel("score, points")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.09))


def origins(found: Mapping[str, str]) -> str:
    """Hardware and dates of all arms, each once."""
    return "; ".join(dict.fromkeys(each for each in found.values() if each))
