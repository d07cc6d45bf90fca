"""Waves of requests on a simulated GPU: `auto` is nearly as fast as the best fixed draft length, and as plain decoding where drafting does not pay."""

import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import pytest

from sglang_ext.core import SLOW_DECAY, AcceptanceTracker
from sglang_ext.managers.spec_decode.round_timer import DraftLength
from sglang_ext.managers.spec_decode.cost_model import BatchLoad, RoundCosts, RoundTimes

# Qwen2.5-Coder-1.5B in bf16 on an H200 (measured on 2026-11-29): bytes, bytes per millisecond, and milliseconds.
WEIGHTS, TOKEN_BYTES, SHARE, BANDWIDTH = 3.1e9, 28_672, 1 / 8, 4.3e9
WIDTHS, LONGEST, OUTPUT, PLAIN_STEPS = (5, 16), 15, 256, 4
CELLS = [*product((1000, 4000, 30_000), (1, 4, 16))]


@dataclass
class Gpu:
    """Times of forwards, in milliseconds.

    Attributes:
        fixed: of each forward, whatever it reads.
        slow: factor of draft steps, as with a slow attention kernel.
        noise: standard deviation of times, relative.
        stalls: whether the first round of each kind is 200 ms slower, as when a kernel is compiled.
        launching: before the first draft step of a round, a fixed part and one per request: the device waits for the host.
        returning: before a plain step that follows drafts or a prefill: the device waits for the host.
    """

    fixed: float = 1.4
    slow: float = 1.0
    noise: float = 0.03
    stalls: bool = False
    launching: tuple[float, float] = (0.0, 0.0)
    returning: float = 0.0
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    seen: set = field(default_factory=set)

    def forward(self, tokens: float) -> float:
        return (self.fixed + (WEIGHTS + TOKEN_BYTES * tokens) / BANDWIDTH) * self.draw.gauss(1, self.noise)

    def spend(self, lengths: list[int], drafts: int, new_copies: list[int], interrupted: bool, follows_plain: bool) -> RoundTimes:
        """An iteration of requests with so many tokens; ``new_copies``: contexts of which copies are made first."""
        stall = 200.0 if self.stalls and (drafts > 0, len(lengths).bit_length()) not in self.seen else 0.0
        self.seen.add((drafts > 0, len(lengths).bit_length()))
        compressing = sum(0.3 + 1e-4 * length for length in new_copies)
        if not drafts:
            steps = [self.forward(sum(lengths)) for _ in range(PLAIN_STEPS)]
            whole = stall + sum(steps) + (0.0 if follows_plain else self.returning)
            return RoundTimes(0, PLAIN_STEPS, compressing, 0.0, whole, sum(steps[1:]), follows_plain=follows_plain)
        steps = [self.slow * self.forward(SHARE * sum(lengths)) for _ in range(drafts)]
        drafting = stall + self.launching[0] + self.launching[1] * len(lengths) + sum(steps)
        later_steps = sum(steps[1:]) if drafts > 1 else None
        width = next(width for width in WIDTHS if width > drafts)
        rest = self.forward(sum(lengths)) * (1 + 0.01 * width * len(lengths) / 16) + (0.0 if interrupted else 0.6)
        return RoundTimes(drafts, 0, compressing, drafting, drafting + rest, later_steps)


@dataclass
class Request:
    context: int
    p: float
    acceptance: AcceptanceTracker
    tokens: int = 1
    copied: bool = False
    times: list[tuple[float, int]] = field(default_factory=list)


