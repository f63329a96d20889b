"""Byte layout of one quantised block of every type pyspec computes with.

A row of `ne0` weights is `ne0 / N` blocks one after the other. Field offsets and sizes are read from these structures by the
decoders, so a layout is written down once. Source: ggml's block formats; the sizes are checked against the gguf package.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int8, c_int16, c_int32, c_int64, c_uint8, c_uint16, c_uint32
from typing import ClassVar

F16 = c_uint16  # ctypes has no half; the decoders reinterpret the two bytes


class BlockLayout(ctypes.LittleEndianStructure):
    """Base of all layouts: packed, little endian. `N` is the number of weights in one block."""

    _pack_ = 1
    N: ClassVar[int]


class PlainF32(BlockLayout):
    N = 1
    _fields_ = (("x", c_float),)


class PlainF16(BlockLayout):
    N = 1
    _fields_ = (("x", F16),)


class PlainBF16(BlockLayout):
    N = 1
    _fields_ = (("x", c_uint16),)


class PlainF64(BlockLayout):
    N = 1
    _fields_ = (("x", c_double),)


class PlainI8(BlockLayout):
    N = 1
    _fields_ = (("x", c_int8),)


class PlainI16(BlockLayout):
    N = 1
    _fields_ = (("x", c_int16),)


class PlainI32(BlockLayout):
    N = 1
    _fields_ = (("x", c_int32),)


class PlainI64(BlockLayout):
    N = 1
    _fields_ = (("x", c_int64),)


class BlockQ8_0(BlockLayout):
    N = 32
    _fields_ = (("d", F16), ("qs", c_int8 * 32))


class BlockQ4_0(BlockLayout):
    N = 32
    _fields_ = (("d", F16), ("qs", c_uint8 * 16))


class BlockQ4_1(BlockLayout):
    N = 32
    _fields_ = (("d", F16), ("m", F16), ("qs", c_uint8 * 16))


class BlockQ5_0(BlockLayout):
    N = 32
    _fields_ = (("d", F16), ("qh", c_uint32), ("qs", c_uint8 * 16))


class BlockQ5_1(BlockLayout):
    N = 32
    _fields_ = (("d", F16), ("m", F16), ("qh", c_uint32), ("qs", c_uint8 * 16))


class BlockQ2_K(BlockLayout):
    """`scales`: low nibble scale, high nibble minimum, of 16 weights each."""

    N = 256
    _fields_ = (("scales", c_uint8 * 16), ("qs", c_uint8 * 64), ("d", F16), ("dmin", F16))


class BlockQ3_K(BlockLayout):
    """`scales`: sixteen 6-bit scales, biased by 32; a set bit of `hmask` means no offset of -4."""

    N = 256
    _fields_ = (("hmask", c_uint8 * 32), ("qs", c_uint8 * 64), ("scales", c_uint8 * 12), ("d", F16))


class BlockQ4_K(BlockLayout):
    """`scales`: eight 6-bit scales and eight 6-bit minima, of 32 weights each."""

    N = 256
    _fields_ = (("d", F16), ("dmin", F16), ("scales", c_uint8 * 12), ("qs", c_uint8 * 128))


class BlockQ5_K(BlockLayout):
    N = 256
    _fields_ = (
        ("d", F16),
        ("dmin", F16),
        ("scales", c_uint8 * 12),
        ("qh", c_uint8 * 32),
        ("qs", c_uint8 * 128),
    )


class BlockQ6_K(BlockLayout):
    N = 256
    _fields_ = (("ql", c_uint8 * 128), ("qh", c_uint8 * 64), ("scales", c_int8 * 16), ("d", F16))


class BlockIQ2_XXS(BlockLayout):
    """`qs`: of 32 weights each, four numbers of lattice points, then a word of four 7-bit signs and a 4-bit scale."""

    N = 256
    _fields_ = (("d", F16), ("qs", c_uint8 * 64))


class BlockIQ3_XXS(BlockLayout):
    """`qs`: numbers of lattice points of four weights; `signs`: of 32 each, a word of four 7-bit signs and a 4-bit scale."""

    N = 256
    _fields_ = (("d", F16), ("qs", c_uint8 * 64), ("signs", c_uint8 * 32))


class BlockIQ4_NL(BlockLayout):
    N = 32
    _fields_ = (("d", F16), ("qs", c_uint8 * 16))


class BlockIQ4_XS(BlockLayout):
    """6-bit scales biased by 32: four low bits in `scales_l`, two high bits in `scales_h`."""

    N = 256
    _fields_ = (("d", F16), ("scales_h", c_uint16), ("scales_l", c_uint8 * 4), ("qs", c_uint8 * 128))


class BlockMXFP4(BlockLayout):
    """`e`: power-of-two scale (E8M0); `qs`: E2M1 codes."""

    N = 32
    _fields_ = (("e", c_uint8), ("qs", c_uint8 * 16))


class BlockNVFP4(BlockLayout):
    """`d`: one UE4M3 scale per 16 weights; a second scale per tensor lies in the sidecar `<name>.scale`."""

    N = 64
    _fields_ = (("d", c_uint8 * 4), ("qs", c_uint8 * 32))
