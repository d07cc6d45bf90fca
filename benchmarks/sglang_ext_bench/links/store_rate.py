"""Measures how fast a prefix store writes and reads pages, without a model, beside bare reads of the same bytes.

    sglang-ext-bench store-rate --store file:/dev/shm/pages --store tcp://127.0.0.1:7100 --layers 36 --heads 8 --dim 128 --pages 128

Pages of random numbers are written and read by the threads of a server. *Restored* is the rate at which pages are read, checked and decoded to
host memory. *Bytes* is the rate of the backend alone: as many threads read the same objects, and do nothing with them. *Copy* is the rate of
one thread that copies a page in memory. Rates are in GB/s of KV; a rate is the median of --repeats.
"""

import argparse
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from sglang_ext.tools import CommandError
from sglang_ext_bench import report
from sglang_ext_bench.options import DTYPES, check_counts

if TYPE_CHECKING:
    import torch

    from sglang_ext.mem_cache.prefix_store.objects import ObjectFormat

COLUMNS = ("store", "written", "restored", "bytes", "restored / bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("--store", action="append", required=True, metavar="URL", help="as for --kv-store; its pages stay there; repeatable")
    add("--form", default="raw", choices=("raw", "anchored"), help="as --kv-store-form (default: %(default)s)")
    add("--layers", type=int, default=36, help="layers of the KV (default: %(default)s)")
    add("--heads", type=int, default=8, help="KV heads (default: %(default)s)")
    add("--dim", type=int, default=128, help="channels of a head (default: %(default)s)")
    add("--dtype", default="bfloat16", choices=DTYPES, help="(default: %(default)s)")
    add("--pages", type=int, default=64, help="pages of 64 tokens (default: %(default)s)")
    add("--repeats", type=int, default=3, help="reads of all pages (default: %(default)s)")
    add("--json", type=Path, help="keep the results here")


def run(args: argparse.Namespace) -> int:
    """Measure all stores, and print the table. Returns 1 if a page was not restored, else 0."""
    import torch

    from sglang_ext.mem_cache.prefix_store.objects import ObjectFormat
    from sglang_ext.mem_cache.prefix_store.store import READERS

    check_counts({f"--{name}": getattr(args, name) for name in ("layers", "heads", "dim", "pages", "repeats")})
    form = ObjectFormat("store-rate", getattr(torch, args.dtype), args.layers, args.heads, args.dim, 64, form=args.form)
    form.compile_codec()
    # Normal numbers, as the codec expects KV. All pages have the same.
    page = torch.randn(form.tensors, form.page_size, args.heads, args.dim).to(form.dtype)
    source = page.repeat(args.pages, 1, 1, 1, 1)
    target = torch.zeros_like(source)
    found, all_restored = {}, True
    for url in args.store:
        target.zero_()
        found[url] = measure(url, form, source, target, args.repeats)
        all_restored &= torch.equal(source.view(torch.uint8), target.view(torch.uint8))
    copy = page.nbytes / seconds_of(lambda: target[0].copy_(page), args.repeats) / 1e9
    rows = [(url, *(f"{each:.2f}" for each in rates), f"{rates[1] / rates[2]:.2f}") for url, rates in found.items()]
    title = f"{args.pages} pages of {page.nbytes / 1e6:.1f} MB, {READERS} readers, GB/s; copy {copy:.2f}"
    report.make_console().print(report.make_table(title, COLUMNS, rows))
    if args.json is not None:
        report.write_json(args.json, {**report.origin(), "stores": {url: dict(zip(COLUMNS[1:], rates)) for url, rates in found.items()}})
    print("all pages restored" if all_restored else "pages were not restored")
    return 0 if all_restored else 1


def measure(url: str, form: "ObjectFormat", source: "torch.Tensor", target: "torch.Tensor", repeats: int) -> tuple[float, float, float]:
    """Write all pages to a store, restore them to ``target``, and read their bytes. Returns the rates, in GB/s of KV.

    ``source``, ``target``: [pages, 2 * layers, page_size, heads, head_dim].

    Raises:
        CommandError: The store fails.
    """
    from sglang_ext.mem_cache.prefix_store.backend import StoreError, open_backend
    from sglang_ext.mem_cache.prefix_store.object_header import ObjectError
    from sglang_ext.mem_cache.prefix_store.objects import StoredPage, fetch_page
    from sglang_ext.mem_cache.prefix_store.store import READERS, PrefixStore

    def pages() -> list[StoredPage]:
        return [StoredPage(form, index.to_bytes(32), index * form.page_size) for index in range(len(source))]

    def write() -> None:
        writes = [store.write(page, lambda page: source[place(page)], lambda: True) for page in pages()]
        if not all(each.result() for each in writes):
            raise StoreError("a page was not written")

    def restore() -> None:
        reading = store.read(pages(), lambda page: target[place(page)], lambda page, kv: None, False)
        while not reading.ended:
            time.sleep(0.001)

    def place(page: StoredPage) -> int:
        return page.start // form.page_size

    def read_bytes() -> None:
        list(readers.map(lambda page: fetch_page(store.backend, page), pages()))

    try:
        with closing(PrefixStore(open_backend(url), url)) as store, ThreadPoolExecutor(READERS) as readers:
            store.backend.delete([page.name for page in pages()])
            # Last, because damaged pages are deleted when they are restored.
            written, bare, restored = seconds_of(write, 1), seconds_of(read_bytes, repeats), seconds_of(restore, repeats)
    except (StoreError, ObjectError) as error:
        raise CommandError(f"--store {url}: {error}") from error
    return tuple(source.nbytes / seconds / 1e9 for seconds in (written, restored, bare))


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Median of the seconds that ``work`` takes."""
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return median(found)
