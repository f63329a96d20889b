"""Byte layout of one quantised block of every type pyspec computes with.

A row of `ne0` weights is `ne0 / N` blocks one after the other. Field offsets and sizes are read from these structures by the
decoders, so a layout is written down once. Source: ggml's block formats; the sizes are checked against the gguf package.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int8, c_int16, c_int32, c_int64, c_uint8, c_uint16, c_uint32
from typing import Any, ClassVar

F16 = c_uint16  # ctypes has no half; the decoders reinterpret the two bytes


class BlockLayout(ctypes.LittleEndianStructure):
    """Base of all layouts: packed, little endian. `N` is the number of weights in one block."""

    _pack_ = 1
    N: ClassVar[int]


def _block(n: int, **fields: Any) -> type[BlockLayout]:
    """A layout of n weights, with these fields in order."""

    class Block(BlockLayout):
        N = n
        _fields_ = tuple(fields.items())

    return Block


PlainF32 = _block(1, x=c_float)
PlainF16 = _block(1, x=F16)
PlainBF16 = _block(1, x=c_uint16)
PlainF64 = _block(1, x=c_double)
PlainI8 = _block(1, x=c_int8)
PlainI16 = _block(1, x=c_int16)
PlainI32 = _block(1, x=c_int32)
PlainI64 = _block(1, x=c_int64)

BlockQ8_0 = _block(32, d=F16, qs=c_int8 * 32)
BlockQ4_0 = _block(32, d=F16, qs=c_uint8 * 16)
BlockQ4_1 = _block(32, d=F16, m=F16, qs=c_uint8 * 16)
BlockQ5_0 = _block(32, d=F16, qh=c_uint32, qs=c_uint8 * 16)
BlockQ5_1 = _block(32, d=F16, m=F16, qh=c_uint32, qs=c_uint8 * 16)
# scales: low nibble scale, high nibble minimum, of 16 weights each
BlockQ2_K = _block(256, scales=c_uint8 * 16, qs=c_uint8 * 64, d=F16, dmin=F16)
# scales: sixteen 6-bit scales, biased by 32; a set bit of hmask means no offset of -4
BlockQ3_K = _block(256, hmask=c_uint8 * 32, qs=c_uint8 * 64, scales=c_uint8 * 12, d=F16)
# scales: eight 6-bit scales and eight 6-bit minima, of 32 weights each
BlockQ4_K = _block(256, d=F16, dmin=F16, scales=c_uint8 * 12, qs=c_uint8 * 128)
BlockQ5_K = _block(256, d=F16, dmin=F16, scales=c_uint8 * 12, qh=c_uint8 * 32, qs=c_uint8 * 128)
BlockQ6_K = _block(256, ql=c_uint8 * 128, qh=c_uint8 * 64, scales=c_int8 * 16, d=F16)
# qs: of 32 weights each, four numbers of lattice points, then a word of four 7-bit signs and a 4-bit scale
BlockIQ2_XXS = _block(256, d=F16, qs=c_uint8 * 64)
# qs: numbers of lattice points of four weights; signs: of 32 each, a word of four 7-bit signs and a 4-bit scale
BlockIQ3_XXS = _block(256, d=F16, qs=c_uint8 * 64, signs=c_uint8 * 32)
BlockIQ4_NL = _block(32, d=F16, qs=c_uint8 * 16)
# 6-bit scales biased by 32: four low bits in scales_l, two high bits in scales_h
BlockIQ4_XS = _block(256, d=F16, scales_h=c_uint16, scales_l=c_uint8 * 4, qs=c_uint8 * 128)
# e: power-of-two scale (E8M0); qs: E2M1 codes
BlockMXFP4 = _block(32, e=c_uint8, qs=c_uint8 * 16)
# d: one UE4M3 scale per 16 weights; a second scale per tensor lies in the sidecar `<name>.scale`
BlockNVFP4 = _block(64, d=c_uint8 * 4, qs=c_uint8 * 32)
