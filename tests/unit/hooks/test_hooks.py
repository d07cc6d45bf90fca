"""Hooks fit the installed SGLang, and one that does not stops the start by name."""

import dataclasses
import pkgutil
import sys
from types import SimpleNamespace

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_ext.hooks import activation as hooking, table as hooks, transfer_table
from sglang_ext.hooks.algorithm import worker_class


@pytest.mark.parametrize("hook", hooks.HOOKS + hooks.PLAIN_CPU_HOOKS + transfer_table.TRANSFER_HOOKS, ids=lambda h: h.target)
def test_hook_fits_the_installed_sglang(hook):
    assert hooking.find_problem(hook) is None
    assert callable(pkgutil.resolve_name(hook.hook))
    assert hook.why


def test_all_hooks_and_private_names_fit_together():
    assert set(hooking.REQUIRED) == {*hooks.HOOKS, *hooks.PLAIN_CPU_HOOKS, *hooks.PRIVATE_NAMES}
    hooking.check_hooks("verified")


def test_a_moved_target_is_named():
    moved = dataclasses.replace(hooks.HOOKS[0], target="sglang.srt.managers.scheduler.no_such_function")
    with pytest.raises(hooking.HookError, match="no_such_function.*--kv-mode full"):
        hooking.check_hooks("verified", [*hooks.SCHEDULER_HOOKS, moved])


def test_a_changed_signature_is_named():
    changed = dataclasses.replace(hooks.SCHEDULER_HOOKS[0], expects=("self", "batch"))
    with pytest.raises(hooking.HookError, match="process_batch_result_decode.*expected self, batch"):
        hooking.check_hooks("lossy", [changed])


def test_each_process_and_mode_has_hooks_of_its_own():
    modules = {name: {hook.hook.split(".")[2] for hook in found} for name, found in (
        ("frontend", hooks.FRONTEND_HOOKS), ("verified", hooks.scheduler_hooks("verified")), ("lossy", hooks.scheduler_hooks("lossy")),
    )}  # fmt: skip
    assert "frontend" in modules["frontend"] and "rounds" not in modules["frontend"]
    assert "rounds" in modules["verified"] and modules["lossy"] - modules["verified"] == {"lossy_admission"}


@pytest.mark.parametrize("use", hooks.PRIVATE_NAMES + transfer_table.TRANSFER_NAMES, ids=lambda use: use.target)
def test_what_is_used_without_a_hook_fits_the_installed_sglang(use):
    assert hooking.find_problem(use) is None
    assert use.why


@pytest.mark.parametrize("use", hooks.PRIVATE_NAMES, ids=lambda use: use.target)
def test_a_use_that_no_longer_fits_stops_the_start_by_name(use):
    changed = dataclasses.replace(use, **{"mentions" if use.mentions else "expects": ("accept_tokens", "a_new_name")})
    with pytest.raises(hooking.HookError, match=f"{use.target.rsplit('.', 1)[1]}.*a_new_name"):
        hooking.check_hooks("verified", [changed])


def test_a_name_that_the_transfer_backend_needs_and_that_moved_stops_its_start():
    hooking.check_transfer()
    moved = dataclasses.replace(transfer_table.TRANSFER_NAMES[0], target="sglang.srt.disaggregation.common.conn.no_such_function")
    with pytest.raises(hooking.HookError, match="progressive cannot start: .*no_such_function.*mooncake"):
        hooking.check_transfer([moved])


def test_a_scheduler_checks_its_hooks_before_it_applies_them(monkeypatch, capsys):
    # SGLang's function with another parameter, as in another version.
    monkeypatch.setattr("sglang.srt.layers.sampler.multinomial_with_seed", lambda logprobs, seed: None)
    with pytest.raises(SystemExit):
        worker_class(SimpleNamespace(kv_mode="verified"))
    assert "multinomial_with_seed" in capsys.readouterr().err


def test_a_patched_fork_calls_its_hooks_itself(monkeypatch):
    moved = dataclasses.replace(hooks.HOOKS[0], target="sglang.srt.managers.scheduler.no_such_function")
    # This module exists in the fork alone.
    monkeypatch.setitem(sys.modules, "sglang.srt.kv_seams", SimpleNamespace(__spec__=object()))
    hooking.activate((moved,))
    assert moved.target not in HookRegistry._hooks
