"""Instructions of NVIDIA GPUs on what lies in a warp's registers: codes to numbers, scores to weights.

A code becomes a number without arithmetic: in the lowest bits of a float16 it is a subnormal, the code times 2 ** -24, or
2 ** bit more where it lies at a higher bit. Tensor cores take these exactly; queries and outputs take the powers back.
Each function answers instructions and their registers; an output is two numbers of 16 bits.
"""

# The power of two of a code at the lowest bit.
SUBNORMAL = -24


def _mask(bits: int, part: int) -> str:
    mask = ((1 << bits) - 1) << bits * part
    return f"{mask << 16 | mask:#x}"


def _numbers(bits: int, selects: list[str], sources: int) -> tuple[str, str]:
    """Each of ``selects`` puts the two bytes that become neighbours into halves of a register, which all parts mask."""
    parts, count = 8 // bits, len(selects)
    first = parts * count
    inputs = f"${first}, " + (f"${first + 4}" if sources == 2 else "0")
    lines = []
    for place, select in enumerate(selects):
        lines.append(f"prmt.b32 t, {inputs}, {select};")
        lines += [f"and.b32 ${part * count + place}, t, {_mask(bits, part)};" for part in range(parts)]
    return "\n".join(["{ .reg .b32 t;", *lines, "}"]), ",".join(["=&r"] * first + ["r"] * (4 * sources))


def key_numbers(bits: int) -> tuple[str, str]:
    """Of four bytes of a token: two outputs for each part, of neighbours."""
    return _numbers(bits, ["0x4140", "0x4342"], 1)


def value_numbers(bits: int) -> tuple[str, str]:
    """Of four bytes of a token, then of another: four outputs for each part, of the same byte of both."""
    return _numbers(bits, ["0x0400", "0x0501", "0x0602", "0x0703"], 2)


def paired_tokens() -> tuple[str, str]:
    """Of two numbers of a token, then of another: two outputs, each of both."""
    return "prmt.b32 $0, $2, $3, 0x5410;\nprmt.b32 $1, $2, $3, 0x7632;", "=&r,=r,r,r"


def products() -> tuple[str, str]:
    """Of two numbers and two others, float16."""
    return "mul.rn.f16x2 $0, $1, $2;", "=r,r,r"


def weights(dtype: str) -> tuple[str, str]:
    """Two to the power of two neighbours of a sum, f16 or bf16; each tile of 8 x 8 is transposed: so a sum becomes B."""
    lines = (
        "ex2.approx.ftz.f32 a, $1;",
        "ex2.approx.ftz.f32 b, $2;",
        f"cvt.rn.{dtype}x2.f32 t, b, a;",
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, t;",
    )
    return "\n".join(["{ .reg .f32 a, b; .reg .b32 t;", *lines, "}"]), "=r,f,f"