@dataclass
class Server:
    """A chooser on a GPU, and the acceptance that it has seen."""

    gpu: Gpu
    chooser: DraftLength
    costs: RoundCosts = field(default_factory=lambda: RoundCosts(WEIGHTS, TOKEN_BYTES, SHARE, WIDTHS))
    typical: AcceptanceTracker = field(default_factory=lambda: AcceptanceTracker(decay=SLOW_DECAY))
    lengths: list[int] = field(default_factory=list)

    def wave(self, context: int, batch: int, p: float, seed: int) -> tuple[float, float]:
        """Decode a wave; milliseconds per token of a request, of all the wave and from each request's second round on."""
        noise, now, waiting, running, done, pending = random.Random(seed), 0.0, batch, [], [], []
        admitted = max(1, batch // 3)
        while waiting or running:
            interrupted = waiting > 0
            for _ in range(min(admitted, waiting)):
                own = min(0.999, max(0.0, noise.gauss(p, 0.02))) if p else 0.0
                running.append(Request(context, own, AcceptanceTracker.from_probability(self.typical.probability)))
            now, waiting = now + 10.0 * interrupted, waiting - min(admitted, waiting)
            lengths = [request.context + request.tokens for request in running]
            load = BatchLoad.of(lengths, sum(length for request, length in zip(running, lengths) if not request.copied))
            drafts = self.chooser.choose(self.costs, load, [request.acceptance.probability for request in running])
            self.lengths.append(drafts)
            new = [length for request, length in zip(running, lengths) if drafts and not request.copied]
            spent = self.gpu.spend(lengths, drafts, new, interrupted, not interrupted and self.lengths[-2:-1] == [0])
            # Times are known two iterations later.
            pending.append((load, spent))
            if len(pending) > 2:
                before = pending.pop(0)
                self.chooser.observe(before[1])
                self.costs.observe(*before)
            now += spent.compressing + spent.whole
            for request in running:
                request.copied |= drafts > 0
                request.tokens += self._answer(request, drafts, noise)
                request.times.append((now, min(request.tokens, OUTPUT)))
            done += [request for request in running if request.tokens >= OUTPUT]
            running = [request for request in running if request.tokens < OUTPUT]
        spans = [(request.times[0], request.times[-1]) for request in done]
        steady = sum((end - begin) / max(1, last - first) for (begin, first), (end, last) in spans) / len(spans)
        return sum(end for _, (end, _) in spans) / len(spans) / OUTPUT, steady

    def _answer(self, request: Request, drafts: int, noise: random.Random) -> int:
        if not drafts:
            return PLAIN_STEPS
        accepted = 0
        while accepted < drafts and noise.random() < request.p:
            accepted += 1
        request.acceptance.observe(drafts, accepted)
        self.typical.observe(drafts, accepted)
        return accepted + 1


@cache
def fixed(cell: tuple[int, int], p: float, length: int, slow: float, seed: int) -> tuple[float, float]:
    """Milliseconds per token of a wave with a fixed length, 0 for plain decoding."""
    return Server(Gpu(slow=slow), DraftLength(length, is_fixed=True)).wave(*cell, p, seed)


def speeds(server: Server, cell: tuple[int, int], p: float, seeds: Sequence[int]) -> tuple[float, float]:
    """Mean speed of waves relative to plain decoding, and from each request's second round on relative to the best fixed length."""

    def mean(waves: Iterable[tuple[float, float]]) -> tuple[float, float]:
        return tuple(statistics.mean(column) for column in zip(*waves))

    others = {length: mean(fixed(cell, p, length, server.gpu.slow, seed) for seed in seeds) for length in ((0, 4, 7, 15) if p > 0.5 else (0,))}
    whole, steady = mean(server.wave(*cell, p, seed) for seed in seeds)
    return others[0][0] / whole, min(other for _, other in others.values()) / steady


@pytest.mark.parametrize("p", [0.965, 0.9, 0.6, 0.0])
@pytest.mark.parametrize("order", [CELLS, CELLS[::-1]], ids=["short-first", "long-first"])
def test_auto_comes_near_the_best_fixed_length_and_never_far_below_plain_decoding(order, p):
    servers, found = [Server(Gpu(draw=random.Random(seed)), DraftLength(LONGEST)) for seed in range(2)], {}
    for cell in order:
        for server in servers:
            # The first wave of a cell may have to measure.
            server.wave(*cell, p, 100)
        found[cell] = tuple(map(statistics.mean, zip(*(speeds(server, cell, p, range(2)) for server in servers))))
    assert {cell: each for cell, each in found.items() if each[0] < 0.97 or each[1] < 0.95} == {}


def test_the_first_wave_of_a_new_server_drafts_where_that_pays():
    servers = [Server(Gpu(draw=random.Random(seed)), DraftLength(LONGEST)) for seed in range(5)]
    plain, near = zip(*(speeds(server, (30_000, 16), 0.965, [seed]) for seed, server in enumerate(servers)))
    assert min(plain) > 1.3 and min(near) > 0.9 and statistics.mean(near) > 0.95


@pytest.mark.parametrize("order", [CELLS, CELLS[::-1]], ids=["short-first", "long-first"])
def test_drafts_that_are_slower_than_their_bytes_say_are_given_up(order):
    server, found = Server(Gpu(slow=2.5), DraftLength(LONGEST)), {}
    for cell in order:
        server.wave(*cell, 0.965, 100)
        found[cell] = speeds(server, cell, 0.965, range(2))[0]
    assert {cell: plain for cell, plain in found.items() if plain < 0.97} == {}


@pytest.mark.parametrize("cell, p", [((30_000, 4), 0.98), ((30_000, 16), 0.935), ((4000, 16), 0.92)])
def test_the_wait_for_the_first_draft_step_counts_once_a_round(cell, p):
    """An H200 waited 3 ms and .45 ms per request (2026-11-30)."""
    launching = (3.0, 0.45)
    server = Server(Gpu(launching=launching), DraftLength(LONGEST))
    server.wave(*cell, p, 100)
    seeds = range(3)
    times = {}
    for length in (0, 4, 7, 11, 15):
        waves = (Server(Gpu(launching=launching), DraftLength(length, is_fixed=True)).wave(*cell, p, seed) for seed in seeds)
        times[length] = statistics.mean(wave[1] for wave in waves)
    assert min(times.values()) / statistics.mean(server.wave(*cell, p, seed)[1] for seed in seeds) > 0.95


@pytest.mark.parametrize("context, batch", [cell for cell in CELLS if cell not in ((4000, 16), (30_000, 16))])
def test_probes_lose_little_though_the_device_waits_for_the_host_after_each(context, batch):
    """An H200 waited for about one plain step (2026-12-01): requests that should not draft lost 4% to 8% in their first waves."""
    returning, speed = 2.3, []
    for seed in range(3):
        server = Server(Gpu(returning=returning, draw=random.Random(seed)), DraftLength(LONGEST))
        plain = Server(Gpu(returning=returning), DraftLength(0, is_fixed=True))
        for batch_before in {1, 4, 16} - {batch}:
            server.wave(1000, batch_before, 0.9, seed)
        speed.append(plain.wave(context, batch, 0.9, 100 + seed)[1] / server.wave(context, batch, 0.9, 100 + seed)[1])
    assert statistics.mean(speed) > 0.97


def test_stalls_of_first_rounds_mislead_no_choice():
    server = Server(Gpu(stalls=True), DraftLength(LONGEST))
    server.wave(30_000, 16, 0.965, 100)
    assert speeds(server, (30_000, 16), 0.965, [0, 1])[1] > 0.95
    for seed in (100, 101):  # The first probe of fewer requests stalls, too.
        server.wave(1000, 4, 0.9, seed)
    assert speeds(server, (1000, 4), 0.9, [0, 1])[0] > 0.97
