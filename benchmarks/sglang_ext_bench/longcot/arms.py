"""The servers that ``sglang-ext-bench longcot`` compares: stock, and one for each selector, mode and setting."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_ext.core import PLAIN_STEPS
from sglang_ext.tools import CommandError, split_flags
from sglang_ext_bench.baselines import SELECTORS, served_method
from sglang_ext_bench.options import numbers

STOCK, RANKS, AUTO = "stock", "spade-ranks", "auto"
# Defaults by device. Those of GPUs are the loads of AsyncSpade's Table 2.
LOADS = {"cuda": "8:32768:2048,16:16384:1024", "cpu": "1:2048:256,2:1024:128"}
LENGTHS = {"cuda": "256,1024", "cpu": "32,64"}
# Methods: the equation that counts their operations (flops.py), and whether cache ranks select tokens.
ARMS: dict[str, tuple[str, bool]] = {
    STOCK: ("full", False),
    "spade": ("spade-between-steps", False),
    RANKS: ("spade", True),
    "quest": ("quest", False),
    "tova": ("tova", False),
    "true-query": ("true-query", False),
    "verify-guided": ("spade", False),
}
MODES = ("lossy", "verified")
# Methods that run on CPUs only.
ON_CPUS = tuple(SELECTORS)
# Default layers per pack on CPUs.
PACKS = ("6", "12")


@dataclass(frozen=True)
class LongcotLoad:
    """Requests that are sent to a server at once.

    Attributes:
        batch: Number of requests.
        context: Tokens of each prompt.
        select: Tokens that each KV head selects.
    """

    batch: int
    context: int
    select: int

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.context} tokens, {self.select} selected"


@dataclass(frozen=True)
class LongcotServer:
    """The configuration of one server.

    Attributes:
        name: Name in tables and file names.
        method: One of :data:`ARMS`.
        mode: ``lossy`` or ``verified``; ``full`` for stock.
        select: Tokens that each KV head selects. 0 for stock, which runs all loads.
        pack: Maximum layers per pack, with cache ranks. 0 for ``auto``. Packs are divided evenly, so they may have fewer layers
            (:attr:`PackSummary.layers`).
        has_timeline: Its cache ranks write a timeline.
        round_tokens: Maximum output tokens of a request per round. A client receives them at once.
        flags: Flags of the server, in addition to those of all servers.
    """

    name: str
    method: str
    mode: str
    select: int
    pack: int
    has_timeline: bool
    round_tokens: int
    flags: tuple[str, ...]

    def runs_load(self, load: LongcotLoad) -> bool:
        """The server runs this load."""
        return self.select in (0, load.select)


def parse_loads(text: str) -> list[LongcotLoad]:
    """Parse ``--load``: BATCH:CONTEXT:SELECT, separated by commas.

    Raises:
        CommandError: A part has another form, or selects too few or too many tokens.
    """
    loads = []
    for part in text.split(","):
        sizes = part.split(":")
        if len(sizes) != 3 or not all(size.strip().isdecimal() and int(size) for size in sizes):
            raise CommandError(f"--load {part!r}: pass BATCH:CONTEXT:SELECT, whole numbers above 0, for example 8:32768:2048")
        load = LongcotLoad(*map(int, sizes))
        if not 2 <= load.select < load.context:
            raise CommandError(f"--load {part!r}: SELECT is {load.select}: pass a number from 2 to below CONTEXT, {load.context}")
        loads.append(load)
    return loads


def on_gpus(args: argparse.Namespace) -> bool:
    """The servers run on NVIDIA GPUs: by ``--device`` of ``--server-arg``, or if PyTorch finds a GPU, as servers decide."""
    from sglang_ext.config.options import expected_device

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device")
    return expected_device(parser.parse_known_args(split_flags(args.server_arg))[0].device) == "cuda"


def set_defaults(args: argparse.Namespace) -> None:
    """Set the loads, lengths, methods and layers per pack that the command line leaves out, by this machine and the servers' device.

    Raises:
        CommandError: ``--pack-layers`` has a number, and cache ranks run on GPUs.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.load = args.load or LOADS[device]
    args.output_len = args.output_len or LENGTHS[device]
    gpus = on_gpus(args)
    if args.method is None:
        unavailable = (*ON_CPUS, *((RANKS,) if torch.cuda.device_count() <= args.ranks else ())) if gpus else ()
        args.method = tuple(method for method in ARMS if method not in unavailable)
    if args.pack_layers is None:
        args.pack_layers = (AUTO,) if gpus else PACKS
    numbered = [each for each in args.pack_layers if each != AUTO]
    if gpus and numbered and RANKS in args.method:
        raise CommandError(
            f"--pack-layers {numbered[0]!r}: cache ranks on GPUs select for all layers of a step at once: pass auto, or leave it out"
        )


