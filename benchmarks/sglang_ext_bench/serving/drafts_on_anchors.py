"""Measures the first tokens of a stored prompt over a slow link: with exact pages, and with drafts on anchors (Lynx, scenario of section 2.2).

    sglang-ext-bench drafts-on-anchors --model MODEL --prompt-file TEXT --store FOLDER --gbps 0.05 --json drafts.json

A server writes the prefix of each prompt to a folder in both forms. A store process sends it at --gbps. Then each prompt is asked once of a new
server, which has computed nothing and so reads the store however slow it is:

- `raw`: pages as they are.
- `exact`: anchors and residuals, without drafts while they arrive. The request returns log-probabilities, with which none are made.
- `drafts`: the request drafts once the anchors are there.

*Kept* is the first draft that the verification keeps, as the server counts it. *Visible* are tokens that the client has. The answers are
compared with those of a server without a store.
"""

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from subprocess import PIPE, Popen
from typing import Any

from sglang_ext.mem_cache.prefix_store.file_backend import FileBackend
from sglang_ext.tools import CommandError, split_flags
from sglang_ext_bench import report
from sglang_ext_bench.client import total
from sglang_ext_bench.options import check_counts
from sglang_ext_bench.prompts import make_prompts
from sglang_ext_bench.server import BenchServer
from sglang_ext_bench.serving.prefix_store import add_common_arguments, ask, host_flags, wait_until_quiet

ARMS = {"raw": "raw", "exact": "anchored", "drafts": "anchored"}
"""Arms, and the form of their pages."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_common_arguments(parser, context_len=4096, output_len=40, host_gb=4.0)
    add = parser.add_argument
    add("--store", type=Path, required=True, metavar="FOLDER", help="a new folder for the stores")
    add("--question-len", type=int, default=64, help="tokens of a prompt after the stored prefix (default: %(default)s)")
    add("--gbps", type=float, default=0.05, help="Gbit/s that the store sends (default: %(default)s)")
    add("--visible", type=int, default=32, help="the token whose time is compared, beside the first (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure all arms, and print the table. Returns 1 if answers differ, else 0."""
    from sglang_ext_bench.speed.settings import log_folder

    counts = {"--prompts": args.prompts, "--context-len": args.context_len, "--output-len": args.output_len, "--question-len": args.question_len}
    check_counts(counts)
    if not 1 <= args.visible <= args.output_len:
        raise CommandError(f"--visible {args.visible}: pass 1 to {args.output_len} (--output-len)")
    if args.store.exists():
        raise CommandError(f"--store {args.store} exists; pass a new folder")
    length = args.context_len + args.question_len
    prompts = [list(ids) for ids in make_prompts(args, args.prompts, [length])[length]]
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    with log_folder(args) as logs:
        for form in dict.fromkeys(ARMS.values()):
            flags = ("--kv-store", f"file:{(args.store / form).absolute()}", "--kv-store-form", form)
            with running(args, flags, logs / f"writing-{form}.log") as server:
                for prompt in prompts:
                    ask(server, prompt[: args.context_len], 1)
                wait_until_quiet(FileBackend(args.store / form))
        with running(args, (), logs / "computed.log") as server:
            expected = [ask(server, prompt, args.output_len)["output_ids"] for prompt in prompts]
        for index, prompt in enumerate(prompts):
            for arm, form in ARMS.items():
                with serving_store(args.store / form, args.gbps, logs / f"store-{arm}-{index}.log") as url:
                    flags = ("--kv-store", url, "--kv-store-form", form)
                    with running(args, flags, logs / f"{arm}-{index}.log") as server:
                        found[arm].append(measure(server, prompt, args.output_len, drafts=arm == "drafts"))
    differing = sum(each["output"] != ids for answers in found.values() for each, ids in zip(answers, expected, strict=True))
    if args.json is not None:
        settings = {name: str(value) for name, value in vars(args).items() if name not in ("json", "logs", "command")}
        report.write_json(args.json, {"settings": settings, **report.origin(), "arms": found, "differing_answers": differing})
    title = f"{args.prompts} prompts of {args.context_len} stored and {args.question_len} new tokens, {args.gbps:g} Gbit/s, medians in s"
    columns = ("pages", "stored tokens", "first kept", "first visible", f"visible {args.visible}", "accepted drafts")
    report.make_console().print(report.make_table(title, columns, table_rows(found, args.visible)))
    print(f"{differing} of {len(ARMS) * args.prompts} answers differ from those of the server without a store")
    return 1 if differing else 0


@contextmanager
def running(args: argparse.Namespace, flags: Sequence[str], log: Path) -> Iterator[BenchServer]:
    """A server with these flags of the store."""
    with BenchServer(str(args.model), (*host_flags(args), "--enable-metrics", *flags, *split_flags(args.server_arg)), log) as server:
        yield server


@contextmanager
def serving_store(folder: Path, gbps: float, log: Path) -> Iterator[str]:
    """A store process that sends the objects of a folder at ``gbps`` Gbit/s. Its URL."""
    flags = "--listen", "tcp://127.0.0.1:0", "--memory-gb", "2", "--disk", str(folder), "--gbps", str(gbps)
    with log.open("wb") as errors, Popen(
        (sys.executable, "-m", "sglang_ext.store", "serve", *flags), stdout=PIPE, stderr=errors, text=True
    ) as process:
        try:
            line = process.stdout.readline()
            url = re.search(r"tcp://[0-9.]+:[0-9]+", line)
            if url is None:
                raise CommandError(f"the store did not start; its first line is {line!r}\n{log.read_text()}")
            yield url[0]
        finally:
            process.terminate()


def measure(server: BenchServer, prompt: Sequence[int], output_len: int, drafts: bool) -> dict[str, Any]:
    """Stream the answer to a prompt.

    Returns:
        ``visible``: seconds from the request to each token. ``kept``: seconds to the first kept draft, None without one. ``stored``: tokens
        from the store. ``drafted``: whether it drafted while it waited. ``accepted``: drafts of these that were accepted, beside the first.
        ``output``: the tokens.
    """
    params = {"temperature": 0, "max_new_tokens": output_len, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": params, "stream": True, "return_logprob": not drafts}
    begin, visible, event = time.perf_counter(), [], {}
    for event in server.stream("generate", body):
        count = event["meta_info"]["completion_tokens"]
        visible += [time.perf_counter() - begin] * (count - len(visible))
    page = server.request("metrics")
    accepted = int(total(page, "sglang_ext:store_early_accepted_total"))
    stored = (event["meta_info"].get("cached_tokens_details") or {}).get("storage", 0)
    kept = total(page, "sglang_ext:store_early_seconds_total") if accepted else None
    drafted = total(page, "sglang_ext:store_early_requests_total") > 0
    return {"visible": visible, "kept": kept, "stored": stored, "drafted": drafted, "accepted": accepted, "output": event["output_ids"]}


def table_rows(found: dict[str, list[dict[str, Any]]], visible: int) -> Iterator[tuple[str, ...]]:
    """Rows of the table. In brackets: the ratio to `exact`. Without drafts, the first visible token is the first that is kept."""
    medians = {}
    for arm, answers in found.items():
        kept = median(each["kept"] or each["visible"][0] for each in answers)
        medians[arm] = kept, *(median(each["visible"][index] for each in answers) for index in (0, visible - 1))
    for arm, values in medians.items():
        shown = (f"{value:.2f} ({value / base:.2f})" for value, base in zip(values, medians["exact"], strict=True))
        stored, accepted = (str(int(median(each[name] for each in found[arm]))) for name in ("stored", "accepted"))
        yield arm, stored, *shown, accepted
