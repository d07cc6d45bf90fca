"""A soak of a prefill and a decode server: both get each request, and leaks and errors of each are found."""

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError

import psutil
import pytest
from launched import Launches
from soak_helpers import SoakServer, run

from sglang_ext_bench.soaking import disaggregated, soak
from sglang_ext_bench.soaking.disaggregated import DisaggregatedServers
from sglang_ext_bench.soaking.request_options import OPTIONS
from sglang_ext_bench.soaking.traffic import MALFORMED

pytestmark = pytest.mark.usefixtures("checked_here", "quick_sleep")


@dataclass
class Shared:
    """The requests of all servers of a test, in their order: role, path and body; and the roles of emptied caches."""

    asked: list[tuple[str, str, Mapping[str, Any]]] = field(default_factory=list)
    flushed: list[str] = field(default_factory=list)


class Part(SoakServer):
    """One server of a pair. It records its requests. A prefill server calls ``prefill`` before it answers."""

    def __init__(self, shared: Shared, *given: Any) -> None:
        super().__init__(*given)
        self.shared = shared
        has_role = "--disaggregation-mode" in self.flags
        self.role = self.flags[self.flags.index("--disaggregation-mode") + 1] if has_role else "stock"

    def flush_cache(self) -> None:
        if self.role != "stock":
            self.shared.flushed.append(self.role)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if self.role != "stock":
            self.shared.asked.append((self.role, path, body))
        if self.role == "prefill":
            self.prefill(body)
        return super().post(path, body)

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self.role != "stock":
            self.shared.asked.append((self.role, path, body))
        yield from super().stream(path, body)

    def prefill(self, body: Mapping[str, Any]) -> None: ...


@pytest.fixture
def part(launches: Launches, char_tokenizer: None) -> Shared:
    shared = Shared()
    launches.make = partial(Part, shared)
    return shared


def refused(code: int, told: str) -> HTTPError:
    return HTTPError("url", code, "refused", Message(), BytesIO(json.dumps({"error": {"message": told}}).encode()))


