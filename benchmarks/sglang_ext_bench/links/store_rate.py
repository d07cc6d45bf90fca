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
from pathlib import Path
from statistics import median

from sglang_ext_bench import report
from sglang_ext_bench.options import DTYPES, check_counts

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

    from sglang_ext.mem_cache.prefix_store.backend import ReadRange, open_backend
    from sglang_ext.mem_cache.prefix_store.objects import ObjectFormat, StoredPage
    from sglang_ext.mem_cache.prefix_store.store import READERS, PrefixStore

    check_counts({f"--{name}": getattr(args, name) for name in ("layers", "heads", "dim", "pages", "repeats")})
    form = ObjectFormat("store-rate", getattr(torch, args.dtype), args.layers, args.heads, args.dim, 64, form=args.form)
    form.compile_codec()
    shape = (args.pages, form.tensors, form.page_size, args.heads, args.dim)
    # Normal numbers, as the codec expects KV.
    source = torch.randn(shape[1:], dtype=torch.float32).to(form.dtype).repeat(args.pages, 1, 1, 1, 1)
    target, hashes = torch.zeros_like(source), [index.to_bytes(32) for index in range(args.pages)]
    found, all_restored = {}, True
    for url in args.store:
        store = PrefixStore(open_backend(url), url)
        pages = [StoredPage(form, page_hash, index * form.page_size) for index, page_hash in enumerate(hashes)]
        store.backend.delete([page.name for page in pages])
        places = {page.name: index for index, page in enumerate(pages)}

        def write() -> None:
            writes = [store.write(page, lambda page: source[places[page.name]], lambda: True) for page in pages]
            assert all(each.result() for each in writes), "a page was not written"

        def restore() -> None:
            again = [StoredPage(form, page.page_hash, page.start) for page in pages]
            reading = store.read(again, lambda page: target[places[page.name]], lambda page, kv: None, False)
            while not reading.ended:
                time.sleep(0.001)

        def read_bytes() -> None:
            list(pool.map(lambda each: store.backend.read([ReadRange(each, 0, memories.pop())]), sizes))

        written = seconds_of(write, 1)
        sizes = {each.name: each.size for each in store.backend.objects() if each.name in places}
        restored = seconds_of(restore, args.repeats)
        all_restored &= torch.equal(source.view(torch.uint8), target.view(torch.uint8))
        with ThreadPoolExecutor(READERS) as pool:
            bare = []
            for _ in range(args.repeats):
                memories = [memoryview(bytearray(size)) for size in sizes.values()]
                bare.append(seconds_of(read_bytes, 1))
        store.close()
        found[url] = [source.nbytes / each / 1e9 for each in (written, restored, median(bare))]
    copy = seconds_of(lambda: target[0].copy_(source[0]), args.repeats)
    rows = [(url, *(f"{each:.2f}" for each in rates), f"{rates[1] / rates[2]:.2f}") for url, rates in found.items()]
    title = f"{args.pages} pages of {source[0].nbytes / 1e6:.1f} MB, {READERS} readers, GB/s; copy {source[0].nbytes / copy / 1e9:.2f}"
    report.make_console().print(report.make_table(title, COLUMNS, rows))
    if args.json is not None:
        report.write_json(args.json, {**report.origin(), "stores": {url: dict(zip(COLUMNS[1:], rates)) for url, rates in found.items()}})
    print("all pages restored" if all_restored else "pages were not restored")
    return 0 if all_restored else 1


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Median of the seconds that ``work`` takes."""
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return median(found)
