"""SGLang on a CPU with neither ``sgl_kernel`` nor a GPU: all operators in plain PyTorch."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform
from torch.overrides import TorchFunctionMode

from sglang_ext.hooks import activation as hooking, table


class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Stock SGLang in PyTorch operators (``torch_native`` attention, no graphs, gloo)."""

    _enum = PlatformEnum.OOT

    def apply_server_args_defaults(self, server_args) -> None:
        """Select options that work without kernels, and a pool that a laptop can allocate, where the user left them open."""
        from sglang.srt.server_args import (
            DETERMINISTIC_ATTENTION_BACKEND_CHOICES, add_deterministic_attention_backend_choices,
            add_radix_supported_deterministic_attention_backend_choices,
        )  # fmt: skip

        # SGLang has selected intel_amx for a CPU by now. It would replace it by torch_native later.
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = "torch_native"
        if server_args.enable_deterministic_inference and "torch_native" not in DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
            # Sampling seeds need that flag. Logits may still depend on the batch.
            add_deterministic_attention_backend_choices(["torch_native"])
            add_radix_supported_deterministic_attention_backend_choices(["torch_native"])
        if server_args.sampling_backend is None:
            server_args.sampling_backend = "pytorch"
        if server_args.grammar_backend is None:
            # xgrammar pins its masks to a GPU and cannot apply them on a CPU.
            server_args.grammar_backend = "llguidance"
        # csgmv is SGLang's default and a Triton kernel.
        if server_args.lora_backend == "csgmv":
            server_args.lora_backend = "torch_native"
        # SGLang's default pool takes 17 GB and 23 s to allocate on a CPU.
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = 32768
        # The scheduler polls. On a CPU the poll would use the cores that compute.
        server_args.sleep_on_idle = True
        server_args.disable_cuda_graph = True

    def init_backend(self) -> None:
        """Replace operators that SGLang compiles, or has as Triton kernels on any device, by plain PyTorch."""
        import torch._dynamo

        # SGLang and its grammar backends compile small operators, which would need a C++ compiler.
        torch._dynamo.config.disable = True
        hooking.apply(table.PLAIN_CPU_HOOKS)

    def get_device(self, local_rank: int = 0) -> str:
        """``cpu``. SGLang's arguments expect the name, not a ``torch.device``."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        """``torch_native``: scaled_dot_product_attention, one request at a time."""
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        """SGLang's own pool. Its CPU paths are plain PyTorch."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        """An allocator without Triton kernels."""
        from sglang_ext.platforms.torch_kernels import TorchPagedAllocator

        return TorchPagedAllocator

    def get_compile_backend(self, mode: str | None = None) -> str:
        """``eager``: nothing is compiled on a plain CPU."""
        return "eager"

    def get_torch_profiler_activity_str(self) -> str:
        """``CPU``, the name in requests to ``/start_profile``."""
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """The profiler activity of that name."""
        return torch.profiler.ProfilerActivity.CPU


class _Unpinned(TorchFunctionMode):
    """Keeps tensors in ordinary memory, ignoring requests to pin them."""

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def relay_without_streams(original: Callable, future_map, batch) -> None:
    """Hook around ``FutureMap._resolve_spec_extras``: gives a round its first tokens, and records no CUDA stream."""
    between = batch.spec_info
    if between is not None and len(between.future_indices):
        between.bonus_tokens = future_map.output_tokens_buf[between.future_indices]


def run_without_pinning(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run one of SGLang's functions with ``pin_memory`` ignored: there is no device to copy to."""
    with _Unpinned():
        return original(*args, **kwargs)


def send_prefix_without_events(original: Callable, scheduler, req) -> None:
    """Hook around ``maybe_send_cached_prefix_chunk``: uses SGLang's plain loop, because a forward on a CPU is complete when it returns."""
    overlaps, scheduler.enable_overlap = scheduler.enable_overlap, False
    try:
        original(scheduler, req)
    finally:
        scheduler.enable_overlap = overlaps
