"""Parses and checks SGLang's server arguments with the flags of sglang-ext.

:class:`CheckedServerArgs` replaces ``sglang.srt.server_args.ServerArgs`` (plugin.py). So the flags are parsed, logged, shown by
``/server_info``, accepted by ``sgl.Engine(...)`` and pickled to the scheduler process like SGLang's own. The scheduler unpickles the
arguments before it loads plugins: this module must import without any hook in place.
"""

import argparse
import dataclasses

import torch
from sglang.srt.arg_groups.arg_utils import NS, A

from sglang_ext import command_line
from sglang_ext.config import model_folder, options
from sglang_ext.config.flags import FLAGS
from sglang_ext.config.rules import KVServerArgs
from sglang_ext.core import RADIX_CACHE_BACKEND, SPECULATIVE_ALGORITHM
from sglang_ext.hooks import activation as hooking


@dataclasses.dataclass
class CheckedServerArgs(KVServerArgs):
    """Server arguments that are parsed, checked and resolved.

    In mode ``full``, the default, only flags of host memory, of a prefix store, and of ``progressive`` transfers are checked.

    Raises:
        OptionError: A flag is out of range, unknown or cannot be combined, or the model is not supported. The message names the value, the
            allowed values and the remedy.
    """

    # SGLang's parser reads the flags from annotations.
    __annotations__ = {flag.name: A[KVServerArgs.__annotations__[flag.name], flag, NS("memory")] for flag in FLAGS}

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Add SGLang's flags and ours. An error that names one of ours is one line."""
        # By name, because SGLang's registry also puts this class in the place of SGLang's.
        super(CheckedServerArgs, CheckedServerArgs).add_cli_args(parser)
        command_line.shorten_errors(parser)

    @classmethod
    @command_line.exit_on_refusal
    def from_cli_args(cls, args: argparse.Namespace) -> "CheckedServerArgs":
        """Create from a command line. A refused flag or a taken port ends the process (``SystemExit``) with one line and code 2."""
        made = super().from_cli_args(args)
        if made.kv_mode != "full" and made.node_rank == 0:
            command_line.check_address(made.host, made.port)
        return made

    def __post_init__(self) -> None:
        """Check the flags, prepare SGLang's own options for the mode, then let SGLang resolve."""
        # SGLang's other processes get the checked arguments, and do not need the checks.
        from sglang_ext import flag_checks

        flag_checks.check_flags(self)
        if not options.has_own_tree(self):
            super().__post_init__()
            return
        prepare(self)
        try:
            super().__post_init__()
        except OSError as error:
            # Errors of the operating system have a number. Those of Hugging Face's library, for a model that it does not find, have none.
            if error.errno is not None:
                raise
            raise model_folder.unreadable_model(self.model_path, error) from error
        if self.model_path.lower() in ("none", "dummy"):
            return
        flag_checks.check_resolved(self)
        if self.kv_mode != "full":
            hooking.activate_frontend(self.kv_mode)

    def check_lora_server_args(self) -> None:
        """SGLang's check. Of all speculative algorithms it allows LoRA with NGRAM only."""
        if self.speculative_algorithm != SPECULATIVE_ALGORITHM:
            super().check_lora_server_args()
            return
        # layers/forward.py:prepare_lora applies adapters to drafts and verifications alike.
        self.override("check_lora_server_args", speculative_algorithm=None)
        super().check_lora_server_args()
        self.override("check_lora_server_args", speculative_algorithm=SPECULATIVE_ALGORITHM)


def prepare(args: KVServerArgs) -> None:
    """Set SGLang's options for its own registries: the radix cache backend and, except in mode ``full``, the speculative algorithm."""
    args.radix_cache_backend = RADIX_CACHE_BACKEND
    if args.kv_mode == "full":
        return
    on_gpu = args.device in (None, "cuda") and torch.cuda.is_available()
    args.speculative_algorithm = SPECULATIVE_ALGORITHM
    args.speculative_num_steps = options.max_pending_drafts(args)
    args.speculative_eagle_topk = 1
    args.speculative_num_draft_tokens = args.speculative_num_steps + 1
    if args.enable_lora or args.lora_paths:
        # Adapters are prepared for each forward of a step or of a verification.
        args.disable_cuda_graph = True
    if args.attention_backend is None and on_gpu:
        args.attention_backend = "triton" if args.enable_deterministic_inference else "flashinfer"
    # Draft and verification share noise, which needs a sampler with a seed.
    args.sampling_backend = args.sampling_backend or "pytorch"
