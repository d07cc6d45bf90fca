"""Fixtures of the benchmarks' tests."""

import subprocess
import time
from collections.abc import Iterator

import pytest
from bench_helpers import CharTokenizer, Here
from launched import Launches
from method_registry import own_methods  # noqa: F401
from model_fixtures import demo_model, model, plugin, tiny  # noqa: F401
from transformers import AutoTokenizer

from sglang_ext.tools import server_process


@pytest.fixture
def checked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers' flags are checked in this process, because another process would load SGLang again."""
    monkeypatch.setattr(server_process, "ProcessPoolExecutor", Here)


@pytest.fixture
def char_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model has a tokenizer with one token per character."""
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: CharTokenizer())


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """SGLang servers that start answer from this process."""
    found = Launches()
    monkeypatch.setattr(subprocess, "Popen", found.popen)
    yield found
    found.close()


@pytest.fixture
def quick_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """``time.sleep`` takes a millisecond, and ``time.monotonic`` goes on by what it should have taken."""
    clock, sleep, slept = time.monotonic, time.sleep, [0.0]

    def pass_by(seconds: float) -> None:
        slept[0] += seconds
        sleep(min(seconds, 0.001))

    monkeypatch.setattr(time, "sleep", pass_by)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + slept[0])
