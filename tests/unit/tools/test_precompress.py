"""``python -m sglang_ext.precompress`` scores documents as KVzip does, once, and as the beginnings of prompts."""

import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Model

from sglang_ext.mem_cache.compressors.kvzip import ScoreIndex
from sglang_ext.mem_cache.scores import model_key
from sglang_ext.precompress import main
from sglang_ext.tools.reconstruction import (
    AttentionInputs,
    PromptPrefix,
    ReconstructionConfig,
    reconstruction_scores,
)

LAYERS = 2
TEXT = "Counting words: " + " ".join(str(number) for number in range(150))


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "document.txt"
    path.write_text(TEXT)
    return path


def precompress(tiny, out, *arguments):
    return main(["--model", str(tiny), "--out", str(out), "--device", "cpu", *map(str, arguments)])


def stored(tiny, folder):
    return ScoreIndex.open(folder, "kvzip", model_key(tiny), LAYERS, 2)


# More than 512 queries are processed in several parts.
@pytest.mark.parametrize(("count", "chunk"), [(70, 30), (700, 600)])
def test_scores_are_the_largest_attention_that_eager_attention_gives_while_the_context_is_repeated(tiny, count, chunk):
    tokens = torch.randint(5, 900, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    how = ReconstructionConfig(chunk=chunk, sinks=3, lead=2, whole_prompt="a", part_prompt="bc")
    words = {"a": [901], "bc": [902, 903]}
    scores = reconstruction_scores(AutoModelForCausalLM.from_pretrained(tiny), words.get, tokens, [904], how)

    eager = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64, attn_implementation="eager")
    for begin in range(0, count, chunk):
        asked = [902, 903, *tokens[begin - 2 : begin], 904] if begin else [901, 904]
        end = min(begin + chunk, count)
        with torch.inference_mode():
            found = eager(torch.tensor([tokens + asked + tokens[begin:end]]), output_attentions=True).attentions
        for layer, attention in enumerate(found):
            # Of the sinks before the chunk, the chunk and what repeats it alone.
            seen = [*range(min(3, begin)), *range(begin, end), *range(count, attention.shape[-1])]
            shares = attention[0, :, count:][..., seen]
            shares = shares / shares.sum(-1, keepdim=True)
            expected = shares[..., min(3, begin) :][..., : end - begin].amax(1).unflatten(0, (2, 2)).amax(1)
            since = max(begin, 3)
            torch.testing.assert_close(scores[layer, :, since:end].double(), expected[:, since - begin :], atol=1e-5, rtol=1e-3)
    assert scores[..., :3].isinf().all()


