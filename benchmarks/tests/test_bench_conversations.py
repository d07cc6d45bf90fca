"""The benchmark of conversations: how it replays them, and what it counts."""

import json

import pytest

from sglang_ext.tools import CommandError
from sglang_ext_bench.serving.conversations import STOCK, STORED, VERIFIED, Conversation, Turn, compare, read_recordings


def test_a_turn_continues_the_turn_before_with_its_answer() -> None:
    prompts = []

    def generate(ids: list[int]) -> dict:
        prompts.append(list(ids))
        return {"output_ids": [90 + len(prompts)], "meta_info": {"cached_tokens": len(ids) - 2, "cached_tokens_details": {"storage": 1}}}

    conversation = Conversation([[1, 2, 3], [4, 5]])
    conversation.take_turn(generate)
    conversation.take_turn(generate)
    assert prompts == [[1, 2, 3], [1, 2, 3, 91, 4, 5]]
    assert conversation.turns == [Turn(3, 1, 1, [91]), Turn(6, 4, 1, [92])]


def replayed(cached: list[int], output: int = 7) -> list[Conversation]:
    return [Conversation([], [Turn(500, each, 0, [output]) for each in cached])]


@pytest.mark.parametrize(
    ("verified", "stored", "lost"),
    [
        ([0, 100, 200, 300], [0, 100, 192, 300], 0),
        ([0, 99, 200, 300], [0, 100, 200, 300], 1),
        ([0, 100, 200, 300], [0, 100, 128, 300], 1),
        ([0, 100, 200, 300], [0, 100, 192, 256], 1),
        ([0, 100, 468, 300], [0, 100, 448, 300], 0),
        ([0, 100, 467, 300], [0, 100, 448, 300], 1),
    ],
    ids=["whole pages after the restart", "verified loses a token", "a page is lost", "the turn after the restart has stock's reuse", "queries", "before the queries"],
)
def test_reuse_below_stocks_is_counted(verified: list[int], stored: list[int], lost: int) -> None:
    # Of stock's prompts of 500 tokens, one is cached but for a token if the other servers have more than 200 of it.
    third = 499 if verified[2] > 200 else 200
    found = {STOCK: replayed([0, 100, third, 300]), VERIFIED: replayed(verified), STORED: replayed(stored)}
    assert compare(found, 2) == (0, lost)


def test_different_answers_are_counted() -> None:
    found = {STOCK: replayed([0, 9]), VERIFIED: replayed([0, 9], output=8), STORED: replayed([0, 9])}
    assert compare(found, 1) == (2, 0)


def test_recordings_are_the_messages_of_users(tmp_path) -> None:
    def case(*texts: str) -> dict:
        return {"messages": [each for text in texts for each in ({"role": "user", "content": text}, {"role": "assistant", "content": "x"})]}

    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"cases": [case("a"), case("a", "b", "c"), case("a", "b", "d"), case("e", "f")]}))
    assert read_recordings(path, 2, 2) == [["a", "b"], ["e", "f"]]
    with pytest.raises(CommandError, match="2 different conversations have 2 turns"):
        read_recordings(path, 3, 2)
    path.write_text('{"cases": [1]}')
    with pytest.raises(CommandError, match="no list `cases`"):
        read_recordings(path, 1, 1)
