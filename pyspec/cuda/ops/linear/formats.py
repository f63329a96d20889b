"""How a matrix of each type is packed: a record of one chunk, encoded from the file's blocks and decoded for the reference.

A record has the codes in the order of tensor-core operands, then the scales (planes.py). Bytes of a record over those of the file's blocks:

    F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q6_K IQ4_NL MXFP4 NVFP4   the same
    Q4_K +2.8 %, Q5_K +2.3 %, IQ4_XS +1.5 %, Q3_K +3.6 %        six-bit scales become bytes
    Q2_K                                                        the same
    IQ3_XXS +41 %, IQ2_XXS +61 %                                numbers of lattice points become signs and levels
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cuda.ops.linear import planes
from pyspec.cuda.ops.linear.dequant import CODINGS, Codes, Coding, ue4m3, weights
from pyspec.cuda.ops.linear.planes import Plane
from pyspec.errors import ModelError
from pyspec.gguf import GGMLType

# Code of the scale 2^7, the largest of linear_wgmma's f16 weights; no model comes near it
MXFP4_LARGEST = 127 + 7


@dataclass(frozen=True, slots=True)
class Format:
    """How matrices of a type are packed. Behind the planes of a record lie its scales, then those of several groups.

    code    the type's number in quants.cuh
    chunk   blocks of 32 columns in a record
    record  bytes of one
    planes  of its codes
    minima  weights are scale * code - minimum: the kernels need sums of the rows, too
    scaled  a second scale for each row
    split   the file's rows [row, block, type_size] -> the rows that are encoded, and the factor of each
    raised  the byte of a record from which on all are one higher; 0: none
    """

    code: int
    chunk: int
    record: int
    planes: tuple[Plane, ...]
    minima: bool = False
    scaled: bool = False
    split: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    raised: int = 0


def encode(blocks: Tensor, type: GGMLType, *, raises: bool = True) -> Tensor:
    """The file's blocks [group, 2, 8, chunk, block, type_size] -> records [group, chunk, record]. raises: see `Format.raised`."""
    form, rows = FORMATS[type], blocks.shape[:4]
    if (coding := CODINGS.get(type)) is None:
        halves = blocks.contiguous().view(torch.int16)
        return planes.halves_in(planes.by_lane(halves.reshape(*rows, form.chunk, 32)))
    codes = coding.split(blocks.flatten(0, 3))
    lanes = planes.by_lane(codes.values.view(*rows, form.chunk, 32))
    parts = [plane.put(lanes >> plane.at if plane.at else lanes) for plane in form.planes]
    scales = _scales_in(coding, codes).view(*rows, form.chunk, -1)
    parts.append(
        planes.pairs_in(scales) if scales.shape[-1] > 1 else planes.bytes_in(scales.squeeze(-1))
    )
    if codes.supers is not None:
        parts.append(planes.pairs_in(_together(codes.supers, codes.super_minima).view(*rows, -1)))
    records = torch.cat(parts, -1)
    if form.raised and raises:
        if (codes.scales > MXFP4_LARGEST).any():
            raise ModelError(
                f"an MXFP4 scale of 2^{int(codes.scales.max()) - 127}; up to 2^7 the kernels can hold"
            )
        # So that the smallest scale, a denormal number in f32, is a normal one as well
        records[..., form.raised :] += 1
    return records


