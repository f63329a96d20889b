"""The quantised types, in plain torch on any device: how the blocks of a file are read as whole codes with scales and minima, and the weights
that these stand for. The reference of every faster kernel.

Each type is said here once: `dequantize` gives its weights; formats.py and tiles.py keep its codes and scales in other orders, for kernels.
In float32 the weights equal the gguf package's bit for bit. Field offsets come from the ctypes layouts of `pyspec.gguf.blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cuda.context import per_device
from pyspec.cuda.ops.linear import grids
from pyspec.errors import ModelError
from pyspec.gguf import GGMLType, blocks
from pyspec.gguf.blocks import BlockLayout

# Weights per step; 1 << 16 and 1 << 18 are up to 1.8 times slower, larger gains nothing
CPU_CHUNK = 1 << 20
GPU_CHUNK = 1 << 26  # weights per step: bounds the temporaries to about 1 GB

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled; the scales are halved


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix in parts, each in the order of columns.

    values  [row, n_in] uint8             codes; of eight bits the bytes of int8
    scales  [row, group] f16 or uint8     of a group; times `supers`, if there are any; f16 and int8: the numbers themselves
    minima  [row, group] or None          added or subtracted, likewise
    supers  [row, n] f16 or None          of several groups; and those of the minima
    """

    values: Tensor
    scales: Tensor
    minima: Tensor | None = None
    supers: Tensor | None = None
    super_minima: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Coding:
    """How weights of a type are coded.

    split    the file's blocks [row, block, type_size] uint8 -> their parts
    bits     8, 4 or 2, and `high` more: 0, 1 or 2
    group    columns that share a scale
    offset   taken off a code
    table    values of the codes; empty: the codes themselves
    width    bits of a scale: 16 are f16, fewer a whole number
    scale    "", or the type that a scale is a code of: "e4m3", "e8m0"
    less     taken off a scale
    span     groups that share a super-scale; 0: none
    factor   of all scales, a power of two
    minima   weights are scale * code - minimum, or, if `added`, plus minimum
    """

    split: Callable[[Tensor], Codes]
    bits: int = 4
    high: int = 0
    group: int = 32
    offset: int = 0
    table: tuple[int, ...] = ()
    width: int = 16
    scale: str = ""
    less: int = 0
    span: int = 0
    factor: float = 1.0
    minima: bool = False
    added: bool = False


def weights(coding: Coding, codes: Codes) -> Tensor:
    """[row, n_in] f32. They equal the gguf package's bit for bit, so the order of products and differences is part of the contract."""
    by = _scales(coding, codes.scales, codes.supers)
    values = codes.values.unflatten(1, (-1, coding.group))
    if coding.table and not coding.offset:
        found = _table(values.device, coding.table).index_select(0, values.flatten().int())
        w = found.view(values.shape).mul_(by)
    elif coding.offset:
        w = by * values.sub(coding.offset).view(torch.int8)
    else:
        w = by * (values.view(torch.int8) if coding.bits == 8 else values)
    if codes.minima is not None:
        least = _scales(coding, codes.minima, codes.super_minima)
        w = w.add_(least) if coding.added else w.sub_(least)
    return w.flatten(1)


def _scales(coding: Coding, scales: Tensor, supers: Tensor | None) -> Tensor:
    """[row, group, 1] f32."""
    if coding.scale and scales.dtype == torch.uint8:
        table = e8m0(scales.device) if coding.scale == "e8m0" else ue4m3(scales.device)
        return table.index_select(0, scales.flatten().int()).view(*scales.shape, 1)
    by = scales.float()
    if supers is not None:
        by = by.sub_(coding.less) if coding.less and scales.dtype == torch.uint8 else by
        by = by.mul_(coding.factor) if coding.factor != 1.0 else by
        by = (supers.float().unsqueeze(-1) * by.unflatten(1, (-1, coding.span))).flatten(1)
    return by.unsqueeze(-1)


