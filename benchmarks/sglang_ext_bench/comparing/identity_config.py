"""The command line of ``sglang-ext-bench identity``: its options, and their checks."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from sglang_ext.core import OptionError
from sglang_ext.tools import CommandError, split_flags
from sglang_ext_bench.client import SamplingSettings
from sglang_ext_bench.comparing.verdict import Rules
from sglang_ext_bench.options import DTYPES, add_start_timeout, check_budgets, check_counts, check_port, names

AUTO: Final = "auto"
"""Value of ``--margin-tolerance`` for a measured tolerance."""


@dataclass(frozen=True)
class IdentityConfig:
    """The checked options of ``identity``. Fields have the names of the options.

    Attributes:
        prompts: None for prompts from text on this machine (corpus.py).
        budgets: Empty for the server's default of each compressor.
        control_arms: Flags of each further stock server.
    """

    model: str
    prompts: Path | None = None
    output_len: int = 64
    compressors: tuple[str, ...] = ("snapkv",)
    budgets: tuple[float, ...] = ()
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
    kv_args: tuple[str, ...] = ()
    control: bool = False
    control_arms: tuple[tuple[str, ...], ...] = ()
    logprobs: bool = False
    margin_tolerance: float | Literal["auto"] = 0.0
    limit: int | None = None
    port: int = 0
    start_timeout: float = 300.0
    request_timeout: float = 1800.0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            CommandError: Names the option, its value and the allowed values.
        """
        counts = {"--output-len": self.output_len, "--page-size": self.page_size}
        counts |= {"--draft-length": self.draft_length}
        counts |= {"--concurrency": min(self.concurrency, default=0)}
        counts |= {"--limit": 1 if self.limit is None else self.limit}
        check_counts(counts)
        check_budgets(self.budgets)
        check_port(self.port)
        if not self.control and not self.compressors:
            raise CommandError("--compressor has no names: pass names separated by commas, or --control to compare stock with stock")
        self._check_sampling()
        self._check_tolerance()

    def _check_sampling(self) -> None:
        if self.temperature < 0:
            raise CommandError(f"--temperature {self.temperature:g}: must be 0 (greedy) or above")
        if (self.temperature > 0) != (self.seed is not None):
            raise CommandError(
                f"--temperature {self.temperature:g} with --seed {self.seed}: outputs can be compared only if they "
                "are greedy or sampled with a seed: pass both options or neither"
            )

    def _check_tolerance(self) -> None:
        if self.margin_tolerance == 0:
            return
        if self.temperature > 0:
            raise CommandError(
                f"--margin-tolerance {self.margin_tolerance} works for greedy runs only, because a sampled token may be "
                "far less likely than the two best: leave out --margin-tolerance or --temperature"
            )
        if not isinstance(self.margin_tolerance, str):
            if not self.margin_tolerance > 0:
                raise CommandError(f"--margin-tolerance {self.margin_tolerance}: must be 0 or above, or {AUTO}")
            return
        if not self.control_arms:
            raise CommandError(
                "--margin-tolerance auto is measured between two batch shapes of stock: add a control with "
                'another shape, such as --control-arg="--chunked-prefill-size 512", or pass a number'
            )
        if self.dtype != "float32":
            raise CommandError(
                f"--margin-tolerance auto with --dtype {self.dtype}: a tolerance applies to float32 only, and other "
                "dtypes are compared with the controls: leave out --margin-tolerance"
            )

    @property
    def common_server_arguments(self) -> tuple[str, ...]:
        """Flags of all servers."""
        arguments = ["--dtype", self.dtype, "--page-size", str(self.page_size)]
        if self.chunked_prefill_size is not None:
            arguments += ["--chunked-prefill-size", str(self.chunked_prefill_size)]
        if self.deterministic:
            arguments.append("--enable-deterministic-inference")
        return (*arguments, *self.server_args)

    def budgets_of(self, compressor: str) -> tuple[float, ...]:
        """The budgets of a compressor.

        Raises:
            CommandError: There is no such compressor.
        """
        from sglang_ext.config.method_options import resolve_budget

        try:
            return self.budgets or (resolve_budget(compressor, None, "--compressor"),)
        except OptionError as error:
            raise CommandError(str(error)) from error

    @property
    def sampling(self) -> SamplingSettings:
        """Sampling parameters of all requests."""
        return SamplingSettings(self.temperature, self.seed)

    def rules(self, tolerance: float) -> Rules:
        """The rules of the verdict, with a given or measured tolerance."""
        return Rules(self.dtype, tolerance, judges_control=self.control)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``identity``."""
    add = parser.add_argument
    add("--model", required=True, help="model folder or name")
    add("--prompts", type=Path, help="folder of .txt files, or JSON lines (text / messages); default: text on this machine")
    add("--output-len", type=int, default=IdentityConfig.output_len, help="tokens to generate for each prompt (default: %(default)s)")
    add("--compressor", type=names, default=IdentityConfig.compressors, help="names separated by commas (default: snapkv)")
    add("--budget", type=_floats, default=(), help="shares of the KV that are kept, separated by commas (default: the server's)")
    add("--draft-length", type=int, default=16, help="(default: %(default)s)")
    add("--temperature", type=float, default=0.0, help="0 is greedy; other values need --seed")
    add("--seed", type=int, help="sampling seed; needs --temperature")
    add(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        help="start all servers with --enable-deterministic-inference, without which SGLang ignores "
        "seeds (default: if --seed is passed)",
    )
    add("--dtype", default="float32", choices=DTYPES, help="(default: %(default)s)")
    add("--concurrency", type=_ints, default=(1,), help="requests at once, separated by commas (default: 1)")
    add("--cache", choices=("cold", "warm"), default="cold", help="warm: each prompt is in the prefix cache before it is compared")
    add("--page-size", type=int, default=1, help="page size of all servers (default: %(default)s)")
    add("--chunked-prefill-size", type=int, help="chunked prefill size of all servers; default: SGLang's")
    add(
        "--server-arg",
        action="append",
        default=[],
        metavar="'--name value'",
        help='flags of all servers, repeatable; write --server-arg="--flag"',
    )
    add(
        "--kv-arg",
        action="append",
        default=[],
        metavar="'--name value'",
        help='flags of the verified servers alone, repeatable: --kv-arg="--kv-full-tier host --kv-host-gb 1"',
    )
    add("--control", action="store_true", help="compare stock with stock")
    add(
        "--control-arg",
        action="append",
        default=[],
        metavar="'--name value'",
        help="also compare stock with a stock server that has this flag, to measure how much stock's outputs vary: "
        '--control-arg="--chunked-prefill-size 512"; in other dtypes than float32 the run fails if verified outputs '
        "differ more than 1.5 times as often as the control's, or at larger top-2 margins than the 99th percentile "
        "of the control's",
    )
    add(
        "--control-arm",
        action="append",
        default=[],
        metavar="'--name value'",
        help="as --control-arg, but each option starts a stock server of its own, for several batch shapes",
    )
    add(
        "--logprobs",
        action="store_true",
        help="compare the log-probabilities of the verified servers too, and report the largest difference from "
        "stock's (those of controls are always compared)",
    )
    add(
        "--margin-tolerance",
        type=_tolerance,
        default=0.0,
        metavar="auto|MARGIN",
        help="tolerate a different output in float32 if stock's two best logits differ by less than this, in at most "
        "0.1%% of the outputs (default: none is tolerated); auto: 10 times the largest difference of a "
        "log-probability between stock and the controls, which are required",
    )
    add("--limit", type=int, help="number of prompts to use; default: all")
    add("--port", type=int, default=0, help="port of the servers; default: any free one")
    add_start_timeout(parser, 300.0)
    add("--request-timeout", type=float, default=1800.0, metavar="SECONDS", help="time limit of one request (default: %(default)g)")
    add("--logs", type=Path, help="folder for the servers' logs; default: none are kept")
    add("--json", type=Path, help="write the report to this file")
    add("--plot", type=Path, help="write a plot of acceptance by draft position to this PNG file")


def config_from(args: argparse.Namespace) -> IdentityConfig:
    """Check the parsed options.

    Raises:
        CommandError: A value is out of range, or a quote is not closed.
    """
    values = dict(vars(args))
    for name in ("logs", "json", "plot"):
        values.pop(name)
    values["compressors"] = values.pop("compressor")
    values["budgets"] = values.pop("budget")
    values["server_args"] = split_flags(values.pop("server_arg"))
    values["kv_args"] = split_flags(values.pop("kv_arg"))
    one_control = split_flags(values.pop("control_arg"))
    more_controls = tuple(split_flags([text]) for text in values.pop("control_arm"))
    values["control_arms"] = ((one_control,) if one_control else ()) + more_controls
    if values["deterministic"] is None:
        values["deterministic"] = values["seed"] is not None
    return IdentityConfig(**values)


def _floats(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in names(text))


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in names(text))


def _tolerance(text: str) -> float | Literal["auto"]:
    return AUTO if text == AUTO else float(text)
