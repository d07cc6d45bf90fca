"""What stock would have answered where another server gave its answer: its log-probabilities, by prefill."""

from collections.abc import Sequence
from typing import Any

from sglang_ext.tools import CommandError
from sglang_ext.tools.server_client import ServerClient, describe_error
from sglang_ext_bench.client import TopLogprobs, parse_top_logprobs
from sglang_ext_bench.prompts import Prompt


def score(client: ServerClient, prompt: Prompt, output_ids: Sequence[int], top: int) -> tuple[TopLogprobs, ...]:
    """The server's best log-probabilities at each token of an answer that was given to a prompt, by prefill.

    Raises:
        CommandError: the server refused, or its answer does not cover the tokens.
    """
    body: dict[str, Any] = {
        "input_ids": [*prompt.input_ids, *output_ids],
        "sampling_params": {"temperature": 0, "max_new_tokens": 0},
        "return_logprob": True,
        "top_logprobs_num": top,
        # The first position asked for has no prediction; the next one is the answer's first token.
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