def test_kvzip_plus_divides_by_the_norm_of_what_the_query_read_and_multiplies_by_that_of_what_the_value_adds(tiny):
    tokens = torch.randint(5, 900, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    how, inputs = ReconstructionConfig(whole_prompt="a"), AttentionInputs(LAYERS, torch.tensor([0, 7, 39]))
    model = AutoModelForCausalLM.from_pretrained(tiny)
    with inputs.record_inputs(model):
        scores = reconstruction_scores(model, {"a": [901]}.get, tokens, [904], how, inputs=inputs)

    eager, seen = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64, attn_implementation="eager"), []
    for layer in eager.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, _, given: seen.append((module, given["hidden_states"][0])), with_kwargs=True
        )
    with torch.inference_mode():
        attention = eager(torch.tensor([tokens + [901, 904] + tokens]), output_attentions=True).attentions
    for layer, (module, states) in enumerate(seen):
        values = (states @ module.v_proj.weight.detach().t()).unflatten(-1, (2, -1))
        found = torch.zeros(2, 40, dtype=torch.float64)
        for head in range(4):
            added = values[:40, head // 2] @ module.o_proj.weight.detach()[:, 16 * head : 16 * head + 16].t()
            weighed = attention[layer][0, head, 40:, :40] / states[40:].norm(dim=-1, keepdim=True) * added.norm(dim=-1)
            found[head // 2] = found[head // 2].maximum(weighed.amax(dim=0))
        torch.testing.assert_close(scores[layer, :, 4:].double(), found[:, 4:], atol=1e-6, rtol=1e-3)
        torch.testing.assert_close(inputs.kept()[layer].double(), states[[0, 7, 39]], atol=1e-4, rtol=1e-3)


def test_a_document_is_scored_once_and_found_by_a_prompt_that_begins_with_it(tiny, document, tmp_path, capsys, monkeypatch):
    out = tmp_path / "scores"
    assert precompress(tiny, out, document) == 0
    tokens = AutoTokenizer.from_pretrained(tiny).encode(TEXT)
    found = stored(tiny, out).match([*tokens, 1, 2, 3])
    assert found.shape == (LAYERS, 2, len(tokens) // 16 * 16) and found.isfinite().any()

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it is there already"))
    assert precompress(tiny, out, document) == 0
    assert "there already" in " ".join(capsys.readouterr().err.split())


def test_an_interrupted_run_keeps_what_is_done_and_a_changed_file_is_made_again(tiny, document, tmp_path, monkeypatch):
    out, second = tmp_path / "scores", tmp_path / "second.txt"
    second.write_text(TEXT[::-1])
    forward, calls = Qwen3Model.forward, []

    def interrupted(*arguments, **named):
        calls.append(1)
        # A document takes two forwards.
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*arguments, **named)

    monkeypatch.setattr(Qwen3Model, "forward", interrupted)
    assert precompress(tiny, out, document, second) == 130
    (first,) = out.iterdir()
    first.write_bytes(first.read_bytes()[:-1])
    assert precompress(tiny, out, document, second) == 0
    assert len(calls) == 3 + 4 and len(list(out.iterdir())) == 2


@pytest.mark.parametrize("system", [None, "Answer in rhyme."])
def test_in_the_chat_template_a_document_begins_the_users_message(tiny, system):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokens = PromptPrefix(chat=True, system=system).tokens(tokenizer, TEXT)
    messages = [{"role": "user", "content": TEXT + "\nHow many words?"}]
    messages = ([] if system is None else [{"role": "system", "content": system}]) + messages
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert prompt[: len(tokens)] == tokens
    assert tokenizer.decode(PromptPrefix(chat=True).suffix(tokenizer)) == "<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--chunk", "0"], "--chunk is 0"),
        (["--chat-template", "--prefix-text", "x"], "pass one of them"),
        (["--system", "x"], "pass --chat-template too"),
        (["--device", "gpu"], "--device gpu: "),
        (["no-such-file.txt"], "no-such-file.txt cannot be read"),
    ],
)
def test_what_cannot_be_scored_is_refused_with_a_remedy(tiny, document, tmp_path, capsys, arguments, reason):
    assert precompress(tiny, tmp_path / "scores", document, *arguments) == 2
    assert reason in " ".join(capsys.readouterr().err.split())


def test_a_text_too_short_for_a_copy_is_left_out(tiny, document, tmp_path, capsys):
    short = tmp_path / "short.txt"
    short.write_text("Few words.")
    assert precompress(tiny, tmp_path / "scores", short, document) == 0
    assert "left out" in capsys.readouterr().err and len(list((tmp_path / "scores").iterdir())) == 1
    assert precompress(tiny, tmp_path / "scores", short, document) == 0, "one is there already"


def test_texts_of_which_all_are_too_short_are_refused(tiny, tmp_path, capsys):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert precompress(tiny, tmp_path / "scores", empty) == 2
    assert "nothing was written: pass longer ones" in capsys.readouterr().err.splitlines()[-1]
    assert not list((tmp_path / "scores").iterdir())


def test_a_folder_that_cannot_be_written_is_refused_in_one_line_before_the_model_is_read(document, capsys):
    assert main(["--model", "/proc/no-such-model", "--out", "/proc/scores", str(document)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--out is '/proc/scores'" in line and "pass a folder that you may write to" in line


def test_a_template_that_changes_the_document_is_refused(tiny, document, tmp_path, capsys):
    changed = shutil.copytree(tiny, tmp_path / "model")
    (changed / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}")
    assert precompress(changed, tmp_path / "scores", document, "--chat-template") == 2
    assert "the chat template changes the document's text" in " ".join(capsys.readouterr().err.split())
