"""The servers of ``sglang-ext-bench methods``, the methods of each server, and the bytes that a draft step of each method reads."""

from dataclasses import dataclass

STOCK = "stock"
KINDS = ("code", "prose")
SELECTED = 0.125
"""Share of the context that a draft step reads with methods that select tokens of the full KV."""
PAGE = 16
"""Tokens of a page of ``quest``."""
QUANTIZING = ("int8", "int4", "rotatekv", "turboquant", "hack", "lynx")
"""Methods that quantize all tokens, measured with their default bits."""
SERVER_NAMES = (STOCK, "snapkv", "quest", "spade", "verify-guided", "kivi", "kivi-2", *QUANTIZING)
"""The servers, in the order of the table."""


@dataclass(frozen=True)
class MeasuredMethod:
    """One row of the table.

    Attributes:
        label: First cell of the row, in Markdown.
        asked: Name that requests pass as ``kv_compressor``. None on the stock server.
        draft_share: Bytes that a draft step reads, over those of the full KV. None for a method with compressed KV of its own,
            whose bytes the server reports.
    """

    label: str
    asked: str | None
    draft_share: float | None = None


@dataclass(frozen=True)
class MethodServer:
    """One server and the methods that it measures.

    A server has at most one method that quantizes tokens. A method that selects tokens of the full KV needs a server of its own.

    Attributes:
        name: Name in logs and in the JSON file.
        flags: Flags beside those of all servers.
        methods: Methods that its requests ask for, one after another.
    """

    name: str
    flags: tuple[str, ...]
    methods: tuple[MeasuredMethod, ...]


def all_servers(draft_length: int, select_interval: int, on_gpu: bool) -> tuple[MethodServer, ...]:
    """Stock SGLang first, then verified servers with a fixed draft length.

    Args:
        draft_length: Draft tokens before each verification.
        select_interval: Draft steps between two selections of ``spade``.
        on_gpu: The servers run on GPUs, on which ``quest`` needs pages of 16 tokens.
    """
    verified = ("--kv-mode", "verified", "--kv-draft-length", str(draft_length), "--kv-compressor")
    dropping = {
        "snapkv": "`snapkv`, 1/4",
        "snapkv:0.125": "`snapkv`, 1/8",
        "snapkv:0.03125": "`snapkv`, 1/32",
        "expected-attention": "`expected-attention`, 1/4",
        "sink-recent": "`sink-recent`, 1/4",
    }
    several = {"snapkv": dropping, "kivi": {"kivi": "`kivi`", "snapkv+kivi": "`snapkv+kivi`, 1/4"}}
    found = {STOCK: MethodServer(STOCK, ("--kv-mode", "full"), (MeasuredMethod("stock", None, 1.0),))}
    for first, labels in several.items():
        more = ",".join(name for name in labels if name != first)
        methods = tuple(MeasuredMethod(label, name) for name, label in labels.items())
        found[first] = MethodServer(first, (*verified, first, "--kv-more-compressors", more), methods)
    found["kivi-2"] = MethodServer("kivi-2", (*verified, "kivi", "--kv-bits", "2"), (MeasuredMethod("`kivi`, 2 bits", "kivi"),))
    for name in QUANTIZING:
        found[name] = MethodServer(name, (*verified, name), (MeasuredMethod(f"`{name}`", name),))
    # Quest reads the minimum and the maximum of the keys of each page in each step, and spade reads all keys at each selection. Keys are half
    # of the KV.
    pages = ("--page-size", str(PAGE)) if on_gpu else ()
    selecting = {
        "quest": (1 / PAGE, pages),
        "spade": (0.5 / select_interval, ("--kv-select-every", str(select_interval))),
        "verify-guided": (0.0, ()),
    }
    for name, (scanned, more) in selecting.items():
        flags = (*verified, name, "--kv-budget", str(SELECTED), *more)
        found[name] = MethodServer(name, flags, (MeasuredMethod(f"`{name}`, 1/8", name, SELECTED + scanned),))
    return tuple(found[name] for name in SERVER_NAMES)
