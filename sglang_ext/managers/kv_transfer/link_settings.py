"""Settings that the two ends of a link must agree on before any KV is transferred, and the error that names the difference."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from sglang_ext.config.disaggregation_options import CODES

Name = Annotated[str, Meta(min_length=1, max_length=128)]
Count = Annotated[int, Meta(ge=1, le=1 << 20)]
OptionValue = bool | Annotated[int, Meta(ge=-(1 << 62), le=1 << 62)] | float | Annotated[str, Meta(max_length=128)]

# Reference of codecs for benchmarks: no stream restores the original KV.
LOSSY = "lossy"
_SAME_CODES = (
    "give both servers the same --kv-mode lossy, --kv-compressor, --kv-more-compressors, --kv-bits, --kv-partition and --kv-prefill, or "
    "neither: prompts are transferred as quantized KV"
)
_SAME_CODEC = "start both servers with the same --kv-reference, and the same --kv-bench-codec where one has it"
_REMEDIES = {
    "model_key": "serve the same weights on both sides",
    "pool_dtype": "give both servers the same --dtype and the same --kv-cache-dtype",
    "layers": "serve the same model on both sides, with the same pipeline ranks",
    "kv_heads": "give both servers the same --tp-size",
    "key_dim": "serve the same model on both sides",
    "value_dim": "serve the same model on both sides",
    "page_size": "install the same version of sglang-ext on both sides, which gives equal pools equal pages",
    "codec": _SAME_CODEC,
    "codec_version": "install the same version of sglang-ext on both sides",
    "codec_options": _SAME_CODEC,
    "reference": _SAME_CODEC,
    "tp_rank": "connect each rank to the receiver of its own rank",
    "tp_size": "give both servers the same --tp-size",
}


class LinkError(Exception):
    """A link, or a room on it, cannot work. The message has the value, the allowed values and the remedy."""


class LinkSettings(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Settings of one end of a link. Both ends' settings must be equal.

    Attributes:
        model_key: Key of the model's weights (mem_cache/scores.py).
        pool_dtype: Dtype of SGLang's KV pool, such as ``bfloat16``.
        layers: Layers that this rank transfers.
        kv_heads: KV heads of this rank.
        key_dim, value_dim: Elements of a head.
        page_size: Tokens in a page of the codec; the last page of a request may hold fewer.
        codec, codec_version: Codec that encodes the pages.
        codec_options: Options of the codec that change its bytes, by name.
        reference: What anchor and residual together restore: ``int8`` the codec's 8-bit reconstruction, ``exact`` the pool's bits, ``raw``
            KV without a codec, ``lossy`` an approximation.
        tp_rank, tp_size: Tensor parallel rank and size of both ends.
    """

    model_key: Name
    pool_dtype: Name
    layers: Count
    kv_heads: Count
    key_dim: Count
    value_dim: Count
    page_size: Count
    codec: Name
    codec_version: Count
    codec_options: Annotated[dict[Name, OptionValue], Meta(max_length=32)]
    reference: Literal["int8", "exact", "raw", "lossy"]
    tp_rank: Annotated[int, Meta(ge=0, le=1 << 20)]
    tp_size: Count


def settings_mismatch(here: LinkSettings, peer: LinkSettings) -> str | None:
    """Return why a peer is refused: the first field that differs, both values and the remedy; None if all are equal.

    The page size is compared last, because it follows from other fields.
    """
    for field in sorted(LinkSettings.__struct_fields__, key="page_size".__eq__):
        ours, theirs = getattr(here, field), getattr(peer, field)
        if ours != theirs:
            remedy = _REMEDIES[field]
            if field == "codec_options":
                remedy = options_mismatch(ours, theirs)
                ours, theirs = ({name: each.get(name) for name in differing_options(ours, theirs)} for each in (ours, theirs))
            return f"{field} is {ours!r} at the receiver and {theirs!r} at the sender; {remedy}"
    return None


def differing_options(ours: dict[str, OptionValue], theirs: dict[str, OptionValue]) -> list[str]:
    """Return the names of the options that differ, or that only one end has."""
    return [name for name in sorted(ours | theirs) if ours.get(name) != theirs.get(name)]


def options_mismatch(ours: dict[str, OptionValue], theirs: dict[str, OptionValue]) -> str:
    """Return which options differ, and the remedy."""
    names = differing_options(ours, theirs)
    coded = all(name.startswith(CODES) for name in names)
    return f"{', '.join(names)}: {_SAME_CODES if coded else _REMEDIES['codec_options']}"


def version_mismatch(here: int, peer: int) -> str | None:
    """Return why a peer with another version of the wire format is refused; None if equal. Checked before all settings."""
    if here == peer:
        return None
    return f"protocol is {here} at the receiver and {peer} at the sender; install the same version of sglang-ext on both sides"
