"""The pool, codec, settings and endpoint of a rank's end of links, and the checks that two servers are compatible."""

import os
import tempfile
from pathlib import Path

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.network import NetworkAddress

from sglang_ext.config.disaggregation_options import RAW, REFERENCES, quantized_transfer_settings
from sglang_ext.core import OptionError
from sglang_ext.managers.kv_transfer import wire
from sglang_ext.managers.kv_transfer.endpoints import SOCKETS, LinkKeys
from sglang_ext.managers.kv_transfer.progressive.handshakes import CONTROL_VERSION, RoomMetadata
from sglang_ext.managers.kv_transfer.progressive.lynx_codec import LynxCodec
from sglang_ext.managers.kv_transfer.progressive.page_codec import BenchCodec, PageCodec, PlacedPage, RawCodec, page_tokens
from sglang_ext.managers.kv_transfer.progressive.pool_buffers import PoolBuffers
from sglang_ext.managers.kv_transfer.wire import LinkError, LinkSettings
from sglang_ext.mem_cache.scores import model_folder, model_key
from sglang_ext.named_classes import NAMED, load_class

# Dtypes by the resolved value of --kv-cache-dtype, for pools without separate scales.
DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def describe_pool(args: KVArgs, config: ModelConfig, tp_size: int) -> PoolBuffers:
    """Return the pool of this rank. Raise ``LinkError`` if this backend cannot transfer it."""
    if args.state_types:
        raise LinkError(f"the model has {args.state_types} besides keys and values; use --disaggregation-transfer-backend mooncake for it")
    name = args.kv_cache_dtype_str
    if name != "auto" and name not in DTYPES:
        raise LinkError(f"--kv-cache-dtype is {name}; backend progressive transfers pools of auto, {', '.join(DTYPES)}: pass one of these")
    device = torch.device("cuda", args.gpu_id) if torch.cuda.is_available() else torch.device("cpu")
    dtype = config.dtype if name == "auto" else DTYPES[name]
    return PoolBuffers(args, dtype, config.get_num_kv_heads(tp_size), config.head_dim, config.v_head_dim, device)


def make_settings(args: ServerArgs, pool: PoolBuffers, codec: PageCodec, tp_rank: int, tp_size: int) -> LinkSettings:
    """Return the settings of this rank's end of links."""
    return LinkSettings(
        model_key=model_key(model_folder(args.model_path, args.revision)),
        pool_dtype=str(pool.dtype).removeprefix("torch."),
        layers=pool.layers,
        kv_heads=pool.heads,
        key_dim=pool.key_dim,
        value_dim=pool.value_dim,
        page_size=codec.page_size,
        codec=codec.name,
        codec_version=codec.version,
        codec_options=codec.options | quantized_transfer_settings(args),
        reference=codec.reference,
        tp_rank=tp_rank,
        tp_size=tp_size,
    )


def receiving_endpoint(host: str, rank: int, keys: LinkKeys | None) -> str:
    """Return the endpoint of a decode rank: with keys an address for other machines, else a file in this user's folder."""
    if keys is not None:
        return NetworkAddress(host, 0).to_tcp()
    folder = Path(tempfile.gettempdir()) / f"sglang-ext-{os.getuid()}"
    return f"ipc://{folder}/{SOCKETS}{os.getpid()}-{rank}"


def metadata_mismatch(metadata: RoomMetadata, settings: LinkSettings, aux_sizes: tuple[int, ...], has_keys: bool) -> str | None:
    """Return why the prefill side, with or without link keys, refuses to send a room with this metadata; None if it can send it."""
    differs = wire.version_mismatch(metadata.version, CONTROL_VERSION)
    if differs is not None:
        return differs
    try:
        differs = wire.settings_mismatch(wire.decode_settings(metadata.settings), settings)
    except wire.WireError as error:
        return f"the decode server's settings are not of this version: {error}"
    if differs is not None:
        return differs
    if metadata.aux_sizes[:-1] != aux_sizes:
        return (
            f"auxiliary records have rows of {metadata.aux_sizes[:-1]} bytes at the receiver and {aux_sizes} at the sender; start both "
            "servers with the same SGLang and the same SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS"
        )
    file = metadata.endpoint.removeprefix("ipc://")
    if (file == metadata.endpoint) != has_keys:
        without, alone = ("decode", "prefill") if has_keys else ("prefill", "decode")
        return f"the {alone} server has --kv-link-keys and the {without} server has none: give both servers the same file"
    if file != metadata.endpoint and not Path(file).exists():
        return (
            f"the decode server at {metadata.host} listens at {metadata.endpoint}, for its own machine only, and there is no such file "
            "here: give both servers the same --kv-link-keys"
        )
    return None


def make_codec(reference: str, pool: PoolBuffers, bench: str | None = None) -> PageCodec:
    """Create the codec of a value of ``--kv-reference``, or of ``--kv-bench-codec`` if one is given.

    Raises:
        LinkError: The codec does not support such a pool.
        OptionError: ``bench`` names no codec.
    """
    if bench is not None:
        return bench_codec(bench).for_pool(pool)
    tokens = page_tokens(pool.bytes_per_token)
    return RawCodec(pool, tokens) if reference == RAW else LynxCodec(pool, reference, tokens)


def bench_codec(value: str) -> type[BenchCodec]:
    """Load the codec that a value of ``--kv-bench-codec`` names. Raise ``OptionError`` if it names no codec's class."""
    setting = f"--kv-bench-codec is {value!r}"
    if NAMED.fullmatch(value) is None:
        raise OptionError(
            f"{setting}; it names the class of a codec for comparison: pass MODULE:CLASS, for example "
            "sglang_ext_bench.baselines.quantized_codec:Int8Codec. The codecs of sglang-ext itself are values of --kv-reference: "
            f"{', '.join(REFERENCES)}"
        )
    return load_class(value, setting, BenchCodec)


def compile_kernels(codec: PageCodec, writes: bool) -> None:
    """Compile the codec's kernels, also those that write pages if ``writes``, by a run on slot 0, which belongs to no request."""
    with codec.pool.use_stream():
        for tensor in codec.pool.tensors:
            # Codecs refuse values that are not finite.
            tensor[0] = 0
        slots = torch.zeros(codec.page_size, dtype=torch.int64, device=codec.pool.device)
        # With sinks, and without.
        for page in (PlacedPage(0, slots), PlacedPage(codec.page_size, slots)):
            encoded = codec.encode(page)
            if codec.has_residual:
                for kinds in ({"residual": False}, {"anchor": False}):
                    codec.start(page, **kinds)()
            if writes:
                codec.write_anchor(page, encoded.anchor)
                if codec.has_residual:
                    codec.write_residual(page, encoded.anchor, encoded.residual)
        codec.pool.synchronize()
