"""Measures the time to the first token while a prefix store fails, beside a server without a store.

    sglang-ext-bench store-failures --model MODEL --prompt-file TEXT --store FOLDER --context-len 2000 --redis 6379

Two servers run: one without a store, and one whose store has all prompts. For each failure the pages are copied back and damaged. Then each
prompt is sent alone to both servers in turn, to empty prefix caches. With --redis, a third server has that Redis server as its store, behind a
link of 10 MB/s. It must be empty. Greedy and seeded answers are compared with those of the server without a store.
"""

import argparse
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from sglang_ext.mem_cache.prefix_store.file_backend import FileBackend
from sglang_ext.tools import CommandError
from sglang_ext_bench import report
from sglang_ext_bench.options import check_counts
from sglang_ext_bench.prompts import make_prompts
from sglang_ext_bench.server import BenchServer
from sglang_ext_bench.serving.prefix_store import (
    COMPUTED,
    STORED,
    add_common_arguments,
    count_differing,
    measure,
    running,
    wait_until_quiet,
)

SLOW_RATE = 10e6
"""Bytes per second of the slow link."""
PAUSE_SECONDS = 6.0
"""Time after which a server asks a store again that failed."""

Damage = Callable[[Path, Path], None]
"""Damages all objects of a store. Its arguments are the folder of the store, and another one to which files may be moved."""


def objects(store: Path) -> list[Path]:
    """Files of objects, or links in their places."""
    return sorted(path for path in store.rglob("*") if path.is_file() and len(path.name) == 64)


def change_bytes(change: Callable[[bytes], bytes]) -> Damage:
    """A damage that replaces the bytes of each object."""

    def damage(store: Path, _: Path) -> None:
        for path in objects(store):
            path.write_bytes(change(path.read_bytes()))

    return damage


def link_objects(store: Path, elsewhere: Path) -> None:
    """Move all objects away, and link to them."""
    for path in objects(store):
        shutil.move(path, elsewhere / path.name)
        path.symlink_to(elsewhere / path.name)


def link_namespace(store: Path, elsewhere: Path) -> None:
    """Move the folder of the only namespace away, and link to it."""
    (path,) = (path for path in store.iterdir() if not path.name.startswith("."))
    shutil.move(path, elsewhere / "namespace")
    path.symlink_to(elsewhere / "namespace")


def exchange_objects(store: Path, elsewhere: Path) -> None:
    """Store each object under the name of another one."""
    found = objects(store)
    for path in found:
        shutil.move(path, elsewhere / path.name)
    for path, other in zip(found, [*found[1:], found[0]]):
        shutil.copyfile(elsewhere / other.name, path)


def make_huge(store: Path, _: Path) -> None:
    """Make each object 10 GB long. The files have holes, and need no space."""
    for path in objects(store):
        os.truncate(path, 10 * 10**9)


def make_folders(store: Path, _: Path) -> None:
    """Replace each object by a folder."""
    for path in objects(store):
        path.unlink()
        path.mkdir()


def remove(store: Path, _: Path) -> None:
    """Remove the folder of the store."""
    shutil.rmtree(store)


def replace_by_file(store: Path, _: Path) -> None:
    """Put a file in place of the folder."""
    shutil.rmtree(store)
    store.write_text("not a folder")


