"""Prints the results of a quality run as tables, and converts them to JSON values."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_ext_bench.comparing.acceptance import Acceptance
from sglang_ext_bench.quality.attention import AttentionError
from sglang_ext_bench.quality.divergence import NOISE_FACTOR, FirstDifferences
from sglang_ext_bench.quality.reporting.results import ArmQuality, Results


def print_results(console: Console, results: Results) -> None:
    """Print a table for each measured part, and the verdict on verified decoding."""
    for print_part in (_print_acceptance, _print_kl, _print_differences, _print_functional):
        print_part(console, results.arms)
    _print_speed(console, results)
    _print_attention(console, results.attention)
    for line in verdict_lines(results):
        console.print(line, markup=False, soft_wrap=True)


def verdict_lines(results: Results) -> list[str]:
    """Lines about servers that failed, and whether verified decoding is within stock's noise."""
    lines = [f"{name}: not measured: {error.splitlines()[0]}" for name, error in results.failed.items()]
    if results.stock is not None and results.stock.kl is not None:
        above = ", ".join(results.above_noise)
        holds = f"does not hold for {above}" if above else "holds"
        lines.append(f"verified decoding within {NOISE_FACTOR:g} times stock's own KL divergence: {holds}")
    return lines


def _table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if not rows:
        return
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _print_acceptance(console: Console, arms: Sequence[ArmQuality]) -> None:
    rows = [
        (each.arm.name, f"{temperature:g}", str(found.verifies), _number(found.accept_length), _number(found.rate))
        for each in arms
        for temperature, found in each.acceptance.items()
    ]
    columns = ("server", "temperature", "verifies", "tokens per verify", "accepted / offered")
    _table(console, "Acceptance", columns, rows)


def _print_kl(console: Console, arms: Sequence[ArmQuality]) -> None:
    rows = [
        (each.arm.name, f"{each.kl.per_step:.3g}", f"{each.kl.largest:.3g}", f"{each.kl.cumulated:.3g}")
        for each in arms
        if each.kl is not None
    ]
    columns = ("server", "mean of a step", "largest", "sum over an answer")
    _table(console, "KL divergence from full KV, lower bound, nats", columns, rows)


def _print_differences(console: Console, arms: Sequence[ArmQuality]) -> None:
    rows = [
        (
            each.arm.name,
            f"{temperature:g}",
            f"{found.identical} of {len(found.indices)}",
            f"{found.median:g}",
            " ".join(f"{where}:{count}" for where, count in found.histogram.items() if count),
        )
        for each in arms
        for temperature, found in each.first_differences.items()
    ]
    columns = ("server", "temperature", "identical", "median", "answers by first difference")
    _table(console, "First token that differs from full KV's", columns, rows)


def _print_functional(console: Console, arms: Sequence[ArmQuality]) -> None:
    kinds = list(dict.fromkeys(kind for each in arms for found in each.functional.values() for kind in found))
    rows = [
        (each.arm.name, f"{temperature:g}", *(_number(found.get(kind)) for kind in kinds))
        for each in arms
        for temperature, found in each.functional.items()
    ]
    _table(console, "Share of tasks done", ("server", "temperature", *kinds), rows)


def _print_speed(console: Console, results: Results) -> None:
    rows = [
        (each.arm.name, f"{each.speed:.1f}", _number(results.speedup(each))) for each in results.arms if each.speed is not None
    ]
    _table(console, "Speed", ("server", "tokens per second", "over stock"), rows)


def _print_attention(console: Console, errors: Sequence[AttentionError]) -> None:
    rows = [
        (
            f"{each.compressor}-{each.budget:g}",
            each.tail,
            f"{each.mean:.3g}",
            f"{each.worst:.3g}",
            f"{max(each.mean_by_layer):.3g} (layer {each.mean_by_layer.index(max(each.mean_by_layer))})",
        )
        for each in errors
    ]
    columns = ("compressor", "newest values", "mean", "worst token", "worst layer's mean")
    _table(console, "Relative error of attention outputs", columns, rows)


def arm_json(each: ArmQuality) -> dict[str, Any]:
    """The figures of a server as JSON values. Temperatures are keys, as text."""
    return {
        "name": each.arm.name,
        "bytes_share": each.bytes_share,
        **dataclasses.asdict(each.arm),
        "acceptance": _by_temperature(each.acceptance, _acceptance_json),
        "kl": each.kl and dataclasses.asdict(each.kl) | {"growth": each.kl.growth},
        "first_differences": _by_temperature(each.first_differences, _differences_json),
        "functional": _by_temperature(each.functional, dict),
        "tokens_per_second": each.speed,
    }


def attention_json(each: AttentionError) -> dict[str, Any]:
    """The errors of one compressor and budget as JSON values."""
    return dataclasses.asdict(each) | {"mean": each.mean, "worst": each.worst}


def _by_temperature(figures: Any, convert: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
    return {f"{temperature:g}": convert(found) for temperature, found in figures.items()}


def _acceptance_json(found: Acceptance) -> dict[str, Any]:
    return dataclasses.asdict(found) | {"accept_length": found.accept_length, "rate": found.rate}


def _differences_json(found: FirstDifferences) -> dict[str, Any]:
    return dataclasses.asdict(found) | {
        "identical": found.identical,
        "median": found.median,
        "histogram": found.histogram,
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
