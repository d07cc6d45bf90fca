"""Entry points for a fork of SGLang with the series of ``patches/``, in place of the plugin's.

The fork's ``ServerArgs`` has the flags itself, so that :class:`~sglang_ext.arguments.CheckedServerArgs` is not used there.
"""

import pkgutil

from sglang.srt.server_args import ServerArgs

from sglang_ext import arguments, flag_checks
from sglang_ext.config import options
from sglang_ext.core import HookError
from sglang_ext.hooks.table import HOOKS, Hook
from sglang_ext.hooks.transfer_table import TRANSFER_HOOKS


def prepare(args: ServerArgs) -> None:
    """Check the flags and set SGLang's own, before SGLang resolves its options. Called if a mode, host memory or our transfer backend is requested.

    Raises ``OptionError`` for a refused flag, ``HookError`` if a function that the backend needs is not marked in the fork.
    """
    flag_checks.check_flags(args)
    if options.has_progressive_transfer(args):
        _check_marks(TRANSFER_HOOKS, f"--disaggregation-transfer-backend {options.BACKEND}")
    if options.has_own_tree(args):
        arguments.prepare(args)


def check(args: ServerArgs) -> None:
    """Check the backend, the model and the fork's hook marks, after SGLang resolved its options. Called unless SGLang's own prefix tree serves.

    Raises ``OptionError`` if one is not supported, ``HookError`` if a function is not marked in the fork.
    """
    flag_checks.check_resolved(args)
    if args.kv_mode != "full":
        _check_marks(HOOKS, f"--kv-mode {args.kv_mode}")


def _check_marks(needed: tuple[Hook, ...], asked: str) -> None:
    for hook in needed:
        marked = getattr(pkgutil.resolve_name(hook.target), "kv_hook", None)
        if marked != hook.hook:
            raise HookError(
                f"{asked} cannot start: this fork of SGLang marks {hook.target} with {marked}; expected {hook.hook}. Apply the patches that "
                "belong to this version of sglang-ext, or leave that out."
            )
