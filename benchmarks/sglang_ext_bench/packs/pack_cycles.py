"""The cycle of a pack of layers on two GPUs, as AsyncSpade's Table 2 has it: docs/benchmarks.md.

    sglang-ext-bench pack-cycles [--model qwen3-8b qwen3-32b] [--load 8:32768:2048 16:16384:1024] [--pack 6 12]
        [--form rows positions] [--score-bits 16 8 4] [--select-by current] [--stay 0.75] [--cycles 30] [--json FILE]
    sglang-ext-bench pack-cycles --device cpu --model tiny --load 2:256:64 --cycles 3

One GPU computes, the other is its cache rank's; where there is one alone both processes have it in turn, and times say nothing of two.
Keys, values and weights are random. *Inference* is a CUDA graph of so many layers of a decode step: norms, rotary embedding, storing of KV
and activations by SGLang's kernels, products with matrices of the model's shapes, queries that are left for the rank, and attention to rows
of copies and 36 tokens after them. The *cycle* is that of a cache rank's own process, which has full KV of all contexts: from when the first
GPU comes to what its host launched of a step, the writing of queries first, until it sees the last answer's word, and does nothing else; the
host is ahead of it, as servers' are, and has told the rank. Of it is *selection* what the rank says itself: queries copied, tokens chosen,
and rows or positions written; *transfer* is the rest, messages and words. *Taking* comes after it: the first GPU copies rows into the
copies, or lets their pointers lead to what was chosen. Each query is the last one and noise, as much as lets --stay of a selection stay.
Medians of --cycles.

The *bandwidth* that is needed is what travels of a cycle, both ways, over inference's time; beside it, were all K and V of a selection
sent. *Agrees*: of the first request's first layer, what PyTorch chooses by exact keys.
"""

import argparse
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter

import torch
from sglang_ext_bench.packs.pack_layers import MODELS, Layers, Load
from sglang_ext_bench.packs.pack_ranks import Cycle, Kind, Rank, wait_for

from sglang_ext.managers.cache_rank.launch import wait_until_ready
from sglang_ext.mem_cache.selection.scoring_keys import SCORE_BITS

# Of what is free on a rank's GPU, full KV of the processes that are there together.
SHARE = 0.8
# Bytes that are copied from GPU to GPU.
COPIED = 1_000_000_000
# Table 2 on H100s, by model, batch and layers: milliseconds of inference and of cache management, GB/s.
PAPER = {
    ("qwen3-8b", 8, 6): (5.47, 3.92, 140.40), ("qwen3-8b", 8, 12): (10.94, 7.85, 140.40),
    ("qwen3-8b", 16, 6): (5.91, 5.18, 129.94), ("qwen3-8b", 16, 12): (11.82, 11.14, 129.94),
    ("qwen3-32b", 8, 4): (4.39, 3.74, 228.88), ("qwen3-32b", 8, 8): (8.78, 7.48, 228.88),
    ("qwen3-32b", 16, 4): (4.37, 3.72, 229.93), ("qwen3-32b", 16, 8): (8.74, 7.48, 229.93),
}  # fmt: skip
HEAD = (
    "setting", "pack", "sent, bits", "inference, ms", "selection", "transfer", "cycle", "hidden", "of inference", "taking",
    "rows that moved", "GB/s", "were all K, V", "paper's inference", "cache", "GB/s", "agrees",
)  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """Of one pack, load and kind of rank.

    Attributes:
        model: its name.
        load: requests.
        layers: of the pack.
        kind: of rank.
        inference: seconds of the layers.
        of_rank: its cycle.
    """

    model: str
    load: Load
    layers: int
    kind: Kind
    inference: float
    of_rank: Cycle

    @property
    def hidden(self) -> bool:
        """Whether the model computes longer than the cycle takes."""
        return self.of_rank.cycle < self.inference

    @property
    def rates(self) -> tuple[float, float]:
        """Bytes a second that must travel in inference's time: those that did, and with all K and V of a selection."""
        return tuple((self.of_rank.up + down) / self.inference for down in (self.of_rank.down, self.of_rank.whole))

    @property
    def told(self) -> dict[str, object]:
        """For a file."""
        setting = {"model": self.model, **self.load._asdict(), "layers": self.layers, **self.kind._asdict()}
        return {**setting, "inference": self.inference, **asdict(self.of_rank), "hidden": self.hidden, "rates": self.rates}

    @property
    def cells(self) -> tuple[str, ...]:
        """As :data:`HEAD` names them."""
        rank, load = self.of_rank, self.load
        times = (f"{1e3 * each:.2f}" for each in (self.inference, rank.selection, rank.cycle - rank.selection, rank.cycle))
        hidden, taking = ("yes" if self.hidden else "no", f"{rank.cycle / self.inference:.2f}"), f"{1e3 * rank.taking:.2f}"
        moved, rates = f"{rank.moved:.2f}" if self.kind.rows else "", (f"{each / 1e9:.1f}" for each in self.rates)
        paper = [f"{each:.2f}" for each in PAPER.get((self.model, load.batch, self.layers), ())] or [""] * 3
        setting = f"{self.model}, {load.batch} x {load.tokens}, {load.keep}", str(self.layers), self.kind.name
        return *setting, *times, *hidden, taking, moved, *rates, *paper, f"{rank.agrees:.3f}"