def decode(records: Tensor, type: GGMLType) -> Tensor:
    """Records [group, chunk, record] -> weights [group, 2, 8, chunk, block, 32] f32."""
    form = FORMATS[type]
    if (coding := CODINGS.get(type)) is None:
        return planes.from_lanes(planes.halves_out(records)).contiguous().view(torch.float16).float()
    sizes = [plane.bits * form.chunk * 64 for plane in form.planes]
    n_super = 2 * (1 + coding.minima) if coding.span else 0  # bytes of a row and chunk
    n_scale = form.record // 16 - sum(sizes) // 16 - n_super
    *parts, scales, supers = records.split([*sizes, 16 * n_scale, 16 * n_super], -1)
    lanes = parts[0].new_zeros(())
    for plane, part in zip(form.planes, parts, strict=True):
        lanes = lanes | plane.take(part) << plane.at
    values = planes.from_lanes(lanes)
    if n_scale > form.chunk:
        scales = planes.pairs_out(scales, form.chunk, n_scale // form.chunk)
    else:
        scales = planes.bytes_out(scales)
    n_row = values.shape[:4].numel()
    own = _scales_out(coding, scales.reshape(n_row, n_scale) - (1 if form.raised else 0))
    halves = (
        planes.pairs_out(supers, n_super).reshape(n_row, -1).view(torch.float16) if n_super else None
    )
    above = (None, None) if halves is None else _apart(halves, coding.minima)
    return weights(coding, Codes(values.reshape(n_row, -1), *own, *above)).view(values.shape)


def _scales_in(coding: Coding, codes: Codes) -> Tensor:
    """[row, bytes] uint8: scales and minima of all groups."""
    if coding.scale == "e4m3":
        # As the upper bits of their f16, whose exponents are longer: denormals end
        exact = 2 * ue4m3(codes.scales.device)[codes.scales.int()]
        return (exact.half().view(torch.int16) >> 7).to(torch.uint8)
    if coding.width == 4 and codes.minima is not None:
        return codes.scales | codes.minima << 4
    return _together(codes.scales - coding.less if coding.less else codes.scales, codes.minima)


def _scales_out(coding: Coding, raw: Tensor) -> tuple[Tensor, Tensor | None]:
    """The inverse, but where a record has the numbers that scales stand for."""
    if coding.scale == "e4m3":
        return (raw.short() << 7).view(torch.float16) / 2, None
    if coding.width == 4:
        return raw & 15, raw >> 4
    if coding.span and not coding.minima:
        return raw.view(torch.int8), None
    return _apart(raw.view(torch.float16) if coding.width == 16 else raw, coding.minima)


def _together(scales: Tensor, minima: Tensor | None) -> Tensor:
    """Bytes of [row, n] scales, each with its minimum behind it."""
    return (scales if minima is None else torch.stack((scales, minima), -1)).view(torch.uint8)


def _apart(both: Tensor, has_minima: bool) -> tuple[Tensor, Tensor | None]:
    return (both[:, ::2], both[:, 1::2]) if has_minima else (both, None)


def _split_bf16(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Over the power of two that brings a row's largest to 2^14 or more: f16 holds 2^15, and 2^-17 with all bits."""
    x = rows.contiguous().view(torch.bfloat16).float().flatten(1)
    exponents = torch.frexp(x.abs().amax(1)).exponent.clamp(-111, 128) - 15  # normal numbers
    powers = torch.ldexp(torch.ones_like(x[:, 0]), exponents)
    return (x / powers[:, None]).half().view(torch.uint8).view(rows.shape), powers


FORMATS: dict[GGMLType, Format] = {
    GGMLType.Q8_0: Format(0, 2, 1088, (planes.WHOLE,)),
    GGMLType.Q4_0: Format(1, 4, 1152, (planes.NIBBLES,)),
    GGMLType.Q4_1: Format(2, 4, 1280, (planes.NIBBLES,), minima=True),
    GGMLType.Q5_0: Format(3, 4, 1408, (planes.NIBBLES, planes.above(planes.BITS, 4))),
    GGMLType.Q5_1: Format(4, 4, 1536, (planes.NIBBLES, planes.above(planes.BITS, 4)), minima=True),
    GGMLType.Q4_K: Format(5, 8, 2368, (planes.NIBBLES,), minima=True),
    GGMLType.Q5_K: Format(6, 8, 2880, (planes.NIBBLES, planes.above(planes.BITS, 4)), minima=True),
    GGMLType.Q6_K: Format(7, 8, 3360, (planes.NIBBLES, planes.above(planes.CRUMBS, 4))),
    GGMLType.IQ4_NL: Format(8, 4, 1152, (planes.NATURAL_NIBBLES,)),
    GGMLType.IQ4_XS: Format(9, 8, 2208, (planes.NATURAL_NIBBLES,)),
    GGMLType.MXFP4: Format(10, 4, 1088, (planes.E2M1,), raised=1024),
    GGMLType.NVFP4: Format(11, 4, 1152, (planes.E2M1,), scaled=True),
    GGMLType.F16: Format(12, 2, 2048, (planes.HALVES,)),
    GGMLType.Q2_K: Format(14, 8, 1344, (planes.COLUMNS,)),
    GGMLType.Q3_K: Format(15, 8, 1824, (planes.CRUMBS, planes.above(planes.BITS, 2))),
    GGMLType.IQ2_XXS: Format(16, 8, 1696, (planes.LEVELS, planes.SIGNS)),
    GGMLType.IQ3_XXS: Format(17, 8, 2208, (planes.NATURAL_NIBBLES,)),
    GGMLType.BF16: Format(13, 2, 2048, (planes.HALVES,), scaled=True, split=_split_bf16),
}
CHUNKS = {type: kind.chunk for type, kind in FORMATS.items()}
RECORDS = {type: kind.record for type, kind in FORMATS.items()}
