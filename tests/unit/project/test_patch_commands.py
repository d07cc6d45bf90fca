"""The command by which a user patches an installed SGLang does so wherever that lies."""

import re
import shutil
import subprocess
from pathlib import Path

import sglang

SERIES = Path(__file__).parents[3] / "patches/sglang-0.5.17"


def test_an_installed_package_within_a_git_repository_is_patched(tmp_path: Path) -> None:
    """A virtual environment mostly lies in a project's repository, where ``git apply`` skips what is below it, and says nothing."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    packages = tmp_path / ".venv/site-packages"
    for name in re.findall(r"^--- a/python/(\S+)", "".join(each.read_text() for each in SERIES.glob("*.patch")), re.MULTILINE):
        source = Path(sglang.__file__).parents[1] / name
        if source.exists():
            (packages / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, packages / name)
    (command,) = re.findall(r"^    (.*git apply .*)$", (SERIES / "README.md").read_text(), re.MULTILINE)
    subprocess.run(["bash", "-c", command.replace("<this folder>", str(SERIES))], cwd=packages, check=True)
    assert (packages / "sglang/srt/kv_seams.py").is_file()