@per_device
def _table(device: torch.device, values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


@per_device
def e8m0(device: torch.device) -> Tensor:
    """[256] float32: half of 2^(code - 127); the two smallest are subnormal."""
    bits = [0x0020_0000 << code if code < 2 else (code - 1) << 23 for code in range(256)]
    return torch.tensor(bits, dtype=torch.int32, device=device).view(torch.float32)


@per_device
def ue4m3(device: torch.device) -> Tensor:
    """[256] float32: half of the unsigned E4M3 number, bias 7, the sign bit ignored. Files mean zero by 0x7f, which is a number here."""

    def value(code: int) -> float:
        exponent, mantissa = (code >> 3) & 15, code & 7
        return mantissa * 2.0**-10 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 8)

    return torch.tensor([value(code) for code in range(256)], dtype=torch.float32, device=device)


# -- the types ---------------------------------------------------------------------------------------------------


def _field(rows: Tensor, layout: type[BlockLayout], name: str) -> Tensor:
    """[row, block, bytes] of a field."""
    field = getattr(layout, name)
    return rows[..., field.offset : field.offset + field.size]


def _half(rows: Tensor, layout: type[BlockLayout], name: str) -> Tensor:
    """[row, block] f16."""
    return _field(rows, layout, name).contiguous().view(torch.float16).squeeze(-1)


@per_device
def _shifts(device: torch.device, bits: int) -> Tensor:
    """[8 // bits, 1] uint8: 0, bits, 2 * bits, ..."""
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device).view(-1, 1)


def _fields(x: Tensor, bits: int) -> Tensor:
    """[..., w] bytes -> [..., 8 // bits, w]: fields of so many bits, lowest first."""
    if bits == 4:
        return torch.stack((x & 15, x >> 4), -2)
    return (x.unsqueeze(-2) >> _shifts(x.device, bits)) & ((1 << bits) - 1)


def _q8_0(rows: Tensor) -> Codes:
    qs, d = _field(rows, blocks.BlockQ8_0, "qs"), _half(rows, blocks.BlockQ8_0, "d")
    return Codes(qs.flatten(1), d)


def _simple(layout: type[BlockLayout]) -> Callable[[Tensor], Codes]:
    """Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL."""

    def split(rows: Tensor) -> Codes:
        q = _fields(_field(rows, layout, "qs"), 4).flatten(-2)
        if hasattr(layout, "qh"):
            high = _field(rows, layout, "qh").unsqueeze(-1) >> _shifts(rows.device, 1).view(8)
            q = q | (high & 1).flatten(-2) << 4
        minima = _half(rows, layout, "m") if hasattr(layout, "m") else None
        return Codes(q.flatten(1), _half(rows, layout, "d"), minima)

    return split


def _k_four(layout: type[BlockLayout]) -> Callable[[Tensor], Codes]:
    """Q4_K, Q5_K."""

    def split(rows: Tensor) -> Codes:
        # [row, block, 8, 32]
        q = _fields(_field(rows, layout, "qs").unflatten(-1, (4, 32)), 4).flatten(-3, -2)
        if hasattr(layout, "qh"):
            q = q | _fields(_field(rows, layout, "qh"), 1) << 4
        scale, low, rest = _field(rows, layout, "scales").unflatten(-1, (3, 4)).unbind(-2)
        scales = torch.cat((scale & 63, (rest & 15) | ((scale >> 2) & 48)), -1).flatten(1)
        lows = torch.cat((low & 63, (rest >> 4) | ((low >> 2) & 48)), -1).flatten(1)
        return Codes(q.flatten(1), scales, lows, _half(rows, layout, "d"), _half(rows, layout, "dmin"))

    return split


def _q6_k(rows: Tensor) -> Codes:
    layout = blocks.BlockQ6_K
    low = _fields(_field(rows, layout, "ql").unflatten(-1, (2, 64)), 4)
    high = _fields(_field(rows, layout, "qh").unflatten(-1, (2, 32)), 2)
    q = low.flatten(1) | high.flatten(1) << 4
    return Codes(q, _field(rows, layout, "scales").flatten(1) ^ 128, None, _half(rows, layout, "d"))


