"""Which of this project's code a steady decode round, and a whole request, go through: docs/architecture.md.

    python docs/benchmarks/paths.py --model MODEL [--server-arg FLAGS] [--functions]

A server runs under Python's profiler, which notes each function of this project that is called. A *round* is all that the scheduler's
process calls from one decode that SGLang asks of the worker to the next, the outcome of the round before among it. It is *steady* where
it drafts and verifies, nobody is admitted or ended in it, and no copy is made. What the steady rounds in the middle half of a long
answer call is counted, all together; in a request, what any process calls from when it is sent until its answer is there.

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
from pathlib import Path

import sglang_ext
from sglang_ext.bench.comparing.identity_options import words
from sglang_ext.bench.server import ServerProcess

PACKAGE = Path(sglang_ext.__file__).parent
# In each process of the server. A function is a file and a name in it; of a class whose constructor is generated, that of the class.
WATCH = '''
import json, os, sys, threading, time

seen, rounds = {}, []
PACKAGE, OUT, BEGINS = os.environ["PATHS_OF"], os.environ["PATHS_TO"], os.environ["PATHS_ROUND"]


def tell():
    while True:
        time.sleep(0.5)
        with open(os.path.join(OUT, f"{os.getpid()}.json.new"), "w") as file:
            json.dump({"seen": [[*key, when] for key, when in list(seen.items())], "rounds": [list(each) for each in list(rounds)]}, file)
        os.replace(file.name, file.name.removesuffix(".new"))


def called(frame):
    code = frame.f_code
    if code.co_filename.startswith(PACKAGE):
        return code.co_filename, code.co_qualname
    if code.co_filename == "<string>" and code.co_argcount:
        first = frame.f_locals.get(code.co_varnames[0])
        built = first if isinstance(first, type) else type(first)
        module = sys.modules.get(built.__module__)
        if built.__module__.startswith("sglang_ext") and module is not None:
            return module.__file__, built.__qualname__
    return None


def note(frame, event, _):
    if event != "call" or (key := called(frame)) is None:
        return
    if key[1] == BEGINS:
        rounds.append(set())
    seen[key] = time.time()
    if rounds:
        rounds[-1].add(key)


threading.Thread(target=tell, daemon=True).start()
sys.setprofile(note)
threading.setprofile(note)
'''
ROUND = "KVWorker.forward_batch_generation"
# What a steady round calls, and what it does not.
CALLED = {"DecodeLoop.decode", "Verifier.verify"}
NOT_CALLED = {"CompressedViews.compress", "RequestStates.admit", "RequestStates.forget"}

Function = tuple[str, str]


def found(folder: Path, since: float, until: float) -> tuple[set[Function], set[Function]]:
    """Functions of a request that was under way in these seconds, and of the steady rounds in its middle half.

    Raises:
        RuntimeError: a name in this script is no function's any more, or no round was steady.
    """
    told = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    request = {(file, name) for each in told for file, name, when in each["seen"] if since <= when <= until + 1}
    if lacking := {ROUND, *CALLED, *NOT_CALLED} - {name for _, name in request}:
        raise RuntimeError(f"a request does not call {', '.join(sorted(lacking))}: was it renamed? Put the names here right")
    rounds = [{(file, name) for file, name in calls} for each in told for calls in each["rounds"]]
    steady = [calls for calls in rounds if CALLED <= (names := {name for _, name in calls}) and not NOT_CALLED & names]
    if len(steady) < 4:
        raise RuntimeError(f"{len(steady)} of {len(rounds)} rounds drafted and verified, without copies made: ask for a longer answer")
    quarter = len(steady) // 4
    return request, set().union(*steady[quarter : len(steady) - quarter])


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


def table(title: str, functions: set[Function], each_function: bool) -> None:
    """Print lines of the functions and of their files: of all, of each folder, and of each file, most first."""
    names = defaultdict(set)
    for path, name in functions:
        names[path].add(name)
    rows, folders = [], defaultdict(list)
    for path in names:
        lines, short = entered(path, names[path]), Path(path).relative_to(PACKAGE)
        row = len(set().union(*lines.values())), len(Path(path).read_text().splitlines()), short.as_posix(), lines
        rows.append(row)
        folders[short.parent.as_posix()].append(row)
    print(f"{title}: {_sums(rows)}")
    for folder, inside in sorted(folders.items(), key=lambda pair: -sum(row[0] for row in pair[1])):
        print(f"    {folder}: {_sums(inside)}")
    print("    entered  whole  file")
    for some, whole, name, lines in sorted(rows, key=lambda row: (-row[0], row[2])):
        print(f"    {some:7}  {whole:5}  {name}")
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
        watched = {"PATHS_OF": str(PACKAGE), "PATHS_TO": temporary, "PATHS_ROUND": ROUND, "PYTHONPATH": search}
        flags = ("--kv-mode", "verified", "--kv-draft-length", "8", *words(args.server_arg))
        with ServerProcess(str(args.model), flags, folder / "server.log", start_timeout=600, env=watched) as server:
            body = {"input_ids": list(range(100, 500)), "sampling_params": {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}}
            server.request("generate", body)
            time.sleep(1)
            since = time.time()
            body["input_ids"], body["sampling_params"]["max_new_tokens"] = list(range(600, 1000)), 160
            answer = server.request("generate", body)
            until = time.time()
            time.sleep(1)
            assert answer["meta_info"]["kv_accepted"] >= 0 < answer["meta_info"]["kv_drafts"], answer
            request, rounds = found(folder, since, until)
    table("a steady round", rounds, args.functions)
    table("a request", request, args.functions)


if __name__ == "__main__":
    main()
