"""The rooms of the package: none imports one above it, and none holds more files than one can oversee."""

from pathlib import Path

from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[2]
MOST_FILES = 16
# Rooms that are still to be divided.
LARGE = {"bench": 45, "bench/quality": 20, "layers/attention": 18, "layers/kernels": 22, "mem_cache/compressors": 19}


def test_no_room_imports_one_above_it(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0, capsys.readouterr().out


def test_rooms_are_small():
    package = ROOT / "sglang_ext"
    folders = {path.parent for path in package.rglob("*.py")}
    for folder in folders:
        name = folder.relative_to(package).as_posix()
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= LARGE.get(name, MOST_FILES), f"{name} holds {len(files)} files: divide it"
