"""Codes of a tile to f16, four bytes at a time: a few instructions of PTX, because Triton finds none that work on several codes at once.

Where there is no PTX (an AMD GPU, the interpreter) kernels decode one by one; both give the same numbers: codes as they are, as whole numbers
of f16's smallest, 2^-24, which costs one instruction for two. The offset of codes from their values (`TiledFormat.bias`) is taken off sums of
rows. Outputs come first: f16 of four bytes in two registers. Of nibbles alone these are the low ones and then the high ones; else
all four quarters of a chunk, whose bytes are two words of nibbles or one of two bits each, then upper bits, then by how much those
of this chunk are shifted.
"""

from __future__ import annotations

from collections.abc import Iterable

from pyspec.cuda.ops.linear.dequant import E2M1
from pyspec.cuda.ops.linear.tiles import BIAS, TiledFormat


def unit(form: TiledFormat) -> float:
    """The power of two that sums of decoded codes are still to be multiplied with, because floats keep the places of their bits."""
    return (
        (2.0**15 if form.table == E2M1 else 2.0**24)
        * (2.0**7 if form.scale == "e4m3" else 1.0)
        * form.factor
    )


def text(form: TiledFormat) -> str:
    """PTX for a word of codes, or for the words that have those of a quarter."""
    if form.bits == 8:
        return _asm(_wide("$0", "$1", "$2"))
    if form.bits == 2:
        return _asm(_crumbs() if not form.high else _eight(form.table))
    if form.high:
        return _asm(_two_more() if form.high == 2 else _one_more())
    if form.table == E2M1:
        return _asm(
            _e2m1(),
            [f"prmt.b32 ${i}, {'lh'[i // 2]}, 0, {('0x1404', '0x3424')[i % 2]}" for i in range(4)],
        )
    if form.table:
        return _asm(_sixteen(form.table))
    split = ["and.b32 l, $4, 0x0f0f0f0f", "shr.u32 h, $4, 4", "and.b32 h, h, 0x0f0f0f0f"]
    return _asm(split, _wide("$0", "$1", "l"), _wide("$2", "$3", "h"))


def _asm(*parts: Iterable[str]) -> str:
    return (
        "{ .reg .b32 a, b, h, l, s, t, u, v, w; "
        + " ".join(f"{x};" for part in parts for x in part)
        + " }"
    )


def _wide(first: str, second: str, word: str) -> list[str]:
    """Bytes as halves."""
    return [f"prmt.b32 {first}, {word}, 0, 0x4140", f"prmt.b32 {second}, {word}, 0, 0x4342"]


def _two_more() -> list[str]:
    """Nibbles in $8 and $9, two upper bits in $10."""
    out: list[str] = []
    for i, shift in enumerate(
        ("shl.b32 a, $10, 4", "shl.b32 a, $10, 2", "mov.b32 a, $10", "shr.u32 a, $10, 2")
    ):
        out += [
            *_nibble(i),
            shift,
            "lop3.b32 l, a, 0x30303030, l, 0xEA",
            *_wide(f"${2 * i}", f"${2 * i + 1}", "l"),
        ]
    return out


def _one_more() -> list[str]:
    """Nibbles in $8 and $9, upper bits of two chunks in $10, the shift in $11."""
    out = ["and.b32 b, $11, 255", "shr.u32 b, $10, b"]
    for i, shift in enumerate(("shl.b32 a, b, 4", "shl.b32 a, b, 3", "mov.b32 a, b", "shr.u32 a, b, 1")):
        out += [
            *_nibble(i),
            shift,
            "lop3.b32 l, a, 0x10101010, l, 0xEA",
            *_wide(f"${2 * i}", f"${2 * i + 1}", "l"),
        ]
    return out


def _nibble(quarter: int) -> list[str]:
    word = f"${8 + quarter % 2}"
    if quarter < 2:
        return [f"and.b32 l, {word}, 0x0f0f0f0f"]
    return [f"shr.u32 l, {word}, 4", "and.b32 l, l, 0x0f0f0f0f"]


def _crumbs() -> list[str]:
    """Four times two bits in $8."""
    out: list[str] = []
    for i in range(4):
        out += [
            f"shr.u32 a, $8, {2 * i}",
            "and.b32 a, a, 0x03030303",
            *_wide(f"${2 * i}", f"${2 * i + 1}", "a"),
        ]
    return out


def _e2m1() -> list[str]:
    """Nibbles as the upper bytes of f16: sign, and three bits where an exponent ends and a fraction begins."""
    low = [
        "shl.b32 a, $4, 1",
        "and.b32 a, a, 0x0e0e0e0e",
        "shl.b32 b, $4, 4",
        "lop3.b32 l, b, 0x80808080, a, 0xEA",
    ]
    return [*low, "shr.u32 a, $4, 3", "and.b32 a, a, 0x0e0e0e0e", "lop3.b32 h, $4, 0x80808080, a, 0xEA"]


def _words(table: tuple[int, ...]) -> list[str]:
    """Four bytes each."""
    whole = bytes(v + BIAS for v in table)
    return [f"0x{int.from_bytes(whole[i : i + 4], 'little'):08x}" for i in range(0, len(whole), 4)]


def _sixteen(table: tuple[int, ...]) -> list[str]:
    """Sixteen bytes in four registers: eight are looked at by three bits of a nibble, twice, and its fourth bit chooses."""
    words = _words(table)
    out = [
        "and.b32 s, $4, 0x77777777",
        "shr.u32 t, $4, 1",
        "and.b32 t, t, 0x44444444",
        "or.b32 t, t, 0x32103210",
    ]
    out += [f"mov.b32 a, {words[0]}", f"mov.b32 b, {words[2]}"]
    for to in "lh":
        out += [
            f"prmt.b32 u, a, {words[1]}, s",
            f"prmt.b32 v, b, {words[3]}, s",
            f"prmt.b32 {to}, u, v, t",
        ]
        out += ["shr.u32 s, s, 16", "shr.u32 t, t, 16"] if to == "l" else []
    return out + _picked(0, 2)


def _eight(table: tuple[int, ...]) -> list[str]:
    """Eight bytes in two registers. Two bits in $8, upper bits of two chunks in $9, the shift in $10: the codes of two quarters at a time
    are nibbles of a word."""
    words = _words(table)
    out = ["and.b32 b, $10, 255", "shr.u32 b, $9, b", f"mov.b32 a, {words[0]}"]
    for i, shift in enumerate(("mov.b32 s, $8", "shr.u32 s, $8, 2")):
        out += [
            shift,
            "and.b32 s, s, 0x33333333",
            f"shl.b32 t, b, {2 - i}",
            "lop3.b32 s, t, 0x44444444, s, 0xEA",
        ]
        out += [f"prmt.b32 l, a, {words[1]}, s", "shr.u32 s, s, 16", f"prmt.b32 h, a, {words[1]}, s"]
        out += _picked(2 * i, 2 * i + 4)
    return out


def _picked(low: int, high: int) -> list[str]:
    """Of l and h, where bytes of two tensors take turns, as halves: to registers `low` and the next one, and to those from `high` on."""
    picks = (
        (low, "l", "0x4240"),
        (low + 1, "h", "0x4240"),
        (high, "l", "0x4341"),
        (high + 1, "h", "0x4341"),
    )
    return [f"prmt.b32 ${to}, {word}, 0, {pick}" for to, word, pick in picks]
