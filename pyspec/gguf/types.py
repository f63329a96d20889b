"""Numbers of the format: metadata value types, tensor types with their block sizes, file types."""

from __future__ import annotations

import ctypes
import re
from enum import IntEnum

from pyspec.gguf import blocks
from pyspec.gguf.blocks import BlockLayout


class ValueType(IntEnum):
    """Type of a metadata value."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


class GGMLType(IntEnum):
    """Type of a tensor. Types without a layout have sizes, so files with them open, but are refused when used."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41

    @property
    def layout(self) -> type[BlockLayout] | None:
        """The block's structure; None for a type pyspec cannot compute with."""
        return _LAYOUTS.get(self)

    @property
    def block_size(self) -> int:
        """Weights in one block."""
        return _SIZES[self][0]

    @property
    def type_size(self) -> int:
        """Bytes of one block."""
        return _SIZES[self][1]


_LAYOUTS: dict[GGMLType, type[BlockLayout]] = {
    GGMLType.F32: blocks.PlainF32,
    GGMLType.F16: blocks.PlainF16,
    GGMLType.BF16: blocks.PlainBF16,
    GGMLType.F64: blocks.PlainF64,
    GGMLType.I8: blocks.PlainI8,
    GGMLType.I16: blocks.PlainI16,
    GGMLType.I32: blocks.PlainI32,
    GGMLType.I64: blocks.PlainI64,
    GGMLType.Q8_0: blocks.BlockQ8_0,
    GGMLType.Q4_0: blocks.BlockQ4_0,
    GGMLType.Q4_1: blocks.BlockQ4_1,
    GGMLType.Q5_0: blocks.BlockQ5_0,
    GGMLType.Q5_1: blocks.BlockQ5_1,
    GGMLType.Q2_K: blocks.BlockQ2_K,
    GGMLType.Q3_K: blocks.BlockQ3_K,
    GGMLType.Q4_K: blocks.BlockQ4_K,
    GGMLType.Q5_K: blocks.BlockQ5_K,
    GGMLType.Q6_K: blocks.BlockQ6_K,
    GGMLType.IQ2_XXS: blocks.BlockIQ2_XXS,
    GGMLType.IQ3_XXS: blocks.BlockIQ3_XXS,
    GGMLType.IQ4_NL: blocks.BlockIQ4_NL,
    GGMLType.IQ4_XS: blocks.BlockIQ4_XS,
    GGMLType.MXFP4: blocks.BlockMXFP4,
    GGMLType.NVFP4: blocks.BlockNVFP4,
}

_SIZES: dict[GGMLType, tuple[int, int]] = {t: (b.N, ctypes.sizeof(b)) for t, b in _LAYOUTS.items()} | {
    GGMLType.Q8_1: (32, 36),
    GGMLType.Q8_K: (256, 292),
    GGMLType.IQ2_XS: (256, 74),
    GGMLType.IQ2_S: (256, 82),
    GGMLType.IQ3_S: (256, 110),
    GGMLType.IQ1_S: (256, 50),
    GGMLType.IQ1_M: (256, 56),
    GGMLType.TQ1_0: (256, 54),
    GGMLType.TQ2_0: (256, 66),
    GGMLType.Q1_0: (128, 18),
}


class LlamaFileType(IntEnum):
    """`general.file_type`: the type of most matrices of a file. For display only, because each tensor has its own type."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q8_0 = 7
    Q5_0 = 8
    Q5_1 = 9
    Q2_K = 10
    Q3_K_S = 11
    Q3_K_M = 12
    Q3_K_L = 13
    Q4_K_S = 14
    Q4_K_M = 15
    Q5_K_S = 16
    Q5_K_M = 17
    Q6_K = 18
    IQ2_XXS = 19
    IQ2_XS = 20
    Q2_K_S = 21
    IQ3_XS = 22
    IQ3_XXS = 23
    IQ1_S = 24
    IQ4_NL = 25
    IQ3_S = 26
    IQ3_M = 27
    IQ2_S = 28
    IQ2_M = 29
    IQ4_XS = 30
    IQ1_M = 31
    BF16 = 32
    TQ1_0 = 36
    TQ2_0 = 37
    MXFP4_MOE = 38
    NVFP4 = 39
    Q1_0 = 40


def file_type_name(number: int | None) -> str:
    """Name of a `general.file_type`; "unknown" if absent, "file type N" for a new number."""
    if number is None:
        return "unknown"
    try:
        return LlamaFileType(number).name
    except ValueError:
        return f"file type {number}"


_SIZES_BY_LETTER = {"S": "Small", "M": "Medium", "L": "Large"}
_BITS = {
    "TQ1_0": "TQ1_0 - 1.69 bpw ternary",
    "TQ2_0": "TQ2_0 - 2.06 bpw ternary",
    "IQ2_XXS": "IQ2_XXS - 2.0625 bpw",
    "IQ2_XS": "IQ2_XS - 2.3125 bpw",
    "IQ2_S": "IQ2_S - 2.5 bpw",
    "IQ2_M": "IQ2_M - 2.7 bpw",
    "IQ3_XS": "IQ3_XS - 3.3 bpw",
    "IQ3_XXS": "IQ3_XXS - 3.0625 bpw",
    "IQ3_S": "IQ3_S - 3.4375 bpw",
    "IQ3_M": "IQ3_S mix - 3.66 bpw",
    "IQ1_S": "IQ1_S - 1.5625 bpw",
    "IQ1_M": "IQ1_M - 1.75 bpw",
    "IQ4_NL": "IQ4_NL - 4.5 bpw",
    "IQ4_XS": "IQ4_XS - 4.25 bpw",
}


def file_type_words(number: int | None) -> str:
    """llama-server's name for a `general.file_type`, e.g. "Q4_K - Medium"; "" if absent, its words for a new number."""
    if number is None:
        return ""
    try:
        name = LlamaFileType(number).name
    except ValueError:
        return "unknown, may not work"
    if name in ("F32", "MXFP4_MOE", "Q2_K"):
        return {"F32": "all F32", "MXFP4_MOE": "MXFP4 MoE", "Q2_K": "Q2_K - Medium"}[name]
    stem, _, size = name.rpartition("_")
    if re.fullmatch(r"Q\d_K", stem):
        return f"{stem} - {_SIZES_BY_LETTER[size]}"
    return _BITS.get(name, name)
