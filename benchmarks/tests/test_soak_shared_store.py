"""A soak of servers that share a prefix store: each request goes to one of them, and leaks and a store beyond its bound are found."""

from pathlib import Path
from typing import Any

import pytest
from launched import Launches
from soak_helpers import SoakServer, run

from sglang_ext.mem_cache.prefix_store.backend import StoreError, open_backend
from sglang_ext.tools import CommandError
from sglang_ext_bench.__main__ import main
from sglang_ext_bench.soaking import shared_store
from sglang_ext_bench.soaking.request_options import OPTIONS
from sglang_ext_bench.soaking.shared_store import StoreProcess

pytestmark = pytest.mark.usefixtures("checked_here", "quick_sleep")


class OnStore(SoakServer):
    """A server that says what it read and holds. The tested ones have flag ``--kv-store``."""

    held, hits = 0, 5

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.rids: set[str] = set()

    def request(self, path: str) -> Any:
        if path != "metrics":
            return super().request(path)
        names = {"host_bytes": self.held, "store_hit_pages_total": self.hits}
        return "".join(f'sglang_ext:{name}{{rank="0"}} {value}\n' for name, value in names.items())

    def answer(self, body: dict[str, Any], count: int) -> dict[str, Any]:
        self.rids.add(body.get("rid", ""))
        return super().answer(body, count)


STORED = ("--kv", "--kv-host-gb 1 --kv-draft-length 15")
"""Flags of servers that can have a store."""


@pytest.fixture
def server(launches: Launches, char_tokenizer: None, monkeypatch: pytest.MonkeyPatch) -> Launches:
    for name in ("LOOK_SECONDS", "DISTURB_SECONDS", "RELEASE_SECONDS"):
        monkeypatch.setattr(shared_store, name, 0.01)
    launches.make = OnStore
    return launches


def test_each_request_has_one_server_and_the_store_is_disturbed(server: Launches, tmp_path: Path) -> None:
    code, totals = run(tmp_path, "--minutes", "5", "--requests", "60", *STORED, "--store", str(tmp_path / "store"), "--store-mb", "7")
    _, first, second = server.made
    assert code == 0 and first.rids & second.rids <= {""} and len(first.rids) > 5 and len(second.rids) > 5
    assert f"file:{tmp_path}/store?max-gb=0.007" in first.flags and first.flags == second.flags
    assert totals["store"]["disturbances"]["folder removed"] and totals["store"]["servers"]["2"]["hit_pages"] == 5
    assert len(totals["requests"]) == len(OPTIONS)


def test_servers_share_a_store_process_which_is_restarted(server: Launches, tmp_path: Path) -> None:
    code, totals = run(tmp_path, "--minutes", "5", "--requests", "60", *STORED, "--store", str(tmp_path / "store"), "--store-process", "--store-mb", "7")
    _, first, second = server.made
    assert code == 0 and first.flags == second.flags and first.flags[first.flags.index("--kv-store") + 1].startswith("tcp://127.0.0.1:")
    assert {"store process killed", "store process restarted"} & {*totals["store"]["disturbances"]}


def test_a_store_process_keeps_its_address_when_it_is_killed_and_ends(tmp_path: Path) -> None:
    with StoreProcess(tmp_path / "store", 10**7, tmp_path / "log") as process:
        group = process.group
        process.kill()
        backend = open_backend(process.url)
        assert backend.statistics().max_size == 10**7 and process.group not in (group, None)
        backend.close()
    assert process.group is None
    with pytest.raises(StoreError):
        open_backend(process.url)


def test_a_store_process_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("no folder")
    process = StoreProcess(tmp_path / "store", 10**7, tmp_path / "log")
    with pytest.raises(CommandError, match=f"did not start: .*store.*; see {tmp_path}/log"), process:
        pass


@pytest.mark.parametrize(
    ("changes", "problem"),
    [({"held": 7}, "server 1 holds 7 bytes of host memory"), ({"hits": 0}, "no page was read"), ({"leaked": 3}, "still holds 3 used tokens")],
    ids=["host memory", "no reads", "tokens"],
)
def test_a_leak_or_an_unused_store_fails(server: Launches, tmp_path: Path, changes: dict[str, int], problem: str) -> None:
    server.make = type("Faulty", (OnStore,), changes)
    code, totals = run(tmp_path, *STORED, "--store", str(tmp_path / "store"), "--store-servers", "1")
    assert code == 1 and any(problem in each for each in totals["problems"])


def test_a_store_beyond_its_bound_fails(server: Launches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Greedy(OnStore):
        def answer(self, body: dict[str, Any], count: int) -> dict[str, Any]:
            if self.env:
                path = tmp_path / "store" / ("a" * 16) / "bb" / ("b" * 64)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(bytes(1_000_001))
            return super().answer(body, count)

    monkeypatch.setattr(shared_store, "DISTURB_SECONDS", 1000.0)
    server.make = Greedy
    code, totals = run(tmp_path, "--minutes", "1", *STORED, "--store", str(tmp_path / "store"), "--store-mb", "1")
    assert code == 1 and "its bound is 1000000" in totals["problems"][0]


def test_a_folder_with_files_is_refused_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("")
    assert main(["soak", "--model", "m", "--prompts", "p", "--store", str(tmp_path)]) == 2
    assert "pass a new folder" in capsys.readouterr().err and (tmp_path / "mine").exists()
    assert main(["soak", "--model", "m", "--prompts", "p", "--store", str(tmp_path / "new"), "--apart"]) == 2
    assert main(["soak", "--model", "m", "--prompts", "p", "--store-process"]) == 2
