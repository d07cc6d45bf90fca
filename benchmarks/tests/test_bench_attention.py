"""``sglang-ext-bench attention`` on a CPU: variants, errors of their outputs, and refused options."""

import argparse
import json

import pytest
import torch

from sglang_ext.mem_cache.compressed.layouts.block_layout import token_seeds
from sglang_ext.tools import CommandError
from sglang_ext_bench import __main__ as bench
from sglang_ext_bench.attention import command
from sglang_ext_bench.attention.setting import (
    AttentionShape,
    FullKV,
    QuantizedKV,
    exactly,
    relative_error,
)

SMALL = ("--device", "cpu", "--contexts", "300", "--batch", "2", "--prefill", "256", "--heads", "4", "--kv-heads", "2", "--head-dim", "64")


def options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args([*SMALL, *given])


def rows(*given: str) -> list[command.AttentionRow]:
    args = options(*given)
    return [row for found in command.measured(args, command.attention_shape(args), 1e9) for row in found]


def test_the_command_writes_what_it_measured(tmp_path, capsys) -> None:
    assert bench.main(["attention", *SMALL, "--json", str(tmp_path / "out.json")]) == 0
    shown = capsys.readouterr().out
    assert "Step: 2 requests of 300 tokens, 4 bits, partitions of 64" in shown and "Prefill: a prompt of 256 tokens" in shown
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["device"] == "CPU" and {row["kind"] for row in written["results"]} == {"step", "prefill"}


def test_arms_differ_by_their_codes_and_compute_them_well() -> None:
    found = {(row.kind, row.arm): row for row in rows()}
    assert list(found) == [
        ("step", "full"), ("step", "fused 4"), ("step", "dequantized 4, then full"), ("step", "hack"), ("prefill", "full"),
        ("prefill", "hack"),
    ]  # fmt: skip
    for (_, arm), row in found.items():
        assert row.seconds > 0 and row.speed > 0
        # HACK quantizes queries and weights to 8 bits.
        assert 0 < row.error < (1e-2 if arm == "hack" else 1e-5), row
        assert row.loss < 1e-5 if arm == "full" else 10 * row.error < row.loss < 0.5, row
    full, fused, pass_, hack = (found["step", arm] for arm in ("full", "fused 4", "dequantized 4, then full", "hack"))
    assert full.bytes == 2 * 300 * 2 * 2 * 64 * 4 and full.speed == 1.0
    assert hack.bytes < full.bytes / 2 and fused.bytes < full.bytes / 2 < pass_.bytes


def test_fewer_bits_lose_more() -> None:
    four, two = ({row.arm: row for row in rows("--prefill", "0", "--bits", bits)} for bits in ("4", "2"))
    assert two["hack"].loss > 2 * four["hack"].loss and two["hack"].bytes < four["hack"].bytes


def test_copies_are_of_the_same_tokens() -> None:
    full = FullKV.of(AttentionShape(2, 1, 64, torch.device("cpu")), 2, 300)
    copies = QuantizedKV.from_full(full, "hack", 4, 32)
    assert copies.packed == copies.packing.packed_slots(256)
    for exact, meant in zip(full.first_request(), copies.first_request()):
        assert torch.equal(exact[:, :4], meant[:, 256:260]) and torch.equal(exact[:, 260:], meant[:, 260:])
        assert 0 < relative_error(meant[:, :256], exact[:, 4:260]) < 0.2
    queries = torch.ones(3, 2, 64)
    assert torch.equal(exactly(queries, *full.first_request(), 0.1)[-1:], exactly(queries[-1:], *full.first_request(), 0.1))


def test_copies_have_codes_that_are_drawn_as_a_server_draws_them() -> None:
    full = FullKV.of(AttentionShape(2, 2, 64, torch.device("cpu")), 1, 300)
    copies = QuantizedKV.from_full(full, "hack", 2, 64)
    packing, places = copies.packing, torch.arange(4, 260).expand(2, -1)
    seeds = token_seeds(range(300), 300, torch.device("cpu"))[places]
    for is_value, (exact, meant, layout) in enumerate(zip(full.first_request(), copies.first_request(), (packing.keys, packing.values))):
        numbers = exact[:, 4:260].float()
        drawn, nearest = (packing.dequantize(packing.codes(numbers, places, bool(is_value), 0, 0, by), layout, None) for by in (seeds, None))
        assert torch.equal(meant[:, :256], drawn.double()) and relative_error(drawn, numbers) > 1.2 * relative_error(nearest, numbers)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (["--contexts", "100"], "--contexts 100: pass at least 256"),
        (["--prefill", "64"], "--prefill 64: pass at least 256"),
        (["--partition", "128"], "--partition 128 with --head-dim 64: pass some of 64, 32, 128 that divide a head"),
        (["--heads", "3"], "--heads 3 with --kv-heads 2: pass a multiple"),
        (["--batch", "0"], "--batch '0': pass numbers above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(
    given: list[str], match: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.timing, "bandwidth", lambda device: pytest.fail("it was measured"))
    with pytest.raises(CommandError, match=match):
        command.run(options(*given))
    assert capsys.readouterr().out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(CommandError, match="--device cuda: this machine has no GPU"):
        command.attention_shape(options("--device", "cuda"))
