"""Lists the files and lines of this project that a steady decode round and a whole request enter.

    sglang-ext-bench paths --model MODEL --server-arg=FLAGS --functions

A server runs under Python's profiler, which records each called function of this project. A *round* is one decode call that SGLang makes to
the worker. A *turn* has all calls of the scheduler's process from one such call to the next, which include the output of the previous round.
A round is *steady* if it drafts and verifies, admits and ends no request, and creates no compressed KV. Rounds and turns are the steady ones
in the middle half of a long output, all together. A *request* has all calls of any process from its sending to its answer. The check of the
prefix tree by an idle scheduler is left out.

The *path* has the files in which an entered function calls a function of another file of this project, directly or through a context
manager or a cached property. The other files are *leaves*. Both are listed in the order of the first call, with the files that each calls.

Column *entered* counts the lines of the called functions and of the heads of their classes (fields and docstring; constructing a class
counts as a call). Column *whole* counts the lines of the file. GPU kernels replace some of the functions that run on a CPU.
"""

import argparse
import ast
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sglang_ext
from sglang_ext.tools import CommandError, split_flags
from sglang_ext_bench.client import SamplingSettings
from sglang_ext_bench.server import BenchServer
from sglang_ext_bench.serving import call_recorder
from sglang_ext_bench.serving.call_recorder import BEGIN_FILE, Function, Pair

PACKAGE = Path(sglang_ext.__file__).parent
ROUND, IDLE = "KVWorker.forward_batch_generation", "check_when_idle"
# Functions that every steady round calls, and functions that no steady round calls.
STEADY_CALLS = {"DecodeLoop.decode", "Verifier.verify"}
OTHER_CALLS = {"CompressedKVCache.compress", "RequestStates.admit", "RequestStates.forget"}
MIN_STEADY_ROUNDS = 4
# Token ids and output tokens of a first request, and of the recorded one.
FIRST_PROMPT, FIRST_TOKENS = range(100, 500), 40
RECORDED_PROMPT, RECORDED_TOKENS = range(600, 1000), 120
# Seconds until all processes have seen the file `begin`, and until they have written the last calls.
BEGIN_SECONDS, END_SECONDS = 2.0, 1.0
START_TIMEOUT = 600.0


@dataclass(frozen=True)
class Entered:
    """Entered functions, in the order of their first call.

    Attributes:
        functions: Each with its file.
        pairs: A file, and another one of which it calls a function.
    """

    functions: list[Function]
    pairs: set[Pair]

    @property
    def path(self) -> list[str]:
        """Files that call functions of other files."""
        callers = {caller for caller, _ in self.pairs}
        return [file for file in dict.fromkeys(file for file, _ in self.functions) if file in callers]

    @classmethod
    def merge(cls, parts: Sequence["Entered"]) -> "Entered":
        """The functions and pairs of any part."""
        functions = list(dict.fromkeys(function for part in parts for function in part.functions))
        return cls(functions, set().union(*(part.pairs for part in parts)))


