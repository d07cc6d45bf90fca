"""Checks of the device, its attention backends, the hooks into SGLang, the model, and the kernels for it."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
import zmq

from sglang_ext import serve_pd
from sglang_ext.config import model_folder, model_options, options, transports
from sglang_ext.config.options import BACKEND
from sglang_ext.doctor.installation import SGLANG_VERSION, Check, make_check, one_line
from sglang_ext.hooks import activation as hooking
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressed.layouts.quantized_blocks import Packing
from sglang_ext.mem_cache.compressors import catalogue

logger = logging.getLogger(__name__)


def check_device() -> Check:
    """Check the device that SGLang would use: an NVIDIA GPU, or the plain CPU platform."""
    from sglang.srt.platforms import current_platform

    from sglang_ext.platforms.plain_cpu import PlainCpuPlatform

    if isinstance(current_platform, PlainCpuPlatform):
        threads = torch.get_num_threads()
        return Check("device", True, f"plain CPU, {threads} thread{'s' * (threads > 1)}")
    if torch.version.cuda is not None and torch.cuda.is_available():
        return Check("device", True, f"CUDA: {torch.cuda.get_device_name()}")
    found = f"SGLang's {type(current_platform).__name__}"
    remedy = (
        "use an NVIDIA GPU, or a CPU with SGLANG_PLUGINS, SGLANG_PLATFORM and SGLANG_USE_CPU_ENGINE "
        "unset; other accelerators serve with --kv-mode full"
    )
    return Check("device", False, found, remedy)


def check_attention_backends() -> Check:
    """Check which attention backends that read compressed KV are installed."""
    # torch_native and triton are part of SGLang. flashinfer is a separate package. fa3 is a part of SGLang's kernels that is compiled for
    # some GPUs.
    on_gpu = torch.cuda.is_available()
    missing = {"flashinfer": not find_spec("flashinfer"), "triton": not on_gpu, "fa3": not (on_gpu and has_fa3())}
    there = [name for name in options.ATTENTION_BACKENDS if not missing.get(name)]
    needed = "flashinfer" if on_gpu else "torch_native"
    remedy = "install flashinfer (`make install`), or pass --attention-backend triton"
    return make_check("attention backends", needed in there, ", ".join(there), remedy)


def has_fa3() -> bool:
    """Whether SGLang's kernels contain FlashAttention-3. They are not loaded for this check."""
    spec = find_spec("sgl_kernel")
    return spec is not None and any(
        any(Path(folder).glob("flash_ops*")) for folder in spec.submodule_search_locations
    )


def check_transfer() -> Check:
    """Check which transfer backends (``--disaggregation-transfer-backend``) work, and whether links can be encrypted."""
    keys = "encrypted with --kv-link-keys" if zmq.has("curve") else "not encrypted: this libzmq has no CURVE"
    obstacles = {name: transports.transport_obstacle(name) for name in transports.TRANSPORTS}
    found = [f"{BACKEND} (ZMQ {zmq.zmq_version()}, {keys})", *(name for name, why in obstacles.items() if why is None)]
    # Of SGLang's own backends, the one that any machine could have.
    lacking = obstacles[transports.MOONCAKE_TCP]
    return Check("KV transfer", True, ", ".join(found) + (f"; not {transports.MOONCAKE_TCP}: {lacking}" if lacking else ""))


def check_router() -> Check:
    """Check that SGLang's router is installed. serve_pd starts it for a prefill and a decode server. A single server needs none."""
    # Looked up as in serve_pd, because the package and the module have different names.
    there = find_spec(serve_pd.ROUTER) is not None
    return Check("router", True, serve_pd.ROUTER if there else f"none, which serve_pd needs: {serve_pd.INSTALL_ROUTER}")


def check_hooks() -> Iterator[Check]:
    """Yield one line for all hooks and private names, and one for each that does not match."""
    table = hooking.entries()
    problems = {entry.target: hooking.find_problem(entry) for entry in table}
    remedy = f"install sglang=={SGLANG_VERSION}, or serve with --kv-mode full"
    fitting = sum(problem is None for problem in problems.values())
    caller = ", called by this patched fork" if hooking.is_patched_fork() else ""
    yield make_check("hooks", fitting == len(table), f"{fitting} of {len(table)} fit{caller}", remedy)
    for target, problem in problems.items():
        if problem is not None:
            yield Check(f"hook {target.rsplit('.', 1)[-1]}", False, f"{target}: {problem}", remedy)


@dataclass(frozen=True)
class ModelInfo:
    """Properties that the checks read from a model's ``config.json``.

    Attributes:
        architecture: Name of its class.
        unsupported: Why its KV cannot be compressed. None if it can.
        head_dim: Channels per head.
        query_heads, kv_heads: Heads per layer.
        dtype: The dtype in which SGLang computes unless ``--dtype`` overrides it.
        stored: Dtype of its weights in the folder.
    """

    architecture: str
    unsupported: str | None
    head_dim: int
    query_heads: int
    kv_heads: int
    dtype: torch.dtype
    stored: torch.dtype


