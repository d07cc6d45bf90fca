"""Triton kernels, through Triton's interpreter, against plain PyTorch."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).parents[2] / "kernels/kernel_checks.py"
PLAIN = (
    *("window_scores", "gather_kept", "page_checksum", "verify_attention", "packed_decode", "packed_gluon", "uneven_decode"),
    *("scatter_cells", "pack_blocks", "lynx"),
)
# These import SGLang, which takes longer than most of them.
OF_SGLANG = ("verify_attention_is_decode", "verify_backend", "packed_backend", "uneven_backend", "pointers")


@pytest.mark.parametrize("checks", [PLAIN, OF_SGLANG], ids=["plain", "of-sglang"])
def test_each_kernel_gives_what_pytorch_gives(checks):
    # The interpreter is chosen as Triton is imported, so they need a process of their own.
    done = subprocess.run([sys.executable, str(CHECKS), *checks], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.split() == list(checks)


def test_kernels_compile_for_a_gpu():
    script = CHECKS.with_name("compile_checks.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = {
        *("packed_splits", "packed_splits_gluon", "join_parts", "_splits", "scatter_kept", "pointer_splits", "write_kept"),
        *("pack_tiles", "_normalizers", "_means"),
    }
    assert expected <= set(done.stdout.split())
