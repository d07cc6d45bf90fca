"""Helpers of the soak's tests: servers that answer its requests, and a run of the command."""

import json
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

from launched import LaunchedServer

from sglang_ext_bench.__main__ import main
from sglang_ext_bench.soaking import soak, tool_calls
from sglang_ext_bench.soaking.answers import LOGPROB_FIELDS
from sglang_ext_bench.soaking.traffic import MALFORMED


class SoakServer(LaunchedServer):
    """Answers 1, 2, 3 and so on. Subclasses may break the answers of the tested server, which has environment variables of its own."""

    retractions, leaked = 0, 0

    def request(self, path: str) -> dict[str, Any]:
        if path == "v1/loads":
            return {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0, "num_used_tokens": self.leaked}]}
        assert path == "server_info"
        return {"disable_overlap_schedule": soak.PLAIN_LOOP in self.flags}

    def post(self, path: str, body: dict[str, Any]) -> Any:
        if path == tool_calls.PATH:
            return {"choices": [{"message": {"content": "fine"}, "finish_reason": "length"}]}
        if path != "generate":
            return {}
        params = body["sampling_params"]
        if any(params.get(name) == value for each in MALFORMED for name, value in each.items()):
            raise HTTPError("url", 400, "malformed", Message(), None)
        answers = [self.answer(body, params["max_new_tokens"]) for _ in range(params.get("n", 1))]
        return answers if "n" in params else answers[0]

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if path == tool_calls.PATH:
            yield {"choices": [{"delta": {"content": "fine"}, "finish_reason": "length"}]}
            return
        count = body["sampling_params"]["max_new_tokens"]
        for index in range(body["sampling_params"].get("n", 1)):
            for end in range(min(1, count), count + 1):
                chunk = {**self.answer(body, end), "index": index}
                if end < count:
                    chunk["meta_info"]["finish_reason"] = None
                yield chunk

    def answer(self, body: dict[str, Any], count: int) -> dict[str, Any]:
        ids = list(range(1, count + 1))
        meta: dict[str, Any] = {"finish_reason": {"type": "length"}}
        if self.env:
            meta |= {"num_retractions": self.retractions, "kv_drafts": 2, "kv_accepted": 1}
            self.break_answer(ids)
        if body.get("return_logprob"):
            meta["output_token_logprobs"] = [[-0.5, token, None] for token in ids]
            for asked, told in LOGPROB_FIELDS.items():
                if body.get(asked):
                    meta[told] = [[[-0.5, token, None]] for token in ids]
        return {"output_ids": ids, "meta_info": meta}

    def break_answer(self, ids: list[int]) -> None: ...


class WrongLast(SoakServer):
    """The last token of each answer of the tested server is wrong."""

    def break_answer(self, ids: list[int]) -> None:
        ids[-1:] = [0] * len(ids[-1:])


def run(folder: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Run the command for a moment. Return its exit code and totals."""
    path, prompts = folder / "totals.json", folder / "prompts.jsonl"
    prompts.write_text('{"text": "ab"}\n')
    common = ("--model", "m", "--prompts", str(prompts), "--minutes", "0.005", "--workers", "2")
    code = main(["soak", *common, "--output-len", "5", "--logs", str(folder), "--json", str(path), *words])
    return code, json.loads(path.read_text())
