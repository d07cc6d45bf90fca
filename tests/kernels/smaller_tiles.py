"""Let kernels pass over their first tile sizes, as on a GPU with little shared memory; to be imported before they are."""

from collections.abc import Sequence

from sglang_ext.layers.kernels import fitting

_usual = fitting.launch_fitting
_passed_over = 0


def pass_over(count: int) -> None:
    """From now on each kernel's first ``count`` tile sizes do not fit, but for the last one."""
    global _passed_over
    _passed_over = count


def launch_fitting(choices: Sequence[object], *given: object) -> None:
    """As fitting.py's, of the others."""
    _usual(choices[min(_passed_over, len(choices) - 1) :], *given)


fitting.launch_fitting = launch_fitting
