"""Runs ``python -m sglang_ext_bench longcot``: starts the servers, sends the loads, writes tables, JSON and plots."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from sglang_ext.config.model_folder import read_config
from sglang_ext.managers.cache_rank import timeline
from sglang_ext.mem_cache.selection.predictors import PREDICTORS
from sglang_ext.tools import CommandError
from sglang_ext.tools.server_process import check_servers, file_name
from sglang_ext_bench import report
from sglang_ext_bench.longcot import overlap, packs, pages, plots, serving, tables
from sglang_ext_bench.longcot.arms import (
    ARMS,
    AUTO,
    Load,
    LongArm,
    arms,
    check_lengths,
    loads,
    settle,
)
from sglang_ext_bench.longcot.flops import ModelShape, token_flops
from sglang_ext_bench.longcot.options import add_arguments
from sglang_ext_bench.longcot.serving import LongFigures
from sglang_ext_bench.options import check_counts, numbers
from sglang_ext_bench.prompts import load_prompts, load_tokenizer
from sglang_ext_bench.speed import settings
from sglang_ext_bench.prompts import make_prompts
from sglang_ext_bench.speed.settings import ServerSetting as Setting

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Measure what was asked for, print tables; 0 when all could be measured, else 1 after the others."""
    settle(args)
    wanted, lengths = loads(args.load), sorted(set(numbers(args.output_len, "--output-len")))
    check(args, lengths)
    chosen = arms(args)
    check_lengths(chosen, lengths)
    # SGLang sends a round's tokens when the next round runs, but those of the last round at once: no length is in a last round.
    longest = lengths[-1] + 2 * max((arm.round_tokens for arm in chosen), default=0)
    shape = ModelShape.of(read_config(args.model))
    # Which folder timelines go to does not matter here.
    flags = {arm.name: settings.flags_of(args, setting_of(arm, Path("timeline"))) for arm in chosen}
    check_servers(str(args.model), flags, max(load.context for load in wanted) + longest, "--load")
    prompts = make_prompts(args, max(load.batch for load in wanted), sorted({load.context for load in wanted}))
    found: list[LongFigures] = []
    packed: list[packs.PackFigures] = []
    steps: list[packs.Step] = []
    arm_of = {arm.name: arm for arm in chosen}

    def measure(setting: Setting, logs: Path) -> None:
        arm = arm_of[setting.name]
        file = logs / f"{file_name(arm.name)}-timeline.jsonl"
        file.unlink(missing_ok=True)
        with settings.server(args, setting_of(arm, file), logs) as server:
            for load in filter(arm.serves, wanted):
                before = len(packs.steps_of(timeline.read(file)))
                waves = serving.answer(server, prompts[load.context][: load.batch], longest, args.repeats, ARMS[arm.method][1])
                found.append(figures_of(arm, load, lengths, waves, shape))
                print(f"{arm.name}: {load}: {told_of(found[-1])}", flush=True)
                taken = packs.steps_of(timeline.read(file))[before:]
                if (told := packs.figures(arm.name, str(load), taken)) is not None:
                    packed.append(told)
                    steps[:] = taken
                # A run that is cut off keeps what it has.
                keep({})

    def keep(failed: dict[str, str]) -> None:
        if args.json:
            kinds = {"results": found, "packs": packed, "pages": paged, "overlaps": overlaps}
            measured = {kind: [asdict(each) for each in measured] for kind, measured in kinds.items()}
            report.write_json(args.json, {"arguments": vars(args), **report.origin(), **measured, "failed": failed})

    paged = [part for load in wanted for part in pages.parts(shape, load, device())] if args.pages else []
    overlaps = overlaps_of(args)
    failed = settings.each(args, [Setting(arm.name) for arm in chosen], measure)
    for lines in (tables.served(found), tables.packed(packed), tables.paged(paged), tables.overlapped(overlaps)):
        for line in lines:
            print(line)
    keep(failed)
    if args.plot:
        told = f"{args.model.resolve().name}, {args.dtype}, {json.dumps(args.load)}"
        plots.write(args.plot, found, steps, overlaps, told)
    return 1 if failed else 0


def told_of(figures: LongFigures) -> str:
    """A line while the rest is measured."""
    drafts = f", {figures.accepted} of {figures.drafts} drafts" if figures.drafts else ""
    choices = f", choices side by side: {figures.choices}" if figures.choices is not None else ""
    return f"{figures.token_ms[-1]:.2f} ms a token{drafts}{choices}"


def check(args: argparse.Namespace, lengths: Sequence[int]) -> None:
    """Refuse numbers that cannot be.

    Raises:
        CommandError: names the option.
    """
    if not args.method and not args.pages and args.overlap_prompts is None:
        raise CommandError('--method "" starts no server, and nothing else is asked for: pass --pages or --overlap-prompts, or a method')
    check_counts({"--repeats": args.repeats, "--draft-length": args.draft_length, "--ranks": args.ranks})
    if args.select_by not in PREDICTORS:
        raise CommandError(f"--select-by {args.select_by!r}: pass {' or '.join(PREDICTORS)}")
    if lengths[0] < 2:
        raise CommandError("--output-len 1: times are of tokens after the first: pass numbers from 2")
    if wrong := [each for each in args.pack_layers if each != AUTO and not (each.isdecimal() and int(each))]:
        raise CommandError(f"--pack-layers {wrong[0]!r}: pass numbers of layers from 1, or auto, separated by commas")
    if not 0 < args.overlap_share < 1:
        raise CommandError(f"--overlap-share {args.overlap_share:g}: pass a share of the context between 0 and 1")


def device() -> torch.device:
    """Where parts of a step are timed."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def setting_of(arm: LongArm, file: Path) -> Setting:
    """An arm as speed benchmarks start servers; ``file`` takes the timeline of its cache ranks, where they write one."""
    watched = ("--kv-bench-timeline", str(file)) if arm.timed else ()
    return Setting(arm.name, (*arm.flags, *watched))


def figures_of(
    arm: LongArm, load: Load, lengths: Sequence[int], waves: Sequence[serving.Answers], shape: ModelShape
) -> LongFigures:
    """What the waves of a load showed."""
    metas = [stream.meta for wave in waves for stream in wave.streams]
    together = serving.together(waves)
    return LongFigures(
        name=arm.name,
        method=arm.method,
        mode=arm.mode,
        load=load,
        lengths=tuple(lengths),
        token_ms=serving.spans(waves, lengths),
        running=together and together.wave.running,
        together_ms=together and together.wave.token_ms,
        choices=together and together.choices,
        drafts=sum(meta.get("kv_drafts", 0) for meta in metas),
        accepted=sum(meta.get("kv_accepted", 0) for meta in metas),
        fallbacks=sum(bool(meta.get("kv_fallback")) for meta in metas),
        flops=token_flops(shape, ARMS[arm.method][0], load.context, load.select),
    )


def overlaps_of(args: argparse.Namespace) -> list[overlap.Overlap]:
    """Of the prompts of --overlap-prompts; none without."""
    if args.overlap_prompts is None:
        return []
    found = load_prompts(args.overlap_prompts, load_tokenizer(str(args.model)), "--overlap-prompts")
    return overlap.measure(args.model, [prompt.input_ids for prompt in found], args.overlap_share)
