"""Which questions a cache rank on a GPU records graphs for."""

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.managers.cache_rank.on_gpu import answering
from sglang_ext.managers.cache_rank.on_gpu.answering import MOST_GRAPHS, RECORDED_AFTER, UNUSED, Answering
from sglang_ext.managers.cache_rank.protocol import Ask


class Recording(Answering):
    """Notes for what it would record, and launches nothing."""

    def __init__(self):
        memory, store = SimpleNamespace(shape=SimpleNamespace(most=64)), SimpleNamespace(slots=lambda lane, tokens: torch.arange(tokens))
        rotary = SimpleNamespace(kept_turns=lambda: ())
        super().__init__(memory, None, store, None, rotary, torch.device("cpu"), True)
        self.recorded: list[int] = []

    def _recorded(self, inputs):
        self.recorded.append(inputs.form.count)
        return lambda: None

    def ask(self, count):
        """So many questions at once, which will be asked again; whether a graph answers them."""
        asks = [Ask(lane, 0, 1, 1, 100, 8, (99,)) for lane in range(count)]
        self.prepare(asks, [1] * count, again=True)
        return count in self.recorded


@pytest.fixture
def made(monkeypatch):
    """Forms whose inputs were made."""
    found, of = [], answering.Inputs.of
    monkeypatch.setattr(answering.Inputs, "of", lambda form, device: found.append(form.count) or of(form, device))
    return found


@pytest.mark.parametrize("forms", [1, 5, MOST_GRAPHS])
def test_each_form_that_comes_again_is_recorded_once_however_many_come_in_turn(forms, made):
    rank = Recording()
    for turn in range(10):
        answered = [rank.ask(count) for count in range(1, forms + 1)]
        assert all(answered) == (turn >= RECORDED_AFTER)
    assert sorted(rank.recorded) == list(range(1, forms + 1))
    assert len(made) <= forms * (RECORDED_AFTER + 1)


def test_more_forms_than_graphs_are_kept_do_not_drive_each_other_out():
    rank = Recording()
    for _ in range(12):
        for count in range(1, MOST_GRAPHS + 5):
            rank.ask(count)
    assert sorted(rank.recorded) == list(range(1, MOST_GRAPHS + 1))
    # The one that was not used for longest makes room, once it was not used for long.
    for _ in range(UNUSED):
        rank.ask(2)
    assert rank.ask(MOST_GRAPHS + 1) and len(rank.recorded) == MOST_GRAPHS + 1
    assert rank.ask(2) and rank.recorded.count(2) == 1, "what is used stays"
