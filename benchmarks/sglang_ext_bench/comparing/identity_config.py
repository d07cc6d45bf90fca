"""What ``python -m sglang_ext_bench identity`` was asked to do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from sglang_ext.core import OptionError
from sglang_ext.tools import CommandError
from sglang_ext_bench.client import SamplingSettings
from sglang_ext_bench.comparing.tolerance import Rules
from sglang_ext_bench.options import check_budgets, check_counts, check_port

AUTO: Final = "auto"
"""As ``--margin-tolerance``: to be measured."""


@dataclass(frozen=True)
class IdentityConfig:
    """The command line of ``identity``, checked. Field names are those of the options.

    Attributes:
        prompts: None for prompts of text that this machine has (corpus.py).
        budgets: empty for each compressor's default in the server.
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
        """Refuse what cannot be compared.

        Raises:
            CommandError: naming the option, its value and what is allowed.
        """
        counts = {"--output-len": self.output_len, "--page-size": self.page_size}
        counts |= {"--draft-length": self.draft_length}
        counts |= {"--concurrency": min(self.concurrency, default=0)}
        counts |= {"--limit": 1 if self.limit is None else self.limit}
        check_counts(counts)
        check_budgets(self.budgets)
        check_port(self.port)
        if not self.control and not self.compressors:
            raise CommandError("--compressor names none: pass names, separated by commas (or --control for stock against stock)")
        self._check_sampling()
        self._check_tolerance()

    def _check_sampling(self) -> None:
        if self.temperature < 0:
            raise CommandError(f"--temperature {self.temperature:g}: must be 0 (greedy) or above")
        if (self.temperature > 0) != (self.seed is not None):
            raise CommandError(
                f"--temperature {self.temperature:g} with --seed {self.seed}: outputs can be compared "
                "greedily (no seed) or sampled with a seed; pass both or neither"
            )

    def _check_tolerance(self) -> None:
        if self.margin_tolerance == 0:
            return
        if self.temperature > 0:
            raise CommandError(
                f"--margin-tolerance {self.margin_tolerance} holds for greedy runs: a sampled token may lie "
                "far below the two best; drop --margin-tolerance or --temperature"
            )
        if not isinstance(self.margin_tolerance, str):
            if not self.margin_tolerance > 0:
                raise CommandError(f"--margin-tolerance {self.margin_tolerance}: must be 0 or above, or {AUTO}")
            return
        if not self.control_arms:
            raise CommandError(
                "--margin-tolerance auto is measured between two batch shapes of stock: add a control "
                'that has another one, such as --control-arg="--chunked-prefill-size 512", or pass a number'
            )
        if self.dtype != "float32":
            raise CommandError(
                f"--margin-tolerance auto with --dtype {self.dtype}: a tolerance is for float32; other "
                "dtypes are compared with the controls' rate; drop --margin-tolerance"
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

    def budgets_of(self, compressor: str) -> tuple[float, ...]:
        """The budgets that a compressor is tried with.

        Raises:
            CommandError: there is no such compressor.
        """
        from sglang_ext.config.method_options import resolve_budget

        try:
            return self.budgets or (resolve_budget(compressor, None, "--compressor"),)
        except OptionError as error:
            raise CommandError(str(error)) from error

    @property
    def sampling(self) -> SamplingSettings:
        """How both arms choose tokens."""
        return SamplingSettings(self.temperature, self.seed)

    def rules(self, tolerance: float) -> Rules:
        """What the run is judged by, with the tolerance given or measured."""
        return Rules(self.dtype, tolerance, judges_control=self.control)
