"""How codes of a tile become f16, four bytes at a time: a few instructions of PTX, for Triton finds none that work on several codes at once.

Where there is no PTX (an AMD GPU, the interpreter) kernels decode one by one; both give the same numbers. Outputs come first: f16 of the four
bytes in two registers, of nibbles those of the low ones and then those of the high ones.
"""

from __future__ import annotations

from pyspec.cuda.ops.linear.dequant import E2M1, IQ4
from pyspec.cuda.ops.linear.tiles import BIAS, TiledFormat


def unit(form: TiledFormat) -> float:
    """What sums of decoded codes are still to be multiplied with, a power of two: floats are left where their bits are."""
    return (2.0**15 if form.table == E2M1 else 1.0) * (2.0**7 if form.scale == "e4m3" else 1.0)


def text(form: TiledFormat) -> str:
    """PTX for a word of codes; where there are upper bits also for the word these lie in, and by how much they are shifted."""
    if form.bits == 8:
        return _asm((), _wide("$0", "$1", "$2"), _less(2, 1024 + BIAS))
    split = ["and.b32 l, $4, 0x0f0f0f0f", "shr.u32 h, $4, 4", "and.b32 h, h, 0x0f0f0f0f"]
    if form.high:
        split += ["and.b32 b, $6, 255", "shr.u32 a, $5, b", "shl.b32 b, a, 4"]
        split += ["lop3.b32 l, b, 0x30303030, l, 0xEA", "lop3.b32 h, a, 0x30303030, h, 0xEA"]
    if form.table == E2M1:
        return _asm(_e2m1(), [f"prmt.b32 ${i}, {'lh'[i // 2]}, 0, {('0x1404', '0x3424')[i % 2]}" for i in range(4)])
    if form.table:
        assert form.table == IQ4
        return _asm(_looked_up(), _less(4, 1024 + BIAS))
    return _asm(split, _wide("$0", "$1", "l") + _wide("$2", "$3", "h"), _less(4, 1024 + form.offset))


def _asm(*parts: list[str] | tuple[str, ...]) -> str:
    return "{ .reg .b32 a, b, h, l, s, t, u, v, w; " + " ".join(f"{x};" for part in parts for x in part) + " }"


def _wide(first: str, second: str, word: str) -> list[str]:
    """Bytes as whole numbers of f16 above 1024."""
    return [f"prmt.b32 {first}, {word}, 0x64646464, 0x4140", f"prmt.b32 {second}, {word}, 0x64646464, 0x4342"]


def _less(n: int, by: int) -> list[str]:
    """What they lie above."""
    half = 0x6400 + by - 1024
    assert by < 2048, "whole numbers below are f16's own bits"
    return [f"mov.b32 b, 0x{half:04x}{half:04x}", *(f"sub.f16x2 ${i}, ${i}, b" for i in range(n))]


def _e2m1() -> list[str]:
    """Nibbles as the upper bytes of f16: sign, and three bits where an exponent ends and a fraction begins."""
    low = ["shl.b32 a, $4, 1", "and.b32 a, a, 0x0e0e0e0e", "shl.b32 b, $4, 4", "lop3.b32 l, b, 0x80808080, a, 0xEA"]
    return [*low, "shr.u32 a, $4, 3", "and.b32 a, a, 0x0e0e0e0e", "lop3.b32 h, $4, 0x80808080, a, 0xEA"]


def _looked_up() -> list[str]:
    """Sixteen bytes in four registers: eight are looked at by three bits of a nibble, twice, and its fourth bit chooses."""
    table = bytes(v + BIAS for v in IQ4)
    words = [f"0x{int.from_bytes(table[i : i + 4], 'little'):08x}" for i in range(0, 16, 4)]
    out = ["and.b32 s, $4, 0x77777777", "shr.u32 t, $4, 1", "and.b32 t, t, 0x44444444", "or.b32 t, t, 0x32103210"]
    out += [f"mov.b32 a, {words[0]}", f"mov.b32 b, {words[2]}"]
    for to in "lh":
        out += [f"prmt.b32 u, a, {words[1]}, s", f"prmt.b32 v, b, {words[3]}, s", f"prmt.b32 {to}, u, v, t"]
        out += ["shr.u32 s, s, 16", "shr.u32 t, t, 16"] if to == "l" else []
    picks = (("$0", "l", "0x4240"), ("$1", "h", "0x4240"), ("$2", "l", "0x4341"), ("$3", "h", "0x4341"))
    return out + [f"prmt.b32 {to}, {word}, 0x64646464, {pick}" for to, word, pick in picks]
