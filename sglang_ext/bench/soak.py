"""Mixed traffic against one verified server for minutes: nothing wrong, nothing leaked, nothing dead.

Stock SGLang answers a set of prompts and sampling options first. Then a verified server, with a pool
too small for the traffic (so that requests are retracted) and SGLang's invariant checks in strict mode,
gets random ones of them with random lengths, some streamed, some aborted; each answer must be the
beginning of stock's. Ends with code 1 on a wrong answer, an unexpected error or a dead server, and with
--force-retraction if no request was retracted.
"""

import argparse
import json
import time
from pathlib import Path

from sglang_ext.bench import BenchError
from sglang_ext.bench.answers import read_samples
from sglang_ext.bench.client import ServerClient, describe_error
from sglang_ext.bench.prompts import Prompt, load_prompts, load_tokenizer
from sglang_ext.bench.sending import References, traffic
from sglang_ext.bench.server import ServerProcess
from sglang_ext.bench.tally import Tally
from sglang_ext.bench.traffic import OPTIONS

STRICT_CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
}
ANSWER_SECONDS = 600.0
"""A request without an answer for so long is a failure."""
SETTLE_SECONDS = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="as for identity")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--workers", type=int, default=8, help="requests in flight")
    parser.add_argument("--output-len", type=int, default=96, help="longest answer, in tokens")
    parser.add_argument("--pool-tokens", type=int, default=9000, help="--max-total-tokens of the server")
    parser.add_argument("--limit", type=int, default=8, help="use the first prompts only")
    parser.add_argument("--kv", default="--kv-compressor snapkv --kv-budget 0.25", help="flags of the mode")
    parser.add_argument("--seed", type=int, default=0, help="of the traffic")
    parser.add_argument(
        "--force-retraction",
        type=int,
        metavar="STEPS",
        help="have the verified server retract a request every STEPS forward passes in which several "
        "decode (SGLANG_TEST_RETRACT), and fail if none was",
    )
    parser.add_argument("--logs", type=Path, default=Path("."))
    parser.add_argument("--json", type=Path, help="write the totals")


def run(args: argparse.Namespace) -> int:
    """Reference answers, then traffic; 0 when all is well."""
    env = server_environment(args.force_retraction)
    prompts = load_prompts(args.prompts, load_tokenizer(args.model))[: args.limit]
    args.logs.mkdir(parents=True, exist_ok=True)
    common = ("--dtype", "float32", "--enable-deterministic-inference")
    with ServerProcess(args.model, common, args.logs / "soak-stock.log") as stock:
        references = reference_answers(stock, prompts, args.output_len)
    flags = (*common, "--kv-mode", "verified", *args.kv.split())
    flags += ("--max-total-tokens", str(args.pool_tokens), "--schedule-conservativeness", "0.1")
    tally = Tally()
    log = args.logs / "soak-verified.log"
    with ServerProcess(args.model, flags, log, request_timeout=ANSWER_SECONDS, env=env) as server:
        traffic(server, prompts, references, args, tally)
        finish(server, tally)
    if args.force_retraction and not tally.retractions:
        tally.fail(
            f"--force-retraction {args.force_retraction}: no request was retracted; use fewer STEPS, or "
            "more --workers or --minutes, so that several requests decode at such a step"
        )
    report(args, tally, flags)
    return 1 if tally.problems else 0


def server_environment(retraction_steps: int | None) -> dict[str, str]:
    """Variables of the verified server.

    Raises:
        BenchError: the number of steps is below 1.
    """
    if retraction_steps is None:
        return dict(STRICT_CHECKS)
    if retraction_steps < 1:
        raise BenchError(f"--force-retraction {retraction_steps}: must be at least 1; leave it out for none")
    return STRICT_CHECKS | {
        "SGLANG_TEST_RETRACT": "1",
        "SGLANG_TEST_RETRACT_INTERVAL": str(retraction_steps),
    }


def reference_answers(stock: ServerClient, prompts: tuple[Prompt, ...], tokens: int) -> References:
    """Stock's answers of ``tokens`` tokens to each prompt with each option, asked one by one.

    Each finds an idle server, which only then can flush its cache. Right after another answer, SGLang
    may still count that request in its batch, and then draws the noise of a seeded one by another route.

    Raises:
        BenchError: stock refused one, or answered without tokens.
    """
    references = {}
    for p, prompt in enumerate(prompts):
        for option in OPTIONS:
            stock.flush_cache()
            try:
                answer = stock.post("generate", option.body(prompt, tokens))
            except OSError as error:
                raise BenchError(f"stock, {option.name}, {prompt.name}: {describe_error(error)}") from error
            references[p, option.name] = read_samples(answer)
    return references


def finish(server: ServerProcess, tally: Tally) -> None:
    """The idle server must pass its own checks and still answer."""
    time.sleep(SETTLE_SECONDS)
    try:
        server.flush_cache()
        server.post("generate", {"text": "Hello", "sampling_params": {"max_new_tokens": 4}})
    except (BenchError, OSError) as error:
        tally.fail(f"after the traffic: {error}\n{server.describe_log()}")


def report(args: argparse.Namespace, tally: Tally, flags: tuple[str, ...]) -> None:
    """Print and write the totals."""
    totals = {
        "minutes": args.minutes,
        "workers": args.workers,
        "force_retraction": args.force_retraction,
        "flags": list(flags),
        **tally.as_json(),
        "requests": [{"name": each.name, **each.sampling, **each.fields} for each in OPTIONS],
    }
    print(json.dumps(totals, indent=1))
    if args.json:
        args.json.write_text(json.dumps(totals, indent=1))
