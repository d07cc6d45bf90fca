"""How a wrong flag on a command line ends: its message in one line on stderr, and exit code 2.

In a program that calls ``sgl.Engine`` the same message is an exception, which it may catch.
"""

import argparse
import sys
from typing import NoReturn

from sglang_ext.hooking import HookError
from sglang_ext.options import OptionError

EXIT_CODE = 2


def exit_if_refused(error: BaseException) -> None:
    """End the process where ``error`` is a refusal of ours; others are for the caller to raise.

    Raises:
        SystemExit: with code 2, once the message stands on stderr.
    """
    if isinstance(error, OptionError | HookError):
        print(f"sglang-ext: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_CODE) from None


def shorten_errors(parser: argparse.ArgumentParser) -> None:
    """Leave the usage, hundreds of lines, out of errors that name a flag of ours; those of SGLang's flags stay."""
    stock = parser.error

    def error(message: str) -> NoReturn:
        if "--kv-" in message:
            parser.exit(EXIT_CODE, f"{parser.prog}: error: {' '.join(message.split())}\n")
        stock(message)

    parser.error = error
