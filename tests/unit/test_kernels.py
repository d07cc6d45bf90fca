"""Triton kernels, through Triton's interpreter, against plain PyTorch."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).parents[1] / "kernel_checks.py"


@pytest.mark.parametrize(
    "check",
    [
        *("window_scores", "gather_kept", "page_checksum", "verify_attention", "verify_attention_is_decode", "verify_backend"),
        *("packed_decode", "packed_gluon", "packed_backend", "uneven_decode", "uneven_backend", "scatter_cells"),
        *("pointers", "pack_blocks"),
    ],
)
def test_kernel_gives_what_pytorch_gives(check):
    # The interpreter is chosen as Triton is imported, so it needs a process of its own.
    done = subprocess.run([sys.executable, str(CHECKS), check], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_kernels_compile_for_a_gpu():
    script = CHECKS.with_name("compile_checks.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = {
        *("packed_splits", "packed_splits_gluon", "join_parts", "_splits", "scatter_kept", "pointer_splits", "write_kept"),
        "pack_tiles",
    }
    assert expected <= set(done.stdout.split())
