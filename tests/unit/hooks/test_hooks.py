"""Hooks fit the installed SGLang, and one that does not stops the start by name."""

import dataclasses
import pkgutil

import pytest

from sglang_ext.hooks import activation as hooking, table as hooks, transfer_table


@pytest.mark.parametrize("hook", hooks.HOOKS + hooks.PLAIN_CPU_HOOKS + transfer_table.TRANSFER_HOOKS, ids=lambda h: h.target)
def test_hook_fits_the_installed_sglang(hook):
    assert hooking.find_problem(hook) is None
    assert callable(pkgutil.resolve_name(hook.hook))
    assert hook.why


def test_a_moved_target_is_named(monkeypatch):
    moved = dataclasses.replace(hooks.HOOKS[0], target="sglang.srt.managers.scheduler.no_such_function")
    monkeypatch.setattr(hooks, "HOOKS", (moved,))
    with pytest.raises(hooking.HookError, match="no_such_function.*--kv-mode full"):
        hooking.check_hooks("verified")


def test_a_changed_signature_is_named(monkeypatch):
    changed = dataclasses.replace(hooks.HOOKS[1], expects=("self", "batch"))
    monkeypatch.setattr(hooks, "HOOKS", (changed,))
    with pytest.raises(hooking.HookError, match="process_batch_result_decode.*expected self, batch"):
        hooking.check_hooks("lossy")


def test_a_process_checks_its_own_hooks(monkeypatch):
    moved = dataclasses.replace(hooks.HOOKS[0], target="sglang.srt.managers.scheduler.no_such_function", process="frontend")
    monkeypatch.setattr(hooks, "HOOKS", (moved,))
    hooking.check_hooks("verified", ("scheduler",))
    with pytest.raises(hooking.HookError, match="no_such_function"):
        hooking.check_hooks("verified", ("frontend",))


@pytest.mark.parametrize("use", hooks.PRIVATE_NAMES + transfer_table.TRANSFER_NAMES, ids=lambda use: use.target)
def test_what_is_used_without_a_hook_fits_the_installed_sglang(use):
    assert hooking.find_problem(use) is None
    assert use.why


@pytest.mark.parametrize("use", hooks.PRIVATE_NAMES, ids=lambda use: use.target)
def test_a_use_that_no_longer_fits_stops_the_start_by_name(monkeypatch, use):
    changed = dataclasses.replace(use, **{"mentions" if use.mentions else "expects": ("accept_tokens", "a_new_name")})
    monkeypatch.setattr(hooks, "PRIVATE_NAMES", (changed,))
    with pytest.raises(hooking.HookError, match=f"{use.target.rsplit('.', 1)[1]}.*a_new_name"):
        hooking.check_hooks("verified")


def test_a_name_that_the_transfer_backend_needs_and_that_moved_stops_its_start(monkeypatch):
    hooking.check_transfer()
    moved = dataclasses.replace(transfer_table.TRANSFER_NAMES[0], target="sglang.srt.disaggregation.common.conn.no_such_function")
    monkeypatch.setattr(transfer_table, "TRANSFER_NAMES", (moved,))
    with pytest.raises(hooking.HookError, match="progressive cannot start: .*no_such_function.*mooncake"):
        hooking.check_transfer()
