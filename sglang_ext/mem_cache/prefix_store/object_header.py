"""The fixed fields of an object of a prefix store, and a check of a whole object that needs no settings of its model.

A store process and the store command check objects with it. Nothing here loads PyTorch. objects.py has the rest of the header.
"""

import struct

import xxhash

MAGIC, VERSION = b"sglextKV", 2
MAX_TENSORS = 1 << 12
"""Most tensors of a page that the check accepts."""
ALIGNMENT = 16
"""The anchors, the residuals, and each of their streams begin at multiples of so many bytes."""
HASH_BYTES, CHECKSUM_BYTES = 32, 16
FIELDS = struct.Struct(f"<8sIIQQQ{HASH_BYTES}s{HASH_BYTES}s{CHECKSUM_BYTES}s{CHECKSUM_BYTES}s{CHECKSUM_BYTES}s")
"""Magic, version, tensors, start, bytes of anchors and of residuals, digest of settings, page's hash, and checksums of anchors, residuals and
restored bits. After the fields: uint32 sizes of each tensor's anchor, then of each residual, zeros, and the checksum of all before it."""


class ObjectError(ValueError):
    """An object that does not restore its page: missing, damaged, or not the expected one. Callers compute the page instead."""


def check_object(name: str, content: memoryview) -> None:
    """Compare an object's size with its header, and the checksums of its header and streams, whatever its format is.

    Raises:
        ObjectError: The object is damaged, has bytes after its residuals, or is another page or of another version.
    """
    if len(content) < FIELDS.size:
        raise ObjectError(f"object {name} is shorter than a header")
    tensors = FIELDS.unpack_from(content)[2]
    header = bytes(content[: header_bytes(min(tensors, MAX_TENSORS))])
    tensors, _, anchors, residuals, _, page_hash, *checksums = unpack_header(header, name)
    if page_hash.hex() != name.partition("/")[2]:
        raise ObjectError(f"object {name} is another page, {page_hash.hex()}")
    size = header_bytes(tensors) + anchors + residuals
    if len(content) != size:
        raise ObjectError(f"object {name} has {len(content)} bytes; its header says {size}")
    begin = len(header)
    for what, end, expected in (("anchors", begin + anchors, checksums[0]), ("residuals", size, checksums[1])):
        if xxhash.xxh3_128_digest(content[begin:end]) != expected:
            raise ObjectError(f"object {name}: the checksum of its {what} differs")
        begin = end


def header_bytes(tensors: int) -> int:
    """Size of the header of an object with this number of tensors."""
    return aligned(FIELDS.size + 8 * tensors + CHECKSUM_BYTES)


def unpack_header(header: bytes, name: str) -> tuple:
    """The fields of a header after its version. Raises :class:`ObjectError` for another version, or a wrong checksum."""
    magic, version, *fields = FIELDS.unpack_from(header)
    # The version is first: the rest of another version's header may differ.
    if magic != MAGIC or version != VERSION:
        raise ObjectError(f"object {name} begins with {magic!r}, version {version}; expected are {MAGIC!r}, version {VERSION}")
    if xxhash.xxh3_128_digest(header[:-CHECKSUM_BYTES]) != header[-CHECKSUM_BYTES:]:
        raise ObjectError(f"object {name}: the header's checksum differs")
    return tuple(fields)


def aligned(size: int) -> int:
    """The next multiple of ``ALIGNMENT``."""
    return -(-size // ALIGNMENT) * ALIGNMENT
