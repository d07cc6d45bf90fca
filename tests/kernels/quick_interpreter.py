"""Let Triton's interpreter leave out what changes no result: for the small tiles of checks that is most of what it does."""

from functools import lru_cache

from triton.language import core
from triton.runtime import interpreter

_replace = interpreter._patch_attr
_make_block_type, _make_tensor = core.block_type.__init__, core.tensor.__init__
_numpys_type, _unwrap = interpreter._get_np_dtype, core._unwrap_if_constexpr
# What a tensor of a scalar type says of its size and shape.
_OF_SCALAR = core.constexpr(1), core.tuple([])
# Kinds of values that hold nothing to unwrap.
_PLAIN = frozenset((core.tensor, core.dtype, int, float, bool, str, type(None)))


@lru_cache(maxsize=None)
def _builtins(package: object) -> tuple[str, ...]:
    """Names of what the interpreter replaces in a module or class of Triton's language while a kernel runs."""
    return tuple(name for name in dir(package) if core.is_builtin(getattr(package, name, None)))


def _replace_builtins(package, builder, scope):
    """As the interpreter does as each function of a kernel begins; all of a package are replaced at once, and put back at once."""
    names = _builtins(package)
    if names and core.is_builtin(getattr(package, names[0])):
        for name in names:
            _replace(package, name, getattr(package, name), builder, scope)


@lru_cache(maxsize=None)
def _fields_of(element: core.dtype, shape: tuple[int, ...]) -> dict[str, object]:
    """Of a block's type; and what a tensor of it says of its size and shape."""
    made = object.__new__(core.block_type)
    _make_block_type(made, element, list(shape))
    made.of_tensor = core.constexpr(made.numel), core.tuple([core.constexpr(size) for size in shape])
    return vars(made)


def _block_type(self, element_ty, shape):
    """A type of a block, whose shape was checked before; those of pointers are made again, as they are no keys."""
    if element_ty.is_ptr():
        _make_block_type(self, element_ty, shape)
    else:
        self.__dict__ = _fields_of(element_ty, tuple(core._unwrap_shape(shape)))


def _tensor(self, handle, type):
    """A tensor of a block's type takes what that says of it; all of scalar types say the same."""
    found = getattr(type, "of_tensor", None)
    if found is not None:
        self.handle, self.type, self.dtype, (self.numel, self.shape) = handle, type, type.element_ty, found
    elif type.is_block():
        _make_tensor(self, handle, type)
    else:
        self.handle, self.type, self.dtype, (self.numel, self.shape) = handle, type, type.scalar, _OF_SCALAR


@lru_cache(maxsize=None)
def _numpys_type_of(name: str) -> object:
    """Of the numbers of a scalar type."""
    return _numpys_type(core.dtype(name))


def _numpys_type_once(type):
    """As the interpreter finds it, which makes a table of all types each time."""
    return _numpys_type_of(type.name) if type.__class__ is core.dtype else _numpys_type(type)


def _unwrap_quickly(value):
    """What a constant of compile time holds, as Triton finds it out, which first asks of four kinds whether it is one of them."""
    kind = value.__class__
    if kind is core.constexpr:
        return value.value
    return value if kind in _PLAIN else _unwrap(value)


def leave_out() -> None:
    """From now on nothing is searched for that is replaced already, types and shapes are found once, and no sums are made for asserts
    that nothing overflows: kernels have these for debugging alone, and else the interpreter makes the sums and forgets them.

    Raises:
        RuntimeError: kernels are for debugging.
    """
    options = interpreter.interpreter_builder.options
    if options.debug:
        raise RuntimeError("kernels for debugging assert that nothing overflows: leave TRITON_DEBUG out")
    object.__setattr__(options, "sanitize_overflow", False)
    interpreter._patch_builtin = _replace_builtins
    core.block_type.__init__, core.tensor.__init__ = _block_type, _tensor
    interpreter._get_np_dtype, core._unwrap_if_constexpr = _numpys_type_once, _unwrap_quickly
