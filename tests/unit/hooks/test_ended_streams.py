"""After a stream's end SGLang's frontend aborts what was not finished then, and no later request of the same id."""

import asyncio
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_ext.hooks import stream_delivery


def ended(monkeypatch, at_end, later, rids="r", children=()):
    """Ids that are aborted: ``at_end`` are there when the stream ends, ``later`` two seconds after that; ``children``: ids of the answers
    of request r."""
    aborted = []
    of_requests = {"r": set(children)} if children else {}
    manager = SimpleNamespace(rid_to_state=dict(at_end), logical_rid_to_child_rids=of_requests, abort_request=aborted.append)

    async def pass_time(seconds):
        assert seconds == 2
        manager.rid_to_state = dict(later)

    monkeypatch.setattr(stream_delivery.asyncio, "sleep", pass_time)
    # As it comes, SGLang has given it no ids, and has not looked whether it is one prompt.
    obj = GenerateReqInput(text=["a"] * len(rids) if isinstance(rids, list) else "a")
    tasks = stream_delivery.abort_unfinished(TokenizerManager.create_abort_task, manager, obj)
    obj.rid = rids
    asyncio.run(tasks())
    return aborted


FIRST, SECOND = object(), object()


@pytest.mark.parametrize(("at_end", "later", "aborted"), [
    ({"r": FIRST}, {"r": FIRST}, ["r"]), ({"r": FIRST}, {}, []), ({}, {"r": SECOND}, []), ({"r": FIRST}, {"r": SECOND}, []),
    ({"other": FIRST}, {"other": FIRST}, [])], ids=["gone client", "ended since", "asked anew", "ended and asked anew", "another's"])  # fmt: skip
def test_what_was_unfinished_is_aborted_and_nothing_that_came_under_its_id_later(monkeypatch, at_end, later, aborted):
    assert ended(monkeypatch, at_end, later) == aborted


def test_of_several_prompts_each_is_looked_at(monkeypatch):
    assert ended(monkeypatch, {"a": FIRST, "b": FIRST}, {"a": FIRST, "b": SECOND, "c": SECOND}, ["a", "b", "c"]) == ["a"]


def test_of_several_answers_to_a_prompt_those_are_aborted_that_go_on(monkeypatch):
    # SGLang forgets the request itself once its answers have ids of their own.
    there = {"r_1": FIRST, "r_2": FIRST, "other": FIRST}
    aborted = ended(monkeypatch, there, {**there, "r_2": SECOND}, children=["r_0", "r_1", "r_2"])
    assert aborted == ["r_1"]


def test_a_request_that_was_refused_has_no_id_to_abort(monkeypatch):
    assert ended(monkeypatch, {"r": FIRST}, {"r": FIRST}, None) == []
