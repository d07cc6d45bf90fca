"""The benchmark of prefix stores sends prompts to servers, computes ratios from their times, and refuses wrong options."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import LaunchedServer, Launches

from sglang_ext.mem_cache.prefix_store.file_backend import FileBackend
from sglang_ext.mem_cache.prefix_store.objects import ObjectFormat, StoredPage, encode_object
from sglang_ext_bench.__main__ import main
from sglang_ext_bench.serving.prefix_store import (
    COMPUTED,
    EMPTY,
    RESTARTED,
    STORED,
    PromptTimes,
    count_differing,
    table_rows,
)


def times(seconds: float, stored: int) -> list[PromptTimes]:
    """Three long prompts, the first of which is slower, and a short one."""
    found = [PromptTimes(6000, seconds * factor, 2 * seconds, stored, ([1], [2])) for factor in (3, 1, 1)]
    return [*found, PromptTimes(512, 0.1, 1.0, 0, ([1], [2]))]


def test_ratios_are_of_each_prompt_to_the_server_without_a_store():
    found = {COMPUTED: times(2.0, 0), EMPTY: times(2.2, 0), STORED: times(0.5, 64), RESTARTED: times(0.25, 128)}
    assert [row[2:] for row in table_rows("file:x", found, 3)] == [
        ("2.000", "1.000", "1.000", "0"),
        ("2.200", "1.100", "1.100", "0"),
        ("0.500", "0.250", "0.250", "64"),
        ("0.250", "0.125", "0.125", "128"),
    ]
    assert count_differing(found) == 0
    found[RESTARTED][3].answers[1][0] = 7
    assert count_differing(found) == 1


class OnStore(LaunchedServer):
    """Answers with the seed of a request, or 0. Servers with one --kv-store share their prompts.

    ``is_wrong``: answers to prompts from the store are wrong.
    """

    stores: dict[str, set[tuple[int, ...]]]
    asked: list[tuple[str, int]]
    is_wrong = False

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.cached: dict[tuple[int, ...], int] = {}

    def flush_cache(self) -> None:
        self.cached.clear()

    @property
    def url(self) -> str:
        return self.flags[self.flags.index("--kv-store") + 1] if "--kv-store" in self.flags else ""

    def request(self, path: str) -> str:
        assert path == "metrics"
        return f'sglang_ext:store_written_pages_total{{rank="0"}} {len(self.stores.get(self.url, ()))}\n'

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        ids, params = tuple(body["input_ids"]), body["sampling_params"]
        if params["max_new_tokens"] == 1:
            self.asked.append((self.url, len(ids)))
        stored = self.stores.setdefault(self.url, set())
        # Tokens that came from the store when the prompt was last not in the prefix cache.
        tokens = self.cached.setdefault(ids, len(ids) if ids in stored else 0)
        if self.url and len(ids) > 3:
            stored.add(ids)
        answer = params.get("sampling_seed", 0) + (self.is_wrong and tokens > 0)
        return {"output_ids": [answer], "meta_info": {"cached_tokens_details": {"storage": tokens} if tokens else None}}


@pytest.fixture
def servers(launches: Launches, quick_sleep: None) -> type[OnStore]:
    launches.make = type("Shared", (OnStore,), {"stores": {}, "asked": []})
    return launches.make


def measure(folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Measure two stores with two long prompts and a short one, from a text."""
    (folder / "config.json").write_text('{"vocab_size": 300}')
    words = [*("--model", str(folder), "--context-len", "40", "--prompts", "2", "--short-prompts", "1", "--short-len", "9", "--output-len", "2")]
    for name in ("a", "b"):
        words += ["--store", f"file:{folder}/{name}"]
    (folder / "text").write_text("".join(map(chr, range(32, 127))))
    code = main(["prefix-store", *words, *(flags or ("--prompt-file", str(folder / "text"))), "--json", str(folder / "found.json")])
    return code, json.loads((folder / "found.json").read_text())


@pytest.mark.usefixtures("char_tokenizer")
def test_each_store_is_measured_empty_then_by_its_server_and_by_one_that_starts_later(servers: type[OnStore], tmp_path: Path) -> None:
    code, found = measure(tmp_path)
    first, second = (f"file:{tmp_path}/{name}" for name in ("a", "b"))
    alone = [40, 40, 9]
    in_turn = [("", 40), (first, 40), (first, 40), ("", 40), ("", 9), (first, 9)]
    warm_up, again = [(first, 40)], [(first, length) for length in alone]
    assert servers.asked[:15] == [("", 40), *warm_up, *in_turn, *again, *warm_up, *again]
    assert [url for url, _ in servers.asked[15:]] == [url.replace(first, second) for url, _ in servers.asked[1:15]]
    stored = {arm: [each["stored"] for each in every] for arm, every in found["stores"][second].items()}
    assert stored == {COMPUTED: [0, 0, 0], EMPTY: [0, 0, 0], STORED: alone, RESTARTED: alone}
    assert code == 0 and found["differing_answers"] == {first: 0, second: 0}


@pytest.mark.usefixtures("char_tokenizer")
def test_greedy_and_seeded_answers_are_compared(servers: type[OnStore], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    servers.is_wrong = True
    code, found = measure(tmp_path)
    # Two answers to three prompts of the same server and of the restarted one.
    assert code == 1 and set(found["differing_answers"].values()) == {12}
    assert "24 of 36 answers differ" in capsys.readouterr().out


def test_random_prompts_get_greedy_answers_from_servers_without_determinism(
    servers: type[OnStore], launches: Launches, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers.is_wrong = True
    code, found = measure(tmp_path, "--greedy-only")
    assert code == 1 and set(found["differing_answers"].values()) == {6}
    assert "12 of 18 answers differ" in capsys.readouterr().out
    assert launches.made and not any("--enable-deterministic-inference" in server.flags for server in launches.made)


def test_a_store_that_has_pages_is_refused(tmp_path, capsys):
    backend, form = FileBackend(tmp_path / "store", 1 << 30), ObjectFormat("m", torch.float32, 1, 1, 16, 64, form="raw")
    page = StoredPage(form, bytes(32), 0)
    backend.put(page.name, encode_object(page, torch.zeros(2, 64, 1, 16)))
    assert main(["prefix-store", "--model", "/", "--prompt-file", "/dev/null", "--store", f"file:{tmp_path}/store"]) == 2
    assert "has 1 pages; pass an empty store" in capsys.readouterr().err
