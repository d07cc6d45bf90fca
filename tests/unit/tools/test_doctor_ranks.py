"""What the doctor says of cache ranks: whether a process can be asked, memory, and GPUs that reach each other."""

import os
import subprocess
from pathlib import Path

import psutil
import pytest
import torch

from sglang_ext.doctor import __main__ as doctor
from sglang_ext.doctor import checks
from sglang_ext.doctor.checks import Check
from sglang_ext.managers.cache_rank import rank_link


def test_a_process_is_started_asked_and_ended() -> None:
    before = set(psutil.Process().children(recursive=True))
    check = checks.check_cache_ranks()
    assert check.ok and not check.remedy and check.name == "cache ranks"
    assert "a process was ready after" in check.found and f"up to {len(os.sched_getaffinity(0))}, one per core" in check.found
    assert "GB of memory free" in check.found
    # Some that had ended before may be gone.
    assert set(psutil.Process().children(recursive=True)) <= before


def test_a_process_that_ends_at_once_is_a_failing_line_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen
    monkeypatch.setattr(rank_link.subprocess, "Popen", lambda command, **given: start(["false"], **given))
    check = checks.check_cache_ranks(seconds=30)
    assert not check.ok and "not ready after" in check.found and check.found.split(";")[0].endswith(": ended")
    assert "without --kv-cache-ranks" in check.remedy


def test_a_process_that_says_nothing_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    start, made = subprocess.Popen, []

    def silent(command: list[str], **given: object) -> subprocess.Popen:
        made.append(start(["sleep", "60"], **given))
        return made[-1]

    monkeypatch.setattr(rank_link.subprocess, "Popen", silent)
    check = checks.check_cache_ranks(seconds=0.3)
    assert not check.ok and check.found.split(";")[0].endswith(": starting")
    assert [each.poll() for each in made] == [-9], "it was ended"


def test_without_memory_to_share_the_line_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*given: object) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "memfd_create", none)
    assert not checks.check_cache_ranks(seconds=5).ok


def test_a_folder_for_sockets_with_too_long_a_name_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(rank_link.tempfile, "tempdir", str(folder))
    check = checks.check_cache_ranks(seconds=30)
    assert not check.ok and "TMPDIR" in check.remedy


def test_other_modes_serve_where_ranks_cannot() -> None:
    failing = Check("cache ranks", False, "none", "another")
    assert doctor.examine({"cache ranks": lambda: failing}) == [failing, Check("kv modes", True, "full, lossy, verified")]


@pytest.mark.parametrize(
    ("count", "apart", "told"),
    [
        (0, (), "no GPU: ranks select on CPU cores"),
        (1, (), "one GPU, on which a second stream selects instead of ranks"),
        (2, (), "2 GPUs, peer access between all"),
        (3, ((0, 2), (2, 1)), "3 GPUs, no peer access between 0 and 2, 1 and 2"),
    ],
)
def test_gpus_and_which_reach_each_other(
    monkeypatch: pytest.MonkeyPatch, count: int, apart: tuple[tuple[int, int], ...], told: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: pair not in apart)
    assert checks.describe_gpus() == told


def test_without_a_shared_folder_ranks_share_all_the_same(tmp_path: Path) -> None:
    assert "which ranks do not need" in checks.describe_memory(tmp_path / "gone")
    assert f"{tmp_path} with " in checks.describe_memory(tmp_path)
