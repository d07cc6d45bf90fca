"""Bytes of a compressed copy, as its server reports them: codes, scales and whatever else lies in its slots."""

import time
from concurrent.futures import ThreadPoolExecutor

from sglang_ext.tools import CommandError
from sglang_ext.tools.server_client import ServerClient, describe_error
from sglang_ext_bench.client import SamplingSettings, generate
from sglang_ext_bench.speed.decode_limit import kv_token_bytes
from sglang_ext_bench.client import readings

POLL_SECONDS = 0.01


def token_bytes(model: str, dtype: str) -> int:
    """Bytes of full KV of one token of a model, folder or name, over all layers."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config().to_dict()
    return kv_token_bytes(config, 4 if dtype == "float32" else 2)


def copy_share(
    client: ServerClient, input_ids: tuple[int, ...], new_tokens: int, bytes_per_token: int, sampling: SamplingSettings = SamplingSettings()
) -> float | None:
    """Bytes of a prompt's compressed copy over those of its full KV, on a server with ``--enable-metrics``.

    The copy is there only while the request runs, so that metrics are read again and again meanwhile.

    Returns:
        None where the server reported no copy.

    Raises:
        CommandError: a request failed.
    """
    client.flush_cache()
    largest = 0.0
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, client, input_ids, sampling, new_tokens)
        while not answer.done():
            largest = max(largest, reported_bytes(client))
            time.sleep(POLL_SECONDS)
    if answer.result().error:
        raise CommandError(f"the bytes of a copy could not be measured: {answer.result().error}")
    return largest / (len(input_ids) * bytes_per_token) or None


def reported_bytes(client: ServerClient) -> float:
    """Bytes in compressed copies at present; 0 where the server does not say.

    Raises:
        CommandError: the server refused, or is gone.
    """
    try:
        page = client.request("metrics")
    except OSError as error:
        raise CommandError(f"GET /metrics failed: {describe_error(error)}; the server must be alive") from error
    return max((value for _, value in readings(page, "sglang_ext:compressed_bytes")), default=0.0)
