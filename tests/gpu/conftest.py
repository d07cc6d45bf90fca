"""Tests that need an NVIDIA GPU; skipped where there is none."""

from pathlib import Path

import pytest
import torch


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist, which reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder's tests without a GPU; with one, run each file's tests in one process."""
    missing = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.xdist_group(f"gpu-{item.path.stem}"))
            if not torch.cuda.is_available():
                item.add_marker(missing)
