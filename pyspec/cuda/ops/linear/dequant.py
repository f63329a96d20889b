"""Dequantisation in plain torch, on any device: the reference of every faster kernel.

In float32 the results equal the gguf package's bit for bit, so the order of the multiplications and subtractions below is part of
the contract. Field offsets come from the ctypes layouts of `pyspec.gguf.blocks`. Each decoder maps [n, type_size] uint8 blocks to
[n, N] float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyspec.cuda.context import per_device
from pyspec.cuda.ops.linear import grids
from pyspec.errors import ModelError
from pyspec.gguf import GGMLType, blocks
from pyspec.gguf.blocks import BlockLayout

ATOL = RTOL = 0.0  # float32 results are exact
# Weights per step; 1 << 16 and 1 << 18 are up to 1.8 times slower, larger gains nothing
CPU_CHUNK = 1 << 20
GPU_CHUNK = 1 << 26  # weights per step: bounds the temporaries to about 1 GB

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled; the scales are halved


def _bytes(raw: Tensor, layout: type[BlockLayout], name: str) -> Tensor:
    """[n, size of the field] uint8, a view."""
    field = getattr(layout, name)
    return raw[:, field.offset : field.offset + field.size]


def _half(raw: Tensor, layout: type[BlockLayout], name: str) -> Tensor:
    """[n, 1] float32 of a float16 field."""
    return _bytes(raw, layout, name).contiguous().view(torch.float16).float()


@per_device
def _shifts(device: torch.device, n: int, step: int) -> Tensor:
    """[n, 1] uint8: 0, step, 2 * step, ..."""
    return torch.arange(0, n * step, step, dtype=torch.uint8, device=device).view(n, 1)


def _unpack(x: Tensor, n: int, bits: int) -> Tensor:
    """[..., w] uint8 -> [..., n, w]: the byte's n fields of `bits` bits, lowest first."""
    if n == 2:
        return torch.stack((x & 15, x >> 4), -2)
    return (x.unsqueeze(-2) >> _shifts(x.device, n, bits)) & ((1 << bits) - 1)


def _bits(x: Tensor) -> Tensor:
    """[n, w] uint8 -> [n, 8 * w]: single bits in the order of a little-endian integer."""
    return ((x.unsqueeze(-1) >> _shifts(x.device, 8, 1).view(8)) & 1).flatten(1)


