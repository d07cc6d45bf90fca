"""Inputs of the benchmarks: responses of a server, prompts, text for prompts, and command names."""

import json
from pathlib import Path

import pytest
from bench_helpers import STATS, CharTokenizer, tops
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.tools import CommandError
from sglang_ext_bench import corpus
from sglang_ext_bench.__main__ import COMMANDS, main
from sglang_ext_bench.client import Generation, parse_response
from sglang_ext_bench.prompts import load_prompts


class TestParseResponse:
    def test_reads_tokens_logprobs_and_counters(self) -> None:
        meta = {
            "output_top_logprobs": [[[-0.5, 7, None], [-1.5, 8, None]]],
            "kv_verifies": 4,
            "kv_drafts": 7,
            "kv_accepted": 4,
            "kv_accept_length": 2.0,
            "kv_accept_histogram": [1, 2, 1],
            "kv_fallback": None,
        }
        answer = parse_response({"output_ids": [7], "meta_info": meta}, 1.5)
        assert answer == Generation((7,), tops(1.0), STATS, seconds=1.5)

    @pytest.mark.parametrize(
        ("payload", "message"),
        [
            ({"meta_info": {}}, "no output_ids"),
            ({"output_ids": [1], "meta_info": {"kv_verifies": 1}}, "malformed"),
            ({"meta_info": {"finish_reason": {"type": "abort", "message": "full"}}}, "aborted: full"),
        ],
    )
    def test_unusable_answer_becomes_an_error(self, payload: dict[str, object], message: str) -> None:
        answer = parse_response(payload)
        assert answer.error is not None and message in answer.error


class TestLoadPrompts:
    def test_folder_in_order_of_names_with_begin_token_once(self, tmp_path: Path) -> None:
        (tmp_path / "b.txt").write_text("<chat")
        (tmp_path / "a.txt").write_text("text")
        (tmp_path / "c.json").write_text("ignored")
        first, second = load_prompts(tmp_path, CharTokenizer())
        assert (first.name, first.input_ids) == ("a.txt", tuple(map(ord, "<text")))
        assert (second.name, second.input_ids) == ("b.txt", tuple(map(ord, "<chat")))

    def test_json_lines_with_text_and_messages(self, tmp_path: Path) -> None:
        path = tmp_path / "p.jsonl"
        rows = [{"text": "hi"}, {"messages": [{"role": "user", "content": "yo"}]}]
        path.write_text("\n\n".join(map(json.dumps, rows)))
        texts = ["".join(map(chr, p.input_ids)) for p in load_prompts(path, CharTokenizer())]
        assert texts == ["<hi", "<[user]yo[assistant]"]

    @pytest.mark.parametrize(
        ("content", "message"),
        [("{", "p.jsonl:1 is not JSON"), ('{"prompt": 1}', "`text`"), ("[]", "`text`"), ("", "no prompt")],
    )
    def test_malformed_file_is_named(self, tmp_path: Path, content: str, message: str) -> None:
        path = tmp_path / "p.jsonl"
        path.write_text(content)
        with pytest.raises(CommandError, match=message):
            load_prompts(path, CharTokenizer())

    def test_missing_path(self, tmp_path: Path) -> None:
        with pytest.raises(CommandError, match="does not exist"):
            load_prompts(tmp_path / "none", CharTokenizer())
        with pytest.raises(CommandError, match="--overlap-prompts .*none does not exist"):
            load_prompts(tmp_path / "none", CharTokenizer(), "--overlap-prompts")


class TestCorpus:
    documents = {"code": [corpus.Document(c, c * 400) for c in "abc"]}

    @given(st.integers(1, 30), st.integers(1, 500), st.integers(0, 500))
    def test_lengths_spread_over_the_range(self, count: int, low: int, more: int) -> None:
        lengths = corpus.spread_lengths(count, low, low + more)
        assert len(lengths) == count and lengths == sorted(lengths)
        assert lengths[0] == low and (count == 1 or lengths[-1] == low + more)

    def test_prompts_reach_their_length_and_repeat(self) -> None:
        first = list(corpus.build(CharTokenizer(), self.documents, [150, 900], seed=1))
        assert [prompt.tokens for prompt in first] == [150, 900]
        assert first == list(corpus.build(CharTokenizer(), self.documents, [150, 900], seed=1))
        assert all(prompt.text.endswith("[assistant]") for prompt in first)

    def test_prompts_of_its_own_are_chats_of_real_text_or_text_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer = CharTokenizer()
        prompts = corpus.default_prompts(tokenizer)
        assert prompts == corpus.default_prompts(tokenizer)
        assert [len(prompt.input_ids) for prompt in prompts][:: len(prompts) - 1] == [300, 1500]
        assert tokenizer.decode(list(prompts[0].input_ids)).endswith("[assistant]")
        monkeypatch.setattr(CharTokenizer, "chat_template", None, raising=False)
        texts = [tokenizer.decode(list(prompt.input_ids)) for prompt in corpus.default_prompts(tokenizer)]
        assert not any("[user]" in text for text in texts) and any("Summarise" in text for text in texts)

    def test_too_little_text_is_an_error(self) -> None:
        with pytest.raises(CommandError, match="lower --max-tokens"):
            list(corpus.build(CharTokenizer(), self.documents, [5000], seed=1))

    def test_template_longer_than_the_prompt_is_an_error(self) -> None:
        with pytest.raises(CommandError, match="raise --min-tokens"):
            list(corpus.build(CharTokenizer(), self.documents, [10], seed=1))

    def test_this_python_has_text_of_each_kind(self) -> None:
        found = corpus.collect()
        assert {"code", "reference"} <= set(found)
        texts = [document.text for documents in found.values() for document in documents]
        assert len(texts) == len(set(texts))


class TestCommands:
    def test_every_command_shows_its_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        for name in COMMANDS:
            with pytest.raises(SystemExit) as stopped:
                main([name, "--help"])
            assert stopped.value.code == 0
            assert f"sglang-ext-bench {name}" in capsys.readouterr().out

    def test_unknown_command_and_failed_measurement_end_with_2(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["identify"]) == 2
        assert main(["prompts", "--out", str(tmp_path), "--tokenizer", "m", "--count", "0"]) == 2
        errors = capsys.readouterr().err
        assert "one of identity" in errors and "--count 0" in errors


@pytest.mark.parametrize("command", ["transfer", "jobs"])
def test_a_default_of_several_names_is_told_as_it_is_given(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "default: raw,int8,int4" in (told := " ".join(capsys.readouterr().out.split())) and "default: (" not in told
