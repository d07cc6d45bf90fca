"""Serve a prefix store, look at one, check it, and delete or copy its pages.

    python -m sglang_ext.store serve --listen tcp://127.0.0.1:7100 --memory-gb 64 --disk /mnt/prefixes --disk-gb 500
    python -m sglang_ext.store list file:/mnt/prefixes
    python -m sglang_ext.store check redis://127.0.0.1:6379/0 --delete
    python -m sglang_ext.store prune file:/mnt/prefixes --max-gb 100
    python -m sglang_ext.store copy file:/mnt/prefixes s3://prefixes/a

Servers may use the store at the same time. They compute pages that they do not find.
"""

import argparse
import logging
import re
import signal
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from sglang_ext.managers.kv_transfer.endpoints import LinkKeys
from sglang_ext.managers.kv_transfer.wire import LinkError
from sglang_ext.managers.store_server.server import StoreServer
from sglang_ext.mem_cache.prefix_store.backend import (
    MAX_OBJECT_BYTES,
    ReadRange,
    StoreBackend,
    StoredObject,
    StoreError,
    open_backend,
)
from sglang_ext.mem_cache.prefix_store.file_backend import DEFAULT_MAX_BYTES, FileBackend
from sglang_ext.mem_cache.prefix_store.object_cache import ObjectCache
from sglang_ext.mem_cache.prefix_store.object_header import ObjectError, check_object
from sglang_ext.tools import LAST_PORT, CommandError, exit_code

logger = logging.getLogger(__name__)

GB = 10**9
NEVER = "-"
"""Shown for a time that the store does not know."""


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(
        "python -m sglang_ext.store", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("url", metavar="URL", help="as for --kv-store of a server")
        return command

    add("list", "print pages and bytes of each namespace: a model, a dtype, a form and a rank")
    check = add("check", "compare the checksums of all pages; exit code 1 if one is damaged")
    check.add_argument("--delete", action="store_true", help="delete damaged pages")
    prune = add("prune", "delete the pages that were used least recently")
    prune.add_argument("--max-gb", type=float, help="GB of 10^9 bytes that may stay")
    prune.add_argument("--older-than", type=float, metavar="HOURS", help="delete pages that were not used in the last HOURS")
    prune.add_argument("--namespace", help="delete all pages of this namespace, as `list` prints it")
    copy = add("copy", "copy all pages to another store, which keeps its own")
    copy.add_argument("to", metavar="TO", help="URL of the other store")
    text = "keep pages of many servers in memory, for --kv-store tcp://ADDRESS:PORT"
    serve = commands.add_parser("serve", help=text, description=text)
    serve.add_argument("--listen", dest="url", required=True, metavar="tcp://ADDRESS:PORT", help="address of one interface; port 0 takes a free one")
    text = "GB of 10^9 bytes of memory for pages; those used least recently are dropped"
    serve.add_argument("--memory-gb", type=float, required=True, metavar="GB", help=text)
    serve.add_argument("--disk", type=Path, metavar="FOLDER", help="folder that gets all pages, so that they survive a restart")
    serve.add_argument("--disk-gb", type=float, metavar="GB", help=f"GB of 10^9 bytes that --disk may hold (default: {DEFAULT_MAX_BYTES // GB})")
    serve.add_argument("--keys", type=Path, metavar="FILE", help="keys of python -m sglang_ext.link_keys, which beyond this machine are required")
    serve.add_argument("--gbps", type=float, help="Gbit/s that the store sends at most")
    return made


def main(arguments: Sequence[str] | None = None, console: Console | None = None) -> int:
    """Run the command. Returns the exit code: 0, 1 if pages are damaged, 2 for an error."""
    args, console = parser().parse_args(arguments), console or Console()

    def work() -> int:
        with ExitStack() as args.opened, _errors_of(args.url):
            return COMMANDS[args.command](args, console)

    return exit_code("store", work, console)


def serve_pages(args: argparse.Namespace, console: Console) -> int:
    """Serve pages until SIGTERM or Ctrl-C. Returns 1 if an internal error ended the store."""
    # Links also take sockets in folders, but no URL of a store names one.
    found = re.fullmatch(r"tcp://.+:([0-9]{1,5})", args.url)
    if found is None or int(found[1]) > LAST_PORT:
        raise CommandError(f"--listen {args.url!r}: pass tcp://ADDRESS:PORT with a port up to {LAST_PORT}, for example tcp://127.0.0.1:7100")
    memory = psutil.virtual_memory().total
    if not 0 < args.memory_gb * GB <= memory:
        raise CommandError(f"--memory-gb {args.memory_gb:g}: pass more than 0 and at most {memory / GB:.1f}, the memory of this machine")
    if args.disk is None and args.disk_gb is not None:
        raise CommandError("--disk-gb bounds --disk: pass --disk FOLDER, or leave it out")
    if args.disk_gb is not None and not 0 < args.disk_gb < float("inf"):
        raise CommandError(f"--disk-gb {args.disk_gb:g}: pass a positive number")
    if args.gbps is not None and not args.gbps >= 0.01:
        raise CommandError(f"--gbps {args.gbps:g}: pass 0.01 or more, or leave it out")
    # Installed first, so that an early signal ends the store cleanly, too.
    stop = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: stop.set())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    disk_bytes = DEFAULT_MAX_BYTES if args.disk_gb is None else int(args.disk_gb * GB)
    disk = None if args.disk is None else FileBackend(args.disk, disk_bytes)
    cache = ObjectCache(int(args.memory_gb * GB), disk)
    try:
        keys = None if args.keys is None else LinkKeys.read(args.keys)
        server = StoreServer(args.url, cache, keys, args.gbps)
    except LinkError as error:
        cache.close()
        raise CommandError(str(error)) from error
    if keys is None:
        logger.warning("prefix store: no --keys, so every user of this machine can read and change pages")
    suffix = "" if keys is None else f"?keys={args.keys}"
    console.print(f"prefix store: pass --kv-store '{server.endpoint}{suffix}' to servers", soft_wrap=True, markup=False, highlight=False)
    while server.is_running and not stop.wait(1):
        pass
    is_running = server.is_running
    server.close()
    logger.info("prefix store %s has ended: %s", server.endpoint, server.report())
    return 0 if is_running else 1


