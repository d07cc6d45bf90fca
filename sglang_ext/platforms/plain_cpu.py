"""SGLang on a CPU with neither ``sgl_kernel`` nor a GPU: every operator in plain PyTorch."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform
from torch.overrides import TorchFunctionMode


class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Stock SGLang in PyTorch operators (``torch_native`` attention, no graphs, gloo)."""

    _enum = PlatformEnum.OOT

    def apply_server_args_defaults(self, server_args) -> None:
        """Choose what runs without kernels, and a pool that a laptop can allocate.

        Only options the user left open are set. SGLang's default pool takes 17 GB and 23 s to
        allocate on a CPU, so ``max_total_tokens`` defaults to 32,768 tokens.
        """
        # SGLang chose intel_amx for a CPU by now, which it replaces later by this one.
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = "torch_native"
        if server_args.enable_deterministic_inference:
            allow_deterministic_inference()
        if server_args.sampling_backend is None:
            server_args.sampling_backend = "pytorch"
        if server_args.grammar_backend is None:
            # xgrammar pins its masks to a GPU and cannot apply them on a CPU.
            server_args.grammar_backend = "llguidance"
        # csgmv is SGLang's default and a Triton kernel.
        if server_args.lora_backend == "csgmv":
            server_args.lora_backend = "torch_native"
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = 32768
        # The scheduler polls; on a CPU the poll takes the cores that compute.
        server_args.sleep_on_idle = True
        server_args.disable_cuda_graph = True

    def init_backend(self) -> None:
        """Put plain PyTorch in place of what SGLang compiles or has as Triton kernels on any device."""
        import torch._dynamo

        from sglang_ext.hooks import activation as hooking

        # Small operators that SGLang and its grammar backends compile would need a C++ compiler.
        torch._dynamo.config.disable = True
        hooking.activate_plain_cpu()

    def get_device(self, local_rank: int = 0) -> str:
        """``cpu``; SGLang's arguments expect the name, not a ``torch.device``."""
        return "cpu"

    def get_default_attention_backend(self) -> str:
        """``torch_native``: scaled_dot_product_attention, one request at a time."""
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        """SGLang's own pool: its CPU paths are plain PyTorch."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        """An allocator without Triton kernels."""
        from sglang_ext.platforms.paged_allocator import TorchPagedAllocator

        return TorchPagedAllocator

    def get_compile_backend(self, mode: str | None = None) -> str:
        """``eager``: nothing is compiled on a plain CPU."""
        return "eager"

    def get_torch_profiler_activity_str(self) -> str:
        """``CPU``, as a request to ``/start_profile`` names it."""
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        """What the profiler looks at by that name."""
        return torch.profiler.ProfilerActivity.CPU

    def get_dispatch_key_name(self) -> str:
        """``native``: SGLang's multi-platform operators run their PyTorch form."""
        return "native"


def allow_deterministic_inference() -> None:
    """Let ``--enable-deterministic-inference`` start on a plain CPU, for sampling seeds.

    SGLang honours a request's ``sampling_seed`` under that flag alone, and refuses it for
    ``torch_native``. Seeds work here; logits that do not depend on the batch are not promised.
    """
    from sglang.srt import server_args

    choices = server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    if "torch_native" not in choices:
        server_args.add_deterministic_attention_backend_choices(["torch_native"])
        server_args.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


class _Unpinned(TorchFunctionMode):
    """Tensors stay in ordinary memory, whatever is asked."""

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def relay_without_streams(original: Callable, future_map, batch) -> None:
    """Hook around ``FutureMap._resolve_spec_extras``: hand a round the tokens that it begins with, and record no stream.

    SGLang tells these tensors which CUDA stream reads them, which torch refuses on a CPU; of what it relays beside tokens,
    verified decoding uses nothing.
    """
    between = batch.spec_info
    if between is not None and len(between.future_indices):
        between.bonus_tokens = future_map.output_tokens_buf[between.future_indices]


def run_without_pinning(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Run one of SGLang's functions with ``pin_memory`` ignored: there is no device to copy to."""
    with _Unpinned():
        return original(*args, **kwargs)


def send_prefix_without_events(original: Callable, scheduler, req) -> None:
    """Hook around ``maybe_send_cached_prefix_chunk``: as in SGLang's plain loop, since a forward on a CPU is over when it returns."""
    overlaps, scheduler.enable_overlap = scheduler.enable_overlap, False
    try:
        original(scheduler, req)
    finally:
        scheduler.enable_overlap = overlaps
