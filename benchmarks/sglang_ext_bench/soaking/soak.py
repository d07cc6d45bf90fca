"""Runs ``python -m sglang_ext_bench soak``: asks stock for references, then sends the traffic and checks each answer."""

import argparse
import json
import time
from collections.abc import Mapping, Sequence

from sglang_ext.tools import CommandError
from sglang_ext.tools.server_client import ServerClient, describe_error
from sglang_ext.tools.server_process import ServerProcess, check_servers
from sglang_ext.tools.options import split_flags as words
from sglang_ext_bench.prompts import Prompt, load_prompts, load_tokenizer
from sglang_ext_bench.report import write_json
from sglang_ext_bench.soaking.apart import Apart, flags_apart, options_apart
from sglang_ext_bench.soaking.given import GivenServer, leak, served_options
from sglang_ext_bench.soaking.processes import ProcessWatch
from sglang_ext_bench.soaking.request_options import OPTIONS, SERVER_FLAGS, Option
from sglang_ext_bench.soaking.sending import References, Soak, answer, traffic
from sglang_ext_bench.soaking.soak_prompts import (
    cases,
    next_turns,
    shared_beginnings,
    short_ones,
)
from sglang_ext_bench.soaking.tally import Tally

STRICT_CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}
ANSWER_SECONDS = 600.0
"""A request without an answer for so long is a failure."""
SETTLE_SECONDS = 3.0
PLAIN_LOOP = "--disable-overlap-schedule"
"""SGLang's flag."""


def run(args: argparse.Namespace) -> int:
    """Reference answers, then traffic; 0 when all is well."""
    check_choices(args)
    env = server_environment(args.force_retraction)
    kv, overlapped = words([args.kv]), not args.disable_overlap
    common = ("--dtype", "float32", *SERVER_FLAGS, *(() if overlapped else (PLAIN_LOOP,)), *words(args.server_arg))
    verified = (*common, "--kv-mode", args.mode, *kv)
    small = ("--max-total-tokens", str(args.pool_tokens), "--schedule-conservativeness", "0.1")
    flags = flags_apart(verified, small, args.link_gbps) if args.apart else {"verified": (*verified, *small)}
    given_servers = [GivenServer(url, ANSWER_SECONDS) for url in (args.url, args.stock_url) if url]
    options = asked_options(args)
    for server in given_servers:
        server.check()
    if given_servers:
        options = served_options(options, given_servers)
    approximate = args.mode == "lossy"
    started = {**({} if approximate or args.stock_url else {"stock": common}), **({} if args.url else flags)}
    if started:
        check_servers(args.model, started)
    given = load_prompts(args.prompts, load_tokenizer(args.model))[: args.limit]
    args.logs.mkdir(parents=True, exist_ok=True)
    if approximate:
        prompts, references = all_prompts(given, [prompt.input_ids[: args.output_len] for prompt in given]), {}
    else:
        with stock_server(args, common) as stock:
            check_loop(stock, overlapped)
            prompts, references = reference_answers(stock, given, args.output_len, options)
    tally = Tally()
    with verified_server(args, flags, env, tally) as server:
        check_loop(server, overlapped)
        asked = cases(len(given), len(prompts) - len(given), options)
        with ProcessWatch(None if isinstance(server, Apart) else server.group) as processes:
            traffic(Soak(server, prompts, asked, references, overlapped, tally, args.compressors), args)
        for problem in processes.problems():
            tally.fail(problem)
        print(processes.table())
        finish(server, tally)
        if isinstance(server, Apart):
            server.check_memory()
    if args.force_retraction and not tally.retractions:
        tally.fail(
            f"--force-retraction {args.force_retraction}: no request was retracted; use fewer STEPS, or "
            "more --workers or --minutes, so that several requests decode at such a step"
        )
    report(args, tally, {} if args.url else flags, overlapped, server, options)
    return 1 if tally.problems else 0


def check_choices(args: argparse.Namespace) -> None:
    """Refuse options that exclude each other, and unknown names.

    Raises:
        CommandError: --url or --mode lossy comes with --apart, or --url with --force-retraction. --leave-out has an unknown name. --requests
            is negative.
    """
    known = [option.name for option in OPTIONS]
    unknown = [name for name in args.leave_out if name not in known]
    if unknown:
        raise CommandError(f"--leave-out {unknown[0]!r} is no way to ask: pass any of {', '.join(known)}")
    if args.requests < 0:
        raise CommandError(f"--requests {args.requests}: must be 0, for no limit, or more")
    if args.url and args.apart:
        raise CommandError("--apart with --url: the soak starts the two servers of --apart itself; leave out one of these")
    if args.url and args.force_retraction:
        raise CommandError(
            f"--force-retraction with --url: start the server at {args.url} with SGLANG_TEST_RETRACT=1 and "
            f"SGLANG_TEST_RETRACT_INTERVAL={args.force_retraction}, and leave --force-retraction out"
        )
    if args.apart and args.mode != "verified":
        raise CommandError(f"--apart with --mode {args.mode}: two servers are verified; leave out one of these")


def asked_options(args: argparse.Namespace) -> tuple[Option, ...]:
    """The ways to ask that the servers serve."""
    options = options_apart() if args.apart else OPTIONS
    return tuple(option for option in options if option.name not in args.leave_out)


