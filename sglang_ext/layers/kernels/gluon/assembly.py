"""PTX instructions for data in a warp's registers: from codes to numbers, and from scores to weights.

A code becomes a number without arithmetic. In the lowest bits of a float16 it is a subnormal: the code times 2 ** -24, or times
2 ** (bit - 24) at a higher bit. Tensor cores multiply subnormals exactly. Queries and outputs undo the powers of two.

Each function returns instructions and their register constraints. An output register holds two numbers of 16 bits.
"""

# Exponent of the power of two of a code at the lowest bit.
SUBNORMAL = -24


def _mask(bits: int, part: int) -> str:
    mask = ((1 << bits) - 1) << bits * part
    return f"{mask << 16 | mask:#x}"


def _numbers(bits: int, selects: list[str], sources: int) -> tuple[str, str]:
    """Each of ``selects`` moves two bytes that become adjacent into the halves of a register. Each part masks that register."""
    parts, count = 8 // bits, len(selects)
    first = parts * count
    inputs = f"${first}, " + (f"${first + 4}" if sources == 2 else "0")
    lines = []
    for place, select in enumerate(selects):
        lines.append(f"prmt.b32 t, {inputs}, {select};")
        lines += [f"and.b32 ${part * count + place}, t, {_mask(bits, part)};" for part in range(parts)]
    return "\n".join(["{ .reg .b32 t;", *lines, "}"]), ",".join(["=&r"] * first + ["r"] * (4 * sources))


def key_numbers(bits: int) -> tuple[str, str]:
    """From four bytes of a token: two outputs for each part, with adjacent numbers."""
    return _numbers(bits, ["0x4140", "0x4342"], 1)


def value_numbers(bits: int) -> tuple[str, str]:
    """From four bytes of a token, then of another token: four outputs for each part, with the same byte of both tokens."""
    return _numbers(bits, ["0x0400", "0x0501", "0x0602", "0x0703"], 2)


def paired_tokens() -> tuple[str, str]:
    """From two numbers of a token, then of another token: two outputs, with one number of each token."""
    return "prmt.b32 $0, $2, $3, 0x5410;\nprmt.b32 $1, $2, $3, 0x7632;", "=&r,=r,r,r"


def products() -> tuple[str, str]:
    """Products of two pairs of float16."""
    return "mul.rn.f16x2 $0, $1, $2;", "=r,r,r"


def weights(dtype: str) -> tuple[str, str]:
    """Two to the power of two adjacent elements of a sum, as f16 or bf16. Each 8 x 8 tile is transposed, so that a sum becomes B."""
    lines = (
        "ex2.approx.ftz.f32 a, $1;",
        "ex2.approx.ftz.f32 b, $2;",
        f"cvt.rn.{dtype}x2.f32 t, b, a;",
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, t;",
    )
    return "\n".join(["{ .reg .f32 a, b; .reg .b32 t;", *lines, "}"]), "=r,f,f"


# BIASED plus an integer below 2 ** 22, in int32, has the bits of a float32 that is greater than the integer by BIAS.
BIASED, BIAS = 0x4B400000, 1.5 * 2.0**23


def is_signed(bits: int, lowest: int) -> bool:
    """Whether a code that begins at bit ``lowest`` of its byte contains the highest bit. Its int8 is then lower by 128."""
    return lowest + bits == 8


def _codes(target: str, source: str, bits: int, lowest: int) -> str:
    """The code at a bit of each byte, not shifted. Lower by 128 if it is signed."""
    mask = f"{(((1 << bits) - 1) << lowest) * 0x01010101:#x}"
    if is_signed(bits, lowest):
        return f"lop3.b32 {target}, {source}, {mask}, 0x80808080, 0x6a;"
    return f"and.b32 {target}, {source}, {mask};"


def key_codes(bits: int, together: int) -> tuple[str, str]:
    """From four bytes of a token: four int8 for each part. ``together``: number of adjacent parts that are shifted to one bit."""
    parts, lines = 8 // bits, []
    for shift in range(together):
        source = f"${parts}"
        if shift:
            lines.append(f"shr.b32 t, ${parts}, {bits * shift};")
            source = "t"
        lines += [_codes(f"${part + shift}", source, bits, bits * part) for part in range(0, parts, together)]
    return "\n".join(["{ .reg .b32 t;", *lines, "}"]), ",".join(["=&r"] * parts + ["r"] * 4)


