"""Options of the commands that time kernels, and their checks."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from sglang_ext.tools import CommandError
from sglang_ext_bench.options import check_counts

T = TypeVar("T")


def add_sizes(parser: argparse.ArgumentParser, sizes: Mapping[str, tuple[int, str]]) -> None:
    """Add options that are whole numbers from 1. ``sizes`` has the default and the help of each, by name."""
    for name, (default, what) in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} (default: %(default)s)")


def check_sizes(args: argparse.Namespace, sizes: Mapping[str, tuple[int, str]]) -> None:
    """Check the options that :func:`add_sizes` added.

    Raises:
        CommandError: One is below 1.
    """
    check_counts({f"--{name}": getattr(args, name.replace("-", "_")) for name in sizes})


def add_list(parser: argparse.ArgumentParser, flag: str, default: Sequence[object], what: str, **more: Any) -> None:
    """Add an option that takes one or more values. ``more`` are further arguments of ``add_argument``."""
    shown = f"{what} (default: {' '.join(map(str, default))})"
    parser.add_argument(flag, nargs="+", default=list(default), help=shown, **more)


def require_gpu() -> None:
    """Refuse a machine without a GPU.

    Raises:
        CommandError: PyTorch finds no GPU.
    """
    if not torch.cuda.is_available():
        raise CommandError("PyTorch finds no GPU here, and kernels are timed on one: run it on a machine with an NVIDIA GPU")


def check_device(device: str) -> None:
    """Refuse a ``--device`` that does not exist.

    Raises:
        CommandError: It is neither ``cpu`` nor a GPU that PyTorch finds.
    """
    if device not in ("cpu", "cuda"):
        raise CommandError(f"--device {device}: pass cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise CommandError("--device cuda: PyTorch finds no GPU here; pass --device cpu")


def positive_int(text: str) -> int:
    """Return a whole number from 1.

    Raises:
        ValueError: ``text`` is not such a number.
    """
    number = int(text)
    if number < 1:
        raise ValueError(f"{text} is below 1")
    return number


def parse_group(text: str, flag: str, parts: Mapping[str, Callable[[str], T]], separator: str = ",") -> tuple[T, ...]:
    """Parse a value of several parts, for example ``16,2`` or ``kivi:4``.

    Args:
        text: The value.
        flag: The flag, for messages.
        parts: Name of each part and the function that converts it. The function raises ValueError for wrong text.
        separator: Text between the parts.

    Raises:
        CommandError: The number of parts is wrong, or a part cannot be converted.
    """
    try:
        return tuple(convert(part) for convert, part in zip(parts.values(), text.split(separator), strict=True))
    except ValueError as error:
        raise CommandError(f"{flag} {text!r}: pass {separator.join(parts).upper()}, with whole numbers from 1") from error
