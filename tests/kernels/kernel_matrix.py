"""Compile every kernel for every shape of attention and every GPU, and compare its shared memory with the GPU's.

``kernel_matrix.py [--sizes] [--dims 64,128] [--groups 1,7] [--dtypes bfloat16] [--chips 80,90] [--launches NAME,...]``

``--quick``: a few shapes on a few GPUs, those that once took too much.

With ``--sizes`` compilation ends where shared memory is known, before LLVM and the assembler: ten times as fast. Prints a line
for each kernel that takes more than its GPU has, or does not compile, and a count; exits with 1 where there was one.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from hashlib import sha256
from pathlib import Path

import torch
import triton
from matrix_arguments import add_shapes, numbers
from matrix_launches import LAUNCHES, ONCE, Shape, shapes
from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from sglang_ext.core import OptionError
from sglang_ext.layers.kernels import quantized_keys
from sglang_ext.layers.kernels.packed import packed_decode

# Bytes of shared memory that a program may have, by compute capability (CUDA C++ Programming Guide, technical specifications).
SHARED = {75: 65_536, 80: 166_912, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}

# Channels, query heads a KV head, dtype, launches and chips of a quick run: heads of Qwen3-235B and Llama-3.1-405B, MQA, others; and
# small heads.
QUICK = (
    (128, 16, torch.bfloat16, ("window", "verify 17", "decode kivi4", "pointers", "choice 8", "uneven"), (80, 90)),
    # GPUs of 9.0 have more shared memory, and the same tiles.
    (128, 16, torch.bfloat16, ("choice", "pages"), (80,)),
    (256, 8, torch.bfloat16, ("window", "verify 17", "verify exact"), (89,)),
    (128, 7, torch.float16, ("decode turboquant4", "decode hack4"), (89,)),
    (128, 7, torch.float16, ("decode turboquant4",), (120,)),
    (128, 16, torch.float16, ("decode hack4",), (89,)),
    (128, 4, torch.bfloat16, ("decode hack4", "decode hack2"), (80, 100)),
    (128, 7, torch.float32, ("pack rotatekv4", "verify 5"), (89,)),
    (64, 71, torch.bfloat16, ("window", "uneven", "choice", "choice 4"), (89,)),
    (128, 1, torch.bfloat16, ("lynx", "copies", "hand over"), (80,)),
    (128, 4, torch.bfloat16, ("prompts hack4", "prompts specialized"), (80, 90)),
    (8, 4, torch.bfloat16, ("window", "verify 5"), (89,)),
)


class Chip:
    """Triton's driver of a machine with a GPU of some compute capability."""

    def __init__(self) -> None:
        self.capability = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        # Kernels are kept by device.
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


def only_sizes() -> None:
    """Let compilation end where shared memory is allocated."""

    def allocated(backend, options, capability):
        def stage(module, metadata):
            version = nvidia_ptx(options, backend.target.arch)
            manager = ir.pass_manager(module.context)
            passes.ttgpuir.add_combine_tensor_select_and_if(manager)
            passes.ttgpuir.add_allocate_warp_groups(manager)
            passes.convert.add_scf_to_cf(manager)
            passes.gluon.add_inliner(manager)
            nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, capability, version)
            nvidia.passes.ttnvgpuir.add_allocate_tensor_memory(manager)
            manager.run(module, "sizes")
            metadata |= {"shared": module.get_int_attr("ttg.shared"), "name": "none", "tmem_size": 0}
            metadata |= {f"{kind}_scratch_{what}": 0 for kind in ("global", "profile") for what in ("size", "align")}
            return str(module)

        return stage

    def hook(backend=None, stages=None, options=None, language=None, capability=None):
        if stages is None:
            return "sizes", sha256(Path(__file__).read_bytes()).hexdigest()
        stages["llir"] = allocated(backend, options, capability)
        stages["ptx"] = stages["cubin"] = lambda module, metadata: b""

    from triton.backends.nvidia.compiler import get_ptx_version_from_options as nvidia_ptx

    triton.knobs.runtime.add_stages_inspection_hook = hook


def read_once(folder: Path) -> None:
    """Let a Triton kernel be read once for all GPUs: what it is before the first pass does not depend on them."""
    made = ASTSource.make_ir

    def make_ir(self, target, options, codegen_fns, module_map, context):
        file = folder / f"{self.hash()}.ttir"
        if not file.exists():
            file.write_text(str(made(self, target, options, codegen_fns, module_map, context)))
        module = ir.parse_mlir_module(str(file), context)
        module.context = context
        return module

    ASTSource.make_ir = make_ir


def compile_only(chip: Chip, made: list[str]) -> None:
    """Let launches compile for ``chip``, and note the kernels that fit its shared memory; as on the GPU, others raise."""
    triton.runtime.driver.set_active(chip)
    run = JITFunction.run

    def compiling(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.metadata.shared > SHARED[chip.capability]:
            raise OutOfResources(kernel.metadata.shared, SHARED[chip.capability], "shared memory")
        made.append(self.__name__)
        return kernel

    JITFunction.run = compiling
    packed_decode.capability = lambda tensor: divmod(chip.capability, 10)
    packed_decode.has_tensor_cores = packed_decode.multiplies_integers = quantized_keys.multiplies_integers = lambda tensor: chip.capability >= 80
    packed_decode.has_ptx = quantized_keys.has_ptx = lambda tensor: True


def arguments() -> argparse.Namespace:
    """Of the command line."""

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sizes", action="store_true")
    parser.add_argument("--chips", type=numbers, default=tuple(SHARED))
    add_shapes(parser, tuple(LAUNCHES))
    return parser.parse_args()


def main() -> int:
    asked, chip, made, counts, names, started = arguments(), Chip(), [], Counter(), set(), time.monotonic()
    if asked.sizes:
        only_sizes()
        read_once(Path(triton.knobs.cache.dir))
    compile_only(chip, made)
    part, parts = asked.part
    jobs = [
        (shape, name, capability)
        for shape in shapes(asked.dims, asked.groups, asked.dtypes)
        for name in asked.launches
        if name not in ONCE or shape.group == asked.groups[0]
        for capability in asked.chips
        # GPUs before 8.0 have no numbers of the kind, and SGLang serves in float16.
        if capability >= 80 or shape.dtype != torch.bfloat16
    ][part::parts]
    if asked.quick:
        jobs = [
            (Shape(*shape), name, capability) for *shape, names, chips in QUICK for name in names for capability in chips
        ]
    for shape, name, capability in jobs:
        chip.capability = capability
        made.clear()
        try:
            LAUNCHES[name](shape)
        except OptionError as refused:
            counts["refused"] += 1
            print(f"refused: sm_{capability}, {name}: {refused}", flush=True)
        except OutOfResources as error:
            counts["over"] += 1
            print(f"over: sm_{capability}, {name}, {shape}: {error}", flush=True)
        except (CompilationError, RuntimeError) as error:
            counts["failed"] += 1
            print(f"failed: sm_{capability}, {name}, {shape}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        counts["kernels"] += len(made)
        names.update(made)
    print("kernels:", *sorted(names))
    print(f"{dict(counts)} in {time.monotonic() - started:.0f} s")
    return int(bool(counts["failed"] + counts["over"]))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        sys.exit(main())
