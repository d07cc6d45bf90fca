"""Compare verified decoding with stock SGLang, token by token.

Starts one server at a time on the loopback interface: stock SGLang once, then the controls (stock
with other batch shapes), then one server for each compressor and budget. All get the same prompts
with caches in the same state, and for a seeded run the same sampling seed. Ends with code 1 if a
prompt fails, if an output differs in float32 beyond the tolerance, or if outputs differ in another
dtype more than the controls' do.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from sglang_ext.tools.options import seconds, split
from sglang_ext_bench.comparing.identity_config import AUTO, IdentityConfig
from sglang_ext_bench.options import DTYPES, names


def _floats(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in names(text))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in names(text))


def given_again(given: Sequence[str], own: Iterable[str]) -> str | None:
    """The first flag, by name, in command lines that a benchmark's ``own`` words have, too; None for none."""
    return min({word.partition("=")[0] for word in words(given) if word.startswith("--")} & {*own}, default=None)


def words(texts: Sequence[str]) -> tuple[str, ...]:
    """Flags that were given in several texts, each split as a shell does.

    Raises:
        CommandError: a quote is left open.
    """
    return tuple(word for text in texts for word in split(text, "flags"))


def _tolerance(text: str) -> float | Literal["auto"]:
    if text == AUTO:
        return AUTO
    return float(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``identity``."""
    add = parser.add_argument
    add("--model", required=True, help="model folder or name")
    add("--prompts", type=Path, help="folder of .txt files, or JSON lines (text / messages); default: text that this machine has")
    add("--output-len", type=int, default=IdentityConfig.output_len, help="tokens to generate for each prompt (default: %(default)s)")
    add("--compressor", type=names, default=IdentityConfig.compressors, help="names, separated by commas (default: snapkv)")
    add("--budget", type=_floats, default=(), help="shares of the KV cache kept, separated by commas (default: the server's)")
    add("--draft-length", type=int, default=16)
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, help="sampling seed; needs --temperature")
    add(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        help="start both servers with --enable-deterministic-inference, without which SGLang ignores "
        "seeds (default: with --seed)",
    )
    add("--dtype", default="float32", choices=DTYPES)
    add("--concurrency", type=_ints, default=(1,), help="prompts in flight, separated by commas")
    add("--cache", choices=("cold", "warm"), default="cold", help="warm: each prompt is cached before")
    add("--page-size", type=int, default=1)
    add("--chunked-prefill-size", type=int)
    add(
        "--server-arg",
        action="append",
        default=[],
        metavar="'--name value'",
        help='for both servers, repeatable; write --server-arg="--flag"',
    )
    add(
        "--kv-arg",
        action="append",
        default=[],
        metavar="'--name value'",
        help='for the verified servers alone, repeatable: --kv-arg="--kv-full-tier host --kv-host-gb 1"',
    )
    add("--control", action="store_true", help="compare stock with stock: the noise of the method itself")
    add(
        "--control-arg",
        action="append",
        default=[],
        metavar="'--name value'",
        help="beside the verified arms compare stock with a stock server that has this argument too, "
        'for the noise of stock itself: --control-arg="--chunked-prefill-size 512"; in other dtypes than '
        "float32 the run fails if verified outputs differ more than 1.5 times as often, or at larger "
        "top-2 margins than the 99th percentile of the control's",
    )
    add(
        "--control-arm",
        action="append",
        default=[],
        metavar="'--name value'",
        help="like --control-arg, but each one is a stock server of its own, for several batch shapes",
    )
    add(
        "--logprobs",
        action="store_true",
        help="ask the verified arms for log-probabilities too, and report the largest difference from "
        "stock's (controls are always asked)",
    )
    add(
        "--margin-tolerance",
        type=_tolerance,
        default=0.0,
        metavar="auto|MARGIN",
        help="forgive a float32 difference where stock's two best logits lie closer than this, in at most "
        "0.1%% of the outputs (default: none is forgiven); auto: 10 times the largest difference of a "
        "log-probability between stock and the controls, which must be given",
    )
    add("--limit", type=int, help="use the first prompts only")
    add("--port", type=int, default=0, help="default: any free one")
    add("--start-timeout", type=seconds, default=300.0, metavar="SECONDS")
    add("--request-timeout", type=float, default=1800.0, metavar="SECONDS")
    add("--logs", type=Path, help="folder that keeps the servers' logs")
    add("--json", type=Path, help="write the report")
    add("--plot", type=Path, help="write a PNG of acceptance by draft position")


def run(args: argparse.Namespace) -> int:
    """Run the command, whose module loads PyTorch and SGLang."""
    from sglang_ext_bench.comparing.identity import run

    return run(args)


def config_from(args: argparse.Namespace) -> IdentityConfig:
    """Check parsed options.

    Raises:
        CommandError: an option's value is out of range, or a quote is left open.
    """
    given = dict(vars(args))
    for name in ("logs", "json", "plot"):
        given.pop(name)
    given["compressors"] = given.pop("compressor")
    given["budgets"] = given.pop("budget")
    given["server_args"] = words(given.pop("server_arg"))
    given["kv_args"] = words(given.pop("kv_arg"))
    together = words(given.pop("control_arg"))
    apart = tuple(tuple(split(text, "flags")) for text in given.pop("control_arm"))
    given["control_arms"] = ((together,) if together else ()) + apart
    if given["deterministic"] is None:
        given["deterministic"] = given["seed"] is not None
    return IdentityConfig(**given)
