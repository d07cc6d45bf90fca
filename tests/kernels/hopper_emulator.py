"""Runs Gluon kernels whose warps are specialized with PyTorch, where there is no GPU, as gluon_emulator.py runs others.

Partitions are threads of which one runs at a time, until it waits at a barrier; when all wait, that is an error. Whatever the hardware may
do late, it does as late as it may: a copy's bytes are there when someone waits for them, and a product reads shared memory when it is
waited for. What no copy filled, or the next one overwrites, is not what was expected.
"""

import ast
import itertools
import threading
from types import SimpleNamespace
from unittest import mock

import torch
from gluon_emulator import KERNELS, Constant, Pointer, Shared, language

# What shared memory holds before bytes are there: numbers that no code is, and no number.
POISON = {torch.int8: 77, torch.float16: torch.nan, torch.float32: torch.nan}


class Stuck(RuntimeError):
    """All partitions wait, or one of them failed."""


class Barrier:
    """A barrier of shared memory, with phases of arrivals and bytes."""

    def __init__(self):
        self.count = None

    def begin(self, count):
        self.count = self.left = count
        self.bytes = self.ended = 0
        self.copies = []

    def arrive(self, count=1):
        self.left -= count
        if self.left < 0:
            raise Stuck("more arrivals at a barrier than it counts")
        self._end()

    def expect(self, count):
        self.bytes += count
        self.arrive()

    def land(self):
        """Let copies under way be there."""
        copies, self.copies = self.copies, []
        for target, found in copies:
            target.copy_(found)
            self.bytes -= found.numel() * found.itemsize
        self._end()

    def _end(self):
        if self.left == 0 and self.bytes == 0 and not self.copies:
            self.left, self.ended = self.count, self.ended + 1

    def passed(self, phase):
        return self.ended % 2 != phase


class Barriers:
    def __init__(self, count):
        self.all = [Barrier() for _ in range(count)]

    def index(self, at):
        return self.all[int(at)]


class Turns:
    """Whose turn it is, of partitions: the first that can go on, in an order."""

    def __init__(self, order):
        self.order, self.ready, self.turn, self.failed = order, {}, None, None
        self.changed, self.inference = threading.Condition(), torch.is_inference_mode_enabled()

    def run(self, partitions):
        self.ready = {number: lambda: True for number in range(len(partitions))}
        threads = [threading.Thread(target=self._body, args=(number, *each), daemon=True) for number, each in enumerate(partitions)]
        for thread in threads:
            thread.start()
        with self.changed:
            self._next()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        if self.failed is not None:
            raise self.failed

    def wait(self, barrier, phase, pred=True):
        """Give the turn away until a barrier's phase has ended."""
        if not pred:
            return
        me = threading.current_thread().number

        def ready():
            barrier.land()
            return barrier.passed(phase)

        with self.changed:
            self.ready[me] = ready
            self._next()
            self._until(me)

    def _body(self, number, function, args):
        threading.current_thread().number = number
        with torch.inference_mode(self.inference):
            try:
                with self.changed:
                    self._until(number)
                function(*args)
            except BaseException as error:  # noqa: BLE001
                self.failed = self.failed or error
            with self.changed:
                del self.ready[number]
                self._next()

    def _until(self, me):
        self.changed.wait_for(lambda: self.turn == me or self.failed is not None)
        if self.failed is not None:
            raise Stuck("another partition failed") from self.failed

    def _next(self):
        try:
            able = [number for number in self.order if number in self.ready and self.ready[number]()]
            if not able and self.ready:
                raise Stuck("all partitions wait at barriers")
        except RuntimeError as error:
            self.failed, able = self.failed or error, []
        self.turn = able[0] if able else None
        self.changed.notify_all()


class Room(Shared):
    def permute(self, order):
        return Room(self.data.permute(order))

    def index(self, at):
        return Room(self.data[at])

    def load(self, layout):
        return self.data.clone()

    def store(self, numbers):
        self.data.copy_(numbers)


