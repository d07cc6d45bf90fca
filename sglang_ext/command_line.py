"""How a wrong flag on a command line ends: its message in one line on stderr, and exit code 2.

In a program that calls ``sgl.Engine`` the same message is an exception, which it may catch. What only the scheduler finds, once
the weights are there, ends that process so, and the one that waits for it with the same code.
"""

import argparse
import errno
import functools
import socket
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import NoReturn, ParamSpec, TypeVar

from sglang_ext.core import HookError, OptionError

EXIT_CODE = 2
SAMPLE_NUMBERS = 200
"""Numbers in the prompt of :func:`sample_request`, each a token or more: above ``core.MIN_CONTEXT``, so that the request drafts."""

Params = ParamSpec("Params")
Returned = TypeVar("Returned")


def exit_if_refused(error: BaseException) -> None:
    """End the process where ``error`` is a refusal of ours; others are for the caller to raise.

    Raises:
        SystemExit: with code 2, once the message stands on stderr.
    """
    if isinstance(error, OptionError | HookError):
        print(f"sglang-ext: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_CODE) from None


def exit_on_refusal(step: Callable[Params, Returned]) -> Callable[Params, Returned]:
    """Mark a step of the scheduler's start: a refusal in it ends the process, where SGLang would print where it was raised."""

    @functools.wraps(step)
    def run(*args: Params.args, **named: Params.kwargs) -> Returned:
        try:
            return step(*args, **named)
        except (OptionError, HookError) as error:
            exit_if_refused(error)
            raise

    return run


def exit_like_scheduler(died: Callable[[int, BaseProcess], RuntimeError], rank: int, proc: BaseProcess) -> RuntimeError:
    """Hook around what SGLang makes of a scheduler that ended before it was ready.

    Args:
        died: SGLang's function, which waits for the process to end.
        rank: of the scheduler.
        proc: its process.

    Raises:
        SystemExit: with code 2 where the scheduler refused an option; it has told which.
    """
    error = died(rank, proc)
    if proc.exitcode == EXIT_CODE:
        raise SystemExit(EXIT_CODE)
    return error


def check_address(host: str, port: int) -> None:
    """Refuse an address where a server cannot listen, before any weights are loaded.

    Raises:
        OptionError: the port is taken, or not for this user, or the host is another machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return  # a name that only the server's own loop may know
    with socket.socket(family, kind, protocol) as tried:
        # As the server does: what a former one has left to wait does not count.
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(address)
        except OSError as error:
            why = {
                errno.EADDRINUSE: f"--port is {port}, where another program listens at {host}: pass another, or end that program",
                errno.EACCES: f"--port is {port}, which this user may not open: pass one from 1024 to 65535",
                errno.EADDRNOTAVAIL: f"--host is {host}, which is no address of this machine: pass 127.0.0.1, or 0.0.0.0 for all that it has",
            }.get(error.errno)
            if why is not None:
                raise OptionError(why) from error


def sample_request(url: str, takes_text: bool = True, has_key: bool = False) -> str:
    """Return a shell command that asks a server for 16 tokens after a prompt that is long enough to draft.

    Args:
        url: Of the server or a router.
        takes_text: The server has a tokenizer; without one, the prompt is token ids.
        has_key: The server wants an API key, which the command takes from the environment.
    """
    key = ' -H "Authorization: Bearer $API_KEY"' if has_key else ""
    # Within the body, single quotes end and begin again around what the shell replaces.
    separator, name, ends = ("' '", "text", '""') if takes_text else (",", "input_ids", "[]")
    numbers = f"""'"$(seq -s {separator} {SAMPLE_NUMBERS})"'"""
    body = f"""'{{"{name}": {ends[0]}{numbers}{ends[1]}, "sampling_params": {{"temperature": 0, "max_new_tokens": 16}}}}'"""
    return f"curl {url}/generate -H 'Content-Type: application/json'{key} -d {body}"


def shorten_errors(parser: argparse.ArgumentParser) -> None:
    """Leave the usage, hundreds of lines, out of errors that name a flag of ours; those of SGLang's flags stay."""
    stock = parser.error

    def error(message: str) -> NoReturn:
        if "--kv-" in message:
            parser.exit(EXIT_CODE, f"{parser.prog}: error: {' '.join(message.split())}\n")
        stock(message)

    parser.error = error
