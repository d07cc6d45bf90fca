"""Some shapes of the matrix of kernels, which kernel_matrix.py and matrix_interpret.py run whole."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import smaller_tiles
from preloaded import run_script

from sglang_ext.core import OptionError
from sglang_ext.layers.kernels import gpu_launch
from sglang_ext.layers.kernels.gpu_launch import launch_first_fitting

KERNELS = Path(__file__).parents[2] / "kernels"
SOURCES = Path(gpu_launch.__file__).parent


def launched():
    """Names of all kernels that the sources launch: ``kernel[grid](...)``. Where a variable is launched, all kernels that its function names."""
    functions = [node for file in SOURCES.rglob("*.py") for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    kernels = {each.name for each in functions if any("jit" in ast.unparse(decorator) for decorator in each.decorator_list)}
    found = set()
    for function in functions:
        calls = (node for node in ast.walk(function) if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript))
        names = {call.func.value.id for call in calls if isinstance(call.func.value, ast.Name)}
        if names - kernels:
            names |= {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
        found |= names & kernels
    assert {"packed_splits_gluon", "integer_splits_gluon", "packed_splits"} <= found
    return found


def test_every_kernel_fits_the_shared_memory_of_every_gpu(preloaded, tmp_path):
    printed = run_script(preloaded, tmp_path / "printed", KERNELS / "kernel_matrix.py", "--sizes", "--quick")
    *_, kernels, _ = printed.splitlines()
    assert "refused: " not in printed and launched() - set(kernels.split()) == set()


def test_kernels_give_what_float64_gives():
    # The interpreter is chosen as Triton is imported, so they need a process of their own.
    done = subprocess.run([sys.executable, str(KERNELS / "matrix_interpret.py"), "--quick"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_what_fits_no_gpu_of_this_kind_is_refused_by_name():
    from triton.runtime.errors import OutOfResources

    tried = []

    def launch(tile):
        tried.append(tile)
        raise OutOfResources(tile, 101_376, "shared memory")

    message = "attention with 256 channels takes 120000 of shared memory, and .* has 101376: pass --x"
    with pytest.raises(OptionError, match=message):
        launch_first_fitting((200_000, 120_000), launch, "a key", lambda: "attention with 256 channels", "pass --x")
    assert tried == [200_000, 120_000]


def test_a_launch_begins_with_what_fitted_last():
    from triton.runtime.errors import OutOfResources

    tried = []

    def launch(tile):
        tried.append(tile)
        if tile > 1:
            raise OutOfResources(tile, 1, "shared memory")

    for _ in range(2):
        launch_first_fitting((3, 2, 1), launch, "another key", str, "")
    assert tried == [3, 2, 1, 1]


@pytest.mark.parametrize(("refused", "launched"), [(0, 3), (2, 1), (99, 1)])
def test_the_matrix_runs_smaller_tiles_down_to_the_smallest(refused, launched):
    tried = []
    smaller_tiles.pass_over(refused)
    smaller_tiles.launch_first_fitting((3, 2, 1), tried.append, f"a key of {refused}", str, "")
    assert tried == [launched]
