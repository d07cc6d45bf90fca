"""Runs a soak: collects stock's answers, starts the tested server, sends the traffic and reports the totals."""

import argparse
import json
import time
from collections.abc import Mapping, Sequence

from sglang_ext.tools import CommandError, split_flags
from sglang_ext.tools.server_process import check_servers
from sglang_ext_bench.prompts import Prompt, load_prompts, load_tokenizer
from sglang_ext_bench.report import write_json
from sglang_ext_bench.server import BenchServer, RequestClient, describe_error
from sglang_ext_bench.soaking.answers import Sample
from sglang_ext_bench.soaking.disaggregated import (
    DisaggregatedServers,
    disaggregated_flags,
    disaggregated_options,
)
from sglang_ext_bench.soaking.external_server import (
    ExternalServer,
    describe_leak,
    supported_options,
)
from sglang_ext_bench.soaking.processes import ProcessWatch
from sglang_ext_bench.soaking.request_options import OPTIONS, SERVER_FLAGS, Option
from sglang_ext_bench.soaking.sending import References, Soak, post, run_traffic
from sglang_ext_bench.soaking.shared_store import ServersOnStore, StoreProcess
from sglang_ext_bench.soaking.tally import Tally
from sglang_ext_bench.soaking.traffic import (
    cases,
    next_turns,
    shared_beginnings,
    short_prompts,
)

STRICT_CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}
ANSWER_SECONDS = 600.0
"""A request without an answer after this time is a failure."""
SETTLE_SECONDS = 3.0
RESTARTED_SHARE = 1 / 3
"""First share of the time, in which a store process is restarted."""
PLAIN_LOOP = "--disable-overlap-schedule"
"""SGLang's flag of the plain loop."""

Servers = DisaggregatedServers | ServersOnStore
Server = BenchServer | ExternalServer | Servers


def run(args: argparse.Namespace) -> int:
    """Collect stock's answers, send the traffic, and report. Return 0 if there is no problem, else 1."""
    env = server_environment(args.force_retraction)
    kv, is_overlapped = split_flags([args.kv]), not args.disable_overlap
    common = ("--dtype", "float32", *SERVER_FLAGS, *(() if is_overlapped else (PLAIN_LOOP,)), *split_flags(args.server_arg))
    process = store_process(args)
    verified = (*common, "--kv-mode", args.mode, *kv, *store_flags(args, process))
    small = ("--max-total-tokens", str(args.pool_tokens), "--schedule-conservativeness", "0.1")
    flags = disaggregated_flags(verified, small, args.link_gbps) if args.apart else {"verified": (*verified, *small)}
    options = select_options(args)
    is_lossy = args.mode == "lossy"
    started = {**({} if is_lossy or args.stock_url else {"stock": common}), **({} if args.url else flags)}
    if started:
        check_servers(args.model, started)
    given = load_prompts(args.prompts, load_tokenizer(args.model))[: args.limit]
    args.logs.mkdir(parents=True, exist_ok=True)
    if is_lossy:
        prompts, references = all_prompts(given, [prompt.input_ids[: args.output_len] for prompt in given]), {}
    else:
        with stock_server(args, common) as stock:
            check_loop(stock, is_overlapped)
            prompts, references = reference_answers(stock, given, args.output_len, options)
    tally = Tally()
    with tested_server(args, flags, env, tally, process) as server:
        check_loop(server, is_overlapped)
        drawn = cases(len(given), len(prompts) - len(given), options)
        with ProcessWatch(lambda: process_groups(server)) as processes:
            run_traffic(Soak(server, prompts, drawn, references, is_overlapped, tally, args.compressors), args)
        for problem in processes.problems():
            tally.fail(problem)
        print(processes.table())
        check_idle(server, tally)
        if isinstance(server, Servers):
            server.check_memory()
    if args.force_retraction and not tally.retractions:
        tally.fail(
            f"--force-retraction {args.force_retraction}: no request was retracted; use fewer STEPS, or "
            "more --workers or --minutes, so that several requests decode at such a step"
        )
    report(args, tally, {} if args.url else flags, is_overlapped, server, options)
    return 1 if tally.problems else 0


