"""Measure the forms of a prefix store's pages on the KV of a model: bits per number, and speed. Runs on a CPU.

    sglang-ext-bench store-forms MODEL --tokens 1024

The KV of all layers is computed in float32 and rounded to the dtype of the pool. The command prints one row per dtype and form:

    bits, anchors; bits, all       bits per number of the pool, with headers
    write, read anchors, ...       MB of KV per second of one core, with checksums, without the store's link
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from sglang_ext.config.model_folder import read_config
from sglang_ext.mem_cache.prefix_store.backend import ReadRange
from sglang_ext.mem_cache.prefix_store.objects import FORMS, ObjectFormat, StoredPage, encode_object, read_page
from sglang_ext.tools import CommandError
from sglang_ext_bench.options import check_counts
from sglang_ext_bench.quality.capture import CapturedModel
from sglang_ext_bench.report import markdown_header, markdown_row

Result = TypeVar("Result")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COLUMNS = ("dtype", "form", "bits, anchors", "bits, all", "write, MB/s", "read anchors", "read exactly")


class Memory:
    """Objects in memory, which :func:`read_page` reads as those of a store."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def read(self, ranges: list[ReadRange], is_use: bool = True) -> list[bool]:
        """Copy ranges of objects to their memory."""
        for each in ranges:
            each.memory[:] = self.objects[each.name][each.offset : each.offset + each.memory.nbytes]
        return [True] * len(ranges)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add("model", nargs="?", type=Path, default=".cache/models/SmolLM2-135M-Instruct", help="folder of the model (default: %(default)s)")
    add("--text", type=Path, default=Path("docs/benchmarks.md"), help="file with the prompt (default: %(default)s)")
    add("--tokens", type=int, default=1024, help="first tokens of the text to use (default: %(default)s)")
    add("--page-size", type=int, default=64, help="tokens of a page (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print a row for each dtype and form.

    Raises:
        CommandError: The text does not exist, or a number is out of range.
        OptionError: The model's folder has no config.json.
    """
    check_counts({"--tokens": args.tokens, "--page-size": args.page_size})
    if not args.text.is_file():
        raise CommandError(f"--text {args.text}: there is no such file; pass a text file")
    if args.page_size > args.tokens:
        raise CommandError(f"--page-size {args.page_size}: pass at most --tokens {args.tokens}")
    read_config(args.model)
    from transformers import AutoTokenizer

    input_ids = tuple(AutoTokenizer.from_pretrained(args.model)(args.text.read_text())["input_ids"][: args.tokens])
    layers = CapturedModel(str(args.model), "float32").attention(input_ids)
    kv = torch.stack([layer.keys for layer in layers] + [layer.values for layer in layers])
    torch.set_num_threads(1)
    print(markdown_header(COLUMNS))
    for dtype in DTYPES:
        for name in FORMS:
            form = ObjectFormat(str(args.model), dtype, len(layers), *kv.shape[2:], page_size=args.page_size, form=name)
            form.compile_codec()
            print(markdown_row([str(dtype)[6:], name, *measure(form, kv.to(dtype))]), flush=True)
    return 0


@torch.inference_mode()
def measure(form: ObjectFormat, kv: torch.Tensor) -> list[str]:
    """Bits per number and MB/s of a form, as cells of a row. ``kv``: [keys and values of layers, tokens, heads, dim]."""
    form.compile_codec()
    store, seconds = Memory(), [0.0, 0.0, 0.0]
    numbers = anchor_bytes = all_bytes = 0
    for start in range(0, kv.shape[1] - form.page_size + 1, form.page_size):
        of_page = kv[:, start : start + form.page_size].contiguous()
        page, out = StoredPage(form, start.to_bytes(32), start), torch.empty_like(of_page)
        parts = timed(seconds, 0, lambda: encode_object(page, of_page))
        store.objects = {page.name: b"".join(parts)}
        timed(seconds, 1, lambda: read_page(store, page, out, exact=False))
        timed(seconds, 2, lambda: read_page(store, page, out))
        assert torch.equal(out, of_page), "a page is restored exactly"
        numbers += of_page.numel()
        anchor_bytes += sum(part.nbytes for part in parts[:2])
        all_bytes += len(store.objects[page.name])
    rates = (numbers * form.dtype.itemsize / each / 1e6 for each in seconds)
    return [f"{8 * anchor_bytes / numbers:.2f}", f"{8 * all_bytes / numbers:.2f}", *(f"{each:,.0f}" for each in rates)]


def timed(seconds: list[float], which: int, call: Callable[[], Result]) -> Result:
    """Call, and add the thread's time on a core to ``seconds[which]``."""
    began = time.thread_time()
    found = call()
    seconds[which] += time.thread_time() - began
    return found
