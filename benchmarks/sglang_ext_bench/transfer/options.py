"""Measure the start of decoding, and the decode speed, during a KV transfer from a prefill server to a decode server.

For each method and link rate, the benchmark starts a prefill server and a decode server on the loopback interface. It sends prompts through
both, one at a time: first cold, then --repeats times from the prefill server's prefix cache. The prefill server computes a cold prompt in
chunks, and transfers each chunk while it computes the next one. --at-once starts several pairs of servers together, and measures one after
another.

Tables show seconds from the end of prefill to the k-th token. The token that prefill computes is not counted. There are three clocks:

generated   The server has computed k tokens. Rejected draft tokens count.
kept        The server has computed the k-th output token.
visible     The client has received the k-th output token.

The JSON file has all requests with their timelines. It is written after each pair, with the names of the pairs that are not measured yet.

All methods except mooncake_tcp use transfer backend progressive, with the same limit of the link. They differ in the codec of pages:

lynx                   Anchors and residuals. The residual restores int8.
lynx-exact             Anchors and residuals. The residual restores the pool's own bits.
raw                    The pool's bytes.
bf16                   bfloat16.
int8                   8 bits, with a scale per token and head.
int8-tensor            8 bits, with a scale per page.
int4                   4 bits, or 5 with scales.
cachegen               A codec like CacheGen's.
lynx-int8, lynx-int4   Lynx's codes in one stream; the anchor alone.
hack4, hack2           Prompts as quantized compressed KV, on which --kv-mode lossy decodes. hack4:32 sets the partition,
                       hack4:quantized computes prompts on the codes, and hack4:32:quantized does both.
int4-lossy             The same as hack4, with compressor int4.
mooncake_tcp           SGLang's own backend, without a limit of the link.
"""

import argparse
from pathlib import Path

from sglang_ext_bench.options import DTYPES, add_start_timeout, names

DEFAULT = "raw,int8,int4,lynx"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``transfer``."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder")
    add("--method", type=names, default=DEFAULT, help="names of methods, separated by commas (default: %(default)s)")
    add("--link-gbps", default="0.1", help="Gbit/s of the link, separated by commas; 0: no limit (default: %(default)s)")
    add("--context-len", default="2048", help="tokens of prompts, separated by commas (default: %(default)s)")
    add("--prompt-file", type=Path, help="text file from which prompts are cut by the model's tokenizer (default: random tokens)")
    add("--prompts", type=int, default=3, help="prompts of each context length (default: %(default)s)")
    add("--repeats", type=int, default=2, help="requests per prompt from the prefix cache; 0: only cold ones (default: %(default)s)")
    add("--output-len", type=int, default=64, help="timed tokens after the token of prefill (default: %(default)s)")
    add("--draft-arg", action="append", default=[], metavar="FLAGS", help="flags of lynx's decode servers, for example '--kv-compressor kivi'")
    add("--server-arg", action="append", default=[], metavar="FLAGS", help="flags of all servers")
    add("--decode-arg", action="append", default=[], metavar="FLAGS", help="flags of all decode servers, for example '--base-gpu-id 1'")
    add("--dtype", default="bfloat16", choices=DTYPES, help="data type of the model (default: %(default)s)")
    add("--accuracy-tokens", type=int, default=0, help="also measure errors of attention outputs, on so many tokens of the first prompt")
    add("--at-once", type=int, default=1, help="pairs of servers that start together; each needs its own memory (default: %(default)s)")
    add("--port", type=int, default=0, help="port of the first prefill server; each pair also uses the next two ports (default: any)")
    add_start_timeout(parser)
    add("--logs", type=Path, help="folder for logs and timelines of the servers (default: none are kept)")
    add("--json", type=Path, help="write all results to this file")
    add("--plot", type=Path, help="write a plot to this PNG file")


def run(args: argparse.Namespace) -> int:
    """Run the command. Its module loads PyTorch and SGLang."""
    from sglang_ext_bench.transfer.command import run

    return run(args)