def value_codes(bits: int) -> tuple[str, str]:
    """From four bytes of each of four tokens: four outputs for each part, with the same byte of all tokens, as int8, not shifted."""
    parts = 8 // bits
    first, second, third, fourth = (f"${4 * parts + 4 * token}" for token in range(4))
    lines = ["{ .reg .b32 a, b, c, d, t;"]
    for target, sources, select in zip("abcd", 2 * [f"{first}, {second}", f"{third}, {fourth}"], ["0x5140"] * 2 + ["0x7362"] * 2):
        lines.append(f"prmt.b32 {target}, {sources}, {select};")
    for byte, (sources, select) in enumerate((("a, b", "0x5410"), ("a, b", "0x7632"), ("c, d", "0x5410"), ("c, d", "0x7632"))):
        lines.append(f"prmt.b32 t, {sources}, {select};")
        lines += [_codes(f"${4 * part + byte}", "t", bits, bits * part) for part in range(parts)]
    return "\n".join([*lines, "}"]), ",".join(["=&r"] * (4 * parts) + ["r"] * 16)


def weight_codes(streams: int) -> tuple[str, str]:
    """From float32 in the layout of a sum, whose lowest bytes are int8: B. 8 x 8 tiles of pairs from two rows are transposed.

    With two streams, also takes a mask. Returns B where the mask is set, and B elsewhere.
    """
    first, second, third, fourth = (f"${streams + place}" for place in range(4))
    lines = [
        "{ .reg .b32 t, u;",
        f"prmt.b32 t, {first}, {third}, 0x40;",
        f"prmt.b32 u, {second}, {fourth}, 0x40;",
        "prmt.b32 t, t, u, 0x5410;",
    ]
    if streams == 1:
        return "\n".join([*lines, "movmatrix.sync.aligned.m8n8.trans.b16 $0, t;", "}"]), "=r,r,r,r,r"
    lines += ["movmatrix.sync.aligned.m8n8.trans.b16 t, t;", "and.b32 $0, t, $6;", "lop3.b32 $1, t, $6, 0, 0x30;", "}"]
    return "\n".join(lines), ",".join(["=&r"] * 2 + ["r"] * 8)


def as_float() -> tuple[str, str]:
    """Reinterpret the bits of a float32."""
    return "mov.b32 $0, $1;", "=f,r"


def rounded_down() -> tuple[str, str]:
    """Clear the two lowest bits of a float32, so that BIAS times it is exact in float32."""
    return "and.b32 $0, $1, 0xfffffffc;", "=f,f"


def wide_product() -> tuple[str, str]:
    """Product of two int32 as int64."""
    return "mul.wide.s32 $0, $1, $2;", "=l,r,r"


def larger_integers() -> tuple[str, str]:
    """From two int16 of at least 0: float32. The int16 become the lowest bits of a float32 of at least 2 ** 23."""
    lines = [f"prmt.b32 {name}, $2, 0x4b00, {select};" for name, select in (("t", "0x5410"), ("u", "0x5432"))]
    lines += [f"mov.b32 {name}, {bits};" for name, bits in (("a", "t"), ("b", "u"))]
    lines += [f"add.rn.f32 ${place}, {name}, 0fCB000000;" for place, name in enumerate("ab")]
    return "\n".join(["{ .reg .b32 t, u; .reg .f32 a, b;", *lines, "}"]), "=&f,=f,r"


def small_integers() -> tuple[str, str]:
    """From two int16 from 0 to 1023: float16. The int16 become the lowest bits of a float16 of at least 1024."""
    lines = ("{ .reg .b32 t, u;", "or.b32 t, $1, 0x64006400;", "mov.b32 u, 0xe400e400;", "add.rn.f16x2 $0, t, u;", "}")
    return "\n".join(lines), "=r,r"
