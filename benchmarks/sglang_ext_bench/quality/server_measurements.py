"""Measures a running server: bytes of its compressed KV, tokens per second, and log-probabilities of given answers."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from sglang_ext.tools import CommandError
from sglang_ext_bench.client import SamplingSettings, generate
from sglang_ext_bench.client import TopLogprobs, parse_top_logprobs
from sglang_ext_bench.prompts import Prompt
from sglang_ext_bench.speed.decode_limit import kv_token_bytes
from sglang_ext_bench.client import readings
from sglang_ext_bench.server import RequestClient, describe_error

POLL_SECONDS = 0.01

Item = TypeVar("Item")
Value = TypeVar("Value")


def run_parallel(width: int, items: Sequence[Item], work: Callable[[Item], Value]) -> tuple[Value, ...]:
    """Call ``work`` for each item in ``width`` threads. Return the results in the order of the items."""
    with ThreadPoolExecutor(width) as pool:
        return tuple(pool.map(work, items))


def token_bytes(model: str, dtype: str) -> int:
    """Bytes of the full KV of one token, over all layers.

    Args:
        model: Model folder or name.
        dtype: Data type of the KV.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config().to_dict()
    return kv_token_bytes(config, 4 if dtype == "float32" else 2)


def compressed_share(
    client: RequestClient, input_ids: tuple[int, ...], new_tokens: int, bytes_per_token: int, sampling: SamplingSettings = SamplingSettings()
) -> float | None:
    """Measure the bytes of a prompt's compressed KV, as a share of its full KV, on a server with ``--enable-metrics``.

    The metrics are polled while the request runs, because its compressed KV is freed at its end.

    Args:
        client: The server.
        input_ids: Token ids of the prompt.
        new_tokens: Tokens to generate.
        bytes_per_token: Bytes of the full KV of one token.
        sampling: Sampling settings of the request.

    Returns:
        The share. None if the server reported no compressed KV.

    Raises:
        CommandError: The request failed.
    """
    client.flush_cache()
    largest = 0.0
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, client, input_ids, sampling, new_tokens)
        while not answer.done():
            largest = max(largest, reported_bytes(client))
            time.sleep(POLL_SECONDS)
    if answer.result().error:
        raise CommandError(f"the bytes of the compressed KV could not be measured: {answer.result().error}")
    return largest / (len(input_ids) * bytes_per_token) or None


def reported_bytes(client: RequestClient) -> float:
    """Bytes of all compressed KV of a server at present. 0 if the server does not report them.

    Raises:
        CommandError: The server refused the request, or is gone.
    """
    try:
        page = client.request("metrics")
    except OSError as error:
        raise CommandError(f"GET /metrics failed: {describe_error(error)}; the server must be alive") from error
    return max((value for _, value in readings(page, "sglang_ext:compressed_bytes")), default=0.0)


def tokens_per_second(client: RequestClient, prompts: Sequence[Prompt], output_len: int, width: int) -> float | None:
    """Measure greedy decoding from cached prompts. Compare the value only with other servers of the same run.

    The first token of each answer is left out. The time includes the compression at the start of decoding.

    Args:
        client: The server.
        prompts: The prompts.
        output_len: Tokens to generate for each.
        width: Requests in flight.

    Returns:
        Tokens per second of all prompts together. None for answers of one token, or if these take longer than whole answers.

    Raises:
        CommandError: A request failed.
    """
    if output_len < 2:
        return None
    _request_seconds(client, prompts, 1, width)
    first, whole = (_request_seconds(client, prompts, count, width) for count in (1, output_len))
    return len(prompts) * (output_len - 1) / (whole - first) if whole > first else None


def _request_seconds(client: RequestClient, prompts: Sequence[Prompt], output_len: int, width: int) -> float:
    settings, started = SamplingSettings(ignore_eos=True), time.perf_counter()
    answers = run_parallel(width, prompts, lambda prompt: generate(client, prompt.input_ids, settings, output_len))
    elapsed = time.perf_counter() - started
    failed = [answer.error for answer in answers if answer.error]
    if failed:
        raise CommandError(f"its speed could not be measured: {len(failed)} of {len(prompts)} requests failed; {failed[0]}")
    return elapsed


def score_answer(client: RequestClient, prompt: Prompt, output_ids: Sequence[int], top: int) -> tuple[TopLogprobs, ...]:
    """Let stock score another server's answer: its most probable tokens at each position of the answer, by prefill.

    Args:
        client: The stock server.
        prompt: The prompt.
        output_ids: Token ids of the answer.
        top: Number of tokens at each position.

    Raises:
        CommandError: The server refused the request, or its answer does not cover the tokens.
    """
    body: dict[str, Any] = {
        "input_ids": [*prompt.input_ids, *output_ids],
        "sampling_params": {"temperature": 0, "max_new_tokens": 0},
        "return_logprob": True,
        "top_logprobs_num": top,
        # The first requested position has no prediction. The next one is the first token of the answer.
        "logprob_start_len": len(prompt.input_ids) - 1,
    }
    try:
        meta = client.post("generate", body)["meta_info"]
    except OSError as error:
        raise CommandError(f"stock could not score the answer to {prompt.name}: {describe_error(error)}") from error
    scored = [row[1] for row in meta["input_token_logprobs"][1:]]
    if scored != list(output_ids):
        raise CommandError(f"stock scored {len(scored)} other tokens than the {len(output_ids)} answered to {prompt.name}")
    return parse_top_logprobs(meta["input_top_logprobs"][1:]) or ()
