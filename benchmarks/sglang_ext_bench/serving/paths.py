"""Which of this project's code a steady decode round, and a whole request, go through.

    sglang-ext-bench paths --model MODEL [--server-arg FLAGS] [--functions]

A server runs under Python's profiler, which notes each function of this project that is called. A *round* is what a decode calls that
SGLang asks of the worker, until it returns; a *turn* all that the scheduler's process calls from one such decode to the next, the outcome
of the round before among it. A round is *steady* where it drafts and verifies, nobody is admitted or ended in it, and no copy is made.
What the steady rounds in the middle half of a long answer call is counted, all together; in a request, what any process calls from when
it is sent until its answer is there, but for the check of the prefix tree by an idle scheduler.

The *path* is what one reads to follow control: the files of which an entered function calls a function of another file of this project,
itself or by a context or a cached property of Python's. Files of which none does are *leaves*: they answer what they are asked. Both are
listed in the order in which they are first entered, with the files that each calls.

Of each file the table says how many lines are in functions that were entered, and in the heads of their classes (fields and docstring; a
class that was only built counts too), and how many the file has. Functions that kernels replace on a GPU count as what runs here.
"""

import argparse
import ast
import json
import os
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import sglang_ext
from sglang_ext.tools.server_process import ServerProcess
from sglang_ext.tools.options import split_flags as words

PACKAGE = Path(sglang_ext.__file__).parent
# In each process of the server. A function is a file and a name in it; of a class whose constructor is generated, that of the class.
WATCH = '''
import json, os, sys, threading, time

seen, passed, rounds = {}, {}, []
PACKAGE, OUT, BEGINS = os.environ["PATHS_OF"], os.environ["PATHS_TO"], os.environ["PATHS_ROUND"]
# What a scheduler does when it is idle.
IDLE, idle = os.environ["PATHS_IDLE"], threading.local()
# Python's own between a caller and a function of ours: of contexts, and of what is cached.
BETWEEN = "contextlib.py", "functools.py"


def tell():
    begun = False
    while True:
        time.sleep(0.5)
        if not begun and os.path.exists(os.path.join(OUT, "begin")):
            begun = True
            for each in (seen, passed, rounds):
                each.clear()
        told = {"seen": list(seen.items()), "passed": list(passed), "rounds": [[list(part) for part in each] for each in list(rounds)]}
        with open(os.path.join(OUT, f"{os.getpid()}.json.new"), "w") as file:
            json.dump(told, file)
        os.replace(file.name, file.name.removesuffix(".new"))


def called(frame):
    code = frame.f_code
    if code.co_filename.startswith(PACKAGE) and code.co_name != "<module>":
        return code.co_filename, code.co_qualname
    if code.co_filename == "<string>" and code.co_argcount:
        first = frame.f_locals.get(code.co_varnames[0])
        built = first if isinstance(first, type) else type(first)
        module = sys.modules.get(built.__module__)
        if built.__module__.startswith("sglang_ext") and module is not None:
            return module.__file__, built.__qualname__
    return None


def note(frame, event, _):
    if frame.f_code.co_qualname == IDLE:
        idle.on = event == "call"
    if getattr(idle, "on", False):
        return
    if event == "return" and frame.f_code.co_qualname == BEGINS and rounds:
        # What was called so far is the round; what follows is the rest of its turn.
        rounds[-1] += tuple(map(dict, rounds[-1]))
    if event != "call" or (key := called(frame)) is None:
        return
    if key[1] == BEGINS:
        rounds.append(({}, {}))
    seen.setdefault(key, time.time())
    back = frame.f_back
    while back is not None and back.f_code.co_filename.endswith(BETWEEN):
        back = back.f_back
    caller = back.f_code.co_filename if back is not None else ""
    pair = (caller, key[0]) if caller.startswith(PACKAGE) and caller != key[0] else None
    if pair is not None:
        passed[pair] = None
    if rounds:
        calls, pairs = rounds[-1][:2]
        calls[key] = None
        if pair is not None:
            pairs[pair] = None


threading.Thread(target=tell, daemon=True).start()
sys.setprofile(note)
threading.setprofile(note)
'''
ROUND, IDLE = "KVWorker.forward_batch_generation", "check_when_idle"
# What a steady round calls, and what it does not.
CALLED = {"DecodeLoop.decode", "Verifier.verify"}
NOT_CALLED = {"CompressedKVCache.compress", "RequestStates.admit", "RequestStates.forget"}

Function = tuple[str, str]


@dataclass(frozen=True)
class Entered:
    """What was entered, in the order in which it first was.

    Attributes:
        functions: each with its file.
        pairs: a file, and another one of which a function was called from there.
    """

    functions: list[Function]
    pairs: set[tuple[str, str]]

    @property
    def passing(self) -> list[str]:
        """Files from which control passes on to another file of ours."""
        callers = {caller for caller, _ in self.pairs}
        return [file for file in dict.fromkeys(file for file, _ in self.functions) if file in callers]


