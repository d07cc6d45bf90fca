"""``sglang-ext-bench <command>``: one module per command, imported when the command is run."""

import argparse
import importlib
import sys
from dataclasses import dataclass

from sglang_ext.core import OptionError
from sglang_ext.tools import CommandError
from sglang_ext.tools.server_process import leave_on_signals, stop_all
from sglang_ext_bench.options import check_outputs


PLOTS = "matplotlib"
"""The package of the extra ``bench``."""


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        module: Module in this package with ``add_arguments(parser) -> None`` and ``run(args) -> int`` (the exit code). It loads neither
            PyTorch nor SGLang before ``run``, so that ``--help`` is quick; modules without servers may. Its docstring is the help text.
        help: One line for the list of commands.
    """

    module: str
    help: str


COMMANDS = {
    # Servers, beside stock SGLang.
    "identity": Command("comparing.identity", "compare the tokens of verified decoding with stock SGLang's"),
    "families": Command("comparing.families", "compare tokens on tiny random models of each supported family"),
    "soak": Command("soaking.options", "send mixed traffic for minutes and check every answer"),
    "decode": Command("speed.decode", "measure decode speed of stock SGLang and of verified decoding"),
    "latency": Command("speed.latency", "measure latency of both against the request rate"),
    "methods": Command("methods.options", "measure acceptance, bytes and speed of all compression methods on one prompt set"),
    "quality": Command("quality.options", "measure what compressed KV costs in quality"),
    "longcot": Command("longcot.options", "measure long answers from sparse attention, and where a step's time goes"),
    "transfer": Command("transfer.options", "measure the time to the k-th token while KV travels to a decode server, by method"),
    "jobs": Command("jobs.options", "measure completion times of jobs on prefill and decode servers"),
    "auto-cells": Command("serving.auto_cells", "compare --kv-draft-length auto with fixed lengths, by context and batch"),
    "beside-others": Command("serving.beside_others", "measure what a schema and a penalty cost other requests in the batch"),
    "cache-ranks": Command("serving.cache_ranks", "measure acceptance and speed with cache ranks"),
    "lossy-contexts": Command("serving.lossy_contexts", "count the contexts that run at once in one pool"),
    "prefix-store": Command("serving.prefix_store", "measure the first token of prompts that a prefix store has"),
    "store-failures": Command("serving.store_failures", "measure the first token of prompts while a prefix store fails"),
    "drafts-on-anchors": Command("serving.drafts_on_anchors", "measure the first tokens of a stored prompt over a slow link"),
    "conversations": Command("serving.conversations", "compare the reuse of conversations' prefixes with stock SGLang's, with a store too"),
    "prefill-on-codes": Command("serving.prefill_on_codes", "measure the loss of --kv-prefill quantized"),
    "step-profile": Command("serving.step_profile", "measure kernels and gaps of a server's decode steps"),
    "paths": Command("serving.paths", "list the files and lines that a round and a request enter"),
    # Models without a server.
    "simulate": Command("simulating.simulate", "simulate full KV in host memory, without a model"),
    "head-budgets-acceptance": Command("acceptance.head_budgets_acceptance", "acceptance by how heads share a budget"),
    "kvzap-acceptance": Command("acceptance.kvzap_acceptance", "acceptance of compressors that drop tokens"),
    "quantized-acceptance": Command("acceptance.quantized_acceptance", "acceptance of compressors that pack tokens"),
    "selection-acceptance": Command("acceptance.selection_acceptance", "acceptance of methods that select tokens in each step"),
    "verify-guided-acceptance": Command("acceptance.verify_guided_acceptance", "acceptance when verifications select tokens"),
    "spared-by-copies": Command("acceptance.spared_by_copies", "count the full KV that a reload could leave out"),
    # Kernels and links.
    "attention": Command("attention.options", "time attention of one layer by the form of its KV"),
    "packed-kernel": Command("kernels.packed_kernel", "time decode attention over quantized blocks"),
    "prefill-tiles": Command("kernels.prefill_tiles", "time prefill on quantized codes, by tile"),
    "sparse-kernels": Command("kernels.sparse_kernels", "time attention through pointers and Quest's page selection"),
    "uneven-kernel": Command("kernels.uneven_kernel", "time decode attention over heads of different lengths"),
    "selection-speed": Command("kernels.selection_speed", "time the selection of a step's tokens"),
    "codec-speed": Command("kernels.codec_speed", "time encoding and decoding of KV pages for a transfer"),
    "compression-time": Command("kernels.compression_time", "time the creation of compressed KV, beside the prefill of its context"),
    "residual-rate": Command("kernels.residual_rate", "time the transfer of residuals to and from host memory"),
    "residual-bits": Command("kernels.residual_bits", "count the bits per number of residuals, for the KV of a model"),
    "lynx-codec": Command("kernels.lynx_codec", "measure error, bits and speed of the transfer codec on the KV of a model"),
    "store-forms": Command("kernels.store_forms", "measure bits and speed of a prefix store's pages on the KV of a model"),
    "copies-beside-loads": Command("kernels.copies_beside_loads", "time small copies to the GPU during loads of full KV"),
    "two-forwards": Command("kernels.two_forwards", "compare two forwards with a mixed one on a CPU"),
    "pack-cycles": Command("packs.pack_cycles", "time a cache rank's cycle of a pack of layers (AsyncSpade, Table 2)"),
    "backend-rate": Command("links.backend_rate", "measure the rate of transfer backend progressive"),
    "link-rate": Command("links.link_rate", "measure the rate of a link"),
    "store-rate": Command("links.store_rate", "measure the rate of a prefix store"),
    # Tools.
    "prompts": Command("corpus", "build a folder of real prompts from text on this machine"),
    "mixed-prompts": Command("acceptance.mixed_prompts", "build prompts of many kinds of text"),
    "pages": Command("pages.command", "write the tables of the results pages from benchmarks/results"),
    "manual": Command("pages.manual", "write the pages of flags and of refused combinations from the code"),
    "plot": Command("plot", "draw the plot of the decode benchmark from its JSON file"),
    "on-gpu": Command("on_gpu", "run named checks and measurements that need a GPU"),
}


def usage() -> str:
    """The list of commands, as shown by ``--help``."""
    lines = [f"  {name:25} {command.help}" for name, command in COMMANDS.items()]
    return "usage: sglang-ext-bench <command> [options]\n\n" + "\n".join(lines)


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
    module = importlib.import_module(f"sglang_ext_bench.{COMMANDS[name].module}")
    parser = argparse.ArgumentParser(
        prog=f"sglang-ext-bench {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    try:
        args = parser.parse_args(arguments[1:])
        check_outputs(args)
        return module.run(args)
    except (CommandError, OptionError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name != PLOTS:
            raise
        print(f"{name}: plots need {PLOTS}, which is not installed: pip install 'sglang-ext[bench]'", file=sys.stderr)
        return 2


def _leave(number: int, frame: object) -> None:
    """Leave no server behind, and wait for no request."""
    stop_all()
    sys.exit(128 + number)


def command() -> int:
    """Entry point of ``sglang-ext-bench``: :func:`main`, which a signal ends together with its servers."""
    leave_on_signals(_leave)
    return main()


if __name__ == "__main__":
    sys.exit(command())