class TestApart:
    def pair(self, logs: Path, problems: list[str], **seconds: float) -> DisaggregatedServers:
        flags, env = disaggregated.disaggregated_flags((), (), 0.2), {"prefill": {}, "decode": {}}
        return DisaggregatedServers("m", flags, logs, env, 2, problems.append, **seconds)

    def test_all_requests_go_to_both_under_one_room_and_totals_say_so(self, part: Shared, tmp_path: Path) -> None:
        code, totals = run(tmp_path, "--apart")
        assert (code, totals["problems"]) == (0, [])
        rooms = {role: {b["bootstrap_room"] for r, p, b in part.asked if (r, p) == (role, "generate")} for role in disaggregated.ROLES}
        assert rooms["prefill"] == rooms["decode"] and len(rooms["decode"]) > 1
        assert totals["outcomes"]["answered"] > 0 and totals["outcomes"]["refused"] > 0
        # All requests of the traffic, and the last one after it.
        assert sum(totals["apart"]["prefill"].values()) == sum(totals["outcomes"].values()) + 1
        assert totals["apart"]["prefill"]["answered"] == totals["outcomes"]["answered"] + totals["outcomes"]["aborted"] + 1
        assert part.flushed == [*disaggregated.ROLES] * 2
        assert [each["name"] for each in totals["requests"]] == [option.name for option in disaggregated.disaggregated_options()]

    def test_of_one_server_totals_say_that_too(self, launches: Launches, char_tokenizer: None, tmp_path: Path) -> None:
        launches.make = SoakServer
        assert run(tmp_path)[1]["apart"] is None

    def test_the_link_is_the_prefill_servers_and_pool_and_retraction_the_decode_servers(
        self, part: Shared, launches: Launches, tmp_path: Path
    ) -> None:
        launches.make = partial(type("Retracting", (Part,), {"retractions": 1}), part)
        run(tmp_path, "--apart", "--link-gbps", "0.5", "--pool-tokens", "4500", "--force-retraction", "3")
        _, prefill, decode = sorted(launches.made, key=lambda server: ["stock", "prefill", "decode"].index(server.role))
        assert "4500" in decode.flags and "4500" not in prefill.flags
        assert prefill.flags[prefill.flags.index("--kv-link-gbps") + 1] == "0.5" and "--kv-link-gbps" not in decode.flags
        assert all(each.env["SGLANG_HOST_IP"] == "127.0.0.1" and soak.STRICT_CHECKS.items() <= each.env.items() for each in (prefill, decode))
        assert "SGLANG_TEST_RETRACT" in decode.env and "SGLANG_TEST_RETRACT" not in prefill.env

    def test_options_that_two_servers_do_not_support_are_left_out(self, part: Shared, tmp_path: Path) -> None:
        left_out = {"two-samples", "three-samples", "two-samples-logprobs", "three-samples-regex", "input-logprobs"}
        left_out |= {"tools", "tools-streamed", "tools-auto"}
        assert {option.name for option in OPTIONS} - {option.name for option in disaggregated.disaggregated_options()} == left_out
        assert not run(tmp_path, "--apart")[1]["options"].keys() & left_out
        # Requests for log-probabilities are sent without this field.
        assert not any("token_ids_logprob" in body for _, path, body in part.asked)
        assert any("top_logprobs_num" in option.fields for option in disaggregated.disaggregated_options())

    @pytest.mark.parametrize("role", disaggregated.ROLES)
    def test_tokens_that_one_of_them_still_holds_are_a_leak(
        self, part: Shared, launches: Launches, tmp_path: Path, role: str
    ) -> None:
        launches.make = partial(type("Leaking", (Part,), {"leaked": property(lambda each: 7 * (each.role == role))}), part)
        code, totals = run(tmp_path, "--apart")
        assert code == 1 and totals["problems"] == [f"the {role} server: 30 s after the last answer the server still holds 7 used tokens"]

    def test_an_abort_goes_to_both(self, part: Shared, tmp_path: Path) -> None:
        with self.pair(tmp_path, []) as pair:
            pair.post_quietly("abort_request", {"rid": "r"})
        assert sorted(part.asked, key=str) == [(role, "abort_request", {"rid": "r"}) for role in sorted(disaggregated.ROLES)]

    def test_the_decode_servers_error_is_raised_and_the_prefill_servers_counted(self, part: Shared, tmp_path: Path) -> None:
        problems: list[str] = []
        with self.pair(tmp_path, problems) as pair, pytest.raises(HTTPError) as raised:
            pair.post("generate", {"rid": "r", "sampling_params": {"max_new_tokens": 1, **MALFORMED[0]}})
        assert raised.value.code == 400 and not problems
        assert list(pair.as_json()["prefill"]) == ["HTTP 400: "]

    def test_messages_of_the_prefill_server_are_counted_without_ids(self, part: Shared, launches: Launches, tmp_path: Path) -> None:
        class Ending(Part):
            def prefill(self, body: Mapping[str, Any]) -> None:
                raise refused(500, f"room {body['bootstrap_room']} of {body['rid']}: the decode side ended it")

        launches.make = partial(Ending, part)
        with self.pair(tmp_path, []) as pair:
            for rid in ("one", "two"):
                assert pair.post("generate", {"rid": rid, "sampling_params": {"max_new_tokens": 1}})["output_ids"] == [1]
        assert pair.as_json()["prefill"] == {"HTTP 500: room ROOM of RID: the decode side ended it": 2}
        assert "2 times HTTP 500" in pair.table()

    @pytest.mark.parametrize("gone", [True, False])
    def test_a_prefill_server_that_is_gone_or_does_not_end_is_a_problem(
        self, part: Shared, launches: Launches, tmp_path: Path, gone: bool
    ) -> None:
        free = threading.Event()

        class Gone(Part):
            def prefill(self, body: Mapping[str, Any]) -> None:
                if gone:
                    raise ConnectionError("no route")
                free.wait(10)

        launches.make = partial(Gone, part)
        problems: list[str] = []
        with self.pair(tmp_path, problems, prefill_seconds=10.0 if gone else 0.01) as pair:
            pair.post("generate", {"rid": "r", "sampling_params": {"max_new_tokens": 1}})
            free.set()
        told = "ConnectionError: the response is incomplete" if gone else "did not end within 0.01 s after the decode server"
        assert len(problems) == 1 and problems[0].startswith(f"r at the prefill server: {told}")

    @pytest.mark.parametrize(("end", "grew"), [(114, False), (116, True)])
    def test_memory_that_grew_since_servers_were_warm_is_a_problem(
        self, part: Shared, launches: Launches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: int, grew: bool
    ) -> None:
        resident = [100]

        def processes() -> Iterator[SimpleNamespace]:
            for server in launches.made:
                yield SimpleNamespace(pid=server.group, memory_info=lambda: SimpleNamespace(rss=resident[0] * 10**6))

        monkeypatch.setattr(psutil, "process_iter", processes)
        problems: list[str] = []
        with self.pair(tmp_path, problems, warm_seconds=0.0) as pair:
            while len(pair.as_json()["resident_mb"]["warm"]) < 2:
                time.sleep(0.01)
            resident[0] = end
            pair.check_memory()
        assert problems == [f"the {role} server's memory grew from 100 to 116 MB" for role in disaggregated.ROLES if grew]
        assert f"{end} MB resident (100 after 0 s, +{end - 100}.0%)" in pair.table()

    def test_a_run_too_short_to_compare_memory_says_so(self, part: Shared, tmp_path: Path) -> None:
        with self.pair(tmp_path, []) as pair:
            pair.check_memory()
        assert "not measured before" in pair.table()


@pytest.mark.parametrize(
    ("chunks", "told"),
    [
        ([], ""),
        ([{"error": {"message": "no room"}}], "no room"),
        ([{"meta_info": {"finish_reason": {"type": "abort", "message": "given up"}}}], "given up"),
        ([{"meta_info": {"finish_reason": None}}, {"meta_info": {"finish_reason": {"type": "length"}}}], disaggregated.ANSWERED),
        ([{"meta_info": {"finish_reason": None}}], ""),
    ],
)
def test_the_last_chunk_of_a_stream_is_the_outcome_at_the_prefill_server(chunks: list[dict[str, Any]], told: str) -> None:
    class Streaming:
        def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
            yield from chunks

    assert disaggregated.prefill_outcome(Streaming(), "generate", {"stream": True}) == told  # type: ignore[arg-type]


def test_memory_is_that_of_a_process_group() -> None:
    assert disaggregated.resident_bytes(os.getpgid(0)) > 10**6 and disaggregated.resident_bytes(None) == 0