def stock_server(args: argparse.Namespace, flags: tuple[str, ...]) -> ServerProcess | GivenServer:
    """The given stock server, or one that is started with ``flags``."""
    if args.stock_url:
        return GivenServer(args.stock_url, ANSWER_SECONDS)
    return ServerProcess(args.model, flags, args.logs / "soak-stock.log")


def verified_server(
    args: argparse.Namespace, flags: Mapping[str, tuple[str, ...]], env: Mapping[str, str], tally: Tally
) -> ServerProcess | GivenServer | Apart:
    """The given one, a started one, or two apart, of which only the one that decodes is made to retract."""
    if args.url:
        return GivenServer(args.url, ANSWER_SECONDS)
    if args.apart:
        return Apart(args.model, flags, args.logs, {"prefill": STRICT_CHECKS, "decode": env}, args.workers, tally.fail)
    return ServerProcess(args.model, flags["verified"], args.logs / f"soak-{args.mode}.log", request_timeout=ANSWER_SECONDS, env=env)


def check_loop(server: ServerClient | Apart, overlapped: bool) -> None:
    """Raise unless the server runs the loop that answers are compared under.

    Raises:
        CommandError: it runs the other one.
    """
    found = not server.request("server_info")["disable_overlap_schedule"]
    if found != overlapped:
        names = {True: "overlapped", False: "plain"}
        raise CommandError(
            f"a server runs SGLang's {names[found]} loop instead of the {names[overlapped]} one, in which penalized answers "
            "differ: name no --disable-overlap-schedule in --kv or --server-arg, but pass --disable-overlap"
        )


def server_environment(retraction_steps: int | None) -> dict[str, str]:
    """Variables of the verified server.

    Raises:
        CommandError: the number of steps is below 1.
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
    stock: ServerClient, given: Sequence[Prompt], tokens: int, options: Sequence[Option] = OPTIONS
) -> tuple[tuple[Prompt, ...], References]:
    """All prompts, the given ones and those made of them, and stock's answers of ``tokens`` tokens to them.

    Each request finds an idle server, which only then can flush its cache. Right after another answer, SGLang
    may still count that request in its batch, and then draws the noise of a seeded one by another route.

    Raises:
        CommandError: stock refused one, or answered without tokens.
    """
    references: References = {}
    prompts = tuple(given)
    for case in cases(len(given), 0, options):
        references[case.prompt, case.option.name] = _reference(stock, prompts[case.prompt], case.option, tokens)
    prompts = all_prompts(given, [references[p, options[0].name][0].ids for p in range(len(given))])
    for case in cases(len(given), len(prompts) - len(given), options)[len(references) :]:
        references[case.prompt, case.option.name] = _reference(stock, prompts[case.prompt], case.option, tokens)
    return prompts, references


def all_prompts(given: Sequence[Prompt], answers: Sequence[Sequence[int]]) -> tuple[Prompt, ...]:
    """The given prompts, and those made of them and of an answer to each."""
    return (*given, *next_turns(given, answers), *shared_beginnings(given), *short_ones(given))


def _reference(stock: ServerClient, prompt: Prompt, option: Option, tokens: int) -> tuple:
    stock.flush_cache()
    try:
        stream = bool(option.stream)
        return answer(stock, option, option.body(prompt, tokens) | {"stream": stream}, stream)
    except OSError as error:
        told = f"stock, {option.name}, {prompt.name}: {describe_error(error)}"
        raise CommandError(f"{told}; if stock does not serve such requests, pass --leave-out {option.name}") from error


def finish(server: ServerProcess | GivenServer | Apart, tally: Tally) -> None:
    """The idle server must hold nothing, pass its own checks and still answer."""
    time.sleep(SETTLE_SECONDS)
    try:
        for role, each in server.by_role.items() if isinstance(server, Apart) else [("", server)]:
            if held := leak(each):
                tally.fail(f"the {role} server: {held}" if role else held)
        server.flush_cache()
        server.post("generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 4}})
        server.flush_cache()
    except (CommandError, OSError) as error:
        tally.fail(f"after the traffic: {error}\n{server.describe_log()}")


def report(
    args: argparse.Namespace,
    tally: Tally,
    flags: Mapping[str, tuple[str, ...]],
    overlapped: bool,
    server: ServerProcess | GivenServer | Apart,
    options: Sequence[Option],
) -> None:
    """Print and write the totals."""
    totals = {
        "mode": args.mode,
        "minutes": args.minutes,
        "workers": args.workers,
        "most_requests": args.requests,
        "urls": {"server": args.url, "stock": args.stock_url},
        "force_retraction": args.force_retraction,
        "overlapped": overlapped,
        "flags": {name: list(of_server) for name, of_server in flags.items()},
        "apart": server.as_json() if isinstance(server, Apart) else None,
        **tally.as_json(),
    }
    print(tally.table())
    if isinstance(server, Apart):
        print(server.table())
    print(json.dumps(totals, indent=1))
    if args.json:
        asked = [{"name": each.name, **each.sampling, **each.fields} for each in options]
        write_json(args.json, {**totals, "requests": asked})
