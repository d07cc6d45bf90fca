"""Let kernels pass over their first tile sizes, as on a GPU with little shared memory; installed before kernels are imported."""

from collections.abc import Sequence

from sglang_ext.layers.kernels import gpu_launch

_usual = gpu_launch.launch_first_fitting
_passed_over = 0
_chosen = False


def pass_over(count: int) -> None:
    """From now on each kernel's first ``count`` tile sizes do not fit, but for the last one."""
    global _passed_over, _chosen
    _passed_over, _chosen = count, False


def had_choice() -> bool:
    """Whether a kernel has had several tile sizes since then."""
    return _chosen


def launch_first_fitting(choices: Sequence[object], *given: object) -> None:
    """As gpu_launch.py's, of the others."""
    global _chosen
    _chosen |= len(choices) > 1
    _usual(choices[min(_passed_over, len(choices) - 1) :], *given)


def install() -> None:
    """Let kernels that are imported from now on be launched so."""
    gpu_launch.launch_first_fitting = launch_first_fitting