def select_options(args: argparse.Namespace) -> tuple[Option, ...]:
    """The request options of a soak. The servers of --url and --stock-url must be healthy; options that they do not support are left out.

    Raises:
        CommandError: A server does not answer, or no option is supported.
    """
    options = disaggregated_options() if args.apart else OPTIONS
    options = tuple(option for option in options if option.name not in args.leave_out)
    servers = [ExternalServer(url, ANSWER_SECONDS) for url in (args.url, args.stock_url) if url]
    for server in servers:
        server.check()
    return supported_options(options, servers) if servers else options


def stock_server(args: argparse.Namespace, flags: tuple[str, ...]) -> BenchServer | ExternalServer:
    """The stock server of --stock-url, or one that is started with ``flags``."""
    if args.stock_url:
        return ExternalServer(args.stock_url, ANSWER_SECONDS)
    return BenchServer(args.model, flags, args.logs / "soak-stock.log")


def store_process(args: argparse.Namespace) -> StoreProcess | None:
    """The store process of --store-process, not started."""
    return StoreProcess(args.store, int(args.store_mb * 1e6), args.logs / "soak-store.log") if args.store_process else None


def store_flags(args: argparse.Namespace, process: StoreProcess | None) -> tuple[str, ...]:
    """Flags of servers that share the store of --store."""
    if args.store is None:
        return ()
    return "--kv-store", f"file:{args.store.absolute()}?max-gb={args.store_mb / 1000:g}" if process is None else process.url, "--enable-metrics"


def tested_server(
    args: argparse.Namespace, flags: Mapping[str, tuple[str, ...]], env: Mapping[str, str], tally: Tally, process: StoreProcess | None = None
) -> Server:
    """The server of --url, one that is started, for --apart a prefill and a decode server, or for --store those that share one.

    Args:
        args: The command line.
        flags: Flags of the servers, by role.
        env: Environment variables of the server. With --apart, of the decode server, because only it retracts requests.
        tally: Collects problems of the servers.
        process: The store process of --store-process.
    """
    if args.url:
        return ExternalServer(args.url, ANSWER_SECONDS)
    if args.apart:
        return DisaggregatedServers(args.model, flags, args.logs, {"prefill": STRICT_CHECKS, "decode": env}, args.workers, tally.fail)
    if args.store is not None:
        names = [f"soak-store-{number}.log" for number in range(1, args.store_servers + 1)]
        servers = [BenchServer(args.model, flags["verified"], args.logs / name, request_timeout=ANSWER_SECONDS, env=env) for name in names]
        return ServersOnStore(servers, args.store, int(args.store_mb * 1e6), tally.fail, process, 60 * args.minutes * RESTARTED_SHARE)
    return BenchServer(args.model, flags["verified"], args.logs / f"soak-{args.mode}.log", request_timeout=ANSWER_SECONDS, env=env)


def process_groups(server: Server) -> tuple[int | None, ...]:
    """Process groups whose processes are watched. A prefill and a decode server watch their memory themselves."""
    if isinstance(server, ServersOnStore):
        return server.groups
    return () if isinstance(server, DisaggregatedServers) else (server.group,)


def check_loop(server: RequestClient | Servers, is_overlapped: bool) -> None:
    """Check that a server runs the same loop of SGLang as the other one.

    Raises:
        CommandError: It runs another loop.
    """
    found = not server.request("server_info")["disable_overlap_schedule"]
    if found != is_overlapped:
        names = {True: "overlapped", False: "plain"}
        raise CommandError(
            f"a server runs SGLang's {names[found]} loop instead of the {names[is_overlapped]} one, in which penalized answers "
            f"differ: remove {PLAIN_LOOP} from --kv and --server-arg, and pass --disable-overlap for the plain loop"
        )


