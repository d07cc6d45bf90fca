"""Commands that time kernels: on a CPU, with tiny sizes, they print their tables; wrong options end them before they start."""

import pytest
import torch

from sglang_ext_bench.__main__ import main


def test_codec_speed_prints_a_row_per_page_size_and_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("codec-speed --device cpu --layers 1 --tokens 2 40".split()) == 0
    header, _, *rows = capsys.readouterr().out.splitlines()
    assert [[cell.strip() for cell in row.split("|")[1:3]] for row in rows] == [
        ["2", "int8"], ["2", "exact"], ["40", "int8"], ["40", "exact"],
    ]  # fmt: skip
    assert {row.count("|") for row in rows} == {header.count("|")}


def test_compression_time_prints_a_line_per_method_and_its_share_of_the_prefill(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--layers 1 --kv-heads 1 --group 1 --dim 32 --tokens 256 --repeats 1 --prefill-seconds 2"
    assert main(["compression-time", *sizes.split(), "snapkv", "kivi:2"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "256 tokens, 1 layers, 1 KV heads of 32; prefill 2000.0 ms"
    assert [line.split()[0] for line in lines] == ["snapkv", "kivi:2"] and all(line.endswith("% of the prefill") for line in lines)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("packed-kernel --methods foo:2", "--methods foo: pass quantizers, from hack, int4"),
        ("packed-kernel --methods kivi:3", "--methods kivi:3: pass bits"),
        ("packed-kernel --parts 3", "--parts '3': pass BLOCKS,EXACT"), ("prefill-tiles --forms 3:64", "--forms 3:64: pass bits from (4, 2)"),
        ("prefill-tiles --tiles 64,0,1", "--tiles '64,0,1': pass ROWS,WARPS,STAGES"), ("uneven-kernel --budget 2", "--budget 2: "),
        ("sparse-kernels --tokens 100", "--tokens 100: pass a multiple of 16"), ("selection-speed --every 20", "--every 20: pass at most --batch 16"),
        ("residual-rate --bits 5", "--bits 5: pass one of"), ("codec-speed --device mps", "--device mps: pass cpu or cuda"),
        ("two-forwards --model x --verified 8", "--verified 8: pass fewer than --requests 8"),
        ("residual-bits --model x --tokens 64 t", "--tokens 64: "),
        ("lynx-codec --text nowhere.md", "--text nowhere.md: there is no such file"),
        ("store-forms --text nowhere.md", "--text nowhere.md: there is no such file"), ("copies-beside-loads", "PyTorch finds no GPU here"),
    ],
)  # fmt: skip
def test_wrong_options_and_machines_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(command.split()) == 2
    assert message in capsys.readouterr().err