def _two_bits(rows: Tensor, layout: type[BlockLayout]) -> Tensor:
    """[row, n_in] codes of two bits of Q2_K and Q3_K."""
    return _fields(_field(rows, layout, "qs").unflatten(-1, (2, 32)), 2).flatten(1)


def _q2_k(rows: Tensor) -> Codes:
    layout = blocks.BlockQ2_K
    both, q = _field(rows, layout, "scales").flatten(1), _two_bits(rows, layout)
    return Codes(q, both & 15, both >> 4, _half(rows, layout, "d"), _half(rows, layout, "dmin"))


def _q3_k(rows: Tensor) -> Codes:
    layout = blocks.BlockQ3_K
    packed = _field(rows, layout, "scales")
    low, high = _fields(packed[..., :8], 4).flatten(1), _fields(packed[..., 8:], 2).flatten(1)
    q = _two_bits(rows, layout) | _fields(_field(rows, layout, "hmask"), 1).flatten(1) << 2
    return Codes(q, low | high << 4, None, _half(rows, layout, "d"))


def _iq4_xs(rows: Tensor) -> Codes:
    layout = blocks.BlockIQ4_XS
    low = _fields(_field(rows, layout, "scales_l").unsqueeze(-1), 4).flatten(1)
    high = _fields(_field(rows, layout, "scales_h").unsqueeze(-1), 2).flatten(1)
    q = _fields(_field(rows, layout, "qs").unflatten(-1, (8, 16)), 4)
    return Codes(q.flatten(1), low | high << 4, None, _half(rows, layout, "d"))


def _lattice(points: Tensor, grid: Tensor, words: Tensor, plus: int) -> tuple[Tensor, Tensor]:
    """Codes of the values of lattice points, and the scales, odd numbers.

    points  [..., 8, n] uint8   of 32 weights each
    grid    [256, 32 / n] uint8 levels of a point
    words   [..., 8, 4] uint8   signs and scales
    plus    the amount that a minus adds to a level
    """
    levels = grid.index_select(0, points.flatten().int())
    own = words.clone(memory_format=torch.contiguous_format)  # those of one block lie at any byte
    word = own.view(torch.int32)
    picked = torch.cat([word >> s & 127 for s in (0, 7, 14, 21)], -1)
    minus = grids.signs(points.device, plus).index_select(0, picked.flatten())
    q = (levels.flatten() + minus.flatten()).view(len(points), -1)
    return q, ((word >> 28 & 15) * 2 + 1).flatten(1).to(torch.uint8)


def _iq2_xxs(rows: Tensor) -> Codes:
    groups = _field(rows, blocks.BlockIQ2_XXS, "qs").unflatten(-1, (8, 8))
    q, scales = _lattice(groups[..., :4], grids.iq2_levels(rows.device), groups[..., 4:], 4)
    return Codes(q, scales, None, _half(rows, blocks.BlockIQ2_XXS, "d"))


def _iq3_xxs(rows: Tensor) -> Codes:
    layout = blocks.BlockIQ3_XXS
    points = _field(rows, layout, "qs").unflatten(-1, (8, 8))
    words = _field(rows, layout, "signs").unflatten(-1, (8, 4))
    q, scales = _lattice(points, grids.iq3_levels(rows.device), words, 8)
    return Codes(q, scales, None, _half(rows, layout, "d"))


def _mxfp4(rows: Tensor) -> Codes:
    q = _fields(_field(rows, blocks.BlockMXFP4, "qs"), 4)
    return Codes(q.flatten(1), _field(rows, blocks.BlockMXFP4, "e").flatten(1))


