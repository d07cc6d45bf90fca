"""How fast a server decodes the prompts of a quality run: ratios between servers of one run, not figures of a machine."""

import time
from collections.abc import Sequence

from sglang_ext.tools import CommandError
from sglang_ext.tools.server_client import ServerClient
from sglang_ext_bench.client import SamplingSettings, generate
from sglang_ext_bench.prompts import Prompt
from sglang_ext_bench.quality.together import together


def tokens_per_second(client: ServerClient, prompts: Sequence[Prompt], output_len: int, width: int) -> float | None:
    """Greedy tokens a second of all prompts, ``width`` at once, from cached prompts; the first token of each does not count.

    Making a copy, which a request does as it begins to decode, is part of it.

    Returns:
        None where it cannot be told: of answers of one token, or where these took longer than all.

    Raises:
        CommandError: a request failed.
    """
    if output_len < 2:
        return None
    _seconds(client, prompts, 1, width)
    first, whole = (_seconds(client, prompts, count, width) for count in (1, output_len))
    return len(prompts) * (output_len - 1) / (whole - first) if whole > first else None


def _seconds(client: ServerClient, prompts: Sequence[Prompt], output_len: int, width: int) -> float:
    settings, began = SamplingSettings(ignore_eos=True), time.perf_counter()
    answers = together(width, prompts, lambda prompt: generate(client, prompt.input_ids, settings, output_len))
    seconds = time.perf_counter() - began
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise CommandError(f"its speed could not be measured: {len(failed)} of {len(prompts)} requests failed; {failed[0]}")
    return seconds
