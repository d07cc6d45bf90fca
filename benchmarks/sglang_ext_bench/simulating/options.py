"""Simulate verified decoding with full KV in host memory, without a model: what would a machine gain, from which acceptance on?

Time comes from bytes over bandwidths, acceptance from random numbers; verifications and loads are placed by the engine's
own admission. Policies say where full KV lies: ``stock`` decodes plainly; ``resident`` keeps it on the device, so that
others wait; ``host`` loads it to verify; ``auto`` does what the equations find best. *Allowed* is what the equations say of
the same placement in the steady state, without prefill; *overall* is from the first request to the last. *Placed* are requests
with full KV on the device, and those that load it; of both follow the *drafts* until a verification. *Rings* are the shares of
link time and of memory that are reserved. *Slack* is iterations from a load's end to its verification.
"""

import argparse
import math
from pathlib import Path

from sglang_ext.core import DEFAULT_BUDGET
from sglang_ext.managers.kv_offload.costs import MAX_DRAFTS

POLICIES = ("stock", "resident", "host", "auto")

MEASURED = {0.87: "snapkv on 1/8 of the tokens", 0.93: "snapkv on 1/4 of the tokens"}
"""Acceptances that were measured on the demo model, with their methods (docs/benchmarks.md, "Acceptance")."""
MEASURED_NOTE = "measured on the demo model: " + ", ".join(f"{p:g} with {method}" for p, method in MEASURED.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command line; the defaults are Qwen3-8B on an H200."""
    add = parser.add_argument
    add("--policy", default=",".join(POLICIES), help="separated by commas: %(default)s")
    probabilities = ",".join(f"{p:g}" for p in (*MEASURED, 0.97, 0.98, 0.99, 0.995))
    add("--acceptance", default=probabilities, help=f"probabilities per token, separated by commas (default: %(default)s; {MEASURED_NOTE})")
    add("--staggered", action="store_true", help="verify requests in iterations of their own (default)")
    add("--lock-step", action="store_true", help="verify all in the same iteration; with --staggered, both")
    add("--memory-tokens", default="262144", help="tokens that fit in the device's memory for KV, separated by commas")
    add("--link-bandwidth", default="53.7e9", help="bytes per second from the host, separated by commas")
    add("--device-bandwidth", type=float, default=4.35e12, help="bytes per second that the device reads")
    add("--weights", type=float, default=16.4e9, help="bytes of the model's weights")
    add("--kv-token", type=float, default=147456, help="bytes of full KV of a token")
    add("--budget", type=float, default=DEFAULT_BUDGET, help="share of the prompt that a copy keeps (default: %(default)s, as the server's)")
    add("--draft-length", type=int, default=16, help="drafts of a request in a round")
    add("--longest", type=int, default=MAX_DRAFTS, help="drafts until a verification, at most")
    add("--turnaround", type=float, default=0.001, help="seconds of a round beside its forwards")
    add("--token-seconds", type=float, default=0.0, help="of computing a verified token")
    add("--prefill-rate", type=float, default=math.inf, help="prompt tokens per second; default: prefill takes no time")
    add("--requests", type=int, default=96, help="in all")
    add("--concurrency", type=int, default=24, help="requests that are sent at once, at most")
    add("--rate", type=float, default=math.inf, help="requests per second that arrive; default: all at once")
    add("--input-len", type=int, default=30720, help="tokens of prompts, on average")
    add("--output-len", type=int, default=2048, help="tokens of outputs, on average")
    add("--sigma", type=float, default=0.0, help="of the logarithm of both lengths; 0: all are equal")
    add("--horizon", type=int, default=64, help="iterations that the admission plans")
    add("--seed", type=int, default=0, help="of lengths, arrivals and acceptance")
    add("--json", type=Path, help="write all figures here")
    add("--plot", type=Path, help="write a PNG here")


def run(args: argparse.Namespace) -> int:
    """Run the command, whose module loads PyTorch and SGLang."""
    from sglang_ext_bench.simulating.simulate import run

    return run(args)