def make_servers(args: argparse.Namespace) -> list[LongcotServer]:
    """The servers of the options, stock first.

    Raises:
        CommandError: There is no such method or mode.
    """
    for option, values, allowed in (("--method", args.method, ARMS), ("--mode", args.mode, MODES)):
        if wrong := [each for each in values if each not in allowed]:
            raise CommandError(f"{option} {wrong[0]!r}: pass some of {', '.join(allowed)}")
    selects = dict.fromkeys(load.select for load in parse_loads(args.load))
    servers = [LongcotServer(STOCK, STOCK, "full", 0, 0, False, 1, ())] if STOCK in args.method else []
    for method in args.method:
        for mode in args.mode:
            if method != STOCK and not (method == "verify-guided" and mode == "lossy"):
                servers += (server for select in selects for server in _method_servers(args, method, mode, select))
    return servers


def check_lengths(servers: Sequence[LongcotServer], lengths: Sequence[int]) -> None:
    """Refuse output lengths that are closer than a round: a client receives the tokens of a round at once.

    Args:
        servers: All servers.
        lengths: ``--output-len``, ascending.

    Raises:
        CommandError: Two lengths, or the first token and the first length, are closer than a round of a server.
    """
    longest = max(servers, key=lambda server: server.round_tokens, default=None)
    if longest is None:
        return
    for before, until in zip((1, *lengths), lengths):
        if until - before < longest.round_tokens:
            raise CommandError(
                f"--output-len {until}: a round of {longest.name} has up to {longest.round_tokens} tokens, and only {until - before} "
                f"are timed from token {before} on: pass numbers from {1 + longest.round_tokens}, at least "
                f"{longest.round_tokens} apart"
            )


def _method_servers(args: argparse.Namespace, method: str, mode: str, select: int) -> Iterator[LongcotServer]:
    """Servers of one method, mode and number of selected tokens: one per selection interval and, with cache ranks, per pack size."""
    from sglang_ext.mem_cache.compressors.step_selectors import Quest

    drafts = ("--kv-draft-length", str(args.draft_length)) if mode == "verified" else ()
    # A round has draft tokens and a bonus token, or plain steps.
    round_tokens = max(PLAIN_STEPS, args.draft_length + 1) if drafts else PLAIN_STEPS
    compressor = "spade" if method.startswith("spade") else method
    flags = ("--kv-mode", mode, "--kv-compressor", served_method(compressor), *drafts)
    name = f"{method} {mode} {select}"
    if method == "verify-guided":
        # Its flag is a share of the context. It is that of the first load with this number of selected tokens.
        share = next(load.select / load.context for load in parse_loads(args.load) if load.select == select)
        yield LongcotServer(name, method, mode, select, 0, False, round_tokens, (*flags, "--kv-budget", f"{share:g}"))
        return
    ranks = ARMS[method][1]
    packs = [0 if pack == AUTO else int(pack) for pack in args.pack_layers] if ranks else [0]
    for interval in numbers(args.select_every, "--select-every"):
        for pack in packs:
            more = ["--kv-select", str(select), "--kv-select-every", str(interval)]
            more += ["--kv-select-by", args.select_by] if compressor == "spade" else []
            # On GPUs its pages are those of the pool.
            more += ["--page-size", str(Quest.page)] if compressor == Quest.name and on_gpus(args) else []
            more += ["--kv-cache-ranks", str(args.ranks), "--kv-pack-layers", str(pack or AUTO)] if ranks else []
            full_name = f"{name}{f' every {interval}' if interval > 1 else ''}{f' packs of up to {pack}' if pack else ''}"
            has_timeline = ranks and not on_gpus(args)
            yield LongcotServer(full_name, method, mode, select, pack, has_timeline, round_tokens, (*flags, *more))