def server_environment(retraction_steps: int | None) -> dict[str, str]:
    """Environment variables of the tested server: strict memory checks, and a retraction every ``retraction_steps`` steps.

    Raises:
        CommandError: The number of steps is below 1.
    """
    if retraction_steps is None:
        return dict(STRICT_CHECKS)
    if retraction_steps < 1:
        raise CommandError(f"--force-retraction {retraction_steps}: must be at least 1; leave it out for none")
    return STRICT_CHECKS | {
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": str(retraction_steps),
    }


def reference_answers(
    stock: RequestClient, given: Sequence[Prompt], tokens: int, options: Sequence[Option] = OPTIONS
) -> tuple[tuple[Prompt, ...], References]:
    """Send all cases to stock. Return all prompts, the given ones and those made of them, and stock's answers.

    Each request finds an idle server, because only an idle server can flush its cache. Right after another answer, SGLang may still
    count that request in its batch, and then draws the noise of a seeded request in another way.

    Args:
        stock: The stock server.
        given: The user's prompts.
        tokens: Most tokens of an answer.
        options: The request options.

    Raises:
        CommandError: Stock refused a request, or its answer is malformed.
    """
    references: References = {}
    prompts = tuple(given)
    for case in cases(len(given), 0, options):
        references[case.prompt, case.option.name] = _reference_answer(stock, prompts[case.prompt], case.option, tokens)
    prompts = all_prompts(given, [references[p, options[0].name][0].ids for p in range(len(given))])
    for case in cases(len(given), len(prompts) - len(given), options)[len(references) :]:
        references[case.prompt, case.option.name] = _reference_answer(stock, prompts[case.prompt], case.option, tokens)
    return prompts, references


def all_prompts(given: Sequence[Prompt], answers: Sequence[Sequence[int]]) -> tuple[Prompt, ...]:
    """The user's prompts, and those made of them and of an answer to each."""
    return (*given, *next_turns(given, answers), *shared_beginnings(given), *short_prompts(given))


def _reference_answer(stock: RequestClient, prompt: Prompt, option: Option, tokens: int) -> tuple[Sample, ...]:
    stock.flush_cache()
    try:
        stream = bool(option.stream)
        return post(stock, option, option.body(prompt, tokens) | {"stream": stream}, stream)
    except OSError as error:
        raise CommandError(
            f"stock, {option.name}, {prompt.name}: {describe_error(error)}; if stock does not support such requests, pass "
            f"--leave-out {option.name}"
        ) from error


def check_idle(server: Server, tally: Tally) -> None:
    """Check a server after the traffic: it must hold no requests and no used tokens, and still answer."""
    time.sleep(SETTLE_SECONDS)
    try:
        for role, each in server.by_role.items() if isinstance(server, Servers) else [("", server)]:
            if leak := describe_leak(each):
                tally.fail(f"the {role} server: {leak}" if role else leak)
        server.flush_cache()
        server.post("generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 4}})
        server.flush_cache()
    except (CommandError, OSError) as error:
        tally.fail(f"after the traffic: {error}\n{server.describe_log()}")


def report(
    args: argparse.Namespace,
    tally: Tally,
    flags: Mapping[str, tuple[str, ...]],
    is_overlapped: bool,
    server: Server,
    options: Sequence[Option],
) -> None:
    """Print the totals, and write them to ``args.json``."""
    totals = {
        "mode": args.mode,
        "minutes": args.minutes,
        "workers": args.workers,
        "most_requests": args.requests,
        "urls": {"server": args.url, "stock": args.stock_url},
        "force_retraction": args.force_retraction,
        "overlapped": is_overlapped,
        "flags": {name: list(server_flags) for name, server_flags in flags.items()},
        "apart": server.as_json() if isinstance(server, DisaggregatedServers) else None,
        "store": server.as_json() if isinstance(server, ServersOnStore) else None,
        **tally.as_json(),
    }
    print(tally.table())
    if isinstance(server, Servers):
        print(server.table())
    print(json.dumps(totals, indent=1))
    if args.json:
        requests = [{"name": each.name, **each.sampling, **each.fields} for each in options]
        write_json(args.json, {**totals, "requests": requests})
