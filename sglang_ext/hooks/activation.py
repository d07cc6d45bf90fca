"""Checks and applies all uses of private SGLang names: the tables in table.py and transfer_table.py.

A target that moved or changed its signature stops the start of a server, with a message that names it.
"""

import importlib.util
import inspect
import logging
import pkgutil
from collections.abc import Iterable

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_ext.core import HookError
from sglang_ext.hooks import table
from sglang_ext.hooks.table import Hook, PrivateName
from sglang_ext.hooks.transfer_table import TRANSFER_HOOKS, TRANSFER_NAMES

logger = logging.getLogger(__name__)


REQUIRED = table.HOOKS + table.PLAIN_CPU_HOOKS + table.PRIVATE_NAMES
"""All hooks and names that must match the installed SGLang before a mode starts."""


def check_hooks(mode: str, needed: Iterable[Hook | PrivateName] = REQUIRED) -> None:
    """Check what a mode needs. Raises ``HookError`` if a hook or name does not match the installed SGLang."""
    _check(needed, f"--kv-mode {mode}", "--kv-mode full")


def check_transfer(needed: Iterable[Hook | PrivateName] = TRANSFER_HOOKS + TRANSFER_NAMES) -> None:
    """Check what the transfer backend ``progressive`` needs. Raises ``HookError`` as :func:`check_hooks`."""
    flag = "--disaggregation-transfer-backend"
    _check(needed, f"{flag} progressive", f"{flag} mooncake")


def _check(needed: Iterable[Hook | PrivateName], asked: str, remedy: str) -> None:
    for entry in needed:
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
    found = tuple(inspect.signature(inspect.unwrap(target)).parameters)
    if found != entry.expects:
        return f"parameters are {', '.join(found)}; expected {', '.join(entry.expects)}"
    return None


def apply(chosen: tuple[Hook, ...]) -> None:
    """Register hooks with SGLang's registry and apply them now. Applying is idempotent.

    Raises:
        HookError: A hook did not take effect. SGLang's registry only logs that.
    """
    for hook in chosen:
        register(hook)
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


def register(hook: Hook) -> None:
    """Register a hook with SGLang's registry, which applies it after the plugins are loaded."""
    if hook.target not in HookRegistry._hooks:
        HookRegistry.register(hook.target, pkgutil.resolve_name(hook.hook), HookType(hook.kind))


def is_patched_fork() -> bool:
    """Whether this SGLang is a fork with the series of ``patches/``, which calls the hooks itself."""
    return importlib.util.find_spec("sglang.srt.kv_seams") is not None


def activate(chosen: tuple[Hook, ...]) -> None:
    """Apply hooks, unless a patched fork calls them."""
    if not is_patched_fork():
        apply(chosen)


def activate_frontend(mode: str) -> None:
    """Apply the hooks of the tokenizer and HTTP process, and log the number of hooks of all processes in one line."""
    if not is_patched_fork():
        plain_cpu = [hook for hook in table.PLAIN_CPU_HOOKS if hook.target in HookRegistry._patched]
        count = len(table.FRONTEND_HOOKS) + len(table.scheduler_hooks(mode)) + len(plain_cpu)
        logger.info("sglang-ext: %d functions of SGLang are hooked, see sglang_ext/hooks/table.py", count)
        apply(table.FRONTEND_HOOKS)
