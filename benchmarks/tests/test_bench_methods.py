"""``sglang-ext-bench methods``: requests name their method, acceptance is counted by kind of text, and a second run measures missing servers."""

import json
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from launched import LaunchedServer

from sglang_ext_bench.__main__ import main
from sglang_ext_bench.methods.servers import SERVER_NAMES

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 5000, "max_position_embeddings": 4096,
}  # fmt: skip
# Keys and values of a token: two layers of two heads of 128 channels, in bfloat16.
TOKEN_BYTES = 2 * 2 * 2 * 128 * 2
CODE, PROSE = "x", "y"


@dataclass
class Behaviour:
    """How all servers of a test behave, and the requests that they got.

    Attributes:
        broken: Names of servers that do not start.
        burst: Tokens of a chunk.
        asked: For each request: name of the server, method, temperature, prompt tokens and output tokens.
    """

    broken: tuple[str, ...] = ()
    burst: int = 4
    asked: list[tuple[str, str | None, float, int, int]] = field(default_factory=list)


class SlowServer(LaunchedServer):
    """A server that accepts 4 of 5 drafts of code, 2 of prose, and holds compressed KV of a quarter of the running prompts."""

    def __init__(self, behaviour: Behaviour, *given: Any) -> None:
        super().__init__(*given)
        self.behaviour, self.name, self.held = behaviour, self.log.stem, 0

    def can_start(self) -> bool:
        return self.name not in self.behaviour.broken

    def request(self, path: str) -> str:
        assert path == "metrics"
        return f'sglang_ext:compressed_bytes{{model_name="m"}} {self.held}'

    def stream(self, path: str, body: dict[str, Any]) -> Any:
        asked, ids = body["sampling_params"], body["input_ids"]
        name = asked.get("custom_params", {}).get("kv_compressor")
        self.behaviour.asked.append((self.name, name, asked["temperature"], len(ids), asked["max_new_tokens"]))
        self.held += len(ids) * TOKEN_BYTES // 4
        drafts = {} if self.name == "stock" else {"kv_drafts": 5, "kv_accepted": 4 if ids[-1] == ord(CODE) else 2, "kv_verifies": 1}
        most = asked["max_new_tokens"]
        for tokens in (*range(1, most, self.behaviour.burst), most):
            yield {"meta_info": {"completion_tokens": tokens, **drafts}}
            time.sleep(0.03)
        self.held -= len(ids) * TOKEN_BYTES // 4


@pytest.fixture
def behaviour(launches) -> Behaviour:
    found = Behaviour()
    launches.make = partial(SlowServer, found)
    return found


@pytest.fixture
def bench(tmp_path, behaviour, checked_here, char_tokenizer):
    """Returns a function that runs the command with a tiny model and texts of one letter."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for kind, letter in (("code", CODE), ("prose", PROSE)):
        (tmp_path / kind).write_text(letter * 1000)

    def run(*more: str) -> int:
        texts = [f"--{kind}-file={tmp_path / kind}" for kind in ("code", "prose")]
        return main(["methods", f"--model={tmp_path}", *texts, "--context-len=64,32", "--requests=2", "--output-len=13", *more])

    return run


def started(launches) -> list[str]:
    """The names of the servers that started, in their order."""
    return [server.name for server in launches.made]


def row(out: str, label: str) -> list[str]:
    """The cells of a row of the printed table."""
    (found,) = [line for line in out.splitlines() if line.startswith(f"| {label} |")]
    return [cell.strip() for cell in found.strip("|").split("|")][1:]


def test_acceptance_is_by_kind_of_text_and_bytes_are_the_servers_or_what_is_selected(bench, behaviour, capsys):
    assert bench("--server=stock,snapkv,quest") == 0
    out = capsys.readouterr().out
    share, *accepted, token_ms, gain = row(out, "`snapkv`, 1/8")
    assert (share, accepted) == (".25", [".80 / .80", ".80 / .80", ".40 / .40", ".40 / .40"])
    assert float(token_ms) > 5 and float(gain) == pytest.approx(1, abs=0.3)
    assert row(out, "stock")[0] == "1.00" and row(out, "stock")[1:5] == ["-"] * 4 and row(out, "stock")[-1] == "-"
    # An eighth of the context, and on a CPU two keys of each page of 16 tokens, which have half of its bytes.
    assert row(out, "`quest`, 1/8")[0] == f"{1 / 8 + 1 / 16:.2f}"[1:]
    of_snapkv = [each[1:4] for each in behaviour.asked if each[0] == "snapkv" and each[4] > 1]
    names = "snapkv", "snapkv:0.125", "snapkv:0.03125", "expected-attention", "sink-recent"
    assert set(of_snapkv) == {(name, heat, length) for name in names for heat in (0.0, 0.7) for length in (32, 64)}
    assert len(of_snapkv) == len(set(of_snapkv)) * 4, "two requests of code and two of prose in each wave"


def test_a_second_run_measures_what_is_missing(bench, behaviour, launches, tmp_path, capsys):
    file = tmp_path / "out.json"
    behaviour.broken = ("int8",)
    more = f"--json={file}", "--temperature=0", "--server=int8,stock,kivi"
    assert bench(*more) == 1 and "int8: failed: the server ended with code 1" in capsys.readouterr().out
    assert started(launches) == ["stock", "kivi"]
    behaviour.broken = ()
    assert bench(*more, "--at-once=2") == 0
    assert started(launches) == ["stock", "kivi", "int8"], "servers with figures do not start again"
    rows = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows == ["| method", "| stock", "| `kivi`", "| `snapkv+kivi`, 1/4", "| `int8`"]
    assert bench(*more, "--output-len=17") == 2 and "other values of --output-len" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_servers_of_all_methods_could_start(bench, launches, device):
    # The flags are checked as the servers check them.
    assert bench(f"--server-arg=--device {device}", "--temperature=0", "--context-len=32", "--output-len=9") == 0
    assert started(launches) == list(SERVER_NAMES)
    paged = {server.name for server in launches.made if "--page-size" in server.flags}
    assert paged == ({"quest"} if device == "cuda" else set())


def test_a_repeated_server_option_adds_servers(bench, launches):
    more = "--temperature=0", "--context-len=32"
    assert bench(*more, "--server=stock", "--server=kivi", "--server=stock,int8") == 0
    assert started(launches) == ["stock", "kivi", "int8"]


def test_the_speed_of_one_burst_is_unknown(bench, behaviour, capsys):
    behaviour.burst = 12
    assert bench("--temperature=0", "--context-len=32", "--server=stock,kivi-2") == 0
    out = capsys.readouterr().out
    assert row(out, "`kivi`, 2 bits")[1:] == [".80", ".40", "-", "-"]
    assert "- ms a token (fewer than two bursts: raise --output-len)" in out


def test_wrong_options_are_named(bench, tmp_path, capsys):
    assert bench("--server=snap") == 2 and "--server 'snap': pass some of stock, snapkv" in capsys.readouterr().err
    assert bench("--requests=2000") == 2 and "pass a longer text" in capsys.readouterr().err
    assert main(["methods"]) == 2 and "nothing is measured: pass --model" in capsys.readouterr().err