@dataclass(frozen=True)
class FileLines:
    """Entered lines of a file.

    Attributes:
        name: The file, relative to the package.
        whole: Lines of the file.
        by_function: Line numbers by function, or by head of a class.
    """

    name: str
    whole: int
    by_function: dict[str, set[int]]

    @classmethod
    def read(cls, path: str, functions: set[str]) -> "FileLines":
        """Read a file and find the lines of the called functions."""
        source = Path(path).read_text()
        return cls(Path(path).relative_to(PACKAGE).as_posix(), len(source.splitlines()), function_lines(source, functions))

    @property
    def entered(self) -> int:
        """Number of entered lines."""
        return len(set().union(*self.by_function.values()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--server-arg", action="append", default=[], metavar="FLAGS", help="flags of the server")
    parser.add_argument("--functions", action="store_true", help="also list the functions of each file")


def run(args: argparse.Namespace) -> int:
    """Send two requests to a server, record the second one, and print the tables. Returns 0."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "sitecustomize.py").write_text(f"{Path(call_recorder.__file__).read_text()}\n\nstart()\n")
        flags = ("--kv-mode", "verified", "--kv-draft-length", "8", *split_flags(args.server_arg))
        server = BenchServer(str(args.model), flags, folder / "server.log", start_timeout=START_TIMEOUT, env=recorder_environment(folder))
        with server:
            server.request("generate", request_body(FIRST_PROMPT, FIRST_TOKENS))
            (folder / BEGIN_FILE).touch()
            time.sleep(BEGIN_SECONDS)
            begin = time.time()
            meta = server.request("generate", request_body(RECORDED_PROMPT, RECORDED_TOKENS))["meta_info"]
            end = time.time()
            time.sleep(END_SECONDS)
            if not meta.get("kv_drafts"):
                raise CommandError(f"the request drafted nothing (kv_fallback {meta.get('kv_fallback')}): change the flags in --server-arg")
            request, turn, one_round = read_recorded(folder, begin, end)
    print_table("a steady round", one_round, args.functions)
    print_table("its turn", turn, args.functions)
    print_table("a request", request, args.functions)
    return 0


def recorder_environment(folder: Path) -> dict[str, str]:
    """Environment variables with which each process of a server records its calls to ``folder``, which has ``sitecustomize.py``."""
    search_path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    names = {"RECORD_PACKAGE": f"{PACKAGE}{os.sep}", "RECORD_FOLDER": str(folder), "RECORD_ROUND": ROUND, "RECORD_IDLE": IDLE}
    return {**names, "PYTHONPATH": search_path}


def request_body(input_ids: Iterable[int], new_tokens: int) -> dict[str, Any]:
    """Body of a request for ``new_tokens`` tokens."""
    return {"input_ids": list(input_ids), "sampling_params": SamplingSettings().as_json(new_tokens)}


def read_recorded(folder: Path, begin: float, end: float) -> tuple[Entered, Entered, Entered]:
    """Read the calls that all processes recorded.

    Args:
        folder: Folder with a file of each process.
        begin: Time at which the request was sent, in seconds.
        end: Time of its answer.

    Returns:
        The calls of the request, of the steady turns in its middle half, and of their rounds.

    Raises:
        CommandError: A function of this module's lists was not called, or too few rounds were steady.
    """
    recorded = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    first_calls = {
        (file, name): seconds for process in recorded for (file, name), seconds in process["functions"] if begin <= seconds <= end
    }
    missing = {ROUND, *STEADY_CALLS, *OTHER_CALLS} - {name for _, name in first_calls}
    if missing:
        raise CommandError(f"the request did not call {', '.join(sorted(missing))}: correct the names in {Path(__file__).name}")
    request = Entered(sorted(first_calls, key=first_calls.__getitem__), {tuple(pair) for process in recorded for pair in process["pairs"]})
    # A round that has not returned has two parts, and no end.
    turns = [
        [Entered([tuple(call) for call in parts[i]], {tuple(pair) for pair in parts[i + 1]}) for i in (0, 2)]
        for process in recorded
        for parts in process["rounds"]
        if len(parts) == 4
    ]
    steady = [turn for turn in turns if is_steady(turn[0])]
    if len(steady) < MIN_STEADY_ROUNDS:
        raise CommandError(
            f"{len(steady)} of {len(turns)} rounds were steady, at least {MIN_STEADY_ROUNDS} are needed: pass flags in --server-arg with "
            "which requests draft in more rounds"
        )
    quarter = len(steady) // 4
    middle = steady[quarter : len(steady) - quarter]
    return request, Entered.merge([turn for turn, _ in middle]), Entered.merge([one_round for _, one_round in middle])


def is_steady(turn: Entered) -> bool:
    """Whether a turn has a round that drafts and verifies, without admission, end of a request, or new compressed KV."""
    names = {name for _, name in turn.functions}
    return names >= STEADY_CALLS and not names & OTHER_CALLS


def function_lines(source: str, functions: set[str]) -> dict[str, set[int]]:
    """Line numbers of functions and of the heads of their classes.

    Args:
        source: Source of a file.
        functions: Qualified names of functions, and of classes that were constructed.
    """
    lines: dict[str, set[int]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                name = prefix + child.name
                if name in functions:
                    lines[name] = lines.get(name, set()) | set(range(_first_line(child), child.end_lineno + 1))
                visit(child, f"{name}.<locals>.")
            elif isinstance(child, ast.ClassDef):
                name = prefix + child.name
                if any(function == name or function.startswith(f"{name}.") for function in functions):
                    head = [part for part in child.body if not isinstance(part, ast.FunctionDef)]
                    lines[name] = set(range(_first_line(child), child.lineno + 1)).union(
                        *(range(part.lineno, part.end_lineno + 1) for part in head)
                    )
                visit(child, f"{name}.")
            else:
                visit(child, prefix)

    visit(ast.parse(source), "")
    return lines


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    """The line of the first decorator, or of the definition."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def print_table(title: str, entered: Entered, with_functions: bool) -> None:
    """Print sums of lines of all files and by folder, and then the files of the path and the leaves."""
    functions: dict[str, set[str]] = defaultdict(set)
    for path, name in entered.functions:
        functions[path].add(name)
    files = {path: FileLines.read(path, names) for path, names in functions.items()}
    folders: dict[str, list[FileLines]] = defaultdict(list)
    for file in files.values():
        folders[Path(file.name).parent.as_posix()].append(file)
    print(f"{title}: {describe_sums(files.values())}")
    for folder, inside in sorted(folders.items(), key=lambda item: -sum(file.entered for file in item[1])):
        print(f"    {folder}: {describe_sums(inside)}")
    path_files = {path: files[path] for path in entered.path}
    leaves = {path: file for path, file in files.items() if path not in path_files}
    for part, shown in (("path", path_files), ("leaves", leaves)):
        print(f"  {part} of {title}: {describe_sums(shown.values())}")
        print("    entered  whole  file")
        for path, file in shown.items():
            called = sorted(files[callee].name for caller, callee in entered.pairs if caller == path and callee in files)
            print(f"    {file.entered:7}  {file.whole:5}  {file.name}  {'-> ' if called else ''}{', '.join(called)}")
            if with_functions:
                for function, lines in file.by_function.items():
                    print(f"        {len(lines):3}               {function}")


def describe_sums(files: Iterable[FileLines]) -> str:
    """Sums of some files."""
    listed = list(files)
    entered, whole = sum(file.entered for file in listed), sum(file.whole for file in listed)
    return f"{len(listed)} files, {entered} lines of functions that are entered, {whole} lines of the files"
