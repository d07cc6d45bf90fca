"""Whether a model that is named by its path is there: libraries would look for such a path among the names of the Hub."""

from pathlib import Path

from sglang_ext.core import OptionError

CONFIGS = ("config.json", "params.json")
"""The second is Mistral's own."""


def is_path(model: str) -> bool:
    """Whether it is meant as a path: it is written like one, or in a folder that exists."""
    path = Path(model)
    return _is_written(path, model) or path.exists() or (path.parent != Path(".") and path.parent.is_dir())


def _is_written(path: Path, model: str) -> bool:
    """Whether it can be no name on the Hub: absolute, or relative to ``.``, ``..`` or ``~``."""
    return path.is_absolute() or model.startswith(("./", "../", "~"))


def find_problem(model: str) -> str | None:
    """Why the path ``model`` holds no model, in one sentence; None where it holds one, and of a name on the Hub."""
    path = Path(model)
    if not is_path(model):
        return None
    if not path.exists():
        return f"{model}: no such folder"
    if path.is_dir() and not any((path / name).is_file() for name in CONFIGS):
        return f"{model}: this folder has no {CONFIGS[0]}"
    return None


def check(model: str) -> None:
    """Refuse a path that holds no model, before SGLang asks the Hub for it; a name on the Hub may have a folder's beginning.

    Raises:
        OptionError: names the path, and the remedy.
    """
    path = Path(model)
    found = find_problem(model) if _is_written(path, model) or path.exists() else None
    if found is not None and model.lower() not in ("none", "dummy"):
        raise OptionError(f"--model-path {found}: pass a Hugging Face folder, with its {CONFIGS[0]}, or a name on the Hub")


def unreadable_model(model: str, error: OSError) -> OptionError:
    """What to say of a model whose config SGLang could not read.

    Args:
        model: as it was passed.
        error: that Hugging Face's library raised.
    """
    why = str(error).strip().split("\n")[0].removesuffix(".")
    where = "" if Path(model).exists() else f"there is no such folder in {Path.cwd()}, and as a name on the Hub "
    return OptionError(
        f"--model-path {model}: {where}it cannot be read: {why}. Pass a Hugging Face folder, with its {CONFIGS[0]}, or the name of a model "
        "that the Hub lets you load, for example Qwen/Qwen3-0.6B"
    )
