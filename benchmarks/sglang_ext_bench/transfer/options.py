"""How soon decoding begins, and how fast it goes on, while KV travels from a prefill to a decode server.

For each method and link rate a prefill and a decode server are started on the loopback interface, a pair after the other, or --at-once
so many together, of which one is measured at a time. All methods but stock's travel over links of transfer backend progressive, with the
same pacing; they differ in the codec of pages. Prompts go through both servers one at a time: first cold (the prefill server computes them
in chunks, which travel meanwhile), then --repeats times from its prefix cache.

Tables show seconds from the end of prefill to the k-th token, the prefill's own not counted, when it was computed (of lynx: drafted)
and when the client had it. JSON has all requests with their timelines; it is written after each pair, with what is left to measure.

--method lynx (against 8 bits), lynx-exact (against the pool's own bits), raw (the pool's bytes), bf16, int8 (by token and head),
int8-tensor, int4 (5 bits with scales), cachegen, lynx-int8 and lynx-int4 (in one stream), hack4, hack2 and int4-lossy (prompts as the codes
of their copies, on which mode lossy answers; hack4:32 and hack4:quantized say the partition, and that prompts are computed on codes),
mooncake_tcp (SGLang's, without a limit).
"""

import argparse
from pathlib import Path

from sglang_ext.tools.options import seconds
from sglang_ext_bench.options import DTYPES, names

DEFAULT = "raw,int8,int4,lynx"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Hugging Face folder")
    add("--method", type=names, default=DEFAULT, help="names, separated by commas (default: %(default)s)")
    add("--link-gbps", default="0.1", help="Gbit/s of the link, separated by commas; 0: no limit (default: %(default)s)")
    add("--context-len", default="2048", help="prompt tokens, separated by commas (default: %(default)s)")
    add("--prompt-file", type=Path, help="take prompts from this text, by the model's tokenizer; default: random tokens")
    add("--prompts", type=int, default=3, help="of each context (default: %(default)s)")
    add("--repeats", type=int, default=2, help="of each prompt from the prefix cache; 0: cold alone (default: %(default)s)")
    add("--output-len", type=int, default=64, help="tokens after the prefill's that are timed (default: %(default)s)")
    add("--draft-arg", action="append", default=[], metavar="FLAGS", help="flags of decode servers of lynx, for example '--kv-compressor kivi'")
    add("--server-arg", action="append", default=[], metavar="FLAGS", help="flags of all servers")
    add("--decode-arg", action="append", default=[], metavar="FLAGS", help="flags of all decode servers, for example '--base-gpu-id 1'")
    add("--dtype", default="bfloat16", choices=DTYPES, help="(default: %(default)s)")
    add("--accuracy-tokens", type=int, default=0, help="also measure vNMSE of attention outputs on so many tokens of the first prompt")
    add("--at-once", type=int, default=1, help="pairs of servers that are started together; their memory adds up (default: %(default)s)")
    add("--port", type=int, default=0, help="of the first prefill server; of each pair the next two are taken as well (default: any)")
    add("--start-timeout", type=seconds, default=600, help="seconds until servers must be ready (default: %(default)s)")
    add("--logs", type=Path, help="folder for the servers' logs and timelines; default: none are kept")
    add("--json", type=Path, help="write all measurements here")
    add("--plot", type=Path, help="write a PNG here")


def run(args: argparse.Namespace) -> int:
    """Run the command, whose module loads PyTorch and SGLang."""
    from sglang_ext_bench.transfer.command import run

    return run(args)