@per_device
def _pairs(device: torch.device, values: tuple[int, ...]) -> Tensor:
    """[256, 2] float32: the table's values at a byte's low and high nibble."""
    table = torch.tensor(values, dtype=torch.float32, device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((table[byte & 15], table[byte >> 4]), 1)


def _looked_up(x: Tensor, values: tuple[int, ...]) -> Tensor:
    """[..., w] uint8 -> [..., 2, w] float32: table values of the low nibbles, then of the high ones."""
    found = _pairs(x.device, values).index_select(0, x.flatten().int())
    return found.view(*x.shape, 2).transpose(-1, -2)


def _q8_0(raw: Tensor) -> Tensor:
    q = _bytes(raw, blocks.BlockQ8_0, "qs").view(torch.int8)
    return q * _half(raw, blocks.BlockQ8_0, "d")


def _q4_0(raw: Tensor) -> Tensor:
    q = _unpack(_bytes(raw, blocks.BlockQ4_0, "qs"), 2, 4).flatten(1)
    return _half(raw, blocks.BlockQ4_0, "d") * (q.view(torch.int8) - 8)


def _q4_1(raw: Tensor) -> Tensor:
    q = _unpack(_bytes(raw, blocks.BlockQ4_1, "qs"), 2, 4).flatten(1)
    return _half(raw, blocks.BlockQ4_1, "d") * q + _half(raw, blocks.BlockQ4_1, "m")


def _five(raw: Tensor, layout: type[BlockLayout]) -> Tensor:
    """[n, 32] uint8 0..31 of Q5_0 and Q5_1."""
    low = _unpack(_bytes(raw, layout, "qs"), 2, 4).flatten(1)
    return low | (_bits(_bytes(raw, layout, "qh")) << 4)


def _q5_0(raw: Tensor) -> Tensor:
    return _half(raw, blocks.BlockQ5_0, "d") * (_five(raw, blocks.BlockQ5_0).view(torch.int8) - 16)


def _q5_1(raw: Tensor) -> Tensor:
    return _half(raw, blocks.BlockQ5_1, "d") * _five(raw, blocks.BlockQ5_1) + _half(
        raw, blocks.BlockQ5_1, "m"
    )


def _two_bits(raw: Tensor, layout: type[BlockLayout]) -> Tensor:
    """[n, 16, 16] uint8 0..3 of Q2_K and Q3_K."""
    return _unpack(_bytes(raw, layout, "qs").unflatten(1, (2, 32)), 4, 2).reshape(-1, 16, 16)


def _q2_k(raw: Tensor) -> Tensor:
    layout = blocks.BlockQ2_K
    scales = _bytes(raw, layout, "scales")
    scale = (_half(raw, layout, "d") * (scales & 15)).unsqueeze(-1)
    low = (_half(raw, layout, "dmin") * (scales >> 4)).unsqueeze(-1)
    return (scale * _two_bits(raw, layout) - low).flatten(1)


def _q3_k(raw: Tensor) -> Tensor:
    layout = blocks.BlockQ3_K
    packed = _bytes(raw, layout, "scales")
    low, high = _unpack(packed[:, :8], 2, 4).flatten(1), _unpack(packed[:, 8:], 4, 2).flatten(1)
    scales = (low | (high << 4)).view(torch.int8) - 32
    offset = (_unpack(_bytes(raw, layout, "hmask"), 8, 1).reshape(-1, 16, 16) ^ 1) << 2
    q = _two_bits(raw, layout).view(torch.int8) - offset.view(torch.int8)
    return ((_half(raw, layout, "d") * scales).unsqueeze(-1) * q).flatten(1)


def _six_bit_scales(raw: Tensor, layout: type[BlockLayout]) -> tuple[Tensor, Tensor]:
    """Scales and minima of Q4_K and Q5_K, [n, 8, 1] float32 each, already times d and dmin."""
    scale, low, rest = _bytes(raw, layout, "scales").unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((scale & 63, (rest & 15) | ((scale >> 2) & 48)), 1)
    lows = torch.cat((low & 63, (rest >> 4) | ((low >> 2) & 48)), 1)
    return (_half(raw, layout, "d") * scales).unsqueeze(-1), (
        _half(raw, layout, "dmin") * lows
    ).unsqueeze(-1)


def _q4_k(raw: Tensor) -> Tensor:
    scale, low = _six_bit_scales(raw, blocks.BlockQ4_K)
    q = _unpack(_bytes(raw, blocks.BlockQ4_K, "qs").unflatten(1, (4, 32)), 2, 4).flatten(1, 2)
    return (scale * q).sub_(low).flatten(1)


def _q5_k(raw: Tensor) -> Tensor:
    scale, low = _six_bit_scales(raw, blocks.BlockQ5_K)
    q = _unpack(_bytes(raw, blocks.BlockQ5_K, "qs").unflatten(1, (4, 32)), 2, 4).flatten(1, 2)
    high = _unpack(_bytes(raw, blocks.BlockQ5_K, "qh"), 8, 1)
    return (scale * (q | (high << 4))).sub_(low).flatten(1)


def _q6_k(raw: Tensor) -> Tensor:
    layout = blocks.BlockQ6_K
    scale = _half(raw, layout, "d") * _bytes(raw, layout, "scales").view(torch.int8)
    low = _unpack(_bytes(raw, layout, "ql").unflatten(1, (2, 64)), 2, 4).reshape(-1, 256)
    high = _unpack(_bytes(raw, layout, "qh").unflatten(1, (2, 32)), 4, 2).reshape(-1, 256)
    q = (low | (high << 4)).view(torch.int8) - 32
    return (scale.unsqueeze(-1) * q.unflatten(1, (16, 16))).flatten(1)


def _signed_points(
    raw: Tensor, layout: type[BlockLayout], codes: Tensor, words: Tensor, of_scale: float
) -> Tensor:
    """[n, 256] float32 of IQ2_XXS and IQ3_XXS.

    codes  float32, the lattice points: n * 256 numbers in the weights' order
    words  [n, 8, 4] uint8, signs and scale of 32 weights, a little-endian word
    """
    word = words.contiguous().view(torch.int32)  # [n, 8, 1]; sign bits shifted in are masked below
    picked = word >> _shifts(raw.device, 4, 7).view(4).int() & 127
    signs = grids.signs(raw.device).index_select(0, picked.flatten()).view(-1, 8, 4, 8)
    scale = _half(raw, layout, "d") * (0.5 + (word >> 28 & 15).flatten(1)) * of_scale
    return (scale.view(-1, 8, 1, 1) * codes.view(-1, 8, 4, 8)).mul_(signs).flatten(1)


def _iq2_xxs(raw: Tensor) -> Tensor:
    layout = blocks.BlockIQ2_XXS
    groups = _bytes(raw, layout, "qs").unflatten(1, (8, 8))
    codes = grids.iq2_xxs(raw.device).index_select(0, groups[..., :4].flatten().int())
    return _signed_points(raw, layout, codes, groups[..., 4:], 0.25)


def _iq3_xxs(raw: Tensor) -> Tensor:
    layout = blocks.BlockIQ3_XXS
    codes = grids.iq3_xxs(raw.device).index_select(0, _bytes(raw, layout, "qs").flatten().int())
    return _signed_points(raw, layout, codes, _bytes(raw, layout, "signs").unflatten(1, (8, 4)), 0.5)


def _iq4_nl(raw: Tensor) -> Tensor:
    q = _looked_up(_bytes(raw, blocks.BlockIQ4_NL, "qs"), IQ4).flatten(1)
    return _half(raw, blocks.BlockIQ4_NL, "d") * q


def _iq4_xs(raw: Tensor) -> Tensor:
    layout = blocks.BlockIQ4_XS
    low = _unpack(_bytes(raw, layout, "scales_l").unsqueeze(-1), 2, 4).flatten(1)
    high = _unpack(_bytes(raw, layout, "scales_h").unsqueeze(-1), 4, 2).flatten(1)
    scale = _half(raw, layout, "d") * ((low | (high << 4)).view(torch.int8) - 32)
    q = _looked_up(_bytes(raw, layout, "qs").unflatten(1, (8, 16)), IQ4).flatten(2)
    return (scale.unsqueeze(-1) * q).flatten(1)


@per_device
def e8m0(device: torch.device) -> Tensor:
    """[256] float32: half of 2^(code - 127); the two smallest are subnormal."""
    bits = [0x0020_0000 << code if code < 2 else (code - 1) << 23 for code in range(256)]
    return torch.tensor(bits, dtype=torch.int32, device=device).view(torch.float32)


@per_device
def ue4m3(device: torch.device) -> Tensor:
    """[256] float32: half of the unsigned E4M3 number, bias 7, the sign bit ignored; 0x7f counts as zero."""

    def value(code: int) -> float:
        exponent, mantissa = (code >> 3) & 15, code & 7
        if code == 0x7F:
            return 0.0
        return mantissa * 2.0**-10 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 8)

    return torch.tensor([value(code) for code in range(256)], dtype=torch.float32, device=device)


