"""Simulate verified decoding with full KV in host memory, without a model: what would a machine gain, from which acceptance on?

Time comes from bytes over bandwidths, acceptance from random numbers; verifications and loads are placed by the engine's
own admission. Policies say where full KV lies: ``stock`` decodes plainly; ``resident`` keeps it on the device, so that
others wait; ``host`` loads it to verify; ``auto`` does what the equations find best. *Allowed* is what the equations say of
the same placement in the steady state, without prefill; *overall* is from the first request to the last. *Placed* are requests
with full KV on the device, and those that load it; of both follow the *drafts* until a verification. *Rings* are the shares of
link time and of memory that are reserved. *Slack* is iterations from a load's end to its verification.
"""

import argparse
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from sglang_ext.bench import BenchError, report
from sglang_ext.bench.options import numbers, probabilities
from sglang_ext.bench.simulating.scenario import TIERS, Request, Scenario, SimulationError
from sglang_ext.bench.simulating.simulate_report import table, write_plot
from sglang_ext.bench.simulating.simulated import Result
from sglang_ext.bench.simulating.simulation import Engine
from sglang_ext.bench.speed import drawing
from sglang_ext.config.options import DEFAULT_BUDGET
from sglang_ext.managers.offload.costs import CostError, Costs
from sglang_ext.managers.offload.placement import LONGEST

