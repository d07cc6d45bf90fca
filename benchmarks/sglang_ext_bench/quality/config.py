"""What ``python -m sglang_ext_bench quality`` was asked to do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from sglang_ext.tools import CommandError
from sglang_ext_bench.client import SamplingSettings
from sglang_ext_bench.options import check_budgets, check_counts, check_port

PARTS = ("acceptance", "kl", "divergence", "functional", "speed", "attention")
COMPARED = ("kl", "divergence", "functional", "speed")
"""Parts that ask stock, lossy and verified servers alike."""
Tail = Literal["exact", "filled", "requantized"]
"""How values lie behind what a copy packs: all exact, as served between two packs; in codes where they fill a partition (RQE); all in
codes (without RQE)."""
TAILS: tuple[Tail, ...] = get_args(Tail)
MODES = ("lossy", "verified")
"""Servers that are compared with stock's."""


@dataclass(frozen=True)
class BenchmarkFile:
    """A user's benchmark: JSON lines, the fields of prompt and expected answer, and how answers are scored.

    ``scored_by`` is one of :data:`~.scorers.BY_NAME`; with ``chat`` prompts go through the model's chat template.
    """

    path: Path
    prompt_field: str
    answer_field: str
    scored_by: str
    new_tokens: int
    chat: bool


@dataclass(frozen=True)
class QualityConfig:
    """The command line of ``quality``, checked. Field names are those of the options.

    Attributes:
        prompts: None where no part needs any.
        draft_lengths: of verified servers; the first one's serves the parts beside acceptance.
        top: best log-probabilities at each step, for KL divergences.
        tasks: functional tasks of each kind; 0 for the benchmark alone.
        task_tokens: tokens of real text in each of them.
        benchmark: a user's tasks, beside these.
        modes: of the servers that are compared with stock's; of :data:`MODES`.
        tails: how values that fill no partition lie, in part attention.
        keep_cache: whether a temperature finds the prefix caches as the one before left them.
    """

    model: str
    parts: tuple[str, ...]
    prompts: Path | None
    compressors: tuple[str, ...]
    budgets: tuple[float, ...]
    draft_lengths: tuple[int, ...] = (4, 8, 16, 32)
    temperatures: tuple[float, ...] = (0.0, 0.7)
    seed: int = 1
    output_len: int = 64
    top: int = 64
    tasks: int = 4
    task_tokens: int = 1024
    benchmark: BenchmarkFile | None = None
    concurrency: int = 4
    modes: tuple[str, ...] = MODES
    tails: tuple[Tail, ...] = ("exact",)
    keep_cache: bool = False
    dtype: str = "float32"
    server_args: tuple[str, ...] = ()
    kv_args: tuple[str, ...] = ()
    limit: int | None = None
    port: int = 0
    start_timeout: float = 300.0
    request_timeout: float = 1800.0

    def __post_init__(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            CommandError: naming the option, its value and what is allowed.
        """
        from sglang_ext_bench.quality.named import Named

        for option, given, allowed in (("--parts", self.parts, PARTS), ("--modes", self.modes, MODES), ("--tail", self.tails, TAILS)):
            for each in given:
                if each not in allowed:
                    raise CommandError(f"{option} {each!r}: pass some of {', '.join(allowed)}, separated by commas")
        given_names = {"--parts": self.parts, "--compressor": self.compressors, "--modes": self.modes, "--tail": self.tails}
        for option, given in given_names.items():
            if not given:
                raise CommandError(f"{option} names nothing; pass some, separated by commas")
        for compressor in self.compressors:
            Named.of(compressor)
        if "verified" not in self.modes and "acceptance" in self.parts:
            raise CommandError(f"--modes {','.join(self.modes)}: --parts acceptance is of verified servers; add verified, or leave it out")
        self._check_ranges()
        self._check_sizes()
        if self.prompts is None and self.parts != ("functional",):
            raise CommandError(f"--parts {','.join(self.parts)} needs --prompts; only functional goes without")
        if "kl" in self.parts and 0 not in self.temperatures:
            raise CommandError(
                "--parts kl compares distributions before temperature, along greedy answers: add 0 to --temperature"
            )

    def _check_ranges(self) -> None:
        counts = {"--output-len": self.output_len, "--top-logprobs": self.top}
        counts |= {"--task-tokens": self.task_tokens, "--concurrency": self.concurrency}
        counts |= {"--draft-length": min(self.draft_lengths), "--limit": 1 if self.limit is None else self.limit}
        check_counts(counts)
        check_budgets(self.budgets)
        check_port(self.port)
        if self.tasks < 1 and "functional" in self.parts and self.benchmark is None:
            raise CommandError(f"--tasks {self.tasks}: --parts functional needs at least 1, or a --benchmark")
        if min(self.temperatures) < 0:
            raise CommandError(f"--temperature {min(self.temperatures):g}: must be 0 (greedy) or above")

    def _check_sizes(self) -> None:
        given = {word.partition("=")[0] for word in (*self.server_args, *self.kv_args)}
        if "attention" in self.parts and (unread := given & {"--kv-bits", "--kv-partition"}):
            raise CommandError(
                f"{min(unread)} is of servers, and --parts attention has none: write it after the method, as in --compressor "
                "'hack:2 --kv-partition 32'"
            )

    def asks(self, *parts: str) -> bool:
        """Whether one of these parts is wanted."""
        return any(part in self.parts for part in parts)

    @property
    def common_server_arguments(self) -> tuple[str, ...]:
        """Arguments of all servers; SGLang honours seeds in deterministic inference only, and metrics tell bytes."""
        seeded = ("--enable-deterministic-inference",) if max(self.temperatures) > 0 else ()
        return ("--dtype", self.dtype, "--enable-metrics", *seeded, *self.server_args)

    def sampling(self, temperature: float, index: int, ignore_eos: bool) -> SamplingSettings:
        """How all servers choose the tokens of the request of that index."""
        return SamplingSettings(temperature, self.seed + index if temperature > 0 else None, ignore_eos)
