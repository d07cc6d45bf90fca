"""Which kernels would serve a model on this machine's GPU."""

import torch

from sglang_ext.doctor.check import Check
from sglang_ext.mem_cache.compressed.formats.packing import Packing
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressors import catalogue


def check_kernels(path: str) -> list[Check]:
    """A line that names the GPU, the model's shape of attention, and the kernels for it; none where SGLang cannot read the model.

    Args:
        path: a Hugging Face folder or name, as for ``--model-path``. Its code is not run.
    """
    from sglang.srt.configs.model_config import ModelConfig

    try:
        config = ModelConfig(path, trust_remote_code=False)
        dim, heads, kv_heads = config.head_dim, config.get_num_attention_heads(1), config.get_num_kv_heads(1)
    except Exception:
        # A config that SGLang cannot read raises errors of any kind; the check of the model says which.
        return []
    shape = f"{dim} channels a head, {heads // kv_heads} query heads a KV head, {str(config.dtype).removeprefix('torch.')}"
    if not torch.cuda.is_available():
        return [Check("kernels", True, f"no GPU; {shape}: PyTorch")]
    gpu = torch.cuda.get_device_properties(0)
    memory = f"{gpu.shared_memory_per_block_optin // 1024} KiB of shared memory"
    packed = packed_kernels(dim, heads // kv_heads, config.dtype)
    methods = "; ".join(f"{', '.join(names)} {kernels}" for kernels, names in packed.items())
    found = f"{gpu.name} (sm_{gpu.major}{gpu.minor}, {memory}); {shape}: Triton for scores and copies; in few bits: {methods}"
    return [Check("kernels", True, found)]


def packed_kernels(dim: int, group: int, dtype: torch.dtype, device: str = "cuda") -> dict[str, list[str]]:
    """Methods that pack tokens on a GPU, by what reads their copies and what writes them.

    Args:
        dim: channels of a head.
        group: query heads that share a KV head.
        dtype: of the KV pool.
        device: where the pool would lie.
    """
    from sglang_ext.layers.kernels.packed.pack_blocks import takes
    from sglang_ext.layers.kernels.packed.packed_decode import fragments

    found: dict[str, list[str]] = {}
    keys = torch.zeros(1, 1, dim, dtype=dtype, device=device)
    buffers = KVBuffers((0,), (1.0,), (keys,), (keys,))
    for name in catalogue.on_gpu():
        try:
            packing = Packing.of(catalogue.quantizer(name, catalogue.code_bits(name, None)), buffers, 1)
        except ValueError:
            found.setdefault("not for such heads", []).append(name)
            continue
        reader = "Gluon" if fragments(packing, keys, keys, group) else "Triton"
        writer = "a kernel" if takes(packing, buffers) else "PyTorch"
        found.setdefault(f"read by {reader}, packed by {writer}", []).append(name)
    return found
