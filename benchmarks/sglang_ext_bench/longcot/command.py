"""Runs ``sglang-ext-bench longcot``: starts the servers, sends the loads, and writes tables, JSON and a plot."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from sglang_ext.config.model_folder import read_config
from sglang_ext_bench.options import file_name, numbers
from sglang_ext_bench import report
from sglang_ext_bench.longcot import flops, overlap, packs, results, serving
from sglang_ext_bench.longcot.arms import ARMS, LongcotLoad, LongcotServer, check_lengths, make_servers, parse_loads, set_defaults
from sglang_ext_bench.longcot.flops import ModelShape, token_flops
from sglang_ext_bench.longcot.options import add_arguments, check_options
from sglang_ext_bench.longcot.serving import LongcotSummary
from sglang_ext_bench.prompts import load_prompts, load_tokenizer
from sglang_ext_bench.server import check_servers
from sglang_ext_bench.speed import settings
from sglang_ext_bench.timelines import PackEvent, read_events
from sglang_ext_bench.prompts import make_prompts
from sglang_ext_bench.speed.settings import ServerSetting

__all__ = ["add_arguments", "run"]


@dataclass
class LongcotMeasurements:
    """Results so far. :meth:`write` is called after each load, so that an interrupted run keeps its results.

    Attributes:
        part_times: Times of the parts of a step.
        overlaps: Overlaps of selections.
        summaries: Summary of each server and load.
        pack_summaries: Summary of packs, for each server with a timeline and each load.
        steps: Steps of the newest load with a timeline.
    """

    part_times: list[flops.StepPartTime]
    overlaps: list[overlap.Overlap]
    summaries: list[LongcotSummary] = field(default_factory=list)
    pack_summaries: list[packs.PackSummary] = field(default_factory=list)
    steps: list[packs.Step] = field(default_factory=list)

    def write(self, args: argparse.Namespace, failed: dict[str, str]) -> None:
        """Write ``--json``. ``failed`` says why servers could not be measured, by name."""
        if args.json:
            groups = {"results": self.summaries, "packs": self.pack_summaries, "pages": self.part_times, "overlaps": self.overlaps}
            measured = {key: [asdict(each) for each in group] for key, group in groups.items()}
            report.write_json(args.json, {"arguments": vars(args), **report.origin(), **measured, "failed": failed})


def run(args: argparse.Namespace) -> int:
    """Measure all servers, step parts and overlaps, and print tables. Returns 0 if all were measured, else 1."""
    set_defaults(args)
    loads, lengths = parse_loads(args.load), sorted(set(numbers(args.output_len, "--output-len")))
    check_options(args, lengths)
    servers = make_servers(args)
    check_lengths(servers, lengths)
    # SGLang sends a round's tokens when the next round runs, but the last round's tokens at once. So no length may be in the last round.
    longest = lengths[-1] + 2 * max((server.round_tokens for server in servers), default=0)
    shape = ModelShape.from_config(read_config(args.model))
    # The folder of timelines does not matter for this check.
    flags = {server.name: settings.flags_of(args, make_setting(server, Path("timeline"))) for server in servers}
    check_servers(str(args.model), flags, max(load.context for load in loads) + longest, "--load")
    prompts = make_prompts(args, max(load.batch for load in loads), sorted({load.context for load in loads}))
    part_times = [each for load in loads for each in flops.time_step_parts(shape, load, device())] if args.pages else []
    measurements = LongcotMeasurements(part_times, measure_overlaps(args))
    by_name = {server.name: server for server in servers}

    def measure_server(setting: ServerSetting, logs: Path) -> None:
        server = by_name[setting.name]
        file = logs / f"{file_name(server.name)}-timeline.jsonl"
        file.unlink(missing_ok=True)
        with settings.server(args, make_setting(server, file), logs) as process:
            for load in filter(server.runs_load, loads):
                num_steps = len(packs.parse_steps(read_events(file, PackEvent)))
                waves = serving.send_waves(process, prompts[load.context][: load.batch], longest, args.repeats, ARMS[server.method][1])
                summary = summarize(server, load, lengths, waves, shape)
                measurements.summaries.append(summary)
                print(f"{server.name}: {load}: {progress_line(summary)}", flush=True)
                steps = packs.parse_steps(read_events(file, PackEvent))[num_steps:]
                if (pack_summary := packs.summarize(server.name, str(load), steps)) is not None:
                    measurements.pack_summaries.append(pack_summary)
                    measurements.steps = steps
                measurements.write(args, {})

    failed = settings.each(args, [ServerSetting(server.name) for server in servers], measure_server)
    for lines in (
        results.serving_tables(measurements.summaries),
        results.pack_table(measurements.pack_summaries),
        results.step_part_tables(measurements.part_times),
        results.overlap_table(measurements.overlaps),
    ):
        for line in lines:
            print(line)
    measurements.write(args, failed)
    if args.plot:
        heading = f"{args.model.resolve().name}, {args.dtype}, {json.dumps(args.load)}"
        results.write_plot(args.plot, measurements.summaries, measurements.steps, measurements.overlaps, heading)
    return 1 if failed else 0


def progress_line(summary: LongcotSummary) -> str:
    """The main results of a load, printed while others are measured."""
    drafts = f", {summary.accepted} of {summary.drafts} drafts" if summary.drafts else ""
    selections = f", selections in time: {summary.choices}" if summary.choices is not None else ""
    return f"{summary.token_ms[-1]:.2f} ms a token{drafts}{selections}"


def device() -> torch.device:
    """The device on which the parts of a step are timed."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_setting(server: LongcotServer, file: Path) -> ServerSetting:
    """The setting that starts a server. Cache ranks with a timeline write it to ``file``."""
    timeline_flags = ("--kv-bench-timeline", str(file)) if server.has_timeline else ()
    return ServerSetting(server.name, (*server.flags, *timeline_flags))


def summarize(
    server: LongcotServer, load: LongcotLoad, lengths: Sequence[int], waves: Sequence[serving.WaveResult], shape: ModelShape
) -> LongcotSummary:
    """Summarize the waves of a load."""
    metas = [stream.meta for wave in waves for stream in wave.streams]
    middle = serving.median_wave(waves)
    return LongcotSummary(
        name=server.name,
        method=server.method,
        mode=server.mode,
        load=load,
        lengths=tuple(lengths),
        token_ms=serving.token_ms(waves, lengths),
        running=middle and middle.wave.running,
        together_ms=middle and middle.wave.token_ms,
        choices=middle and middle.selections,
        drafts=sum(meta.get("kv_drafts", 0) for meta in metas),
        accepted=sum(meta.get("kv_accepted", 0) for meta in metas),
        fallbacks=sum(bool(meta.get("kv_fallback")) for meta in metas),
        flops=token_flops(shape, ARMS[server.method][0], load.context, load.select),
    )


def measure_overlaps(args: argparse.Namespace) -> list[overlap.Overlap]:
    """Measure the overlaps of ``--overlap-prompts``. Empty without it."""
    if args.overlap_prompts is None:
        return []
    prompts = load_prompts(args.overlap_prompts, load_tokenizer(str(args.model)), "--overlap-prompts")
    return overlap.measure(args.model, [prompt.input_ids for prompt in prompts], args.overlap_share)
