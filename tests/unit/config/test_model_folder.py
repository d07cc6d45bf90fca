"""A model that is not there is refused by name, before SGLang asks the Hub for a path, and in one line where the Hub has none."""

from collections.abc import Callable
from pathlib import Path

import pytest
from argument_helpers import arguments

from sglang_ext.arguments import CheckedServerArgs
from sglang_ext.config import model_folder
from sglang_ext.config.rules import KVServerArgs
from sglang_ext.core import OptionError


def instead(monkeypatch: pytest.MonkeyPatch, looks: Callable[[CheckedServerArgs], None]) -> None:
    """Let ``looks`` be what SGLang's own arguments do."""
    monkeypatch.setattr(KVServerArgs.__bases__[0], "__post_init__", looks)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder ``models``, in which commands run."""
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path / "models"


def test_a_path_is_told_from_a_name_by_its_beginning_or_its_parent(folder: Path) -> None:
    assert model_folder.find_problem("models/nope") == "models/nope: no such folder"
    assert model_folder.find_problem("models") == "models: this folder has no config.json"
    assert model_folder.find_problem("Qwen/Qwen3-8B") is None and model_folder.find_problem("gpt2") is None
    (folder / "config.json").write_text("{}")
    assert model_folder.find_problem("models") is None


@pytest.mark.parametrize("model", ["/proc/nope", "./nope", "../nope", "~/nope", "models"])
@pytest.mark.parametrize("mode", ["verified", "lossy"])
def test_a_path_without_a_model_is_refused_before_sglang_looks_for_it(model: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, lambda args: pytest.fail("SGLang looked for it"))
    with pytest.raises(OptionError, match=f"^--model-path {model}: .*: pass a Hugging Face folder, with its config.json, or a name on the Hub"):
        CheckedServerArgs.__post_init__(arguments(model_path=model, kv_mode=mode))


def test_in_full_sglang_alone_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    instead(monkeypatch, lambda args: None)
    CheckedServerArgs.__post_init__(arguments(model_path="/proc/nope", kv_mode="full"))


def test_a_name_on_the_hub_may_begin_as_a_folder_does(folder: Path) -> None:
    model_folder.check_model_folder("models/nope")
    (folder / "config.json").write_text("{}")
    model_folder.check_model_folder("models")


def test_what_the_hub_says_of_a_name_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def looks(args: CheckedServerArgs) -> None:
        raise OSError("models/nope is not a local folder.\nIf it is private, log in")

    instead(monkeypatch, looks)
    words = "--model-path models/nope: there is no such folder in .*, and as a name .* cannot be read: models/nope is not a local folder. Pass "
    with pytest.raises(OptionError, match=words) as refused:
        CheckedServerArgs.__post_init__(arguments(model_path="models/nope"))
    assert "\n" not in str(refused.value)


def test_errors_of_the_system_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def looks(args: CheckedServerArgs) -> None:
        raise PermissionError(13, "no")

    instead(monkeypatch, looks)
    with pytest.raises(PermissionError):
        CheckedServerArgs.__post_init__(arguments())
