"""Which of this project's files a decode round, and a whole request, go through, and how many lines they have: docs/architecture.md.

    python docs/benchmarks/paths.py --model MODEL [--server-arg FLAGS]

A server runs under Python's profiler, which notes each file of which a function is called: in a round those under ``DecodeLoop.decode``
and what SGLang makes of its result, in a request all that any process calls from when it is sent until its answer is there. Functions
that kernels replace on a GPU count as what runs here.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import sglang_ext
from sglang_ext.bench.comparing.identity_options import words
from sglang_ext.bench.server import ServerProcess

PACKAGE = Path(sglang_ext.__file__).parent
# In each process of the server. A round is what these functions call.
WATCH = '''
import atexit, json, os, sys, threading, time

seen, in_round, depth, told = {}, set(), 0, [0.0]
PACKAGE, OUT = os.environ["PATHS_OF"], os.environ["PATHS_TO"]
ROUND = {("loop.py", "decode"), ("processing.py", "process_emitted")}


def tell(now):
    told[0] = now
    with open(os.path.join(OUT, f"{os.getpid()}.json.new"), "w") as file:
        json.dump({"seen": seen, "round": sorted(in_round)}, file)
    os.replace(file.name, file.name.removesuffix(".new"))


def note(frame, event, _):
    global depth
    name = frame.f_code.co_filename
    if event not in ("call", "return") or not name.startswith(PACKAGE):
        return
    step = (os.path.basename(name), frame.f_code.co_name) in ROUND
    if event == "return":
        depth -= step
        return
    depth += step
    now = time.time()
    seen[name] = now
    if depth:
        in_round.add(name)
    if now > told[0] + 0.2:
        tell(now)


sys.setprofile(note)
threading.setprofile(note)
'''


def found(folder: Path, since: float, until: float) -> tuple[set[str], set[str]]:
    """Files of a request that was under way in these seconds, and of its rounds."""
    told = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    request = {name for each in told for name, when in each["seen"].items() if since <= when <= until + 1}
    return request, {name for each in told for name in each["round"]}


def table(title: str, names: set[str]) -> None:
    """Print files, lines of each, and their sums."""
    lines = {Path(name).relative_to(PACKAGE).as_posix(): len(Path(name).read_text().splitlines()) for name in names}
    print(f"{title}: {len(lines)} files, {sum(lines.values())} lines")
    for name, count in sorted(lines.items()):
        print(f"    {count:4} {name}")


def main() -> None:
    """Serve one request of 400 tokens, which drafts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--server-arg", action="append", default=[], metavar="FLAGS")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "sitecustomize.py").write_text(WATCH)
        search = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        watched = {"PATHS_OF": str(PACKAGE), "PATHS_TO": temporary, "PYTHONPATH": search}
        flags = ("--kv-mode", "verified", "--kv-draft-length", "8", *words(args.server_arg))
        with ServerProcess(str(args.model), flags, folder / "server.log", start_timeout=600, env=watched) as server:
            body = {"input_ids": list(range(100, 500)), "sampling_params": {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}}
            server.request("generate", body)
            time.sleep(1)
            since = time.time()
            body["input_ids"] = list(range(600, 1000))
            answer = server.request("generate", body)
            until = time.time()
            time.sleep(1)
            assert answer["meta_info"]["kv_accepted"] >= 0 < answer["meta_info"]["kv_drafts"], answer
            request, rounds = found(folder, since, until)
    table("a round", rounds)
    table("a request", request)


if __name__ == "__main__":
    main()
