"""The layers of the package: none imports one above it. No folder has more than 16 files."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
MAX_FILES = 16


def test_no_layer_imports_one_above_it():
    # In its own process, because it changes how this one logs.
    program = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_folders_are_small():
    package = ROOT / "sglang_ext"
    folders = {path.parent for path in package.rglob("*.py")}
    for folder in folders:
        name = folder.relative_to(package).as_posix()
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= MAX_FILES, f"{name} has {len(files)} files; at most {MAX_FILES} are allowed: divide the folder"


def test_the_served_package_does_not_import_the_benchmarks():
    importing = re.compile(r"^\s*(from|import) sglang_ext_bench", re.MULTILINE)
    assert [str(path) for path in (ROOT / "sglang_ext").rglob("*.py") if importing.search(path.read_text())] == []
