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


@pytest.mark.parametrize("use", hooks.USES, ids=lambda use: use.target)
def test_what_is_used_without_a_hook_fits_the_installed_sglang(use):
    assert hooks.find_problem(use) is None
    assert use.why


@pytest.mark.parametrize("use", hooks.USES, ids=lambda use: use.target)
def test_a_use_that_no_longer_fits_stops_the_start_by_name(monkeypatch, use):
    changed = dataclasses.replace(use, expects=("accept_tokens", "a_new_name"))
    monkeypatch.setattr(hooks, "USES", (changed,))
    with pytest.raises(hooks.HookError, match=f"{use.target.rsplit('.', 1)[1]}.*a_new_name"):
        hooks.check("verified")