DAMAGES: dict[str, Damage] = {
    "empty objects": change_bytes(lambda old: b""),
    "half objects": change_bytes(lambda old: old[: len(old) // 2]),
    "a wrong byte in the header": change_bytes(lambda old: old[:20] + bytes([old[20] ^ 1]) + old[21:]),
    "a wrong byte in the KV": change_bytes(lambda old: old[:-9] + bytes([old[-9] ^ 1]) + old[-8:]),
    "another object under each name": exchange_objects,
    "objects of 10 GB": make_huge,
    "links in place of objects": link_objects,
    "a link in place of the namespace": link_namespace,
    "folders in place of objects": make_folders,
    "removed folder": remove,
    "a file in place of the folder": replace_by_file,
}


def restore(store: Path, whole: Path) -> None:
    """Undo a damage: make the folder a copy of ``whole``."""
    for path in store.iterdir() if store.is_dir() else [store]:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
    shutil.copytree(whole, store, dirs_exist_ok=True)


class SlowLink:
    """Context manager: forwards connections to a port of this machine, and limits the bytes of its replies.

    Args:
        target: The port.
        rate: Bytes per second of all connections together.

    Attributes:
        port: The port to connect to.
    """

    def __init__(self, target: int, rate: float) -> None:
        self._target, self._rate = target, rate
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._free_at = 0.0

    def __enter__(self) -> "SlowLink":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                near.close()
                continue
            for source, target, is_slow in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._forward, args=(source, target, is_slow), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_slow: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if is_slow:
                    with self._lock:
                        self._free_at = max(time.monotonic(), self._free_at) + len(data) / self._rate
                        wait = self._free_at - time.monotonic()
                    time.sleep(max(0.0, wait))
                target.sendall(data)
        except OSError:
            return
        finally:
            # Wakes the thread of the other direction.
            for each in (source, target):
                with each:
                    _shut_down(each)


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_common_arguments(parser, context_len=2000, output_len=8, host_gb=4.0)
    parser.add_argument("--store", type=Path, required=True, metavar="FOLDER", help="a new folder for the store")
    text = "also measure a store of 10 MB/s: port of an empty Redis server of this machine"
    parser.add_argument("--redis", type=int, metavar="PORT", help=text)


def run(args: argparse.Namespace) -> int:
    """Measure all failures, and print the table. Returns 1 if answers differ, else 0."""
    from sglang_ext_bench.speed.settings import log_folder

    check_counts({"--prompts": args.prompts, "--context-len": args.context_len, "--output-len": args.output_len})
    if args.store.exists():
        raise CommandError(f"--store {args.store} exists, and would be removed; pass a new folder")
    store = args.store.absolute()
    prompts = [list(ids) for ids in make_prompts(args, args.prompts, [args.context_len])[args.context_len]]
    found: dict[str, dict[str, Any]] = {}
    with log_folder(args) as logs, running(args, logs / "computed.log") as computed:
        with running(args, logs / "stored.log", "--kv-store", f"file:{store}") as server, TemporaryDirectory() as folder:
            found["a store without the prompts"] = measure_pair(computed, server, prompts, args.output_len)
            wait_until_quiet(FileBackend(store))
            whole = Path(folder) / "whole"
            shutil.copytree(store, whole)
            found["a store with the prompts"] = measure_pair(computed, server, prompts, args.output_len)
            for name, damage in DAMAGES.items():
                time.sleep(PAUSE_SECONDS)
                restore(store, whole)
                elsewhere = Path(folder) / name
                elsewhere.mkdir()
                damage(store, elsewhere)
                found[name] = measure_pair(computed, server, prompts, args.output_len)
        if args.redis is not None:
            with SlowLink(args.redis, SLOW_RATE) as link:
                url = f"redis://127.0.0.1:{link.port}/0"
                with running(args, logs / "slow.log", "--kv-store", url) as server:
                    found["10 MB/s, without the prompts"] = measure_pair(computed, server, prompts, args.output_len)
                    time.sleep(PAUSE_SECONDS)
                    found["10 MB/s, with the prompts"] = measure_pair(computed, server, prompts, args.output_len)
    differing = sum(each["differing"] for each in found.values())
    if args.json is not None:
        settings = {name: str(value) for name, value in vars(args).items() if name not in ("json", "logs", "command")}
        report.write_json(args.json, {"settings": settings, **report.origin(), "failures": found})
    rows = [
        (name, f"{each['computed']:.3f}", f"{each['seconds']:.3f}", f"{each['seconds'] / each['computed']:.3f}", str(each["stored"]))
        for name, each in found.items()
    ]
    columns = ("store", "first token without it, s", "with it, s", "ratio", "from the store")
    report.make_console().print(report.make_table(f"{args.prompts} prompts of {args.context_len} tokens, medians", columns, rows))
    print(f"{differing} of {2 * args.prompts * len(found)} answers differ from those of the server without a store")
    return 1 if differing else 0


def measure_pair(computed: BenchServer, server: BenchServer, prompts: Sequence[Sequence[int]], output_len: int) -> dict[str, Any]:
    """Send each prompt to both servers in turn.

    Returns:
        Median seconds to the first token of both, the median of tokens from the store, and the number of answers that differ.
    """
    without, stored = zip(*((measure(computed, prompt, output_len), measure(server, prompt, output_len)) for prompt in prompts))
    return {
        "computed": median(each.seconds for each in without),
        "seconds": median(each.seconds for each in stored),
        "stored": int(median(each.stored for each in stored)),
        "differing": count_differing({COMPUTED: without, STORED: stored}),
    }
