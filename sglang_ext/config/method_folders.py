"""Folders that some methods read and the others do not: ``--kv-scores``, ``--kv-predictor``."""

from pathlib import Path
from typing import TYPE_CHECKING

from sglang_ext.core import OptionError
from sglang_ext.mem_cache.compressors import catalogue
from sglang_ext.mem_cache.compressors.contracts.registry import COMPRESSORS

if TYPE_CHECKING:
    from sglang_ext.arguments import KVServerArgs


def check(args: "KVServerArgs", compressors: tuple[str, ...]) -> None:
    """Refuse a folder that none of ``compressors``, values of ``--kv-compressor``, reads, and its absence where one does.

    Raises:
        OptionError: names the flag, its value and the remedy.
    """
    for name in catalogue.dropping():
        if (wanted := COMPRESSORS[name].reads) is None:
            continue
        folder = getattr(args, wanted.flag.removeprefix("--").replace("-", "_"))
        reader = next((each for each in compressors if catalogue.parse(each)[0] == name), None)
        if reader is not None and folder is None:
            named = "--kv-compressor is" if reader == compressors[0] else "--kv-more-compressors has"
            raise OptionError(
                f"{named} {reader!r}, which {wanted.why}: pass {wanted.flag} FOLDER, written by "
                f"python -m {wanted.maker}, or one of {', '.join(catalogue.online())}"
            )
        if reader is None and folder is not None:
            raise OptionError(
                f"{wanted.flag} is {folder!r} with --kv-compressor {', '.join(compressors)}, which reads none: pass "
                f"--kv-compressor {name}, or leave it out"
            )
        # An empty name would be the working folder.
        if folder is not None and not (folder and Path(folder).is_dir()):
            module = wanted.maker.split()[0]
            raise OptionError(f"{wanted.flag} is {folder!r}, which is no folder: pass one that python -m {module} wrote to")