class Source:
    """What a descriptor is in a kernel."""

    def __init__(self, descriptor):
        self.base, self.dtype, self.layout = descriptor.base, descriptor.base.dtype, descriptor.layout
        self.block_type = SimpleNamespace(shape=descriptor.block_shape)


def _copy(source, at, barrier, target):
    rows, columns = source.block_type.shape
    first, second = map(int, at)
    found = source.base[first : first + rows, second : second + columns].clone()
    assert found.shape == target.data.shape
    target.data.fill_(POISON[found.dtype])
    barrier.copies.append((target.data, found))


class Product:
    """Of asynchronous tensor cores: computed when it is waited for."""

    def __init__(self, left, right, acc):
        self.left, self.right, self.acc = left, right, acc

    def compute(self):
        acc = self.acc.compute() if isinstance(self.acc, Product) else self.acc
        # Of registers, or of shared memory.
        left, right = self.left.data, self.right.data
        assert left.dtype == right.dtype
        found = left.double() @ right.double() + (0 if acc is None else acc)
        return found.to(torch.int32 if left.dtype == torch.int8 else torch.float32)


def _mma(left, right, acc, use_acc=True, is_async=False):
    made = Product(left, right, acc if use_acc else None)
    return made if is_async else made.compute()


def _mma_wait(left, deps):
    assert left == 0
    found = tuple(each.compute() for each in deps)
    return found if len(found) > 1 else found[0]


_to = torch.Tensor.to


def _cast(tensor, dtype, bitcast=False):
    return tensor.view(dtype) if bitcast else _to(tensor, dtype)


def _jit(made=None, **options):
    return made or _jit


class Emulated:
    """The kernel ``name`` of a module of that name, launched as Triton's are; ``order``: which partitions go first."""

    def __init__(self, name, order=(0, 1, 2)):
        self.name, self.order, self.launches = name, order, 0

    def __getitem__(self, grid):
        def launch(*args, F, num_warps):
            assert num_warps == 4
            turns, program = Turns(self.order), [0, 0, 0]
            names = self._names(grid, program, turns)
            given = [Pointer(part.flatten()) if isinstance(part, torch.Tensor) else part for part in args]
            given = [Source(part) if hasattr(part, "block_shape") else part for part in given]
            given = [tuple(Pointer(each.flatten()) for each in part) if isinstance(part, tuple) else part for part in given]
            with mock.patch.object(torch.Tensor, "to", _cast):
                for program[:] in itertools.product(*map(range, grid)):
                    names[self.name](*given, F=Constant(F))
            self.launches += 1

        return launch

    def _names(self, grid, program, turns):
        from sglang_ext.layers.kernels.packed import prefill_attention

        gl = language(grid, program, None)
        plain = gl.allocate_shared_memory

        def allocate(dtype, shape, layout):
            if layout == "barriers":
                return Barriers(shape[0])
            return Room(torch.full_like(plain(torch.float32, shape, layout).data, 0).to(dtype).fill_(POISON[dtype]))

        gl.allocate_shared_memory, gl.full_like = allocate, torch.full_like
        gl.warp_specialize = lambda partitions, warps, registers: turns.run(partitions)
        mbarrier = SimpleNamespace(
            MBarrierLayout=lambda: "barriers", init=lambda barrier, count: barrier.begin(count), wait=turns.wait,
            expect=lambda barrier, count: barrier.expect(count), arrive=lambda barrier, count: barrier.arrive(count),
        )  # fmt: skip
        names = {
            "gl": gl, "gluon": SimpleNamespace(jit=_jit), "mbarrier": mbarrier, "tma": SimpleNamespace(async_copy_global_to_shared=_copy),
            "fence_async_shared": lambda: None, "warpgroup_mma": _mma, "warpgroup_mma_wait": _mma_wait,
            **{name: getattr(prefill_attention, name).value for name in ("FAR", "LOG_LAST", "ROUNDED", "ROUNDING", "SHIFT")},
        }  # fmt: skip
        tree = ast.parse((KERNELS / f"{self.name}.py").read_text())
        tree.body = [part for part in tree.body if not isinstance(part, ast.ImportFrom)]
        exec(compile(tree, self.name, "exec"), names)
        return names