@cache
def read_model(path: str) -> ModelInfo | Check:
    """Read a model as SGLang does, once for all checks. If it cannot be read, return the failing line with the reason.

    Args:
        path: A Hugging Face folder or name, as for ``--model-path``. Its code is not run.
    """
    from sglang.srt.configs.model_config import ModelConfig

    missing = model_folder.find_problem(path)
    if missing is not None:
        return Check("model", False, missing, "pass a Hugging Face folder, or a name on the Hub")
    try:
        config = ModelConfig(path, trust_remote_code=False)
        return ModelInfo(
            architecture=config.hf_config.architectures[0],
            unsupported=model_options.unsupported_model_reason(config),
            head_dim=config.head_dim,
            query_heads=config.get_num_attention_heads(1),
            kv_heads=config.get_num_kv_heads(1),
            dtype=config.dtype,
            stored=getattr(config.hf_config, "dtype", None) or config.dtype,
        )
    except Exception as error:  # transformers and SGLang raise many types of errors
        logger.debug("sglang-ext: %s cannot be read", path, exc_info=True)
        remedy = "pass a Hugging Face folder or name that SGLang serves; the cause is in its config.json"
        return Check("model", False, f"{path}: {one_line(error)}", remedy)


def check_model(path: str) -> Check:
    """Check that a model's family can be compressed. ``path`` as for :func:`read_model`."""
    model = read_model(path)
    if isinstance(model, Check):
        return model
    found = f"{path}: {model.unsupported or model.architecture}"
    return make_check("model", model.unsupported is None, found, "serve this model with --kv-mode full")


def check_kernels(path: str) -> list[Check]:
    """Return a line with the GPU, the shape of the model's attention, and the kernels for it. Empty if SGLang cannot read the model.

    Args:
        path: As for :func:`read_model`.
    """
    model = read_model(path)
    if isinstance(model, Check):
        # check_model reports the reason.
        return []
    group = model.query_heads // model.kv_heads
    dtype, stored = (str(each).removeprefix("torch.") for each in (model.dtype, model.stored))
    # SGLang's --dtype auto uses float16 for float32.
    computed = dtype if dtype == stored else f"{dtype} unless --dtype says another (stored: {stored})"
    shape = f"{model.head_dim} channels a head, {group} query heads a KV head, {computed}"
    if not torch.cuda.is_available():
        return [Check("kernels", True, f"no GPU; {shape}: PyTorch")]
    gpu = torch.cuda.get_device_properties(0)
    memory = f"{gpu.shared_memory_per_block_optin // 1024} KiB of shared memory"
    packed = packed_kernels(model.head_dim, group, model.dtype)
    methods = "; ".join(f"{', '.join(names)} {kernels}" for kernels, names in packed.items())
    found = f"{gpu.name} (sm_{gpu.major}{gpu.minor}, {memory}); {shape}: Triton for scores and compressed KV; in few bits: {methods}"
    return [Check("kernels", True, found)]


def packed_kernels(dim: int, group: int, dtype: torch.dtype, device: str = "cuda") -> dict[str, list[str]]:
    """Group the packing methods that work on a GPU by the kernels that read and write their compressed KV.

    Args:
        dim: Channels per head.
        group: Query heads per KV head.
        dtype: Dtype of the KV pool.
        device: Device of the KV pool.
    """
    from sglang_ext.layers.attention.decode_backend import LARGEST_HEAD, SMALLEST_HEAD
    from sglang_ext.layers.kernels.packed.pack_blocks import can_pack
    from sglang_ext.layers.kernels.packed.packed_decode import fragments, multiplies_integers

    if not SMALLEST_HEAD <= dim <= LARGEST_HEAD:
        return {"not for such heads": list(catalogue.on_gpu())}
    found: dict[str, list[str]] = {}
    keys = torch.zeros(1, 1, dim, dtype=dtype, device=device)
    buffers = KVBuffers((0,), (1.0,), (keys,), (keys,))
    for name in catalogue.on_gpu():
        try:
            packing = Packing.for_pool(catalogue.quantizer(name, catalogue.code_bits(name, None)), buffers, 1)
        except ValueError:
            found.setdefault("not for such heads", []).append(name)
            continue
        if packing.keys.sums and not multiplies_integers(keys):
            found.setdefault("not on this GPU", []).append(name)
            continue
        reader = "Gluon" if fragments(packing, keys, keys, group) else "Triton"
        writer = "a kernel" if can_pack(packing, buffers) else "PyTorch"
        found.setdefault(f"read by {reader}, packed by {writer}", []).append(name)
    return found