def line(cells: Sequence[str]) -> str:
    """Of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def peer_rates(device: torch.device, other: torch.device) -> tuple[float, float]:
    """Bytes a second of a copy to another GPU, and of one back."""
    here, there = (torch.zeros(COPIED, dtype=torch.uint8, device=each) for each in (device, other))
    rates = []
    for into, source in ((there, here), (here, there)):
        times = []
        for _ in range(7):
            wait_for(device), wait_for(other)
            begun = perf_counter()
            into.copy_(source)
            wait_for(device), wait_for(other)
            times.append(perf_counter() - begun)
        rates.append(COPIED / median(times))
    return rates[0], rates[1]


def together(ranks: Sequence[Rank], room: float) -> Iterator[list[Rank]]:
    """Those whose full KV so many bytes hold, one at least, in their order."""
    some: list[Rank] = []
    for rank in ranks:
        if some and sum(each.held_bytes for each in [*some, rank]) > room:
            yield some
            some = []
        some.append(rank)
    yield some


def measured(options: argparse.Namespace, layers: Layers) -> Iterator[Figures]:
    """All loads, forms and bits of some layers; processes for which there is room start together."""
    inference = {load: layers.inference(load) for load in layers.loads}
    layers.drop_weights()
    persistence, room = {load: layers.persistence(load, options.stay) for load in layers.loads}, math.inf
    if options.device.type == "cuda":
        torch.cuda.empty_cache()
        room = SHARE * torch.cuda.mem_get_info(options.rank_device)[0]
    kinds = [Kind(form == "rows", bits, options.select_by) for form in options.form for bits in options.score_bits]
    # Twice as many rows as are to come, so that an answer has room for those of each head.
    ranks = [Rank(layers, kind, options.rank_device, 2 * (1 - options.stay)) for kind in kinds]
    for some in together(ranks, room):
        try:
            wait_until_ready([rank.link for rank in some], "its cycles cannot be measured")
            for rank in some:
                rank.hand_over()
                for load in layers.loads:
                    cycle = rank.measure(load, persistence[load], options.cycles)
                    yield Figures(layers.name, load, layers.count, rank.kind, inference[load], cycle)
                rank.link.end()
        finally:
            for rank in some:
                rank.link.end()


def parsed() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda:0", help="of the model, a GPU or cpu (default: %(default)s)")
    add("--rank-device", help="of the cache rank (default: cuda:1 where there is one, else the model's)")
    add("--model", nargs="+", choices=MODELS, default=["qwen3-8b", "qwen3-32b"])
    loads = [Load(8, 32768, 2048), Load(16, 16384, 1024)]
    add("--load", nargs="+", type=Load.of, default=loads, metavar="BATCH:TOKENS:SELECTED")
    add("--pack", nargs="+", type=int, help="layers (default: Table 2's of each model)")
    add("--form", nargs="+", choices=("rows", "positions"), default=["rows", "positions"], help="what comes back")
    add("--score-bits", nargs="+", type=int, choices=SCORE_BITS, default=list(SCORE_BITS))
    add("--select-by", choices=("current", "regressed"), default="current")
    add("--stay", type=float, default=0.75, help="share of a selection that is in the next one, too (default: %(default)s)")
    add("--cycles", type=int, default=30)
    add("--json", type=Path, help="file of all figures")
    options = parser.parse_args()
    if not 0 <= options.stay < 1:
        parser.error(f"--stay {options.stay}: a share from 0 to below 1")
    for name, numbers in (("--pack", options.pack or [1]), ("--cycles", [options.cycles])):
        if min(numbers) < 1:
            parser.error(f"{name} {min(numbers)}: a whole number from 1")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.parent}: make it first")
    gpus, known = torch.cuda.device_count(), re.compile(r"cpu|cuda(:\d+)?")
    for name, device in (("--device", options.device), ("--rank-device", options.rank_device or options.device)):
        if not known.fullmatch(device) or device.partition(":")[0] != options.device.partition(":")[0]:
            parser.error(f"{name} {device}: cpu, or a GPU, as cuda:0, the same for both")
        if device != "cpu" and int(device.partition(":")[2] or 0) >= gpus:
            parser.error(f"{name} {device}: PyTorch finds {gpus} GPUs here: pass --device cpu, as with --model tiny --load 2:256:64")
    on_gpu = options.device != "cpu"
    if on_gpu and "tiny" in options.model:
        parser.error("--model tiny is for --device cpu: SGLang's kernels take no heads of its 16 channels")
    options.device = torch.device("cuda", int(options.device.partition(":")[2] or 0)) if on_gpu else torch.device("cpu")
    if not options.rank_device:
        options.rank_device = "cuda:1" if on_gpu and gpus > 1 else str(options.device)
    return options


def main() -> None:
    """Print what the GPUs are, and a line of the table as soon as it is known."""
    options, found, rates, begun = parsed(), [], None, monotonic()
    torch.manual_seed(0)
    if options.device.type == "cuda":
        torch.cuda.set_device(options.device)
        of_rank = torch.device(options.rank_device)
        print(f"model on {torch.cuda.get_device_name(options.device)}, rank on {torch.cuda.get_device_name(of_rank)}", flush=True)
        if of_rank == options.device:
            print("one GPU: the model and the rank have it in turn; their cycles say nothing of two", flush=True)
        else:
            rates = peer_rates(options.device, of_rank)
            torch.cuda.empty_cache()
            print("a copy of 1 GB: {:.0f} GB/s to the rank, {:.0f} GB/s back".format(*(each / 1e9 for each in rates)), flush=True)
    print(f"\n{line(HEAD)}\n{'|---' * len(HEAD)}|", flush=True)
    for name in options.model:
        for count in options.pack or MODELS[name].packs:
            for figures in measured(options, Layers(name, count, options.load, options.device)):
                found.append(figures.told)
                print(line(figures.cells), flush=True)
                if options.json:
                    told = {"devices": [str(options.device), options.rank_device], "peer": rates, "packs": found}
                    options.json.write_text(json.dumps(told, indent=1))
    print(f"\n{monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
