"""Checks and applies all uses of private SGLang names: the tables in table.py and transfer_table.py.

:func:`check_hooks` resolves all of them when a mode is enabled. A target that moved or changed its signature stops the start, with a message
that names it.
"""

import dataclasses
import importlib.util
import inspect
import logging
import pkgutil
from collections.abc import Iterable

from sglang_ext.core import HookError
from sglang_ext.hooks import table
from sglang_ext.hooks.table import Hook, PrivateName

logger = logging.getLogger(__name__)


def required_names() -> tuple[Hook | PrivateName, ...]:
    """All hooks and names that must match the installed SGLang before a mode starts."""
    return table.HOOKS + table.PLAIN_CPU_HOOKS + table.PRIVATE_NAMES


def check_hooks(mode: str, processes: tuple[str, ...] = ("frontend", "scheduler")) -> None:
    """Check all hooks of these processes and all private names. Raises ``HookError`` if one does not match the installed SGLang."""
    chosen = (entry for entry in required_names() if isinstance(entry, PrivateName) or entry.process in processes)
    _check(chosen, f"--kv-mode {mode}", "--kv-mode full")


def check_transfer() -> None:
    """Check the hooks and names of the transfer backend ``progressive``. Raises ``HookError`` as :func:`check_hooks`."""
    from sglang_ext.hooks import transfer_table

    flag = "--disaggregation-transfer-backend"
    _check(transfer_table.TRANSFER_HOOKS + transfer_table.TRANSFER_NAMES, f"{flag} progressive", f"{flag} mooncake")


def _check(chosen: Iterable[Hook | PrivateName], asked: str, remedy: str) -> None:
    for entry in chosen:
        problem = find_problem(entry)
        if problem is not None:
            raise HookError(
                f"{asked} cannot start: {entry.target} does not fit ({problem}). It is needed because {entry.why}. "
                f"Install sglang==0.5.17, or use {remedy}."
            )


def find_problem(entry: Hook | PrivateName) -> str | None:
    """Why a hook or a private name does not match the installed SGLang. None if it matches."""
    try:
        target = pkgutil.resolve_name(entry.target)
    except (ImportError, AttributeError) as error:
        return f"no such name: {error}"
    if isinstance(entry, PrivateName) and entry.mentions:
        source = inspect.getsource(target)
        missing = [name for name in entry.mentions if name not in source]
        return f"its source does not name {', '.join(missing)}" if missing else None
    if dataclasses.is_dataclass(target):
        missing = set(entry.expects) - {field.name for field in dataclasses.fields(target)}
        return f"no field is called {', '.join(sorted(missing))}" if missing else None
    found = tuple(inspect.signature(inspect.unwrap(target)).parameters)
    if found != entry.expects:
        return f"parameters are {', '.join(found)}; expected {', '.join(entry.expects)}"
    return None


def apply(chosen: tuple[Hook, ...]) -> None:
    """Register hooks with SGLang's registry and apply them now.

    Applying is idempotent. SGLang's registry only logs a failure. This function raises.

    Raises:
        HookError: A hook did not take effect.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    for hook in chosen:
        _register(hook)
    # SGLang's registry logs each hook that it applies.
    registry_logger = logging.getLogger("sglang.srt.plugins.hook_registry")
    level = registry_logger.level
    registry_logger.setLevel(max(level, logging.WARNING))
    try:
        HookRegistry.apply_hooks()
    finally:
        registry_logger.setLevel(level)
    for hook in chosen:
        if hook.target not in HookRegistry._patched:
            raise HookError(f"the hook on {hook.target} was not applied; see the log for the reason")


def _register(hook: Hook) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if hook.target not in HookRegistry._hooks:
        HookRegistry.register(hook.target, pkgutil.resolve_name(hook.hook), HookType(hook.kind))


def is_patched_fork() -> bool:
    """Whether this SGLang is a fork with the series of ``patches/``, which calls the hooks itself."""
    return importlib.util.find_spec("sglang.srt.kv_seams") is not None


def activate_frontend(mode: str) -> None:
    """Apply the hooks of the tokenizer and HTTP process, and log the number of hooks of all processes in one line."""
    if not is_patched_fork():
        from sglang.srt.plugins.hook_registry import HookRegistry

        count = sum(hook.mode in (None, mode) for hook in table.HOOKS) + sum(hook.target in HookRegistry._patched for hook in table.PLAIN_CPU_HOOKS)
        logger.info("sglang-ext: %d functions of SGLang are hooked, see sglang_ext/hooks/table.py", count)
        _apply_for(mode, "frontend")


def activate_scheduler(mode: str) -> None:
    """Apply the hooks that the scheduler process needs in this ``--kv-mode``."""
    if not is_patched_fork():
        _apply_for(mode, "scheduler")


def _apply_for(mode: str, process: str) -> None:
    apply(tuple(hook for hook in table.HOOKS if hook.mode in (None, mode) and hook.process == process))


def register_transfer() -> None:
    """Register the hook that provides the classes of the transfer backend ``progressive``. The others are applied when it is used."""
    _register(table.KV_CLASS_HOOK)


def activate_transfer() -> None:
    """Apply the hooks of the transfer backend ``progressive``, in a scheduler process that uses it."""
    if not is_patched_fork():
        from sglang_ext.hooks import transfer_table

        apply(transfer_table.TRANSFER_HOOKS)


def activate_plain_cpu() -> None:
    """Apply the hooks of the plain CPU platform, in any mode."""
    apply(table.PLAIN_CPU_HOOKS)
