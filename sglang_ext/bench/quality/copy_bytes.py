"""Bytes of a compressed copy, as its server reports them: codes, scales and whatever else lies in its slots."""

import re

from sglang_ext.bench import BenchError
from sglang_ext.bench.client import SamplingSettings, ServerClient
from sglang_ext.bench.decode_limit import kv_token_bytes

REPORTED = re.compile(r"^sglang_ext:compressed_bytes\{[^}]*\} (\S+)$", re.MULTILINE)
OUTPUT_TOKENS = 8


def token_bytes(model: str, dtype: str) -> int:
    """Bytes of full KV of one token of a model, folder or name, over all layers."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model).get_text_config().to_dict()
    return kv_token_bytes(config, 4 if dtype == "float32" else 2)


def copy_share(client: ServerClient, input_ids: tuple[int, ...], bytes_per_token: int) -> float:
    """Bytes of a prompt's compressed copy over those of its full KV, on a server with ``--enable-metrics``.

    Raises:
        BenchError: the request failed, or the server reports no copy.
    """
    client.flush_cache()
    sampling = SamplingSettings().as_json(OUTPUT_TOKENS)
    body = {"input_ids": list(input_ids), "sampling_params": sampling, "stream": True}
    largest = 0.0
    try:
        for _ in client.stream("generate", body):
            largest = max(largest, *map(float, REPORTED.findall(client.request("metrics"))), 0.0)
    except OSError as error:
        raise BenchError(f"the bytes of a copy could not be measured: {error}") from error
    if not largest:
        raise BenchError(
            f"no copy of a prompt of {len(input_ids)} tokens was reported (sglang_ext:compressed_bytes); use longer prompts"
        )
    return largest / (len(input_ids) * bytes_per_token)
