"""The command line of ``python -m sglang_ext.bench identity``."""

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.bench import BenchError
from sglang_ext.bench.client import SamplingSettings


@dataclass(frozen=True)
class IdentityConfig:
    """The command line of ``identity``, checked. Field names are those of the options."""

    model: str
    prompts: Path
    output_len: int
    compressors: tuple[str, ...]
    budgets: tuple[float, ...]
    draft_length: int = 16
    temperature: float = 0.0
    seed: int | None = None
    deterministic: bool = False
    dtype: str = "float32"
    concurrency: tuple[int, ...] = (1,)
    cache: str = "cold"
    page_size: int = 1
    chunked_prefill_size: int | None = None
    server_args: tuple[str, ...] = ()
    control: bool = False
    control_args: tuple[str, ...] = ()
    margin_tolerance: float = 0.0
    limit: int | None = None
    port: int = 0
    start_timeout: float = 300.0
    request_timeout: float = 1800.0

    def __post_init__(self) -> None:
        """Refuse what cannot be compared.

        Raises:
            BenchError: naming the option, its value and what is allowed.
        """
        counts = {"--output-len": self.output_len, "--page-size": self.page_size}
        counts |= {"--draft-length": self.draft_length}
        counts |= {"--concurrency": min(self.concurrency, default=0)}
        counts |= {"--limit": 1 if self.limit is None else self.limit}
        for option, value in counts.items():
            if value < 1:
                raise BenchError(f"{option} {value}: must be at least 1")
        for budget in self.budgets:
            if not 0 < budget <= 1:
                raise BenchError(f"--budget {budget:g}: a budget is a share of the cache in (0, 1]")
        if not self.control and not (self.compressors and self.budgets):
            raise BenchError("--compressor and --budget are needed (or --control for stock against stock)")
        self._check_sampling()

    def _check_sampling(self) -> None:
        if self.temperature < 0:
            raise BenchError(f"--temperature {self.temperature:g}: must be 0 (greedy) or above")
        if (self.temperature > 0) != (self.seed is not None):
            raise BenchError(
                f"--temperature {self.temperature:g} with --seed {self.seed}: outputs can be compared "
                "greedily (no seed) or sampled with a seed; pass both or neither"
            )
        if self.temperature > 0 and self.margin_tolerance > 0:
            raise BenchError(
                "--margin-tolerance holds for greedy runs: a sampled token may lie far below the two "
                "best; drop --margin-tolerance or --temperature"
            )

    @property
    def common_server_arguments(self) -> tuple[str, ...]:
        """Arguments that both arms get."""
        arguments = ["--dtype", self.dtype, "--page-size", str(self.page_size)]
        if self.chunked_prefill_size is not None:
            arguments += ["--chunked-prefill-size", str(self.chunked_prefill_size)]
        if self.deterministic:
            arguments.append("--enable-deterministic-inference")
        return (*arguments, *self.server_args)

    @property
    def sampling(self) -> SamplingSettings:
        """How both arms choose tokens."""
        return SamplingSettings(self.temperature, self.seed)


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _floats(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in _names(text))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in _names(text))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``identity``."""
    add = parser.add_argument
    add("--model", required=True, help="model folder or name")
    add("--prompts", required=True, type=Path, help="folder of .txt files, or JSON lines (text / messages)")
    add("--output-len", required=True, type=int, help="tokens to generate for each prompt")
    add("--compressor", type=_names, default=(), help="names, separated by commas")
    add("--budget", type=_floats, default=(), help="shares of the KV cache kept, separated by commas")
    add("--draft-length", type=int, default=16)
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, help="sampling seed; needs --temperature")
    add(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        help="start both servers with --enable-deterministic-inference, without which SGLang ignores "
        "seeds (default: with --seed)",
    )
    add("--dtype", default="float32")
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
    add("--control", action="store_true", help="compare stock with stock: the noise of the method itself")
    add(
        "--control-arg",
        action="append",
        default=[],
        metavar="'--name value'",
        help="beside the verified arms compare stock with a stock server that has this argument too, "
        'for the noise of stock itself: --control-arg="--chunked-prefill-size 512"',
    )
    add(
        "--margin-tolerance",
        type=float,
        default=0.0,
        help="forgive a float32 difference where stock's two best logits lie closer than this "
        "(default: none is forgiven; a sound value is 10 times the largest logit difference between "
        "two batch shapes of stock)",
    )
    add("--limit", type=int, help="use the first prompts only")
    add("--port", type=int, default=0, help="default: any free one")
    add("--start-timeout", type=float, default=300.0, metavar="SECONDS")
    add("--request-timeout", type=float, default=1800.0, metavar="SECONDS")
    add("--logs", type=Path, help="folder that keeps the servers' logs")
    add("--json", type=Path, help="write the report")
    add("--plot", type=Path, help="write a PNG of acceptance by draft position")


def config_from(args: argparse.Namespace) -> IdentityConfig:
    """Check parsed options.

    Raises:
        BenchError: an option's value is out of range.
    """
    given = dict(vars(args))
    for name in ("logs", "json", "plot"):
        given.pop(name)
    given["compressors"] = given.pop("compressor")
    given["budgets"] = given.pop("budget")
    for name in ("server_arg", "control_arg"):
        given[f"{name}s"] = tuple(word for text in given.pop(name) for word in shlex.split(text))
    if given["deterministic"] is None:
        given["deterministic"] = given["seed"] is not None
    return IdentityConfig(**given)
