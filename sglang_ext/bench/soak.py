"""Mixed traffic against one verified server for minutes: nothing wrong, nothing leaked, nothing dead.

Stock SGLang answers a set of prompts and sampling options first. Then a verified server, with a pool
too small for the traffic (so that requests are retracted) and SGLang's invariant checks in strict mode,
gets random ones of them with random lengths, some streamed, some aborted; each answer must be the
beginning of stock's. Ends with code 1 on a wrong answer, an unexpected error or a dead server.
"""

import argparse
import json
import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_ext.bench import BenchError
from sglang_ext.bench.prompts import Prompt, load_prompts, load_tokenizer
from sglang_ext.bench.server import ServerProcess

STRICT_CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0, "logit_bias": {"28": -4.0, "30": 2.0}},
    {"temperature": 0, "frequency_penalty": 0.4},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0.8, "sampling_seed": 3},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "sampling_seed": 9},
    {"temperature": 0, "regex": "[a-z0-9 ,.]{60,70}"},
)


@dataclass
class Tally:
    """What happened, counted by the traffic's threads under ``lock``."""

    outcomes: Counter = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    retractions: int = 0
    drafts: int = 0
    accepted: int = 0
    fallbacks: Counter = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, outcome: str, meta: dict[str, Any] | None = None, problem: str = "") -> None:
        """Count one request."""
        with self.lock:
            self.outcomes[outcome] += 1
            if problem:
                self.problems.append(problem)
            if meta:
                self.retractions += meta.get("num_retractions", 0)
                self.drafts += meta.get("kv_drafts", 0)
                self.accepted += meta.get("kv_accepted", 0)
                self.fallbacks[str(meta.get("kv_fallback"))] += 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="as for identity")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--workers", type=int, default=8, help="requests in flight")
    parser.add_argument("--output-len", type=int, default=96, help="longest answer, in tokens")
    parser.add_argument("--pool-tokens", type=int, default=9000, help="--max-total-tokens of the server")
    parser.add_argument("--limit", type=int, default=8, help="use the first prompts only")
    parser.add_argument("--kv", default="--kv-compressor snapkv --kv-budget 0.25", help="flags of the mode")
    parser.add_argument("--seed", type=int, default=0, help="of the traffic")
    parser.add_argument("--logs", type=Path, default=Path("."))
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> int:
    """Reference answers, then traffic; 0 when all is well."""
    prompts = load_prompts(args.prompts, load_tokenizer(args.model))[: args.limit]
    args.logs.mkdir(parents=True, exist_ok=True)
    os.environ.update(STRICT_CHECKS)
    common = ("--dtype", "float32", "--enable-deterministic-inference")
    with ServerProcess(args.model, common, args.logs / "soak-stock.log") as stock:
        references = reference_answers(stock, prompts, args.output_len)
    flags = (*common, "--kv-mode", "verified", *args.kv.split())
    flags += ("--max-total-tokens", str(args.pool_tokens), "--schedule-conservativeness", "0.1")
    tally = Tally()
    with ServerProcess(args.model, flags, args.logs / "soak-verified.log") as server:
        traffic(server, prompts, references, args, tally)
        finish(server, tally)
    report(args, tally, flags)
    return 1 if tally.problems else 0


def reference_answers(
    stock: ServerProcess, prompts: tuple[Prompt, ...], tokens: int
) -> dict[tuple[int, int], list[int]]:
    """Stock's output ids by (prompt, options)."""
    answers = {}
    for p, prompt in enumerate(prompts):
        for o, options in enumerate(OPTIONS):
            answers[p, o] = stock.post("generate", body_of(prompt, options, tokens))["output_ids"]
    return answers


def body_of(prompt: Prompt, options: dict[str, Any], tokens: int) -> dict[str, Any]:
    """A request for ``tokens`` tokens."""
    params = {"max_new_tokens": tokens, "ignore_eos": "regex" not in options, **options}
    return {"input_ids": list(prompt.input_ids), "sampling_params": params}


def traffic(
    server: ServerProcess,
    prompts: tuple[Prompt, ...],
    references: dict[tuple[int, int], list[int]],
    args: argparse.Namespace,
    tally: Tally,
) -> None:
    """Send random requests from ``args.workers`` threads until the time is over."""
    deadline = time.monotonic() + 60 * args.minutes

    def worker(index: int) -> None:
        chance = random.Random(args.seed * 1000 + index)
        count = 0
        while time.monotonic() < deadline and not tally.problems:
            count += 1
            p, o = chance.choice(list(references))
            tokens = chance.randint(1, args.output_len)
            body = body_of(prompts[p], OPTIONS[o], tokens)
            body["rid"] = f"soak-{index}-{count}"
            kind = chance.choices(("plain", "abort", "malformed"), (8, 2, 1))[0]
            send(server, kind, body, references[p, o], chance.random() * 4, tally)

    threads = [threading.Thread(target=worker, args=(i,)) for i in range(args.workers)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        time.sleep(5)
        left = max(0, deadline - time.monotonic())
        print(f"\r{left:5.0f} s left, {dict(tally.outcomes)}", end="", flush=True)
    print()


def send(
    server: ServerProcess, kind: str, body: dict[str, Any], expected: list[int], delay: float, tally: Tally
) -> None:
    """One request; ``abort`` takes it back after ``delay`` seconds, ``malformed`` must be refused."""
    if kind == "malformed":
        body["sampling_params"]["top_p"] = 7.0
    if kind == "abort":
        threading.Timer(delay, lambda: server.post_quietly("abort_request", {"rid": body["rid"]})).start()
    try:
        answer = server.post("generate", body)
    except OSError as error:
        refused = kind == "malformed" and getattr(error, "code", 0) == 400
        tally.add("refused" if refused else "failed", problem="" if refused else f"{body['rid']}: {error}")
        return
    meta, ids = answer["meta_info"], answer["output_ids"]
    if meta["finish_reason"]["type"] == "abort" and kind == "abort":
        tally.add("aborted", meta, wrong(ids, expected, body))
    elif kind == "malformed":
        tally.add("failed", problem=f"{body['rid']}: top_p 7 was accepted")
    else:
        tally.add("answered", meta, wrong(ids, expected, body))


def wrong(ids: list[int], expected: list[int], body: dict[str, Any]) -> str:
    """A description of a wrong answer; empty for a right one."""
    if ids == expected[: len(ids)]:
        return ""
    first = next(i for i, token in enumerate(ids) if i >= len(expected) or token != expected[i])
    return f"{body['rid']}: differs from stock at token {first}: {body['sampling_params']}"


def finish(server: ServerProcess, tally: Tally) -> None:
    """The idle server must pass its own checks and still answer."""
    time.sleep(3)
    try:
        server.flush_cache()
        server.post("generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 4}})
    except (BenchError, OSError) as error:
        tally.add("failed", problem=f"after the traffic: {error}\n{server.describe_log()}")


def report(args: argparse.Namespace, tally: Tally, flags: tuple[str, ...]) -> None:
    """Print and write the totals."""
    totals = {
        "minutes": args.minutes,
        "workers": args.workers,
        "flags": list(flags),
        "outcomes": dict(tally.outcomes),
        "retractions": tally.retractions,
        "drafts": tally.drafts,
        "accepted": tally.accepted,
        "fallbacks": dict(tally.fallbacks),
        "problems": tally.problems[:20],
        "options": list(OPTIONS),
    }
    print(json.dumps(totals, indent=1))
    if args.json:
        args.json.write_text(json.dumps(totals, indent=1))