POLICIES = ("stock", *TIERS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line; the defaults are Qwen3-8B on an H200."""
    add = parser.add_argument
    add("--policy", default=",".join(POLICIES), help="separated by commas: %(default)s")
    add("--acceptance", default="0.97,0.98,0.99,0.995", help="probabilities per token, separated by commas")
    add("--staggered", action="store_true", help="verify requests in iterations of their own (default)")
    add("--lock-step", action="store_true", help="verify all in the same iteration; with --staggered, both")
    add("--memory-tokens", default="262144", help="tokens that fit in the device's memory for KV, separated by commas")
    add("--link-bandwidth", default="53.7e9", help="bytes per second from the host, separated by commas")
    add("--device-bandwidth", type=float, default=4.35e12, help="bytes per second that the device reads")
    add("--weights", type=float, default=16.4e9, help="bytes of the model's weights")
    add("--kv-token", type=float, default=147456, help="bytes of full KV of a token")
    add("--budget", type=float, default=DEFAULT_BUDGET, help="share of the prompt that a copy keeps (default: %(default)s, as the server's)")
    add("--draft-length", type=int, default=16, help="drafts of a request in a round")
    add("--longest", type=int, default=LONGEST, help="drafts until a verification, at most")
    add("--turnaround", type=float, default=0.001, help="seconds of a round beside its forwards")
    add("--token-seconds", type=float, default=0.0, help="of computing a verified token")
    add("--prefill-rate", type=float, default=math.inf, help="prompt tokens per second; default: prefill takes no time")
    add("--requests", type=int, default=96, help="in all")
    add("--concurrency", type=int, default=24, help="requests that are sent at once, at most")
    add("--rate", type=float, default=math.inf, help="requests per second that arrive; default: all at once")
    add("--input-len", type=int, default=30720, help="tokens of prompts, on average")
    add("--output-len", type=int, default=2048, help="tokens of outputs, on average")
    add("--sigma", type=float, default=0.0, help="of the logarithm of both lengths; 0: all are equal")
    add("--horizon", type=int, default=64, help="iterations that the admission plans")
    add("--seed", type=int, default=0, help="of lengths, arrivals and acceptance")
    add("--json", type=Path, help="write all figures here")
    add("--plot", type=Path, help="write a PNG here")


def run(args: argparse.Namespace) -> int:
    """Simulate all combinations and print a table of each machine; 0 when all could run."""
    results = list(simulate(args))
    console = report.make_console()
    machines = dict.fromkeys((each.memory_tokens, each.link_bandwidth) for each in results)
    for memory, link in machines:
        mine = [each for each in results if (each.memory_tokens, each.link_bandwidth) == (memory, link)]
        console.print(table(mine, f"Simulated: {memory:g} tokens of memory, link {link / 1e9:g} GB/s"))
    if args.json:
        rows = [asdict(each) | {"ratio": each.ratio} for each in results]
        report.write_json(args.json, {"arguments": vars(args), **report.origin(), "simulated": True, "results": rows})
    if args.plot:
        write_plot(args.plot, results, heading(args))
    return 0


def heading(args: argparse.Namespace) -> drawing.Heading:
    """What the plot is of: no machine that servers ran on."""
    lengths = f"prompts of {args.input_len} and outputs of {args.output_len} tokens, {args.concurrency} at once"
    settings = f"{args.weights / 1e9:g} GB of weights, {args.kv_token:g} bytes of KV a token, {lengths}, budget {args.budget:g}"
    machine = f"simulated machine: {args.device_bandwidth / 1e12:g} TB/s, link {args.link_bandwidth} B/s, {args.memory_tokens} tokens of memory"
    return drawing.Heading("Tokens per second by where full KV lies", settings, machine)


def simulate(args: argparse.Namespace) -> Iterator[Result]:
    """Each combination of machine, policy, acceptance and schedule; plain decoding once for a machine.

    Raises:
        BenchError: an option is out of range, or a request fits in no memory.
    """
    policies = args.policy.split(",")
    if unknown := set(policies) - set(POLICIES):
        raise BenchError(f"--policy {args.policy!r}: {', '.join(sorted(unknown))} is none of {', '.join(POLICIES)}")
    acceptances = probabilities(args.acceptance, "--acceptance")
    schedules = [True] * (args.staggered or not args.lock_step) + [False] * args.lock_step
    memories = numbers(args.memory_tokens, "--memory-tokens", float)
    links = numbers(args.link_bandwidth, "--link-bandwidth", float)
    try:
        for memory, link in itertools.product(memories, links):
            costs = costs_of(args, memory, link)
            for policy in policies:
                plain = policy == "stock"
                for p, staggered in itertools.product(acceptances[:1] if plain else acceptances, [True] if plain else schedules):
                    yield one(args, costs, policy, p, staggered)
    except (CostError, SimulationError) as error:
        raise BenchError(str(error)) from error


def costs_of(args: argparse.Namespace, memory_tokens: float, link: float) -> Costs:
    """Of the mean request, which has half of its output."""
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


def requests_of(args: argparse.Namespace) -> list[Request]:
    """All requests, the same for each policy.

    Raises:
        BenchError: there are none.
    """
    if min(args.requests, args.input_len, args.output_len, args.concurrency) < 1 or not args.rate > 0 or args.sigma < 0:
        raise BenchError(
            "pass at least 1 for --requests, --concurrency, --input-len and --output-len, and no --rate or --sigma below 0"
        )
    noise, now, requests = random.Random(args.seed), 0.0, []
    for _ in range(args.requests):
        # A lognormal number's mean is e^(mu + sigma^2 / 2).
        factors = [noise.lognormvariate(-(args.sigma**2) / 2, args.sigma) for _ in range(2)]
        prompt, output = (max(1, round(mean * factor)) for mean, factor in zip((args.input_len, args.output_len), factors))
        requests.append(Request(prompt, output, now))
        now += 0.0 if math.isinf(args.rate) else noise.expovariate(args.rate)
    return requests


def one(args: argparse.Namespace, costs: Costs, policy: str, p: float, staggered: bool) -> Result:
    """One scenario, from the first request to the last."""
    scenario = Scenario(
        costs, args.kv_token, p, policy, args.concurrency, staggered, args.longest, args.prefill_rate, args.horizon, args.seed
    )
    engine = Engine(scenario, requests_of(args))
    rounds, placement, admission = engine.run(), engine.placement, engine.admission
    steady = rounds.steady
    return Result(
        policy=policy,
        schedule="plain" if engine.plain else "staggered" if staggered else "lock-step",
        acceptance=p,
        memory_tokens=costs.memory / args.kv_token,
        link_bandwidth=costs.link,
        resident=placement.resident,
        offloaded=placement.offloaded,
        drafts_resident=placement.drafts_resident,
        drafts_offloaded=placement.drafts_offloaded,
        tokens_per_second=steady.tokens / steady.seconds,
        allowed=placement.tokens_per_second,
        overall=rounds.whole.tokens / engine.now,
        tokens=rounds.whole.tokens,
        requests_mean=steady.running / steady.seconds,
        requests_most=rounds.whole.most,
        link_used=steady.busy / (steady.seconds + steady.prefill),
        link_reserved=steady.link / steady.rounds,
        memory_reserved=steady.memory / steady.rounds,
        load_ms=1000 * rounds.latency / max(1, rounds.loads),
        slack=rounds.slack / max(1, rounds.loads),
        verifications=rounds.whole.verifications,
        waits=admission.refused,
        slips=admission.slips,
    )
