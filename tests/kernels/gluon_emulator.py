"""Runs Gluon kernels with PyTorch, a program after the other, where there is no GPU.

Tensors are PyTorch's: layouts move nothing, but for assembly. That runs on registers (ptx_emulator.py): which numbers a lane's
registers hold is what the kernel's layouts say. That tensors lie so, and conversions of layouts move nothing, is the compiler's
to check (compile_checks.py).
"""

import ast
import itertools
from pathlib import Path
from types import SimpleNamespace

import torch
from ptx_emulator import Assembly

KERNELS = Path(__file__).parents[2] / "sglang_ext/layers/kernels/gluon"
# Of each kernel, in the order in which they import each other.
MODULES = {"packed_splits_gluon": ("tiles", "packed_blocks")}
MODULES["integer_splits_gluon"] = (*MODULES["packed_splits_gluon"], "integer_products", "integer_blocks")


class Pointer:
    """Into a flat tensor."""

    def __init__(self, data, at=0):
        self.data, self.at, self.dtype = data, at, SimpleNamespace(element_ty=data.dtype)

    def __add__(self, step):
        return Pointer(self.data, self.at + step)


class Constant:
    """A constexpr, seen from inside a kernel."""

    def __init__(self, value):
        self.value = value


class Shared:
    """Shared memory: what is not copied to it yet is not a number."""

    def __init__(self, data):
        self.data = data

    def index(self, at):
        return Shared(self.data[at])

    def slice(self, first, count, dim=0):
        return Shared(self.data.narrow(dim, first, count))

    def load(self, layout):
        assert list(self.data.shape) == list(layout.shape)
        return self.data.clone()


class Copies:
    """Asynchronous copies: they arrive when they are waited for."""

    def __init__(self):
        self.open, self.groups = [], []

    def async_copy_global_to_shared(self, shared, source):
        self.open.append((shared.data, load(source)))

    def commit_group(self):
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, left):
        while len(self.groups) > left:
            for target, found in self.groups.pop(0):
                target.copy_(found)


def load(pointer, mask=None, other=0):
    at = torch.as_tensor(pointer.at)
    if mask is None:
        return pointer.data[at]
    at, mask = torch.broadcast_tensors(at, mask)
    return torch.where(mask, pointer.data[torch.where(mask, at, 0)], torch.tensor(other, dtype=pointer.data.dtype))


def store(pointer, value, mask):
    at, value, mask = torch.broadcast_tensors(pointer.at, value, mask)
    pointer.data[at[mask]] = value[mask]


def language(grid, program, assembly):
    """What stands for ``triton.experimental.gluon.language``."""

    def tensors(name):
        return lambda left, right: getattr(torch, name)(torch.as_tensor(left), torch.as_tensor(right))

    return SimpleNamespace(
        constexpr=lambda value: value, static_range=range, load=load, store=store,
        program_id=lambda axis: program[axis], num_programs=lambda axis: grid[axis],
        SliceLayout=lambda axis, parent: None, SwizzledSharedLayout=lambda *_: None, inline_asm_elementwise=assembly,
        arange=lambda first, end, layout: torch.arange(first, end), cdiv=lambda left, right: -(-left // right),
        thread_barrier=lambda: None,
        full=lambda shape, value, dtype, layout: torch.full(tuple(shape), value, dtype=dtype),
        allocate_shared_memory=lambda dtype, shape, layout: Shared(torch.full(tuple(shape), torch.nan, dtype=dtype)),
        convert_layout=lambda numbers, layout, assert_trivial=False: numbers, expand_dims=torch.unsqueeze, where=torch.where,
        broadcast=lambda left, right: torch.broadcast_tensors(*map(torch.as_tensor, (left, right))),
        join=lambda left, right: torch.stack([left, right], -1),
        split=lambda both: both.unbind(-1), max=torch.amax, min=torch.amin, sum=torch.sum, exp2=torch.exp2, log2=torch.log2,
        fma=lambda left, right, more: (left.double() * right.double() + more.double()).float(),
        minimum=tensors("minimum"), maximum=tensors("maximum"),
        int8=torch.int8, int32=torch.int32, int64=torch.int64, float16=torch.float16, bfloat16=torch.bfloat16, float32=torch.float32,
    )  # fmt: skip


def _mma(left, right, acc):
    return (left.double() @ right.double() + acc).to(acc.dtype)


class Emulated:
    """The kernel ``name``, launched as Triton's are; its constants are ``F``."""

    def __init__(self, name):
        self.name = name

    def __getitem__(self, grid):
        def launch(*args, F, num_warps, **constants):
            from sglang_ext.layers.kernels.gluon import fragments, integer_fragments
            from sglang_ext.layers.kernels.packed import integer_attention

            of_values = F.quartet_layout if self.name == "integer_splits_gluon" else F.paired_layout
            layouts = {F.key_assembly[0]: F.key_layout, F.value_assembly[0]: of_values}
            layouts[fragments.PAIRED_TOKENS[0]] = F.exact_paired
            program = [0, 0, 0]
            names = {
                "gl": language(grid, program, Assembly(layouts)), "gluon": SimpleNamespace(jit=lambda made: made), "mma_v2": _mma,
                "fragments": fragments, "integer_fragments": integer_fragments, "integer_attention": integer_attention,
                "async_copy": Copies(),
            }  # fmt: skip
            for module in MODULES[self.name]:
                tree = ast.parse((KERNELS / f"{module}.py").read_text())
                tree.body = [part for part in tree.body if not isinstance(part, ast.ImportFrom)]
                exec(compile(tree, module, "exec"), names)
            given = [Pointer(part.flatten()) if isinstance(part, torch.Tensor) else part for part in args]
            assert all(part.is_contiguous() for part in args if isinstance(part, torch.Tensor))
            for split, head, request in itertools.product(*map(range, grid)):
                program[:] = split, head, request
                names[self.name](*given, F=Constant(F), **constants)

        return launch
