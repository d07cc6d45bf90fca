"""What a fork of SGLang with the series of ``patches/`` calls, in place of the plugin's entry point.

The fork's ``ServerArgs`` has the flags itself, so that :class:`sglang_ext.arguments.KVServerArgs` is
not used there.
"""

import pkgutil
from typing import TYPE_CHECKING

from sglang_ext import flag_checks
from sglang_ext.arguments import KVServerArgs
from sglang_ext.hooks import application as hooking
from sglang_ext.hooks import table as hooks

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def prepare(args: "ServerArgs") -> None:
    """Before SGLang resolves its options: check the flags, set SGLang's own for the mode.

    Raises:
        OptionError: a flag is out of range, or an option cannot be combined with the mode.
    """
    flag_checks.check_flags(args)
    KVServerArgs._prepare_speculation(args)


def check(args: "ServerArgs") -> None:
    """After SGLang resolved its options: check the backend, the model and the fork's seams.

    Raises:
        OptionError: the attention backend or the model is not supported, or a predictor is of another model.
        hooking.HookError: a function is not marked in the fork, or has other parameters than expected.
    """
    flag_checks.check_resolved(args)
    for hook in hooks.HOOKS:
        marked = getattr(pkgutil.resolve_name(hook.target), "kv_hook", None)
        if marked != hook.hook:
            raise hooking.HookError(
                f"--kv-mode {args.kv_mode} cannot start: this fork of SGLang marks {hook.target} "
                f"with {marked}; expected {hook.hook}. Apply the patches that belong to this "
                "version of sglang-ext, or use --kv-mode full."
            )