@contextmanager
def _errors_of(url: str) -> Iterator[None]:
    """Turn errors of a store into errors of the command, which name its URL."""
    try:
        yield
    except StoreError as error:
        raise CommandError(f"{url}: {error}") from error


def _open(url: str, args: argparse.Namespace) -> StoreBackend:
    """Open a store, which is closed at the end of the command. Raises ``CommandError`` with the remedy if it does not answer."""
    try:
        backend = open_backend(url)
    except StoreError as error:
        raise CommandError(f"{url}: {error}; start this store, or pass the URL of one that runs") from error
    return args.opened.enter_context(closing(backend))


def _open_existing(args: argparse.Namespace) -> StoreBackend:
    """Open the store of a command.

    Raises ``CommandError`` for a folder that does not exist: opening would create it, and a mistyped one has no pages.
    """
    if args.url.startswith("file:"):
        folder, _ = FileBackend.split_url(args.url)
        if not folder.is_dir():
            raise CommandError(f"{args.url}: there is no folder {folder}; pass the folder of a prefix store")
    return _open(args.url, args)


def list_pages(args: argparse.Namespace, console: Console) -> int:
    """Print a row for each namespace."""
    pages: dict[str, list[StoredObject]] = defaultdict(list)
    for each in _open_existing(args).objects():
        pages[each.name.partition("/")[0]].append(each)
    table = Table("namespace", "pages", "GB", "last used")
    for namespace, found in sorted(pages.items()):
        used = [each.used_at for each in found if each.used_at is not None]
        last = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(max(used))) if used else NEVER
        table.add_row(namespace, f"{len(found):,}", f"{sum(each.size for each in found) / GB:.3f}", last)
    console.print(table)
    return 0


def check_pages(args: argparse.Namespace, console: Console) -> int:
    """Compare all checksums, and print the damaged pages."""
    backend, count, gone, damaged = _open_existing(args), 0, 0, []
    for page, content in _contents(backend):
        count += content is not None
        gone += content is None
        if isinstance(content, ObjectError):
            damaged.append(page.name)
            console.print(str(content), soft_wrap=True)
    if args.delete and damaged:
        backend.delete(damaged)
    deleted, others = " and deleted" if args.delete and damaged else "", f"; {gone} were deleted during the check" if gone else ""
    console.print(f"{count} pages, {len(damaged)} damaged{deleted}{others}")
    return 1 if damaged else 0


