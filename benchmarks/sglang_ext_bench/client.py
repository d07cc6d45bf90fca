"""A prompt that is sent to a server, and how its tokens are chosen."""

import time
from dataclasses import dataclass
from typing import Any

from sglang_ext.tools.server_client import ServerClient, describe_error
from sglang_ext_bench.comparing.generation import Generation, parse_response


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are chosen. ``temperature`` 0 is greedy; a seed needs a server that honours it.

    With ``ignore_eos`` an answer has all tokens that were asked for, else it may end by itself before. ``kv_compressor`` names
    one of the server's methods for this request; None for the first.
    """

    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = True
    kv_compressor: str | None = None

    def as_json(self, new_tokens: int) -> dict[str, Any]:
        """``sampling_params`` of a request for ``new_tokens`` tokens."""
        params: dict[str, Any] = {
            "temperature": self.temperature,
            "max_new_tokens": new_tokens,
            "ignore_eos": self.ignore_eos,
        }
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        if self.kv_compressor is not None:
            params["custom_params"] = {"kv_compressor": self.kv_compressor}
        return params


def generate(
    client: ServerClient,
    input_ids: tuple[int, ...],
    sampling: SamplingSettings,
    new_tokens: int,
    top_logprobs: int = 0,
) -> Generation:
    """Send one prompt; a refused or broken request comes back as ``Generation.error``.

    ``top_logprobs`` is the number of best log-probabilities wanted for each output token.
    """
    body: dict[str, Any] = {
        "input_ids": list(input_ids),
        "sampling_params": sampling.as_json(new_tokens),
    }
    if top_logprobs:
        body |= {"return_logprob": True, "top_logprobs_num": top_logprobs}
    started = time.monotonic()
    try:
        payload = client.post("generate", body)
    except (OSError, ValueError) as error:
        return Generation(error=describe_error(error), seconds=time.monotonic() - started)
    return parse_response(payload, time.monotonic() - started)
