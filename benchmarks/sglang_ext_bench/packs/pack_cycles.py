"""Time the cycle of a pack of layers at a cache rank, as in AsyncSpade's Table 2.

    sglang-ext-bench pack-cycles --json FILE
    sglang-ext-bench pack-cycles --model qwen3-8b --load 8:32768:2048 --pack 6 12 --form rows --score-bits 8
    sglang-ext-bench pack-cycles --device cpu --model tiny --load 2:256:64 --cycles 3

One GPU computes the layers, a second one runs the cache rank in a process of its own. On one GPU both share it, and the times do not hold
for two. Keys, values and weights are random. Each query is the previous one mixed with noise, so that a share --stay of a selection stays.
The command prints one row per model, load, pack and kind of rank, with medians of --cycles cycles:

    inference, ms         a CUDA graph of the layers in a decode step, with attention to the selected tokens and 36 tokens after them
    selection             the rank's own time: queries are copied, tokens selected, and rows or positions written
    transfer              the rest of the cycle: messages and waiting
    cycle                 from when the first GPU writes the queries until it sees the last selection
    hidden                whether the cycle is shorter than inference
    of inference          cycle over inference
    taking                after the cycle: the first GPU copies rows, or sets pointers
    rows that moved       share of a selection whose rows were sent
    GB/s                  bytes sent in both directions, over the time of inference
    were all K, V         the same if all rows of a selection were sent
    paper's ...           the paper's figures on H100s: inference, ms; cache management, ms; GB/s
    agrees                share of a selection that PyTorch selects by exact keys, in one layer of one request
"""

import argparse
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

import torch

from sglang_ext.managers.cache_rank.feature import wait_until_ready
from sglang_ext.mem_cache.selection.scoring_keys import SCORE_BITS
from sglang_ext.tools import CommandError
from sglang_ext_bench.kernels.options import add_list
from sglang_ext_bench.kernels.timing import wall_seconds
from sglang_ext_bench.options import check_counts
from sglang_ext_bench.packs.pack_layers import MODELS, LayerPack, Load
from sglang_ext_bench.packs.pack_ranks import CycleTimes, PackRank, RankKind, synchronize
from sglang_ext_bench.report import markdown_header, markdown_row, origin, write_json

# Share of the free memory of the rank's GPU that the full KV of concurrent processes may use.
MEMORY_SHARE = 0.8
# Bytes of a copy from GPU to GPU, and its repetitions.
COPIED, COPIES = 1_000_000_000, 7
# Table 2 on H100s, by model, batch and layers: milliseconds of inference and of cache management, GB/s.
PAPER = {
    ("qwen3-8b", 8, 6): (5.47, 3.92, 140.40), ("qwen3-8b", 8, 12): (10.94, 7.85, 140.40),
    ("qwen3-8b", 16, 6): (5.91, 5.18, 129.94), ("qwen3-8b", 16, 12): (11.82, 11.14, 129.94),
    ("qwen3-32b", 8, 4): (4.39, 3.74, 228.88), ("qwen3-32b", 8, 8): (8.78, 7.48, 228.88),
    ("qwen3-32b", 16, 4): (4.37, 3.72, 229.93), ("qwen3-32b", 16, 8): (8.74, 7.48, 229.93),
}  # fmt: skip
COLUMNS = (
    "setting", "pack", "sent, bits", "inference, ms", "selection", "transfer", "cycle", "hidden", "of inference", "taking",
    "rows that moved", "GB/s", "were all K, V", "paper's inference", "cache", "GB/s", "agrees",
)  # fmt: skip
CPU_EXAMPLE = "--device cpu --model tiny --load 2:256:64"


