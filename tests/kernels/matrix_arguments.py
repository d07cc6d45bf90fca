"""Which part of the matrix a command runs over."""

import argparse

import torch
from matrix_launches import DIMS, DTYPES, GROUPS


def numbers(text: str) -> tuple[int, ...]:
    """Of an argument such as ``64,128``."""
    return tuple(map(int, text.split(",")))


def add_shapes(parser: argparse.ArgumentParser, launches: tuple[str, ...]) -> None:
    """Arguments that choose shapes, kernels, and one of several parts of what they are together."""
    parser.add_argument("--dims", type=numbers, default=DIMS)
    parser.add_argument("--groups", type=numbers, default=GROUPS)
    parser.add_argument("--dtypes", type=lambda text: tuple(getattr(torch, name) for name in text.split(",")), default=DTYPES)
    parser.add_argument("--launches", type=lambda text: tuple(text.split(",")), default=launches)
    parser.add_argument("--part", type=lambda text: tuple(map(int, text.split("/"))), default=(0, 1), help="such as 1/4")
