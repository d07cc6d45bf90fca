"""Decode speed: stock SGLang against verified decoding, on the same prompts in one run.

For each setting a server is started. Each batch decodes, streaming, --repeats times; its prompts are put into the
prefix cache before, one after another, as far as they fit, which measures the time to the first token. The table shows the
median, its ratio to stock, and the least time that the GPU's measured read bandwidth allows. Where a batch does not fit at once,
what is measured is as many requests as do. Prompts from a text are other ones in each wave, as some servers learn from
answers (SGLang's NGRAM).

With --force-acceptance P each draft is accepted with probability P when those before it were, whatever
verification finds: speed at the acceptance of a trained model, on weights without training. Verification
still runs on the full KV, and what is rejected is rolled back. Several P are measured on one server.
"""

import argparse
from pathlib import Path

from sglang_ext_bench.speed import server_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    add = parser.add_argument
    add("--context-len", default="32768", help="prompt tokens of each request, separated by commas")
    add("--batch", default="8,16", help="requests at once, separated by commas")
    add("--output-len", type=int, default=256, help="output tokens of each request")
    server_options.add_arguments(parser)
    add("--prompt-file", type=Path, help="take prompts from this text, by the model's tokenizer; default: random tokens")
    add("--repeats", type=int, default=3, help="waves of each batch")


def run(args: argparse.Namespace) -> int:
    """Run the command, whose module loads PyTorch and SGLang."""
    from sglang_ext_bench.speed.decode import run

    return run(args)