def _mxfp4(raw: Tensor) -> Tensor:
    scale = (
        e8m0(raw.device)
        .index_select(0, _bytes(raw, blocks.BlockMXFP4, "e").flatten().int())
        .unsqueeze(-1)
    )
    return scale * _looked_up(_bytes(raw, blocks.BlockMXFP4, "qs"), E2M1).flatten(1)


def _nvfp4(raw: Tensor) -> Tensor:
    scale = (
        ue4m3(raw.device)
        .index_select(0, _bytes(raw, blocks.BlockNVFP4, "d").flatten().int())
        .view(-1, 4, 1)
    )
    q = _looked_up(_bytes(raw, blocks.BlockNVFP4, "qs").unflatten(1, (4, 8)), E2M1).flatten(2)
    return (scale * q).flatten(1)


_DECODERS: dict[GGMLType, Callable[[Tensor], Tensor]] = {
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
    GGMLType.IQ2_XXS: _iq2_xxs,
    GGMLType.IQ3_XXS: _iq3_xxs,
    GGMLType.IQ4_NL: _iq4_nl,
    GGMLType.IQ4_XS: _iq4_xs,
    GGMLType.MXFP4: _mxfp4,
    GGMLType.NVFP4: _nvfp4,
}
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
QUANTISED = frozenset(_DECODERS)
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
    decode, packed = _DECODERS[type], raw.reshape(-1, type.type_size)
    chunk = (CPU_CHUNK if raw.device.type == "cpu" else GPU_CHUNK) // type.block_size
    filled = out.view(-1, type.block_size)
    for at in range(0, len(packed), chunk):
        filled[at : at + chunk] = decode(packed[at : at + chunk])
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