@dataclass(frozen=True)
class PackResult:
    """Figures of one pack, load and kind of rank.

    Attributes:
        model: Name of the model.
        load: The requests.
        layers: Layers of the pack.
        kind: Configuration of the rank.
        inference: Seconds of the layers in a decode step.
        times: Times of the rank's cycle.
    """

    model: str
    load: Load
    layers: int
    kind: RankKind
    inference: float
    times: CycleTimes

    @property
    def hidden(self) -> bool:
        """Whether the cycle is shorter than inference."""
        return self.times.cycle < self.inference

    @property
    def rates(self) -> tuple[float, float]:
        """Bytes per second of inference: those that were sent, and those of a whole selection's K and V."""
        sent, whole = ((self.times.up + down) / self.inference for down in (self.times.down, self.times.whole))
        return sent, whole

    @property
    def record(self) -> dict[str, object]:
        """All figures, for a JSON file."""
        setting = {"model": self.model, **self.load._asdict(), "layers": self.layers, **self.kind._asdict()}
        return {**setting, "inference": self.inference, **asdict(self.times), "hidden": self.hidden, "rates": self.rates}

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of a row, in the order of :data:`COLUMNS`."""
        times, load = self.times, self.load
        milliseconds = (f"{1e3 * each:.2f}" for each in (self.inference, times.selection, times.cycle - times.selection, times.cycle))
        hidden, taking = ("yes" if self.hidden else "no", f"{times.cycle / self.inference:.2f}"), f"{1e3 * times.taking:.2f}"
        moved, rates = f"{times.moved:.2f}" if self.kind.rows else "", (f"{each / 1e9:.1f}" for each in self.rates)
        paper = [f"{each:.2f}" for each in PAPER.get((self.model, load.batch, self.layers), ())] or [""] * 3
        setting = f"{self.model}, {load.batch} x {load.tokens}, {load.keep}", str(self.layers), self.kind.name
        return *setting, *milliseconds, *hidden, taking, moved, *rates, *paper, f"{times.agrees:.3f}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--device", default="cuda:0", help="device of the model, a GPU or cpu (default: %(default)s)")
    add("--rank-device", help="device of the cache rank (default: cuda:1 if there is one, else the model's)")
    add_list(parser, "--model", ("qwen3-8b", "qwen3-32b"), "shapes", choices=MODELS)
    loads = "requests, tokens of each, and tokens that a KV head selects (default: 8:32768:2048 16:16384:1024)"
    add("--load", nargs="+", type=Load.parse, default=[Load(8, 32768, 2048), Load(16, 16384, 1024)], metavar="BATCH:TOKENS:SELECTED", help=loads)
    add("--pack", nargs="+", type=int, help="layers of a pack (default: those of Table 2, by model)")
    forms = ("rows", "positions")
    add_list(parser, "--form", forms, "what the rank sends: K and V rows (lossy) or positions (verified)", choices=forms)
    add_list(parser, "--score-bits", SCORE_BITS, "bits of scored keys", type=int, choices=SCORE_BITS)
    add("--select-by", choices=("current", "regressed"), default="current", help="query predictor (default: %(default)s)")
    add("--stay", type=float, default=0.75, help="share of a selection that stays in the next one (default: %(default)s)")
    add("--cycles", type=int, default=30, help="measured cycles, after the warm-up (default: %(default)s)")
    add("--json", type=Path, help="file for all figures, written after each row")


def run(args: argparse.Namespace) -> int:
    """Print what the GPUs are, and each row of the table as soon as it is measured.

    Raises:
        CommandError: An option is out of range, or a device does not exist.
    """
    device, rank_device = settle_devices(args)
    found, rates, begun = [], None, monotonic()
    torch.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        print(f"model on {torch.cuda.get_device_name(device)}, rank on {torch.cuda.get_device_name(rank_device)}", flush=True)
        if rank_device == device:
            print("one GPU: the model and the rank share it; their times do not hold for two GPUs", flush=True)
        else:
            rates = copy_rates(device, rank_device)
            torch.cuda.empty_cache()
            print("a copy of 1 GB: {:.0f} GB/s to the rank, {:.0f} GB/s back".format(*(each / 1e9 for each in rates)), flush=True)
    print(f"\n{markdown_header(COLUMNS)}", flush=True)
    for name in args.model:
        for count in args.pack or MODELS[name].packs:
            for result in measure(args, LayerPack(name, count, args.load, device), rank_device):
                found.append(result.record)
                print(markdown_row(result.cells), flush=True)
                if args.json:
                    devices = [str(device), str(rank_device)]
                    write_json(args.json, {**origin(), "devices": devices, "peer": rates, "packs": found})
    print(f"\n{monotonic() - begun:.0f} s", flush=True)
    return 0


def settle_devices(args: argparse.Namespace) -> tuple[torch.device, torch.device]:
    """Check the options. Returns the devices of the model and of the cache rank.

    Raises:
        CommandError: An option is out of range, or a device does not exist.
    """
    if not 0 <= args.stay < 1:
        raise CommandError(f"--stay {args.stay}: pass a share from 0 to below 1")
    check_counts({"--pack": min(args.pack or [1]), "--cycles": args.cycles})
    gpus = torch.cuda.device_count()
    on_gpu, default = args.device != "cpu", args.device
    if not args.rank_device and on_gpu and gpus > 1:
        default = "cuda:1"
    found = []
    for flag, text in (("--device", args.device), ("--rank-device", args.rank_device or default)):
        kind, _, index = text.partition(":")
        if not re.fullmatch(r"cpu|cuda(:\d+)?", text) or (kind == "cuda") != on_gpu:
            raise CommandError(f"{flag} {text}: pass cpu, or a GPU such as cuda:0, for both --device and --rank-device")
        if on_gpu and int(index or 0) >= gpus:
            raise CommandError(f"{flag} {text}: PyTorch finds {gpus} GPUs here; pass {CPU_EXAMPLE} to run on a CPU")
        found.append(torch.device("cuda", int(index or 0)) if on_gpu else torch.device("cpu"))
    if on_gpu and "tiny" in args.model:
        raise CommandError(f"--model tiny with --device {args.device}: SGLang's kernels do not support heads of 16 channels; pass --device cpu")
    return found[0], found[1]


def copy_rates(device: torch.device, other: torch.device) -> tuple[float, float]:
    """Return the bytes per second of a copy to another GPU, and of one back."""
    here, there = (torch.zeros(COPIED, dtype=torch.uint8, device=each) for each in (device, other))

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)
        synchronize(device), synchronize(other)

    to_other, back = (COPIED / wall_seconds(lambda: copy(*each), "cuda", COPIES) for each in ((there, here), (here, there)))
    return to_other, back


def measure(args: argparse.Namespace, pack: LayerPack, rank_device: torch.device) -> Iterator[PackResult]:
    """Measure all loads, forms and bits of a pack. Processes whose full KV fits on the rank's device start together."""
    inference = {load: pack.inference_seconds(load) for load in pack.loads}
    pack.free_weights()
    persistence, room = {load: pack.find_persistence(load, args.stay) for load in pack.loads}, math.inf
    if rank_device.type == "cuda":
        torch.cuda.empty_cache()
        room = MEMORY_SHARE * torch.cuda.mem_get_info(rank_device)[0]
    kinds = [RankKind(form == "rows", bits, args.select_by) for form in args.form for bits in args.score_bits]
    # A reply has memory for twice the expected rows, since heads differ.
    ranks = [PackRank(pack, kind, str(rank_device), 2 * (1 - args.stay)) for kind in kinds]
    for group in fitting_groups(ranks, room):
        try:
            wait_until_ready([rank.link for rank in group], "its cycles cannot be measured")
            for rank in group:
                rank.send_full_kv()
                for load in pack.loads:
                    times = rank.measure(load, persistence[load], args.cycles)
                    yield PackResult(pack.name, load, pack.count, rank.kind, inference[load], times)
                rank.link.end()
        finally:
            for rank in group:
                rank.link.end()


def fitting_groups(ranks: Sequence[PackRank], room: float) -> Iterator[list[PackRank]]:
    """Yield the ranks in order, in groups whose full KV fits into ``room`` bytes. A group has at least one rank."""
    group: list[PackRank] = []
    for rank in ranks:
        if group and sum(each.held_bytes for each in [*group, rank]) > room:
            yield group
            group = []
        group.append(rank)
    yield group