def _nvfp4(rows: Tensor) -> Codes:
    scales = _field(rows, blocks.BlockNVFP4, "d").flatten(1)
    q = _fields(_field(rows, blocks.BlockNVFP4, "qs").unflatten(-1, (4, 8)), 4)
    return Codes(q.flatten(1), (scales & 0x7F).where(scales != 0x7F, 0))


_LEVELS2 = (*grids.IQ2_LEVELS, 0, *(-x for x in grids.IQ2_LEVELS), 0)
_LEVELS3 = (*grids.IQ3_LEVELS, *(-x for x in grids.IQ3_LEVELS))
CODINGS: dict[GGMLType, Coding] = {
    GGMLType.Q8_0: Coding(_q8_0, bits=8),
    GGMLType.Q4_0: Coding(_simple(blocks.BlockQ4_0), offset=8),
    GGMLType.Q4_1: Coding(_simple(blocks.BlockQ4_1), minima=True, added=True),
    GGMLType.Q5_0: Coding(_simple(blocks.BlockQ5_0), high=1, offset=16),
    GGMLType.Q5_1: Coding(_simple(blocks.BlockQ5_1), high=1, minima=True, added=True),
    GGMLType.Q4_K: Coding(_k_four(blocks.BlockQ4_K), width=8, span=8, minima=True),
    GGMLType.Q5_K: Coding(_k_four(blocks.BlockQ5_K), high=1, width=8, span=8, minima=True),
    GGMLType.Q6_K: Coding(_q6_k, high=2, group=16, offset=32, width=8, less=128, span=16),
    GGMLType.Q2_K: Coding(_q2_k, bits=2, group=16, width=4, span=16, minima=True),
    GGMLType.Q3_K: Coding(
        _q3_k, bits=2, high=1, group=16, offset=4, table=tuple(range(-4, 4)), width=8, less=32, span=16
    ),
    GGMLType.IQ2_XXS: Coding(_iq2_xxs, bits=2, high=1, table=_LEVELS2, width=8, span=8, factor=0.125),
    GGMLType.IQ3_XXS: Coding(_iq3_xxs, table=_LEVELS3, width=8, span=8, factor=0.25),
    GGMLType.IQ4_NL: Coding(_simple(blocks.BlockIQ4_NL), table=IQ4),
    GGMLType.IQ4_XS: Coding(_iq4_xs, table=IQ4, width=8, less=32, span=8),
    GGMLType.MXFP4: Coding(_mxfp4, table=E2M1, width=8, scale="e8m0"),
    GGMLType.NVFP4: Coding(_nvfp4, group=16, table=E2M1, width=8, scale="e4m3"),
}


# -- tensors ---------------------------------------------------------------------------------------------------

_PLAIN = {
    GGMLType.F32: torch.float32,
    GGMLType.F16: torch.float16,
    GGMLType.BF16: torch.bfloat16,
    GGMLType.F64: torch.float64,
    GGMLType.I8: torch.int8,
    GGMLType.I16: torch.int16,
    GGMLType.I32: torch.int32,
    GGMLType.I64: torch.int64,
}
QUANTISED = frozenset(CODINGS)
SUPPORTED: frozenset[GGMLType] = QUANTISED | frozenset(_PLAIN)


def refusal(type: GGMLType) -> str | None:
    """Why tensors of this type cannot be used; None if they can."""
    if type in SUPPORTED:
        return None
    return f"tensor type {type.name} is not supported (a file quantised to Q4_K_M, Q8_0 or another common type is)"


