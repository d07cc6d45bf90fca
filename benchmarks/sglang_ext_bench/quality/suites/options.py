"""Options of ``quality --suite``, and the names of suites, tasks and arms. Loads neither PyTorch nor SGLang."""

import argparse
from pathlib import Path

from sglang_ext.tools import CommandError

RULER, GSM8K = "ruler", "gsm8k"
SUITES = (RULER, GSM8K)
RULER_TASKS = ("needles", "tracking", "copy", "aggregation")
FULL = "full"
DEFAULT_ARMS = (
    FULL,
    "kivi",
    "snapkv:0.25",
    "snapkv:0.125",
    "quest:0.125",
    "spade:0.125",
    "spade:0.125 --kv-select-every 4",
    "int4",
    "hack",
    "hack --kv-prefill quantized",
)
"""On a GPU ``spade`` selects on a second stream. A selection is 2 steps old with the default of one step, and 5 to 8 with 4 steps."""
SUITE_OPTIONS = ("cases", "lengths", "ruler_tasks", "arms", "results", "servers_at_once")
"""Options that only ``--suite`` reads."""
SHARED_OPTIONS = (
    *("suite", "model", "seed", "concurrency", "dtype", "server_arg", "port", "start_timeout", "request_timeout"),
    *("logs", "json", "plot"),
)
"""Options that runs with and without ``--suite`` read."""


def add_suite_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that only ``--suite`` reads."""
    add = parser.add_argument_group("task suites").add_argument
    add("--suite", help=f"score tasks of {' and '.join(SUITES)}, separated by commas, in place of --parts; needs --results")
    arms = ", ".join(DEFAULT_ARMS)
    add("--arms", help=f"METHOD[:BUDGET] [FLAGS], separated by commas, each in --kv-mode lossy; full is stock (default: {arms})")
    add("--cases", type=int, default=100, help="cases of each task and length (default: %(default)s)")
    add("--lengths", default="2048,4096,8192,16384", help="tokens of the prompts of ruler, separated by commas (default: %(default)s)")
    add("--ruler-tasks", default=",".join(RULER_TASKS), help="tasks of ruler, separated by commas (default: %(default)s)")
    add("--results", type=Path, metavar="FOLDER", help="folder with a JSON file for each arm; a run adds the answers that are missing there")
    add("--servers-at-once", type=int, default=1, help="servers that run at the same time, distributed over the GPUs (default: %(default)s)")


def check_unread(args: argparse.Namespace, defaults: argparse.Namespace) -> None:
    """Refuse options that this run does not read.

    Args:
        args: The parsed options.
        defaults: The defaults of all options.

    Raises:
        CommandError: An option would not be read. The message has its name.
    """
    given = [name for name, value in vars(args).items() if value != getattr(defaults, name, None)]
    unread = [name for name in given if (name not in (*SUITE_OPTIONS, *SHARED_OPTIONS) if args.suite is not None else name in SUITE_OPTIONS)]
    if unread:
        flag = f"--{unread[0].replace('_', '-')}"
        without = f"only --suite reads it: pass --suite {','.join(SUITES)}, or leave {flag} out"
        why = without if args.suite is None else f"--suite {args.suite} does not read it: leave one of them out"
        raise CommandError(f"{flag} {getattr(args, unread[0])}: {why}")
