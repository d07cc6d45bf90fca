"""Which kernels would serve a model on this machine's GPU."""

import torch

from sglang_ext.doctor.check import Check
from sglang_ext.doctor.serving import read_model
from sglang_ext.mem_cache.compressed.formats.packing import Packing
from sglang_ext.mem_cache.compressed.kv_buffers import KVBuffers
from sglang_ext.mem_cache.compressors import catalogue


def check_kernels(path: str) -> list[Check]:
    """A line that names the GPU, the model's shape of attention, and the kernels for it; none where SGLang cannot read the model.

    Args:
        path: as for :func:`read_model`.
    """
    model = read_model(path)
    if isinstance(model, Check):
        # The check of the model says why.
        return []
    group = model.query_heads // model.kv_heads
    shape = f"{model.head_dim} channels a head, {group} query heads a KV head, {str(model.dtype).removeprefix('torch.')}"
    if not torch.cuda.is_available():
        return [Check("kernels", True, f"no GPU; {shape}: PyTorch")]
    gpu = torch.cuda.get_device_properties(0)
    memory = f"{gpu.shared_memory_per_block_optin // 1024} KiB of shared memory"
    packed = packed_kernels(model.head_dim, group, model.dtype)
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
