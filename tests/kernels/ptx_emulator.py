"""Runs inline assembly of Gluon kernels in NumPy, on the registers of a warp, as the PTX manual says."""

import itertools
import re
from types import SimpleNamespace

import numpy as np
import torch


def registers(layout):
    """Flat places of what each lane's registers hold: [lanes, registers]."""
    steps = [int(np.prod(layout.shape[axis + 1 :])) for axis in range(len(layout.shape))]

    def places(bases):
        found = [0]
        for basis in bases:
            step = sum(b * s for b, s in zip(basis, steps))
            found += [place + step for place in found]
        return np.array(found)

    return places(layout.lane_bases)[:, None] + places(layout.reg_bases)[None]


def run(assembly, inputs):
    """Registers that instructions leave: ``inputs`` and results by number, uint32 [lanes, instances]."""
    held = {f"${number}": register for number, register in inputs.items()}
    held["0"] = np.zeros_like(next(iter(inputs.values())))
    for line in re.findall(r"(\w[\w.]*) ([^;]*);", re.sub(r"\{? ?\.reg [^;]*;", "", assembly)):
        name, (target, *sources) = line[0], [part.strip() for part in line[1].split(",")]
        held[target] = INSTRUCTIONS[name.split(".")[0]](name, *(held.get(s, s) for s in sources))
    return held


def _prmt(name, low, high, select):
    low, high = np.broadcast_arrays(_number(low), _number(high))
    picked = [(int(select, 16) >> 4 * place) & 15 for place in range(4)]
    taken = [(high if pick > 3 else low) >> np.uint32(pick % 4 * 8) & np.uint32(255) for pick in picked]
    return np.bitwise_or.reduce([byte << np.uint32(8 * place) for place, byte in enumerate(taken)])


def _cvt(name, high, low):
    dtype = torch.bfloat16 if "bf16x2" in name else torch.float16
    halves = [torch.from_numpy(part.view(np.float32)).to(dtype).view(torch.int16).numpy().view(np.uint16) for part in (low, high)]
    return halves[0].astype(np.uint32) | halves[1].astype(np.uint32) << np.uint32(16)


def _movmatrix(name, source):
    """Lane ``4 * row + column // 2`` holds the matrix's ``row`` and two columns."""
    matrix = np.stack([source & np.uint32(0xFFFF), source >> np.uint32(16)], 1).reshape(8, 8, -1)
    halves = matrix.swapaxes(0, 1).reshape(32, 2, -1)
    return halves[:, 0] | halves[:, 1] << np.uint32(16)


def _as(dtype, source):
    return torch.from_numpy(np.ascontiguousarray(source)).view(dtype)


def _bits(numbers):
    return numbers.contiguous().view(torch.int32).numpy().view(np.uint32)


def _mul(name, left, right):
    return _bits(_as(torch.float16, left) * _as(torch.float16, right))


def _add(name, left, right):
    """Of two float16, or of a float32 and a constant."""
    if name == "add.rn.f16x2":
        return _bits(_as(torch.float16, left) + _as(torch.float16, np.broadcast_to(right, left.shape)))
    constant = np.frombuffer(bytes.fromhex(right.removeprefix("0f")), ">f4").astype(np.float32)
    return _bits(_as(torch.float32, left) + torch.from_numpy(constant))


def _number(source):
    """A register, or what a constant says."""
    return np.uint32(int(source, 0)) if isinstance(source, str) else source


def _lop3(name, first, second, third, table):
    """Each bit of the result is the table's at the place that the bits of the sources tell."""
    sources, found = [_number(part) for part in (first, second, third)], np.uint32(0)
    for place in range(8):
        if int(table, 16) >> place & 1:
            parts = [part if place >> 2 - at & 1 else ~part for at, part in enumerate(sources)]
            found = found | parts[0] & parts[1] & parts[2]
    return found


INSTRUCTIONS = {
    "prmt": _prmt,
    "and": lambda name, left, right: left & _number(right),
    "or": lambda name, left, right: left | _number(right),
    "shr": lambda name, left, count: left >> np.uint32(int(count)),
    "mov": lambda name, source: np.array([_number(source)]) if isinstance(source, str) else source,
    "add": _add,
    "lop3": _lop3,
    "cvt": _cvt,
    "movmatrix": _movmatrix,
    "mul": _mul,
    "ex2": lambda name, source: np.exp2(source.view(np.float32)),
}


def _sum_layout(rows, columns):
    """Of a sum of mma.sync.m16n8k16."""
    steps = [[0, 1], *([1 << bit, 0] for bit in range(3, rows.bit_length() - 1)), *([[0, 8]] if columns == 16 else [])]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return SimpleNamespace(shape=[rows, columns], reg_bases=steps, lane_bases=lanes)


class Assembly:
    """``inline_asm_elementwise``; ``layouts``: of the tensors that some assembly is given."""

    def __init__(self, layouts):
        self.layouts = layouts

    def places(self, assembly, shape, pack):
        if "movmatrix" in assembly:
            return registers(_sum_layout(*shape))
        if assembly in self.layouts:
            assert list(self.layouts[assembly].shape) == list(shape)
            return registers(self.layouts[assembly])
        return np.arange(int(np.prod(shape))).reshape(-1, pack)

    def __call__(self, assembly, constraints, inputs, dtypes, pure, pack):
        if assembly.startswith("mul.wide.s32"):
            # The only one of registers of 64 bits.
            return inputs[0].long() * inputs[1].long()
        shape, places = inputs[0].shape, self.places(assembly, inputs[0].shape, pack)
        names = constraints.split(",")
        given = itertools.count(sum(name.startswith("=") for name in names))
        held = {}
        for part in inputs:
            mine = part.contiguous().flatten()[torch.from_numpy(places)].contiguous()
            mine = mine.view(torch.int32).numpy().view(np.uint32).reshape(len(places), places.shape[1] // pack, -1)
            held |= {next(given): mine[..., register] for register in range(mine.shape[-1])}
        assert next(given) == len(names)
        left, found = run(assembly, held), []
        for number, dtype in enumerate(dtypes if isinstance(dtypes, tuple) else (dtypes,)):
            each = pack * dtype.itemsize // 4
            mine = np.stack([left[f"${number * each + register}"] for register in range(each)], -1)
            halves = torch.from_numpy(mine.reshape(len(places), -1).view(np.int32)).view(dtype)
            out = torch.empty(int(np.prod(shape)), dtype=dtype)
            out[torch.from_numpy(places)] = halves
            found.append(out.view(shape))
        return tuple(found) if isinstance(dtypes, tuple) else found[0]
