"""The servers that bench longcot compares: stock, and each way to choose the tokens that a step reads."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_ext.core import PLAIN_STEPS
from sglang_ext.tools import CommandError
from sglang_ext_bench.baselines import SELECTORS, served_method
from sglang_ext_bench.comparing.identity_options import words
from sglang_ext_bench.options import numbers

STOCK, RANKS, AUTO = "stock", "spade-ranks", "auto"
# Defaults by device; on a GPU the loads of Table 2.
LOADS = {"cuda": "8:32768:2048,16:16384:1024", "cpu": "1:2048:256,2:1024:128"}
LENGTHS = {"cuda": "256,1024", "cpu": "32,64"}
# By name: the equation of its operations, and whether cache ranks choose.
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
# Served on a CPU only.
ON_CPUS = tuple(SELECTORS)
# Layers of a pack there, unless told.
PACKS = ("6", "12")


@dataclass(frozen=True)
class Load:
    """What servers are asked for.

    Attributes:
        batch: requests at once.
        context: tokens of each prompt.
        select: tokens that each KV head reads.
    """

    batch: int
    context: int
    select: int

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.context} tokens, {self.select} selected"


@dataclass(frozen=True)
class LongArm:
    """One server.

    Attributes:
        name: in tables, and of its files.
        method: of :data:`ARMS`.
        mode: lossy, verified; full for stock.
        select: tokens of each KV head; 0 for stock, whose figures all loads share.
        pack: layers of a pack at most, where ranks choose; 0 for auto. As they are divided evenly a server's packs may have fewer
            (:attr:`PackFigures.layers`).
        timed: whether its cache ranks write a timeline.
        round_tokens: output tokens of a request that come at once, at most: those of a round.
        flags: of the server, beside those of all.
    """

    name: str
    method: str
    mode: str
    select: int
    pack: int
    timed: bool
    round_tokens: int
    flags: tuple[str, ...]

    def serves(self, load: Load) -> bool:
        """Whether its figures are of this load."""
        return self.select in (0, load.select)


def loads(text: str) -> list[Load]:
    """Of ``--load``: BATCH:CONTEXT:SELECT, separated by commas.

    Raises:
        CommandError: one is none.
    """
    found = []
    for part in text.split(","):
        sizes = part.split(":")
        if len(sizes) != 3 or not all(size.strip().isdecimal() and int(size) for size in sizes):
            raise CommandError(f"--load {part!r}: pass BATCH:CONTEXT:SELECT, whole numbers above 0, for example 8:32768:2048")
        load = Load(*map(int, sizes))
        if not 2 <= load.select < load.context:
            raise CommandError(f"--load {part!r}: of {load.context} tokens {load.select} are selected: pass a number from 2 to below them")
        found.append(load)
    return found


def on_gpus(args: argparse.Namespace) -> bool:
    """Whether servers run on NVIDIA GPUs, as they decide themselves: by --device, else by what torch finds."""
    from sglang_ext.config.options import expected_device

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--device")
    return expected_device(parser.parse_known_args(words(args.server_arg))[0].device) == "cuda"


def settle(args: argparse.Namespace) -> None:
    """Set loads, lengths, methods and layers of packs where the command line left them open, by the machine and by where servers run.

    Raises:
        CommandError: packs are named by number, and cache ranks are on GPUs.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    args.load = args.load or LOADS[device]
    args.output_len = args.output_len or LENGTHS[device]
    gpus = on_gpus(args)
    if args.method is None:
        missing = (*ON_CPUS, *((RANKS,) if torch.cuda.device_count() <= args.ranks else ())) if gpus else ()
        args.method = tuple(method for method in ARMS if method not in missing)
    if args.pack_layers is None:
        args.pack_layers = (AUTO,) if gpus else PACKS
    named = [each for each in args.pack_layers if each != AUTO]
    if gpus and named and RANKS in args.method:
        raise CommandError(
            f"--pack-layers {named[0]!r}: cache ranks on GPUs are asked for all layers of a step at once: pass auto, or leave it out"
        )


def arms(args: argparse.Namespace) -> list[LongArm]:
    """Of the options, stock first.

    Raises:
        CommandError: there is no such method or mode.
    """
    for option, given, allowed in (("--method", args.method, ARMS), ("--mode", args.mode, MODES)):
        if wrong := [each for each in given if each not in allowed]:
            raise CommandError(f"{option} {wrong[0]!r}: pass some of {', '.join(allowed)}")
    selects = dict.fromkeys(load.select for load in loads(args.load))
    found = [LongArm(STOCK, STOCK, "full", 0, 0, False, 1, ())] if STOCK in args.method else []
    for method in args.method:
        for mode in args.mode:
            if method != STOCK and not (method == "verify-guided" and mode == "lossy"):
                found += (arm for select in selects for arm in _arms(args, method, mode, select))
    return found


def check_lengths(chosen: Sequence[LongArm], lengths: Sequence[int]) -> None:
    """Refuse lengths of answers between which a server may send no tokens, as those of a round come at once.

    Args:
        chosen: All servers.
        lengths: ``--output-len``, ascending.

    Raises:
        CommandError: Two lengths, or the first length and the first token, are closer than a round of a server is long.
    """
    slowest = max(chosen, key=lambda arm: arm.round_tokens, default=None)
    if slowest is None:
        return
    for before, until in zip((1, *lengths), lengths):
        if until - before < slowest.round_tokens:
            raise CommandError(
                f"--output-len {until}: a round of {slowest.name} gives up to {slowest.round_tokens} tokens at once, and only "
                f"{until - before} are timed from token {before} on: pass numbers from {1 + slowest.round_tokens}, at least "
                f"{slowest.round_tokens} apart"
            )


def _arms(args: argparse.Namespace, method: str, mode: str, select: int) -> Iterator[LongArm]:
    """Of one method, mode and number of tokens: one for each number of steps between choices, and of ranks for each pack."""
    from sglang_ext.mem_cache.compressors.each_step.quest import Quest

    drafts = ("--kv-draft-length", str(args.draft_length)) if mode == "verified" else ()
    # Drafts and the bonus token; without drafts a round has plain steps.
    round_tokens = max(PLAIN_STEPS, args.draft_length + 1) if drafts else PLAIN_STEPS
    compressor = "spade" if method.startswith("spade") else method
    flags = ("--kv-mode", mode, "--kv-compressor", served_method(compressor), *drafts)
    name = f"{method} {mode} {select}"
    if method == "verify-guided":
        # It takes a share of the context, that of the first load with so many tokens.
        share = next(load.select / load.context for load in loads(args.load) if load.select == select)
        yield LongArm(name, method, mode, select, 0, False, round_tokens, (*flags, "--kv-budget", f"{share:g}"))
        return
    ranks = ARMS[method][1]
    packs = [0 if pack == AUTO else int(pack) for pack in args.pack_layers] if ranks else [0]
    for every in numbers(args.select_every, "--select-every"):
        for pack in packs:
            more = ["--kv-select", str(select), "--kv-select-every", str(every)]
            more += ["--kv-select-by", args.select_by] if compressor == "spade" else []
            # There its pages are those of the pool.
            more += ["--page-size", str(Quest.scoring.page)] if compressor == Quest.name and on_gpus(args) else []
            more += ["--kv-cache-ranks", str(args.ranks), "--kv-pack-layers", str(pack or AUTO)] if ranks else []
            told = f"{name}{f' every {every}' if every > 1 else ''}{f' packs of up to {pack}' if pack else ''}"
            yield LongArm(told, method, mode, select, pack, ranks and not on_gpus(args), round_tokens, (*flags, *more))
