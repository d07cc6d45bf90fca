"""Mixed traffic against one verified or lossy server for minutes: nothing wrong, nothing leaked, nothing dead.

Stock SGLang answers a set of prompts and sampling options first, one by one. Then a verified server, which runs the
same loop of SGLang (overlapped, or with --disable-overlap the plain one), with a pool
too small for the traffic (so that requests are retracted) and SGLang's invariant checks in strict mode, gets random
ones of them with random lengths: cold and warm, some streamed, some aborted, some malformed; each answer must be the
beginning of stock's. Ends with code 1 on a wrong answer, an unexpected error or a dead server, and with
--force-retraction if no request was retracted.

What SGLang's overlapped loop itself does otherwise is counted apart: a request that is retracted may stream a chunk without new
tokens, or, before its first token was looked at, lose that token's log-probability.

At the end an idle server may hold no used tokens and no requests, by SGLang's own counters (/v1/loads). With --url the soak tests a
running server, which may be any SGLang server, and with --stock-url it asks a running stock server. Ways to ask that one of them lacks a
flag for are left out.

With --apart the verified server is two, between which KV travels over transfer backend progressive: one prefills, the other, with the
small pool, decodes. Each request goes to both. Both must end it, and hold no more memory at the end than when they were warm. Of one
server each process is watched, cache ranks among them: its memory, and its open descriptors.

With --mode lossy the server answers approximately, and stock is not asked: answers must be as many and as long as asked for, with
log-probabilities of each token where these were asked for.
"""

import argparse
from pathlib import Path

from sglang_ext_bench.options import names

MODES = ("verified", "lossy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line."""
    add = parser.add_argument
    add("--model", required=True)
    add("--prompts", type=Path, required=True, help="required: folder of .txt files, or JSON lines (text / messages)")
    add("--minutes", type=float, default=10, help="longest time of the traffic (default: %(default)s)")
    add("--requests", type=int, default=0, help="end after this many requests; 0: after --minutes (default: %(default)s)")
    add("--url", help="address of a running server to test; its prefix cache is emptied; --kv and --pool-tokens do not apply")
    add("--stock-url", help="address of a running stock server; without it the soak starts one")
    add("--compressors", type=names, default=(), help="values of kv_compressor that requests name at random, comma-separated")
    add("--leave-out", type=names, default=(), help="names of ways to ask that are not asked, comma-separated")
    add("--workers", type=int, default=8, help="requests in flight")
    add("--output-len", type=int, default=96, help="longest answer, in tokens")
    add("--pool-tokens", type=int, default=9000, help="--max-total-tokens of the server")
    add("--limit", type=int, default=4, help="use the first prompts only; stock answers each of them in every way")
    add("--mode", choices=MODES, default=MODES[0], help="of the server (default: %(default)s)")
    add(
        "--kv",
        default="--kv-compressor snapkv --kv-budget 0.25 --kv-draft-length 15",
        help="flags of the mode",
    )
    add("--disable-overlap", action="store_true", help="both servers in SGLang's plain loop")
    add("--server-arg", action="append", default=[], metavar="FLAGS", help="flags of both servers, repeatable")
    add("--seed", type=int, default=0, help="of the traffic")
    add(
        "--force-retraction",
        type=int,
        metavar="STEPS",
        help="have the verified server retract a request every STEPS forward passes in which several "
        "decode (SGLANG_TEST_RETRACT), and fail if none was",
    )
    add("--apart", action="store_true", help="verify on a prefill and a decode server instead of one")
    add("--link-gbps", type=float, default=0.2, help="Gbit/s of the link between them (default: %(default)s)")
    add("--logs", type=Path, default=Path("."))
    add("--json", type=Path, help="write the totals")


def run(args: argparse.Namespace) -> int:
    """Run the command, whose module loads PyTorch and SGLang."""
    from sglang_ext_bench.soaking.soak import run

    return run(args)
