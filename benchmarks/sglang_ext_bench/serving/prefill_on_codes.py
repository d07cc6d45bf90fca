"""What `--kv-prefill quantized` costs the text that a model expects: docs/results/hack.md.

    sglang-ext-bench prefill-on-codes --model MODEL [--tokens 700]

Four prompts of Python's own documentation and source; the mean negative log-probability of their tokens, of exact prompts and of codes.
"""

import argparse
import inspect
import pydoc_data.topics
import statistics
import tempfile
import textwrap
from pathlib import Path

from transformers import AutoTokenizer

from sglang_ext.tools.server_process import ServerProcess

LOSSY = ("--kv-mode", "lossy", "--kv-compressor", "hack", "--dtype", "float32")
CODES = (*LOSSY, "--kv-prefill", "quantized")
ARMS: dict[str, tuple[str, ...]] = {
    "exact": LOSSY,
    **{
        f"{bits} bits, partitions of {size}": (*CODES, "--kv-bits", str(bits), "--kv-partition", str(size))
        for bits in (4, 2)
        for size in (32, 64)
    },
}


def texts() -> list[str]:
    """Two of documentation, two of source."""
    topics = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return [topics[:20_000], topics[40_000:60_000], inspect.getsource(argparse), inspect.getsource(textwrap)]


def expected(server: ServerProcess, prompts: list[list[int]]) -> list[float]:
    """Log-probabilities of all tokens but each prompt's first."""
    found = []
    for prompt in prompts:
        body = {"input_ids": prompt, "return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 1}}
        found += [each[0] for each in server.request("generate", body)["meta_info"]["input_token_logprobs"][1:]]
    return found


def main() -> None:
    """Each arm on a server of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=700, help="of each prompt")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts, exact = [tokenizer.encode(text)[: args.tokens] for text in texts()], []
    for name, flags in ARMS.items():
        with tempfile.TemporaryDirectory() as folder, ServerProcess(str(args.model), flags, Path(folder) / "server.log") as server:
            found = expected(server, prompts)
        exact = exact or found
        apart = statistics.mean(abs(one - other) for one, other in zip(found, exact, strict=True))
        print(f"{name}: {-statistics.mean(found):.3f} nats a token of {len(found)}, each {apart:.3f} apart from exact", flush=True)


if __name__ == "__main__":
    main()
