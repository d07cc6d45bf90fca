"""How many contexts run at once in one pool: stock, and lossy serving that gives full KV back (docs/benchmarks.md).

    sglang-ext-bench lossy-contexts --model MODEL [--tokens N] [--contexts N] [--methods int4,kivi:2] [--server-arg FLAGS]

The pool has room for so many whole contexts of so many tokens, in bfloat16 on a CPU. Each server is sent more prompts than it can hold,
all different, and told to answer at length; counted are the requests that run at once, on copies, when no more have joined for a while.
A method is named as for --kv-compressor, with the bits of its codes after a colon, and after another what prompts attend to
(--kv-prefill): hack:2:quantized. With spade a cache rank has full KV, and --kv-select stands after the colon.
"""

import argparse
import random
import tempfile
import threading
import time
from itertools import chain
from pathlib import Path

from sglang_ext.tools.server_process import CommandError, ServerProcess
from sglang_ext_bench.client import total

ANSWER, VOCABULARY = 256, 20000
# SGLang tells how many requests run when it logs; so often it logs rounds.
LOGGED = ("--decode-log-interval", "4")
# Seconds between looks at the metrics page.
LOOK = 1.0


def at_once(server: ServerProcess, prompts: list[list[int]], patience: float) -> int:
    """Requests of ``prompts`` that run at once, when none has joined for ``patience`` seconds."""

    def ask(ids: list[int]) -> None:
        try:
            params = {"max_new_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
            server.request("generate", {"input_ids": ids, "sampling_params": params})
        except (CommandError, ConnectionError):
            pass  # the server ends before the answer does

    for ids in prompts:
        threading.Thread(target=ask, args=(ids,), daemon=True).start()
    most, since = 0, time.monotonic()
    while time.monotonic() - since < patience and most < len(prompts):
        time.sleep(LOOK)
        running = int(total(server.request("metrics"), "sglang:num_running_reqs"))
        if running > most:
            most, since = running, time.monotonic()
            print(f"  {most} run", flush=True)
    full = total(server.request("metrics"), "sglang_ext:fallback_tokens_total")
    if full:
        print(f"  {full:.0f} tokens were answered on full KV")
    return most


def flags_of(name: str) -> tuple[str, ...]:
    """The flags of a server with the method of this name; none for stock."""
    if name == "stock":
        return ()
    method, *rest = name.split(":")
    lossy = ("--kv-mode", "lossy", "--kv-compressor", method)
    if method == "spade":
        return (*lossy, "--kv-cache-ranks", "1", "--kv-select", *(rest or ["0.125"]))
    return (*lossy, *chain.from_iterable(zip(("--kv-bits", "--kv-prefill"), rest)))


def main() -> None:
    """Start one server after another, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=2048, help="of a context")
    parser.add_argument("--contexts", type=int, default=12, help="that the pool holds whole")
    parser.add_argument("--methods", default="int4,kivi,hack,kivi:2,hack:2")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds without another that joins")
    parser.add_argument("--most", type=float, default=8.0, help="prompts that are sent, over those that fit whole")
    parser.add_argument("--server-arg", default="", help="further flags of all servers")
    args = parser.parse_args()
    draw = random.Random(0)
    prompts = [[draw.randrange(100, VOCABULARY) for _ in range(args.tokens)] for _ in range(int(args.most * args.contexts))]
    size = str(args.tokens * args.contexts)
    pool = ("--dtype", "bfloat16", "--max-total-tokens", size, "--enable-metrics", *LOGGED, *args.server_arg.split())
    counts = {}
    for name in ("stock", *args.methods.split(",")):
        print(name, flush=True)
        log = Path(tempfile.mkdtemp()) / "server.log"
        with ServerProcess(args.model, (*pool, *flags_of(name)), log, request_timeout=3600) as server:
            counts[name] = at_once(server, prompts, args.patience)
    print("\n| method | at once | over stock's |\n|---|---|---|")
    for name, count in counts.items():
        print(f"| `{name}` | {count} | {count / counts['stock']:.2f} |")


if __name__ == "__main__":
    main()
