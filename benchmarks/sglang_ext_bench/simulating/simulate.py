"""Simulate verified decoding with full KV in host memory, without a model: the throughput of a machine by acceptance rate.

Times are bytes divided by bandwidths. Acceptance is random. The server's own scheduler places verifications and loads. A policy says
where full KV is stored:

stock      Plain decoding without drafts.
resident   Full KV stays on the device. Other requests wait for memory.
host       Full KV is in host memory. A request loads it for each verification.
auto       The placement that is fastest by the cost model.

Columns of the table:

allowed    Tokens per second by the cost model, for the same placement in the steady state, without prefill.
gain       Tokens per second over those of stock.
overall    Tokens per second from the first request to the last, with prefill.
placed     Requests with full KV on the device + requests that load it.
drafts     Draft tokens before a verification, for both groups.
running    Requests at once: mean / maximum.
link       Share of time in which the link loads full KV.
reserved   Reserved share of link time / of memory.
slack      Rounds from the end of a load to its verification.
refused    Verifications that the scheduler could not place, counted in each round.
postponed  Verifications postponed because a load was late.
"""

import argparse
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from sglang_ext.core import DEFAULT_BUDGET
from sglang_ext.managers.kv_offload.throughput_model import MAX_DRAFTS, CostError, Costs
from sglang_ext.tools import CommandError
from sglang_ext_bench import report
from sglang_ext_bench.options import numbers, probabilities
from sglang_ext_bench.simulating.scenario import (
    Scenario,
    SimulatedRequest,
    SimulationError,
)
from sglang_ext_bench.simulating.simulation import Simulation
from sglang_ext_bench import drawing

POLICIES = ("stock", "resident", "host", "auto")

MEASURED = {0.87: "snapkv on 1/8 of the tokens", 0.93: "snapkv on 1/4 of the tokens"}
"""Acceptance rates measured on the demo model, and their methods (docs/benchmarks.md, "Acceptance")."""
MEASURED_NOTE = "measured on the demo model: " + ", ".join(f"{p:g} with {method}" for p, method in MEASURED.items())

