"""Records which functions of a package a Python process calls. Copied to ``sitecustomize.py``, it runs in each process of a server.

It reads environment variables and imports nothing of this project, because it starts before the server's own imports:

- ``RECORD_PACKAGE``: folder of the package whose calls are recorded, with a separator at its end.
- ``RECORD_FOLDER``: folder for the output. Each process writes a JSON file there twice a second, in the format of :meth:`Recorder.as_json`.
  A file ``begin`` in this folder makes all processes discard earlier calls.
- ``RECORD_ROUND``: qualified name of the function that runs a decode round.
- ``RECORD_IDLE``: name of a function that a scheduler calls when it is idle. Calls inside it are not recorded.
"""

import json
import os
import sys
import threading
import time
from types import FrameType
from typing import Any

BEGIN_FILE = "begin"
WRITE_INTERVAL = 0.5
# Frames of Python between a caller and a function of the package: context managers and cached properties.
BETWEEN = ("contextlib.py", "functools.py")

Function = tuple[str, str]
"""A file and the qualified name of a function in it. For a generated constructor, the name of the class."""
Pair = tuple[str, str]
"""A file, and another one of which it calls a function."""
Calls = tuple[dict[Function, None], dict[Pair, None]]
"""Called functions and pairs, in the order of the first call."""


class Recorder:
    """Records calls in all threads of a process.

    Args:
        package: Folder of the package, with a separator at its end.
        round_name: Qualified name of the function that runs a decode round.
        idle_name: Name of the function that a scheduler calls when it is idle.
    """

    def __init__(self, package: str, round_name: str, idle_name: str) -> None:
        self._package, self._round_name, self._idle_name = package, round_name, idle_name
        self._idle = threading.local()
        self.clear()

    def clear(self) -> None:
        """Discard all calls."""
        self._first_calls: dict[Function, float] = {}
        self._pairs: dict[Pair, None] = {}
        # For each round: all calls until the next round begins, then a copy of those until the round returned.
        self._rounds: list[list[dict[Any, None]]] = []

    def as_json(self) -> str:
        """``functions`` with the time of the first call, ``pairs``, and ``rounds``, each with the functions and pairs of both spans."""
        rounds = [[list(part) for part in parts] for parts in list(self._rounds)]
        return json.dumps({"functions": list(self._first_calls.items()), "pairs": list(self._pairs), "rounds": rounds})

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call; a function for ``sys.setprofile``."""
        name = frame.f_code.co_qualname
        if name == self._idle_name:
            self._idle.is_on = event == "call"
        if getattr(self._idle, "is_on", False):
            return
        if event == "return" and name == self._round_name and self._rounds:
            self._rounds[-1] += [dict(part) for part in self._rounds[-1]]
        function = self._function(frame) if event == "call" else None
        if function is None:
            return
        if function[1] == self._round_name:
            self._rounds.append([{}, {}])
        self._first_calls.setdefault(function, time.time())
        pair = self._pair(frame, function)
        if pair is not None:
            self._pairs[pair] = None
        if self._rounds:
            functions, pairs = self._rounds[-1][:2]
            functions[function] = None
            if pair is not None:
                pairs[pair] = None

    def _function(self, frame: FrameType) -> Function | None:
        """The called function, if it belongs to the package."""
        code = frame.f_code
        if code.co_filename.startswith(self._package) and code.co_name != "<module>":
            return code.co_filename, code.co_qualname
        if code.co_filename == "<string>" and code.co_argcount:
            # A generated constructor, as of a dataclass.
            first = frame.f_locals.get(code.co_varnames[0])
            built = first if isinstance(first, type) else type(first)
            file = getattr(sys.modules.get(built.__module__), "__file__", None) or ""
            if file.startswith(self._package):
                return file, built.__qualname__
        return None

    def _pair(self, frame: FrameType, function: Function) -> Pair | None:
        """The caller's file and the function's, if both belong to the package and differ."""
        back = frame.f_back
        while back is not None and back.f_code.co_filename.endswith(BETWEEN):
            back = back.f_back
        caller = back.f_code.co_filename if back is not None else ""
        return (caller, function[0]) if caller.startswith(self._package) and caller != function[0] else None


def write_periodically(recorder: Recorder, folder: str) -> None:
    """Write the recorded calls to a file of this process, again and again."""
    has_begun = False
    while True:
        time.sleep(WRITE_INTERVAL)
        if not has_begun and os.path.exists(os.path.join(folder, BEGIN_FILE)):
            has_begun = True
            recorder.clear()
        path = os.path.join(folder, f"{os.getpid()}.json")
        with open(f"{path}.new", "w") as file:
            file.write(recorder.as_json())
        os.replace(f"{path}.new", path)


def start() -> None:
    """Record all threads of this process until it ends."""
    recorder = Recorder(*(os.environ[name] for name in ("RECORD_PACKAGE", "RECORD_ROUND", "RECORD_IDLE")))
    threading.Thread(target=write_periodically, args=(recorder, os.environ["RECORD_FOLDER"]), daemon=True).start()
    sys.setprofile(recorder.profile)
    threading.setprofile(recorder.profile)
