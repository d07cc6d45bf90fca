"""Reports of an identity run: tables and summary lines, a plot, and JSON."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from sglang_ext_bench import drawing, report
from sglang_ext_bench.comparing.acceptance import acceptance
from sglang_ext_bench.comparing.compare import (
    Comparison,
    LogprobDifference,
    PromptResult,
)
from sglang_ext_bench.comparing.verdict import Rules, Verdict

COLUMNS = ("prompt", "tokens", "identical", "first diff", "top-2 margin", "logprob diff", "accept len", "g")
TABLE_POSITIONS = (1, 2, 4, 8, 16)
"""Draft positions with a column of their own."""


def print_comparison(console: Console, comparison: Comparison, rules: Rules, draft_length: int) -> None:
    """Print a table of the prompts, and the summary of one setting."""
    positions = [j for j in TABLE_POSITIONS if j <= draft_length]
    columns = (*COLUMNS, *(f"pos {j}" for j in positions))
    rows = [_row(result, positions, draft_length) for result in comparison.results]
    console.print(report.make_table(comparison.setting.label, columns, rows))
    for line in summary_lines(comparison, rules):
        console.print(line, markup=False)
    console.print()


def summary_lines(comparison: Comparison, rules: Rules) -> list[str]:
    """Summarize one setting: identical outputs, failures, fallbacks and acceptance."""
    total = comparison.acceptance
    failed = [result for result in comparison.results if rules.fails(comparison, result)]
    tolerated = [result for result in comparison.results if rules.tolerates(result)]
    lines = [
        f"{comparison.setting.label}: {comparison.identical} of {len(comparison.results)} identical, "
        f"{len(failed)} failed" + (f", {len(tolerated)} tolerated" if tolerated else "")
    ]
    differing = [result for result in comparison.results if result.first_difference is not None]
    if differing:
        margins = [result.margin for result in differing if result.margin is not None]
        largest = _number(max(margins, default=None), "g")
        lines.append(f"  {len(differing)} differ; largest top-2 margin at the first difference {largest}")
    largest_logprob = comparison.max_logprob_difference
    if largest_logprob is not None:
        name, found = largest_logprob
        lines.append(f"  largest logprob difference {found.value:.3g}: {name} at token {found.index}")
    fallbacks = [result for result in comparison.results if result.fallback is not None]
    if fallbacks:
        reasons = ", ".join(sorted({str(result.fallback) for result in fallbacks}))
        lines.append(f"  {len(fallbacks)} served with the full KV: {reasons}")
    if total.verifies:
        curve = " ".join(f"{rate:.2f}" for rate in total.by_position)
        lines.append(
            f"  {total.verifies} verifications, accept length {_number(total.accept_length)}, "
            f"g = accepted / offered = {_number(total.rate)}"
        )
        lines.append(f"  acceptance by draft position: {curve}")
    lines += [f"  {result.name}: {result.error}" for result in comparison.results if result.error]
    return lines


def print_verdict(console: Console, verdict: Verdict) -> None:
    """Print the verdict, and whether the run passes."""
    for line in verdict.lines():
        console.print(line, markup=False, soft_wrap=True)
    console.print("passed" if verdict.holds else "FAILED", markup=False)


def as_json(
    config: Mapping[str, Any], comparisons: Sequence[Comparison], rules: Rules, verdict: Verdict
) -> dict[str, Any]:
    """Return the report as JSON values: options, versions, command, verdict, and one entry per setting."""
    return {
        "config": dict(config),
        **report.origin(),
        "rules": dataclasses.asdict(rules),
        "verdict": verdict.as_json(),
        "comparisons": [_comparison_json(each, rules) for each in comparisons],
    }


def write_plot(path: Path, comparisons: Sequence[Comparison], measured_with: str) -> None:
    """Plot acceptance over draft position, one line per setting. Writes nothing if nothing was drafted.

    Args:
        path: PNG file.
        comparisons: The results of all settings.
        measured_with: The settings that all comparisons share, for the subtitle.
    """
    shares = {each.setting.label: each.acceptance.by_position for each in comparisons if each.acceptance.by_position}
    if not shares:
        return
    curves = [drawing.Curve(label, range(1, len(share) + 1), share) for label, share in shares.items()]
    with drawing.png(path, (7, 4.5), drawing.Heading("Draft tokens accepted by verification", measured_with)) as axes:
        if drawing.draw(axes, curves, "draft position"):
            axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set(ylabel="share of verifications that accept it", ylim=(0, 1.02))
        axes.grid(alpha=0.3)


def _row(result: PromptResult, positions: Sequence[int], draft_length: int) -> list[str]:
    cells = [escape(result.name), str(result.prompt_tokens), _verdict(result)]
    cells += [_number(result.first_difference, "d"), _number(result.margin, ".3g")]
    found = result.max_logprob_difference
    cells.append("-" if found is None else f"{found.value:.2g} @{found.index}")
    if result.verify is None:
        return cells + ["-"] * (2 + len(positions))
    curve = acceptance(result.verify, draft_length)
    rates = curve.by_position
    cells += [_number(result.verify.accept_length), _number(curve.rate)]
    return cells + [_number(rates[j - 1] if j <= len(rates) else None) for j in positions]


def _verdict(result: PromptResult) -> str:
    if result.error is not None:
        return "[red]error[/red]"
    if not result.identical:
        return "[red]no[/red]"
    return "yes (full KV)" if result.fallback is not None else "[green]yes[/green]"


def _number(value: float | None, form: str = ".2f") -> str:
    return "-" if value is None else format(value, form)


def _comparison_json(comparison: Comparison, rules: Rules) -> dict[str, Any]:
    total = comparison.acceptance
    rows = [
        dataclasses.asdict(result)
        | {"failed": rules.fails(comparison, result), "tolerated": rules.tolerates(result)}
        for result in comparison.results
    ]
    return {
        "setting": dataclasses.asdict(comparison.setting),
        "summary": {
            "prompts": len(rows),
            "identical": comparison.identical,
            "failed": sum(row["failed"] for row in rows),
            "tolerated": sum(row["tolerated"] for row in rows),
            "fallbacks": sum(row["fallback"] is not None for row in rows),
            "max_logprob_difference": _logprob_json(comparison.max_logprob_difference),
            "verifies": total.verifies,
            "accept_length": total.accept_length,
            "acceptance_rate": total.rate,
            "acceptance_by_position": total.by_position,
            "offered_by_position": total.offered,
        },
        "prompts": rows,
    }


def _logprob_json(found: tuple[str, LogprobDifference] | None) -> dict[str, Any] | None:
    return None if found is None else {"prompt": found[0], **dataclasses.asdict(found[1])}
