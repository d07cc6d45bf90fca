"""What the decode benchmark measured: as figures, as a line of text, and as a plot."""

from dataclasses import dataclass, field
from pathlib import Path

from sglang_ext_bench.speed import drawing
from sglang_ext_bench.speed.decode_wave import Wave


@dataclass(frozen=True)
class Result:
    """A batch's decode speed in one setting.

    Attributes:
        setting: its name.
        context: prompt tokens of each request.
        running: requests that decoded side by side.
        tokens_per_second: of all, median of the waves.
        token_ms: milliseconds per output token of each request that ran.
        steady: tokens per second of all between each request's first verification and its last, median of the waves.
        gain: these tokens per second over stock's; None before stock was measured.
        limit_ms: the least that the bandwidth allows; None without a GPU, and where full KV lies in tiers.
        allowed: tokens per second that bandwidths and memory allow where full KV lies in tiers, at a forced acceptance.
        waves: what was measured.
        acceptance: probability that a draft was forced to be accepted; None where verification decided.
        prefill: seconds to the first token of one prompt alone that is not in the prefix cache, median; None where the only prompt
            of its length made the server ready for it.
        parts_ms: milliseconds of the last round's parts: draft, rest, step (metrics.py).
        memory_gib: GiB of device memory in use after the waves, which is the most so far, as PyTorch gives none back;
            None without a GPU.
    """

    setting: str
    context: int
    batch: int
    running: int
    tokens_per_second: float
    token_ms: float
    gain: float | None
    limit_ms: float | None
    waves: list[Wave]
    allowed: float | None = None
    steady: float = 0.0
    acceptance: float | None = None
    prefill: float | None = None
    parts_ms: dict[str, float] = field(default_factory=dict)
    memory_gib: float | None = None


def line(result: Result) -> str:
    """A result as one line of text."""
    parts = [f"{result.setting:24} context {result.context:6} batch {result.batch:3}"]
    if result.acceptance is not None:
        parts.append(f"p {result.acceptance:g}")
    if result.running < result.batch:
        parts.append(f"{result.running} at once")
    parts.append(f"{result.token_ms:8.2f} ms/token")
    parts.append(f"{result.tokens_per_second:7.0f} tokens/s")
    if result.gain:
        parts.append(f"gain {result.gain:5.2f}")
    if result.limit_ms:
        parts.append(f"limit {result.limit_ms:6.2f} ms ({result.limit_ms / result.token_ms:4.0%})")
    if result.allowed:
        steady = f"steady {result.steady:.0f} ({result.steady / result.allowed:4.0%})"
        parts.append(f"allowed {result.allowed:.0f} tokens/s ({result.tokens_per_second / result.allowed:4.0%}), {steady}")
    lengths = [f"{wave.accept_length:.2f}" for wave in result.waves if wave.accept_length]
    if lengths:
        parts.append(f"accept length {' '.join(lengths)}")
    fallbacks = sum(wave.fallbacks for wave in result.waves)
    if fallbacks:
        parts.append(f"{fallbacks} requests ended on full KV")
    parts += [f"{part} {ms:.2f} ms" for part, ms in result.parts_ms.items()]
    if result.prefill is not None:
        parts.append(f"first token {1000 * result.prefill:.0f} ms")
    if result.memory_gib is not None:
        parts.append(f"memory {result.memory_gib:.2f} GiB")
    return "  ".join(parts)


def write_plot(path: Path, results: list[Result], measured_with: str) -> None:
    """Bars of milliseconds per token, by context and batch; ``measured_with`` tells the settings that all share."""
    names = list(dict.fromkeys(_label(result) for result in results))
    places = list(dict.fromkeys((result.context, result.batch) for result in results))
    with drawing.png(path, (8, 4.5), drawing.Heading("Time per output token of each request", measured_with)) as axes:
        for name, at in zip(names, drawing.centres(len(places), len(names))):
            mine = [result for result in results if _label(result) == name]
            where = [at[places.index((result.context, result.batch))] for result in mine]
            axes.bar(where, [result.token_ms for result in mine], width=0.9 * drawing.bar_width(len(names)), label=name)
        axes.set_xticks(range(len(places)), [f"{context} tokens\nbatch {batch}" for context, batch in places])
        axes.set_ylabel("ms per token")
        axes.legend()


def _label(result: Result) -> str:
    return result.setting if result.acceptance is None else f"{result.setting} p={result.acceptance:g}"
