"""Reports a wrong flag on a command line: the message in one line on stderr, and exit code 2.

In a program that calls ``sgl.Engine`` the message is an exception that it may catch. If only the scheduler finds the error, after the
weights are loaded, its process ends in this way. The process that waits for it ends with the same code.
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
"""Numbers in the prompt of :func:`sample_request`, each at least one token: more than ``core.MIN_CONTEXT``, so that the request drafts."""

Params = ParamSpec("Params")
Returned = TypeVar("Returned")


def exit_if_refused(error: BaseException) -> None:
    """End the process with code 2 and one line (``SystemExit``) if ``error`` is one of our refusals. The caller raises others."""
    if isinstance(error, OptionError | HookError):
        print(f"sglang-ext: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        raise SystemExit(EXIT_CODE) from None


def exit_on_refusal(step: Callable[Params, Returned]) -> Callable[Params, Returned]:
    """Wrap a step of the scheduler's start: a refusal ends the process without the traceback that SGLang would print."""

    @functools.wraps(step)
    def run(*args: Params.args, **named: Params.kwargs) -> Returned:
        try:
            return step(*args, **named)
        except (OptionError, HookError) as error:
            exit_if_refused(error)
            raise

    return run


def exit_like_scheduler(died: Callable[[int, BaseProcess], RuntimeError], rank: int, proc: BaseProcess) -> RuntimeError:
    """Hook around SGLang's error for a scheduler that ended before it was ready. SGLang's function waits for the process to end.

    If the scheduler refused an option, and has printed which, this raises ``SystemExit`` with code 2.
    """
    error = died(rank, proc)
    if proc.exitcode == EXIT_CODE:
        raise SystemExit(EXIT_CODE)
    return error


def check_address(host: str, port: int) -> None:
    """Refuse an address where a server cannot listen (``OptionError``): its port is taken or not allowed, or its host is another machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError:
        return  # a name that only the server's own event loop may resolve
    with socket.socket(family, kind, protocol) as tried:
        # As the server does: waiting connections of a previous server do not count.
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
    """Return a shell command that requests 16 tokens from a server or router at ``url``, after a prompt that is long enough to draft.

    Without ``takes_text``, as from a server without tokenizer, the prompt is token ids. An API key (``has_key``) is taken from the environment.
    """
    key = ' -H "Authorization: Bearer $API_KEY"' if has_key else ""
    # Within the body, single quotes end before the text that the shell replaces, and begin again after it.
    separator, name, ends = ("' '", "text", '""') if takes_text else (",", "input_ids", "[]")
    numbers = f"""'"$(seq -s {separator} {SAMPLE_NUMBERS})"'"""
    body = f"""'{{"{name}": {ends[0]}{numbers}{ends[1]}, "sampling_params": {{"temperature": 0, "max_new_tokens": 16}}}}'"""
    return f"curl {url}/generate -H 'Content-Type: application/json'{key} -d {body}"


def shorten_errors(parser: argparse.ArgumentParser) -> None:
    """Omit the usage, hundreds of lines, from errors that name one of our flags. Errors of SGLang's flags keep it."""
    stock = parser.error

    def error(message: str) -> NoReturn:
        if "--kv-" in message:
            parser.exit(EXIT_CODE, f"{parser.prog}: error: {' '.join(message.split())}\n")
        stock(message)

    parser.error = error