COLUMNS = (
    "policy", "p", "tokens/s", "allowed", "ratio", "gain", "overall", "placed", "drafts", "running", "link", "reserved",
    "load ms", "slack", "refused", "postponed",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. The defaults are Qwen3-8B on an H200."""
    add = parser.add_argument
    add("--policy", default=",".join(POLICIES), help="policies, separated by commas (default: %(default)s)")
    rates = ",".join(f"{p:g}" for p in (*MEASURED, 0.97, 0.98, 0.99, 0.995))
    add("--acceptance", default=rates, help=f"acceptance rates, separated by commas (default: %(default)s; {MEASURED_NOTE})")
    add("--staggered", action="store_true", help="requests verify in different rounds (default)")
    add("--lock-step", action="store_true", help="all requests verify in the same round; with --staggered, simulate both")
    add("--memory-tokens", default="262144", help="tokens of KV that fit on the device, separated by commas (default: %(default)s)")
    add("--link-bandwidth", default="53.7e9", help="bytes per second from the host, separated by commas (default: %(default)s)")
    add("--device-bandwidth", type=float, default=4.35e12, help="bytes per second that the device reads (default: %(default)s)")
    add("--weights", type=float, default=16.4e9, help="bytes of the model's weights (default: %(default)s)")
    add("--kv-token", type=float, default=147456, help="bytes of full KV per token (default: %(default)s)")
    add("--budget", type=float, default=DEFAULT_BUDGET, help="share of the prompt in compressed KV (default: %(default)s, as the server's)")
    add("--draft-length", type=int, default=16, help="draft tokens per request and round (default: %(default)s)")
    add("--longest", type=int, default=MAX_DRAFTS, help="maximum draft tokens before a verification (default: %(default)s)")
    add("--turnaround", type=float, default=0.001, help="seconds of a round outside its forwards (default: %(default)s)")
    add("--token-seconds", type=float, default=0.0, help="compute time of a verified token, in seconds (default: %(default)s)")
    add("--prefill-rate", type=float, default=math.inf, help="prompt tokens per second (default: prefill takes no time)")
    add("--requests", type=int, default=96, help="number of requests (default: %(default)s)")
    add("--concurrency", type=int, default=24, help="maximum number of requests at once (default: %(default)s)")
    add("--rate", type=float, default=math.inf, help="requests that arrive per second (default: all arrive at once)")
    add("--input-len", type=int, default=30720, help="mean tokens of a prompt (default: %(default)s)")
    add("--output-len", type=int, default=2048, help="mean tokens of an output (default: %(default)s)")
    add("--sigma", type=float, default=0.0, help="standard deviation of the logarithm of both lengths (default: all lengths are equal)")
    add("--horizon", type=int, default=64, help="rounds that the scheduler plans ahead (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of lengths, arrivals and acceptance (default: %(default)s)")
    add("--json", type=Path, help="write all results to this file")
    add("--plot", type=Path, help="write a plot to this PNG file")


@dataclass(frozen=True)
class SimulationResult:
    """The result of one scenario. Its fields are keys of the JSON file.

    Attributes:
        policy: Where full KV is stored.
        schedule: ``staggered``, ``lock-step``, or ``plain`` without drafts.
        acceptance: Probability that a draft token is accepted.
        memory_tokens: Tokens of KV that fit on the device.
        link_bandwidth: Bytes per second from the host.
        resident: Placed requests with full KV on the device.
        offloaded: Placed requests that load full KV.
        drafts_resident: Draft tokens of a resident request before a verification.
        drafts_offloaded: Draft tokens of an offloaded request before a verification.
        tokens_per_second: Throughput in the steady state, without prefill.
        allowed: The same by the cost model.
        overall: Tokens per second from the first request to the last, with prefill.
        tokens: Output tokens of all requests.
        requests_mean: Mean number of running requests in the steady state.
        requests_most: Maximum number of running requests.
        link_used: Share of time in which the link loads full KV.
        link_reserved: Mean reserved share of link time.
        memory_reserved: Mean reserved share of memory for loads.
        load_ms: Mean time from queueing a load to its end, in milliseconds.
        slack: Mean rounds from the end of a load to its verification.
        verifications: Verifications of all requests.
        waits: Refused verifications, counted in each round.
        slips: Verifications postponed because a load was late.
    """

    policy: str
    schedule: str
    acceptance: float
    memory_tokens: float
    link_bandwidth: float
    resident: int
    offloaded: int
    drafts_resident: int
    drafts_offloaded: int
    tokens_per_second: float
    allowed: float
    overall: float
    tokens: int
    requests_mean: float
    requests_most: int
    link_used: float
    link_reserved: float
    memory_reserved: float
    load_ms: float
    slack: float
    verifications: int
    waits: int
    slips: int

    @property
    def ratio(self) -> float:
        """Simulated throughput over that of the cost model."""
        return self.tokens_per_second / self.allowed if self.allowed else 0.0


def run(args: argparse.Namespace) -> int:
    """Simulate all combinations and print one table per machine. Returns 0."""
    results = list(simulate_all(args))
    console = report.make_console()
    machines = dict.fromkeys((each.memory_tokens, each.link_bandwidth) for each in results)
    for memory, link in machines:
        selected = [each for each in results if (each.memory_tokens, each.link_bandwidth) == (memory, link)]
        console.print(results_table(selected, f"Simulated: {memory:g} tokens of memory, link {link / 1e9:g} GB/s"))
    console.print(f"Acceptance: {MEASURED_NOTE}. To measure your model and prompts: sglang-ext-bench identity, sglang-ext-bench quality.")
    if args.json:
        rows = [asdict(each) | {"ratio": each.ratio} for each in results]
        report.write_json(args.json, {"arguments": vars(args), **report.origin(), "simulated": True, "results": rows})
    if args.plot:
        write_plot(args.plot, results, plot_heading(args))
    return 0


def simulate_all(args: argparse.Namespace) -> Iterator[SimulationResult]:
    """Simulate each combination of machine, policy, acceptance and schedule. Plain decoding runs once per machine.

    Raises:
        CommandError: An option is out of range, or a request does not fit in memory.
    """
    policies = args.policy.split(",")
    if unknown := set(policies) - set(POLICIES):
        raise CommandError(f"--policy {args.policy!r}: unknown policy {', '.join(sorted(unknown))}: pass some of {', '.join(POLICIES)}")
    acceptances = probabilities(args.acceptance, "--acceptance")
    schedules = [True] * (args.staggered or not args.lock_step) + [False] * args.lock_step
    memories = numbers(args.memory_tokens, "--memory-tokens", float)
    links = numbers(args.link_bandwidth, "--link-bandwidth", float)
    try:
        for memory, link in itertools.product(memories, links):
            costs = make_costs(args, memory, link)
            for policy in policies:
                plain = policy == "stock"
                for p, staggered in itertools.product(acceptances[:1] if plain else acceptances, [True] if plain else schedules):
                    yield simulate_one(args, costs, policy, p, staggered)
    except (CostError, SimulationError) as error:
        raise CommandError(str(error)) from error


def make_costs(args: argparse.Namespace, memory_tokens: float, link: float) -> Costs:
    """Costs of a machine for the mean request, which has generated half of its output.

    Args:
        args: Options of the command.
        memory_tokens: Tokens of KV that fit on the device.
        link: Bytes per second from the host.
    """
    return Costs(
        weights=args.weights,
        context=args.kv_token * (args.input_len + args.output_len / 2),
        bandwidth=args.device_bandwidth,
        link=link,
        memory=args.kv_token * memory_tokens,
        budget=args.budget,
        drafts=args.draft_length,
        turnaround=args.turnaround,
        token_seconds=args.token_seconds,
        recent=args.kv_token * args.output_len / 2,
    )


def make_requests(args: argparse.Namespace) -> list[SimulatedRequest]:
    """Create all requests. They are equal for all policies.

    Raises:
        CommandError: A number of requests, a length, --rate or --sigma is out of range.
    """
    if min(args.requests, args.input_len, args.output_len, args.concurrency) < 1 or not args.rate > 0 or args.sigma < 0:
        raise CommandError(
            f"--requests {args.requests}, --concurrency {args.concurrency}, --input-len {args.input_len}, --output-len {args.output_len}, "
            f"--rate {args.rate:g}, --sigma {args.sigma:g}: pass at least 1 for the first four, a --rate above 0 and a --sigma of at least 0"
        )
    noise, now, requests = random.Random(args.seed), 0.0, []
    for _ in range(args.requests):
        # The mean of a lognormal distribution is e^(mu + sigma^2 / 2).
        factors = [noise.lognormvariate(-(args.sigma**2) / 2, args.sigma) for _ in range(2)]
        prompt_len, output_len = (max(1, round(mean * factor)) for mean, factor in zip((args.input_len, args.output_len), factors))
        requests.append(SimulatedRequest(prompt_len, output_len, now))
        now += 0.0 if math.isinf(args.rate) else noise.expovariate(args.rate)
    return requests


def simulate_one(args: argparse.Namespace, costs: Costs, policy: str, p: float, staggered: bool) -> SimulationResult:
    """Simulate one scenario from the first request to the last."""
    scenario = Scenario(
        costs, args.kv_token, p, policy, args.concurrency, staggered, args.longest, args.prefill_rate, args.horizon, args.seed
    )
    simulation = Simulation(scenario, make_requests(args))
    totals, placement, scheduler = simulation.run(), simulation.placement, simulation.scheduler
    steady = totals.steady
    return SimulationResult(
        policy=policy,
        schedule="plain" if simulation.is_plain else "staggered" if staggered else "lock-step",
        acceptance=p,
        memory_tokens=costs.memory / args.kv_token,
        link_bandwidth=costs.link,
        resident=placement.resident,
        offloaded=placement.offloaded,
        drafts_resident=placement.drafts_resident,
        drafts_offloaded=placement.drafts_offloaded,
        tokens_per_second=steady.tokens / steady.seconds,
        allowed=placement.tokens_per_second,
        overall=totals.all_rounds.tokens / simulation.now,
        tokens=totals.all_rounds.tokens,
        requests_mean=steady.running_seconds / steady.seconds,
        requests_most=totals.all_rounds.max_running,
        link_used=steady.link_seconds / (steady.seconds + steady.prefill_seconds),
        link_reserved=steady.link_reserved / steady.rounds,
        memory_reserved=steady.memory_reserved / steady.rounds,
        load_ms=1000 * totals.load_seconds / max(1, totals.num_loads),
        slack=totals.slack_rounds / max(1, totals.num_loads),
        verifications=totals.all_rounds.verifications,
        waits=scheduler.refused,
        slips=scheduler.num_postponed,
    )


def results_table(results: Sequence[SimulationResult], title: str) -> Table:
    """The table of one machine. Gains are over stock, if it was simulated."""
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    plain = next((each.tokens_per_second for each in results if each.policy == "stock"), None)
    for each in results:
        table.add_row(*_row(each, plain))
    return table


def _row(result: SimulationResult, plain: float | None) -> tuple[str, ...]:
    """Cells of a result. ``plain`` is the throughput of stock in tokens per second."""
    drafts = "-" if result.schedule == "plain" else f"{result.drafts_resident or '-'} / {result.drafts_offloaded or '-'}"
    return (
        result.policy if result.schedule != "lock-step" else f"{result.policy} lock-step",
        "-" if result.policy == "stock" else f"{result.acceptance:g}",
        f"{result.tokens_per_second:.0f}",
        f"{result.allowed:.0f}",
        f"{result.ratio:.2f}",
        f"{result.tokens_per_second / plain:.2f}" if plain else "-",
        f"{result.overall:.0f}",
        f"{result.resident} + {result.offloaded}",
        drafts,
        f"{result.requests_mean:.1f} / {result.requests_most}",
        f"{result.link_used:.0%}",
        f"{result.link_reserved:.0%} / {result.memory_reserved:.0%}" if result.offloaded else "-",
        f"{result.load_ms:.0f}" if result.load_ms else "-",
        f"{result.slack:.1f}" if result.load_ms else "-",
        str(result.waits),
        str(result.slips),
    )


def plot_heading(args: argparse.Namespace) -> drawing.Heading:
    """The heading of the plot. It names the simulated machine instead of this one."""
    lengths = f"prompts of {args.input_len} and outputs of {args.output_len} tokens, {args.concurrency} at once"
    settings = f"{args.weights / 1e9:g} GB of weights, {args.kv_token:g} bytes of KV a token, {lengths}, budget {args.budget:g}"
    machine = f"simulated machine: {args.device_bandwidth / 1e12:g} TB/s, link {args.link_bandwidth} B/s, {args.memory_tokens} tokens of memory"
    return drawing.Heading("Tokens per second by where full KV is stored", settings, machine)


def write_plot(path: Path, results: Sequence[SimulationResult], heading: drawing.Heading) -> None:
    """Plot tokens per second over acceptance, one line per policy, schedule and machine. Dotted lines are those of the cost model."""
    span = sorted({each.acceptance for each in results if each.policy != "stock"} or {results[0].acceptance})
    keys = dict.fromkeys((each.policy, each.schedule, each.memory_tokens, each.link_bandwidth) for each in results)
    several, curves = len({key[2:] for key in keys}) > 1, []
    for index, key in enumerate(keys):
        policy, schedule, memory, link = key
        selected = [each for each in results if (each.policy, each.schedule, each.memory_tokens, each.link_bandwidth) == key]
        label = f"{policy}, {schedule}" + (f", {memory:g} tokens, {link / 1e9:g} GB/s" if several else "")
        if policy == "stock":
            curves.append(drawing.Curve(label, span, [selected[0].tokens_per_second] * len(span), color="gray"))
            continue
        acceptances, color = [each.acceptance for each in selected], f"C{index % 10}"
        curves.append(drawing.Curve(label, acceptances, [each.tokens_per_second for each in selected], color=color))
        curves.append(drawing.Curve(f"{label}, allowed", acceptances, [each.allowed for each in selected], ":", color))
    with drawing.png(path, (8, 4.5), heading) as axes:
        drawing.draw(axes, curves, "acceptance per token")
        axes.set(ylabel="tokens per second, simulated", ylim=(0, None))