def prune_pages(args: argparse.Namespace, console: Console) -> int:
    """Delete pages until the limits hold."""
    if args.max_gb is None and args.older_than is None and args.namespace is None:
        raise CommandError("prune deletes nothing without a limit: pass --max-gb, --older-than or --namespace")
    for flag, limit in (("--max-gb", args.max_gb), ("--older-than", args.older_than)):
        if limit is not None and not limit >= 0:
            raise CommandError(f"{flag} {limit:g}: pass 0 or more")
    backend = _open_existing(args)
    pages = sorted(backend.objects(), key=lambda each: each.used_at or 0.0)
    namespaces = {each.name.partition("/")[0] for each in pages}
    if args.namespace is not None and args.namespace not in namespaces:
        raise CommandError(f"--namespace {args.namespace!r}: {args.url} has none of this name; `list {args.url}` prints those that it has")
    if args.older_than is not None and any(each.used_at is None for each in pages):
        raise CommandError(f"{args.url} does not know when pages were used: pass --max-gb or --namespace")
    gone: list[StoredObject] = []
    kept: deque[StoredObject] = deque()
    for each in pages:
        (gone if _is_outdated(each, args) else kept).append(each)
    size, max_bytes = sum(each.size for each in kept), float("inf") if args.max_gb is None else args.max_gb * GB
    while size > max_bytes:
        gone.append(kept.popleft())
        size -= gone[-1].size
    backend.delete([each.name for each in gone])
    console.print(f"{len(gone)} pages deleted, {sum(each.size for each in gone) / GB:.3f} GB; {len(kept)} stay")
    return 0


def _is_outdated(page: StoredObject, args: argparse.Namespace) -> bool:
    if args.namespace is not None and page.name.partition("/")[0] == args.namespace:
        return True
    return args.older_than is not None and time.time() - page.used_at > 3600 * args.older_than


def copy_pages(args: argparse.Namespace, console: Console) -> int:
    """Copy all undamaged pages that the other store lacks."""
    source, target = _open_existing(args), _open(args.to, args)
    copied = size = damaged = gone = 0
    for page, content in _contents(source):
        if content is None or isinstance(content, ObjectError):
            gone += content is None
            damaged += content is not None
            continue
        with _errors_of(args.to):
            is_new = target.put(page.name, [memoryview(content)])
        copied += is_new
        size += is_new * page.size
    console.print(f"{copied} pages copied, {size / GB:.3f} GB; {damaged} damaged; {gone} deleted while copying")
    return 0


def _contents(backend: StoreBackend) -> Iterator[tuple[StoredObject, bytearray | ObjectError | None]]:
    """All pages with their bytes. A damaged page has its error instead, a page that was deleted meanwhile has None."""
    # Listed first: a store process closes a connection that asks for nothing for minutes.
    for page in list(backend.objects()):
        try:
            content = _read_page(backend, page)
        except ObjectError as error:
            yield page, error
        else:
            yield page, content


def _read_page(backend: StoreBackend, page: StoredObject) -> bytearray | None:
    """The bytes of a page. None if it was deleted after it was listed. Raises ``ObjectError`` if it is damaged."""
    if page.size > MAX_OBJECT_BYTES:
        raise ObjectError(f"object {page.name} of {page.size} bytes: at most {MAX_OBJECT_BYTES} are read")
    content = bytearray(page.size)
    if not all(backend.read([ReadRange(page.name, 0, memoryview(content))], is_use=False)):
        if not backend.count_run([page.name]):
            return None
        raise ObjectError(f"object {page.name} is shorter than {page.size} bytes, or cannot be read")
    check_object(page.name, memoryview(content))
    return content


COMMANDS = {"serve": serve_pages, "list": list_pages, "check": check_pages, "prune": prune_pages, "copy": copy_pages}

if __name__ == "__main__":
    sys.exit(main())