def dequantize(
    raw: Tensor, type: GGMLType, shape: Sequence[int], out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """The tensor of shape `shape` (torch order) held by `raw`, in new memory on raw's device.

    raw [n_bytes] uint8, any shape with that many elements, contiguous. NVFP4's per-tensor scale is not applied.
    Errors: ModelError for a type pyspec cannot compute with.
    """
    if why := refusal(type):
        raise ModelError(why)
    n = math.prod(shape)
    assert raw.dtype == torch.uint8 and raw.numel() * type.block_size == n * type.type_size, (
        raw.shape,
        type,
        shape,
    )
    out = torch.empty(n, dtype=out_dtype, device=raw.device)
    if (plain := _PLAIN.get(type)) is not None:
        out.copy_(raw.reshape(-1).view(plain))
        return out.view(*shape)
    coding, packed = CODINGS[type], raw.reshape(-1, 1, type.type_size)
    chunk = (CPU_CHUNK if raw.device.type == "cpu" else GPU_CHUNK) // type.block_size
    filled = out.view(-1, type.block_size)
    for at in range(0, len(packed), chunk):
        filled[at : at + chunk] = weights(coding, coding.split(packed[at : at + chunk]))
    return out.view(*shape)


def dequantize_rows(
    raw: Tensor, type: GGMLType, rows: Tensor, out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """Chosen rows of a matrix, for an embedding look-up: only these are decoded.

    raw   [row, bytes of a row]  uint8
    rows  [n]                    int32 or int64, in range (the caller's token ids are checked)
    ->    [n, columns]           out_dtype
    """
    picked = raw.index_select(0, rows)
    columns = raw.shape[1] // type.type_size * type.block_size
    return dequantize(picked, type, (len(rows), columns), out_dtype)


def quantize(x: Tensor, type: GGMLType) -> Tensor:
    """Pack x [..., columns] float32 into [..., bytes of a row] uint8, bit for bit like the gguf package.

    Types: F32, F16, BF16, Q8_0, Q4_0. Errors: ModelError for others and for rows that are no multiple of the block.
    """
    if type not in _ENCODERS:
        raise ModelError(
            f"cannot quantise to {type.name} (can to {', '.join(t.name for t in _ENCODERS)})"
        )
    if x.shape[-1] % type.block_size:
        raise ModelError(
            f"rows of {x.shape[-1]} are not a multiple of {type.name}'s block of {type.block_size}"
        )
    row_bytes = x.shape[-1] // type.block_size * type.type_size
    packed = _ENCODERS[type](x.float().contiguous().view(-1, type.block_size))
    return packed.view(torch.uint8).view(*x.shape[:-1], row_bytes)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1.0 / scale)


def _to_q8_0(x: Tensor) -> Tensor:
    scale = x.abs().amax(1, keepdim=True) / 127
    scaled = x * _inverse(scale)
    size = scaled.abs()
    whole = size.floor()
    # Half away from zero, as C's roundf
    rounded = scaled.sign() * (whole + (2 * (size - whole)).floor())
    return torch.cat((scale.half().view(torch.uint8), rounded.to(torch.int8).view(torch.uint8)), 1)


def _to_q4_0(x: Tensor) -> Tensor:
    scale = x.gather(1, x.abs().argmax(1, keepdim=True)) / -8
    q = (x * _inverse(scale) + 8.5).trunc().clamp_(0, 15).to(torch.uint8).view(-1, 2, 16)
    return torch.cat((scale.half().view(torch.uint8), q[:, 0] | (q[:, 1] << 4)), 1)


def _to_bf16(x: Tensor) -> Tensor:
    bits = x.view(torch.int32).long() & 0xFFFF_FFFF
    quiet = (bits & 0xFFFF_0000) | (64 << 16)
    bits = torch.where((bits & 0x7FFF_FFFF) > 0x7F80_0000, quiet, bits)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(torch.int16)


_ENCODERS: dict[GGMLType, Callable[[Tensor], Tensor]] = {
    GGMLType.F32: lambda x: x,
    GGMLType.F16: lambda x: x.half(),
    GGMLType.BF16: _to_bf16,
    GGMLType.Q8_0: _to_q8_0,
    GGMLType.Q4_0: _to_q4_0,
}


def half_floats(type: GGMLType) -> list[int]:
    """Offsets of the f16 scales and minima in a block."""
    fields = [getattr(type.layout, name, None) for name in ("d", "dmin", "m")]
    return [field.offset for field in fields if field is not None and field.size == 2]
