"""Every way in: the examples, ``sgl.Engine``, ``sglang serve``; bad requests at the door."""

import ast
import json
import re
import runpy
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from preloaded import Preloaded, run_script
from servers import EXPECTED_TOKENS, STRICT, Server, greedy
from waiting import tries, until

from sglang_ext.hooks import table as hooks

pytestmark = pytest.mark.server

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*command: str) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    return done.stdout


def test_the_curl_example_prints_stocks_text_and_its_drafts(stock: Server, verified: Server) -> None:
    answers = [run("bash", str(EXAMPLES / "curl.sh"), server.url) for server in (stock, verified)]
    expected, found = (answer.rstrip().rpartition("\n") for answer in answers)
    assert found[0] == expected[0] != ""
    assert ast.literal_eval(found[2])["kv_drafts"] > 0


def test_the_first_request_of_the_readme_drafts(verified: Server) -> None:
    readme = (EXAMPLES.parent / "README.md").read_text()
    command = re.search(r"^    (curl http://127.0.0.1:30000/generate .*\\\n.*)$", readme, re.MULTILINE)[1]
    found = json.loads(run("bash", "-c", command.replace("http://127.0.0.1:30000", f"--silent {verified.url}")))["meta_info"]
    assert found["kv_accepted"] > 0 and found["kv_fallback"] is None


def test_the_openai_example_prints_what_it_prints_on_stock(
    stock: Server, verified: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # In this process, which has the packages loaded.
    example, printed = str(EXAMPLES / "openai_client.py"), []
    for server in (stock, verified):
        monkeypatch.setattr(sys, "argv", [example, server.url])
        runpy.run_path(example, run_name="__main__")
        printed.append(capsys.readouterr().out)
    expected, found = printed
    assert found == expected
    assert found.strip()


def test_the_frontend_example_prints_every_part_of_its_program(
    verified: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # What such programs give is compared with stock in test_frontend_programs.py. SGLang is imported here already.
    example = EXAMPLES / "frontend_program.py"
    monkeypatch.setattr(sys, "argv", [str(example), verified.url])
    runpy.run_path(str(example), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    parts = dict(line.split(": ", 1) for line in lines if ": " in line)
    assert {"summary", "subject", "year", "strength", "weakness", "batch"} <= set(parts)
    assert parts["year"][:2] in ("19", "20") and parts["subject"] in (" text", " numbers", " pictures")
    assert sum(line.startswith("batch: ") for line in lines) == 2


def test_the_engine_of_the_example_gives_stocks_texts(
    of_all_layers: dict[str, list[str]], demo_model: Path, preloaded: Preloaded | None, tmp_path: Path
) -> None:
    printed = run_script(preloaded, tmp_path / "printed", EXAMPLES / "offline_engine.py", str(demo_model))
    for text in of_all_layers["texts"]:
        assert f"{text}\n{{'kv_" in printed
    counts = [ast.literal_eval(line) for line in printed.splitlines() if line.startswith("{'kv_")]
    assert len(counts) == 2 and all(count["kv_drafts"] > 0 for count in counts)


def test_sglang_serve_takes_the_flags_and_chooses_draft_lengths_without_a_prefix_cache(
    launch: Callable[..., Server], prompts: list[list[int]], expected: list[list[int]]
) -> None:
    flags = ("--kv-mode", "verified", "--kv-budget", "0.3", "--kv-draft-length", "auto", "--disable-radix-cache")
    # Prompts of several chunks: without a prefix cache nothing but the request knows of the first ones.
    server = launch(*flags, "--chunked-prefill-size", "256", env=STRICT, console=True)
    assert server.command[1] == "serve"
    info = server.request("server_info")
    assert (info["kv_mode"], info["kv_budget"], info["kv_compressor"]) == ("verified", 0.3, "snapkv")
    assert info["kv_draft_length"] == "auto"
    # The first iterations of a batch size are plain steps, by which drafting is judged. On a busy machine it may seem slower for a while.
    for _ in tries(4, "drafts"):
        found = server.ask_all(prompts, 4, **greedy(EXPECTED_TOKENS))
        assert [r["output_ids"] for r in found] == expected
        assert all(r["meta_info"]["kv_fallback"] in (None, "slower") for r in found)
        if sum(r["meta_info"]["kv_drafts"] for r in found) > 0:
            break


def test_a_server_tells_mode_method_and_address_when_it_is_ready_and_its_hooks_in_one_line(
    stock: Server, verified: Server
) -> None:
    until(lambda: "listening on" in verified.log.read_text(), "it tells its address")
    log = verified.log.read_text()
    ready = log.partition("ready to roll!")[2]
    told = [line.partition("sglang-ext: ")[2] for line in ready.splitlines() if "sglang-ext: " in line][:3]
    assert told[0].startswith("mode verified: drafts on compressed KV")
    assert told[1] == "compressor snapkv (budget 0.25), draft length 4"
    command = told[2].removeprefix(f"listening on {verified.url}; try: ")
    assert json.loads(run("bash", "-c", f"{command} --silent"))["meta_info"]["kv_drafts"] > 0
    assert log.count("functions of SGLang are hooked") == 1
    assert len([line for line in log.splitlines() if "sglang-ext: " in line and "compressor snapkv" in line]) == 1
    ours = {hook.target for hook in hooks.HOOKS + hooks.PLAIN_CPU_HOOKS}
    assert not [line for line in log.splitlines() if "hook(s) to" in line and any(target in line for target in ours)]
    # The log also has paths, such as that of a clone in a folder of this name.
    assert "sglang-ext: " not in stock.log.read_text().partition("ready to roll!")[2]


@pytest.mark.parametrize(
    "body",
    [
        b"{not json",
        json.dumps({"text": "x", "sampling_params": {"temperature": -1}}).encode(),
        json.dumps({"input_ids": [5] * 9000, "sampling_params": {"max_new_tokens": 4}}).encode(),
    ],
    ids=["malformed", "impossible-value", "too-long"],
)
def test_bad_requests_get_stocks_error_and_the_server_goes_on(
    stock: Server, verified: Server, body: bytes
) -> None:
    codes = [refusal(server, body) for server in (stock, verified)]
    assert codes[0] == codes[1] >= 400
    assert verified.alive()


def refusal(server: Server, body: bytes) -> int:
    """The HTTP status with which a request is refused."""
    request = urllib.request.Request(server.url + "/generate", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=60)
    return raised.value.code
