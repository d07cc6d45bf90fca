"""``python -m sglang_ext_bench <command>``: one module per command, imported when it is asked for."""

import argparse
import importlib
import sys
from dataclasses import dataclass

from sglang_ext import output_files
from sglang_ext.core import OptionError
from sglang_ext.tools import CommandError
from sglang_ext.tools.server_process import leave_on_signals, stop_all


@dataclass(frozen=True)
class Command:
    """A subcommand.

    ``module`` has ``add_arguments(parser) -> None`` and ``run(args) -> int`` (the exit code). It loads neither PyTorch nor SGLang before
    ``run``, so that ``--help`` is quick.
    """

    module: str
    help: str


COMMANDS = {
    "identity": Command(
        "sglang_ext_bench.comparing.identity_options", "compare the tokens of verified decoding with stock SGLang's"
    ),
    "decode": Command("sglang_ext_bench.speed.decode_options", "measure decode speed of stock SGLang and of verified decoding"),
    "latency": Command("sglang_ext_bench.speed.latency_options", "measure latency of both against the rate of requests"),
    "transfer": Command(
        "sglang_ext_bench.transfer.options", "measure the time to the k-th token while KV travels to a decode server, by method"
    ),
    "jobs": Command(
        "sglang_ext_bench.jobs.options", "measure completion times of jobs that are prefilled on some servers and decoded on others"
    ),
    "longcot": Command(
        "sglang_ext_bench.longcot.options", "measure long answers from sparse attention, and where a step's time goes"
    ),
    "quality": Command(
        "sglang_ext_bench.quality.options",
        "measure what compressed KV costs in quality, and that verified decoding costs nothing",
    ),
    "methods": Command(
        "sglang_ext_bench.methods.options", "measure acceptance, bytes and speed of all compression methods on one prompt set"
    ),
    "families": Command(
        "sglang_ext_bench.comparing.families", "identity on tiny random models of each supported family"
    ),
    "simulate": Command(
        "sglang_ext_bench.simulating.options", "simulate full KV in host memory: what a machine would gain, without a model"
    ),
    "attention": Command(
        "sglang_ext_bench.attention.options", "time attention of one layer by how KV is kept, without a server"
    ),
    "soak": Command(
        "sglang_ext_bench.soaking.options", "send mixed traffic for minutes and check every answer"
    ),
    "prompts": Command(
        "sglang_ext_bench.corpus", "build a folder of real prompts from text on this machine"
    ),
}


def usage() -> str:
    """The list of commands, as shown by ``--help``."""
    lines = [f"  {name:10} {command.help}" for name, command in COMMANDS.items()]
    return "usage: python -m sglang_ext_bench <command> [options]\n\n" + "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; 2 for a wrong command or a failed measurement."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    name = arguments[0]
    if name not in COMMANDS:
        print(f"unknown command {name!r}; one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    module = importlib.import_module(COMMANDS[name].module)
    parser = argparse.ArgumentParser(
        prog=f"python -m sglang_ext_bench {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    try:
        args = parser.parse_args(arguments[1:])
        output_files.check_outputs(args)
        return module.run(args)
    except (CommandError, OptionError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2


def _leave(number: int, frame: object) -> None:
    """Leave no server behind, and wait for no request."""
    stop_all()
    sys.exit(128 + number)


if __name__ == "__main__":
    leave_on_signals(_leave)
    sys.exit(main())
