"""Runs ``python -m sglang_ext_bench simulate``: all combinations of machine, policy, acceptance and schedule."""

import argparse
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import asdict

from sglang_ext.managers.kv_offload.costs import CostError, Costs
from sglang_ext.tools import CommandError
from sglang_ext_bench import report
from sglang_ext_bench.options import numbers, probabilities
from sglang_ext_bench.simulating.options import MEASURED_NOTE, POLICIES, add_arguments
from sglang_ext_bench.simulating.scenario import Request, Scenario, SimulationError
from sglang_ext_bench.simulating.simulate_report import table, write_plot
from sglang_ext_bench.simulating.simulated import Result
from sglang_ext_bench.simulating.simulation import Engine
from sglang_ext_bench import drawing

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Simulate all combinations and print a table of each machine; 0 when all could run."""
    results = list(simulate(args))
    console = report.make_console()
    machines = dict.fromkeys((each.memory_tokens, each.link_bandwidth) for each in results)
    for memory, link in machines:
        mine = [each for each in results if (each.memory_tokens, each.link_bandwidth) == (memory, link)]
        console.print(table(mine, f"Simulated: {memory:g} tokens of memory, link {link / 1e9:g} GB/s"))
    console.print(f"Acceptance: {MEASURED_NOTE}. `bench identity` and `bench quality` measure it on your model and prompts.")
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
        CommandError: an option is out of range, or a request fits in no memory.
    """
    policies = args.policy.split(",")
    if unknown := set(policies) - set(POLICIES):
        raise CommandError(f"--policy {args.policy!r}: {', '.join(sorted(unknown))} is none of {', '.join(POLICIES)}")
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
        raise CommandError(str(error)) from error


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
        CommandError: there are none.
    """
    if min(args.requests, args.input_len, args.output_len, args.concurrency) < 1 or not args.rate > 0 or args.sigma < 0:
        raise CommandError(
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
        slips=admission.num_postponed,
    )
