"""Hooks fit the installed SGLang, and one that does not stops the start by name."""

import dataclasses

import pytest

from sglang_ext import hooks


@pytest.mark.parametrize("hook", hooks.HOOKS + hooks.PLAIN_CPU_HOOKS, ids=lambda h: h.target)
def test_hook_fits_the_installed_sglang(hook):
    assert hooks.find_problem(hook) is None
    assert callable(hooks._load(hook.hook))
    assert hook.why


def test_a_moved_target_is_named(monkeypatch):
    moved = dataclasses.replace(hooks.HOOKS[0], target="sglang.srt.managers.scheduler.no_such_function")
    monkeypatch.setattr(hooks, "HOOKS", (moved,))
    with pytest.raises(hooks.HookError, match="no_such_function.*--kv-mode full"):
        hooks.check("verified")


def test_a_changed_signature_is_named(monkeypatch):
    changed = dataclasses.replace(hooks.HOOKS[1], expects=("self", "batch"))
    monkeypatch.setattr(hooks, "HOOKS", (changed,))
    with pytest.raises(hooks.HookError, match="process_batch_result_decode.*expected self, batch"):
        hooks.check("lossy")
