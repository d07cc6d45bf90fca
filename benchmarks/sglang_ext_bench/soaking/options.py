"""Sends mixed traffic to one server for minutes and checks every answer.

First, stock SGLang answers a set of prompts and request options, one request at a time. Then a verified server gets random requests
of that set, with random lengths. Some have a cached prefix, some are streamed, aborted or malformed. Each answer must be the beginning
of stock's answer.

The verified server runs the same loop of SGLang as stock: the overlapped one, or with --disable-overlap the plain one. Its KV pool is
too small for the traffic, so that requests are retracted. SGLang's memory checks run in strict mode.

The exit code is 1 after a wrong answer, an unexpected error or a dead server. With --force-retraction it is also 1 if no request was
retracted.

Two deviations are counted but do not fail the soak, because stock SGLang's overlapped loop has them too. A retracted request may stream
a chunk without new tokens. It may also lose the log-probability of its first token.

At the end an idle server must hold no used tokens and no requests, by SGLang's own counters (/v1/loads). The soak also samples the
memory and the open descriptors of each process of the server, cache ranks included. After 8 minutes it fails if one of them keeps
growing.

--url tests a running SGLang server, and --stock-url names a running stock server. Request options that need a flag which one of them
lacks are left out.

--apart starts a prefill and a decode server instead of one, with transfer backend progressive. Each request goes to both, and both must
end it. Neither may hold much more memory at the end than after its warm-up.

--store starts servers that share a bounded prefix store. Meanwhile pages of the store are damaged, and its folder is removed. With
--store-process the servers share a store process (tcp://), which has the folder as its disk. In the first third of the time this process is
restarted and killed. The soak fails if no page is read from the store. So the prompts must exceed --pool-tokens and --kv-host-gb:

    sglang-ext-bench prompts --out prompts --tokenizer MODEL --count 4 --min-tokens 700 --max-tokens 700
    sglang-ext-bench soak --model MODEL --prompts prompts --store FOLDER --store-mb 40 --limit 3 --pool-tokens 1900 --kv="--kv-host-gb 0.02"

--mode lossy does not ask stock, because the answers are approximate. It checks the number and the length of the answers, and
the log-probabilities of each token where a request asks for them.
"""

import argparse
from pathlib import Path

from sglang_ext.tools import CommandError
from sglang_ext_bench.options import check_counts, names
from sglang_ext_bench.soaking.request_options import OPTIONS

MODES = ("verified", "lossy")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``soak``."""
    add = parser.add_argument
    add("--model", required=True, help="required: model folder or name")
    add("--prompts", type=Path, required=True, help="required: folder of .txt files, or JSON lines (text / messages)")
    add("--minutes", type=float, default=10, help="longest time of the traffic (default: %(default)s)")
    add("--requests", type=int, default=0, help="end after this many requests; 0: after --minutes (default: %(default)s)")
    add("--url", help="address of a running server to test; its prefix cache is emptied; --kv and --pool-tokens do not apply")
    add("--stock-url", help="address of a running stock server; without it the soak starts one")
    add("--compressors", type=names, default=(), help="values of kv_compressor that requests name at random, comma-separated")
    add("--leave-out", type=names, default=(), help="names of request options to leave out, comma-separated")
    add("--workers", type=int, default=8, help="requests in flight (default: %(default)s)")
    add("--output-len", type=int, default=96, help="longest answer, in tokens (default: %(default)s)")
    add("--pool-tokens", type=int, default=9000, help="--max-total-tokens of the server (default: %(default)s)")
    add("--limit", type=int, default=4, help="use only the first prompts; stock answers each with every option (default: %(default)s)")
    add("--mode", choices=MODES, default=MODES[0], help="mode of the server (default: %(default)s)")
    add(
        "--kv",
        default="--kv-compressor snapkv --kv-budget 0.25 --kv-draft-length 15",
        help="flags of the mode (default: %(default)s)",
    )
    add("--disable-overlap", action="store_true", help="run both servers in SGLang's plain loop")
    add("--server-arg", action="append", default=[], metavar="FLAGS", help="flags of both servers, repeatable")
    add("--seed", type=int, default=0, help="seed of the traffic (default: %(default)s)")
    add(
        "--force-retraction",
        type=int,
        metavar="STEPS",
        help="make the verified server retract a request every STEPS forward passes in which several requests decode "
        "(SGLANG_TEST_RETRACT); fail if no request was retracted",
    )
    add("--apart", action="store_true", help="verify on a prefill and a decode server instead of one server")
    add("--link-gbps", type=float, default=0.2, help="Gbit/s of the link between them (default: %(default)s)")
    add("--store", type=Path, metavar="FOLDER", help="verify on servers that share a prefix store in this folder; its pages are deleted")
    add("--store-servers", type=int, default=2, help="number of these servers (default: %(default)s)")
    add("--store-mb", type=float, default=200.0, help="bound of the store, in MB; less than the prompts need (default: %(default)s)")
    text = "the servers share a store process (tcp://) with the folder of --store as its disk, which is restarted"
    add("--store-process", action="store_true", help=text)
    add("--logs", type=Path, default=Path("."), help="folder of the servers' logs (default: the current one)")
    add("--json", type=Path, help="write the totals to this file")


def check_options(args: argparse.Namespace) -> None:
    """Refuse options that exclude each other, and unknown names.

    Raises:
        CommandError: --url or --mode lossy comes with --apart or --store, --apart with --store, or --url with --force-retraction. --leave-out has
            an unknown name. --requests is negative. --store-servers is below 1. --store-process comes without --store.
    """
    known = [option.name for option in OPTIONS]
    unknown = [name for name in args.leave_out if name not in known]
    if unknown:
        raise CommandError(f"--leave-out {unknown[0]!r} is not a request option: pass any of {', '.join(known)}")
    if args.requests < 0:
        raise CommandError(f"--requests {args.requests}: must be 0, for no limit, or more")
    if args.url and args.apart:
        raise CommandError("--apart with --url: the soak starts the two servers of --apart itself; leave out one of these")
    if args.url and args.force_retraction:
        raise CommandError(
            f"--force-retraction with --url: start the server at {args.url} with SGLANG_TEST_RETRACT=1 and "
            f"SGLANG_TEST_RETRACT_INTERVAL={args.force_retraction}, and leave --force-retraction out"
        )
    if args.store is not None:
        if args.apart or args.url or args.mode != "verified":
            raise CommandError("--store starts servers in --mode verified itself; leave out --apart, --url and --mode lossy")
        check_counts({"--store-servers": args.store_servers})
        if args.store.exists() and any(args.store.iterdir()):
            raise CommandError(f"--store {args.store} is not empty, and the soak deletes its content; pass a new folder")
    elif args.store_process:
        raise CommandError("--store-process needs the folder of its disk: pass --store FOLDER, or leave it out")
    if args.apart and args.mode != "verified":
        raise CommandError(f"--apart with --mode {args.mode}: a prefill and a decode server need --mode verified; leave out one of these")


def run(args: argparse.Namespace) -> int:
    """Check the options and run the soak. Its module loads PyTorch and SGLang."""
    check_options(args)
    from sglang_ext_bench.soaking.soak import run

    return run(args)