def found(folder: Path, since: float, until: float) -> tuple[Entered, Entered, Entered]:
    """Of a request that was under way in these seconds, and of the turns, and rounds alone, of the steady ones in its middle half.

    Raises:
        RuntimeError: a name in this script is no function's any more, or no round was steady.
    """
    told = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    seen = {(file, name): when for each in told for (file, name), when in each["seen"] if since <= when <= until}
    if lacking := {ROUND, *CALLED, *NOT_CALLED} - {name for _, name in seen}:
        raise RuntimeError(f"a request does not call {', '.join(sorted(lacking))}: was it renamed? Put the names here right")
    request = Entered(sorted(seen, key=seen.__getitem__), {tuple(pair) for each in told for pair in each["passed"]})
    rounds = [
        [Entered([tuple(call) for call in part[at]], {*map(tuple, part[at + 1])}) for at in (0, 2)]
        for each in told
        for part in each["rounds"]
        if len(part) == 4
    ]
    steady = [one for one in rounds if CALLED <= (names := {name for _, name in one[0].functions}) and not NOT_CALLED & names]
    if len(steady) < 4:
        raise RuntimeError(f"{len(steady)} of {len(rounds)} rounds drafted and verified, without copies made: ask for a longer answer")
    middle = steady[len(steady) // 4 : len(steady) - len(steady) // 4]
    turn, alone = (together([one[place] for one in middle]) for place in (0, 1))
    return request, turn, alone


def together(parts: list[Entered]) -> Entered:
    """What was entered in any of several."""
    functions = list(dict.fromkeys(function for one in parts for function in one.functions))
    return Entered(functions, set().union(*(one.pairs for one in parts)))


def entered(path: str, names: set[str]) -> dict[str, set[int]]:
    """Lines, by function or head of a class, of those of a file that were called, and of the classes that they stand in."""
    lines: dict[str, set[int]] = {}

    def visit(node: ast.AST, within: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                if (name := within + child.name) in names:
                    first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                    lines[name] = lines.get(name, set()) | set(range(first, child.end_lineno + 1))
                visit(child, f"{within}{child.name}.<locals>.")
            elif isinstance(child, ast.ClassDef):
                name = within + child.name
                if any(each == name or each.startswith(f"{name}.") for each in names):
                    first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                    bodies = [part for part in child.body if not isinstance(part, ast.FunctionDef)]
                    lines[name] = set(range(first, child.lineno + 1)).union(*(range(p.lineno, p.end_lineno + 1) for p in bodies))
                visit(child, f"{name}.")
            else:
                visit(child, within)

    visit(ast.parse(Path(path).read_text()), "")
    return lines


def table(title: str, what: Entered, each_function: bool) -> None:
    """Print lines of the functions and of their files: of all, of each folder, and of each file; then the path, in its order."""
    names = defaultdict(set)
    for path, name in what.functions:
        names[path].add(name)
    rows, folders = {}, defaultdict(list)
    for path in names:
        lines, short = entered(path, names[path]), Path(path).relative_to(PACKAGE)
        rows[path] = len(set().union(*lines.values())), len(Path(path).read_text().splitlines()), short.as_posix(), lines
        folders[short.parent.as_posix()].append(rows[path])
    print(f"{title}: {_sums([*rows.values()])}")
    for folder, inside in sorted(folders.items(), key=lambda pair: -sum(row[0] for row in pair[1])):
        print(f"    {folder}: {_sums(inside)}")
    path = {file: rows[file] for file in what.passing}
    leaves = {file: row for file, row in rows.items() if file not in path}
    for part, those in (("path", path), ("leaves", leaves)):
        print(f"  {part} of {title}: {_sums([*those.values()])}")
        print("    entered  whole  file")
        for file, (some, whole, name, lines) in those.items():
            called = sorted(rows[to][2] for caller, to in what.pairs if caller == file and to in rows)
            print(f"    {some:7}  {whole:5}  {name}  {'-> ' if called else ''}{', '.join(called)}")
            if each_function:
                for function, own in lines.items():
                    print(f"        {len(own):3}               {function}")


def _sums(rows: list[tuple]) -> str:
    of_functions, of_files = (sum(row[k] for row in rows) for k in (0, 1))
    return f"{len(rows)} files, {of_functions} lines of functions that are entered, {of_files} lines of the files"


def main() -> None:
    """Serve one request of 400 tokens, which drafts, and one more of other tokens, which is watched."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--server-arg", action="append", default=[], metavar="FLAGS")
    parser.add_argument("--functions", action="store_true", help="list the functions of each file, too")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "sitecustomize.py").write_text(WATCH)
        search = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        watched = {"PATHS_OF": str(PACKAGE), "PATHS_TO": temporary, "PATHS_ROUND": ROUND, "PATHS_IDLE": IDLE, "PYTHONPATH": search}
        flags = ("--kv-mode", "verified", "--kv-draft-length", "8", *words(args.server_arg))
        with ServerProcess(str(args.model), flags, folder / "server.log", start_timeout=600, env=watched) as server:
            body = {"input_ids": list(range(100, 500)), "sampling_params": {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}}
            server.request("generate", body)
            (folder / "begin").touch()
            time.sleep(2)
            since = time.time()
            body["input_ids"], body["sampling_params"]["max_new_tokens"] = list(range(600, 1000)), 120
            answer = server.request("generate", body)
            until = time.time()
            time.sleep(1)
            assert answer["meta_info"]["kv_accepted"] >= 0 < answer["meta_info"]["kv_drafts"], answer
            request, turn, round_ = found(folder, since, until)
    table("a steady round", round_, args.functions)
    table("its turn", turn, args.functions)
    table("a request", request, args.functions)


if __name__ == "__main__":
    main()
