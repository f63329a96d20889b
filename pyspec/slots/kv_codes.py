"""How keys and values become codes and factors (`encoded`), and numbers again (`decoded`); and how heads are turned before.

A value is rounded by operations that every device rounds alike, from its row alone. q8_0 rounds its scale before it makes codes, to nearest
even. The others have the codes and factors of llama.cpp's reference rounding with fused products: codes are made with the scale in f32.

Codes of 4 bits lie two in a byte, the lower dim in the lower half. Of 5 bits, the lower 4 lie so; behind a head's halves follow the fifth
bits of its dims, eight in a byte, the lowest dim first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.slots.kv_types import BLOCK, F8, Q8_0, KvType

MAX_SCALE = 515.5  # of q8_0: 127 times this is finite in f16, which kernels compute with
MAX_F8 = 448.0
MAX_PACKED = 64512.0  # of packed types: codes times scales, plus least values, are finite in f16
LEAST_STEP = 2.0**-64  # smaller distances of codes, which f16 has not, count as none


def encoded(x: Tensor, of: KvType) -> tuple[Tensor, Tensor | None]:
    """x [..., dim] -> codes [..., n_code] of the type's dtype, and factors [..., n_scale] f16 if it has any."""
    if of == Q8_0:
        return quantized(x)
    if of.is_packed:
        return packed(x, of)
    return (x.float().clamp(-MAX_F8, MAX_F8) if of == F8 else x).to(of.dtype), None


def decoded(codes: Tensor, factors: Tensor | None, of: KvType, dtype: torch.dtype) -> Tensor:
    """The values, exact in f32."""
    if factors is None:
        return codes.to(dtype)
    if of == Q8_0:
        return dequantized(codes, factors, dtype)
    return unpacked(codes, factors, of, dtype)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """q8_0: x [..., dim] -> codes [..., dim] int8 and scales [..., dim / 32] f16.

    The scale is rounded before the codes are made, so that they match it when read. A NaN makes the scale of its block NaN.
    """
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = (blocks.abs().amax(-1) * (1 / 127)).clamp(max=MAX_SCALE).half()
    wide = scale.float()[..., None]
    codes = (blocks * wide.reciprocal()).round().clamp(-127, 127)
    return torch.where(wide > 0, codes, 0.0).to(torch.int8).flatten(-2), scale


def dequantized(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of q8_0, exact in f32."""
    found: Tensor = codes.to(dtype).unflatten(-1, (-1, BLOCK)) * scale.to(dtype)[..., None]
    return found.flatten(-2)


def packed(x: Tensor, of: KvType) -> tuple[Tensor, Tensor]:
    """Types of 4 and 5 bits: x [..., dim] -> codes [..., dim * bits / 8] uint8 and factors [..., n_scale] f16.

    With a least value it is code 0, and the largest is the last code. Without one, the value that is largest in size (the first of them) is
    code 0, of the opposite sign, and zero is the middle. A NaN makes the factors of its block NaN.
    """
    blocks = x.float().unflatten(-1, (-1, BLOCK)).clamp(-MAX_PACKED, MAX_PACKED)
    most = 2**of.bits - 1
    if of.n_factor == 2:
        least = blocks.amin(-1, keepdim=True)
        step = (blocks.amax(-1, keepdim=True) - least) / torch.full_like(least, most)  # no reciprocal
        codes, factors = _rounded(blocks - least, step, 0.5, most), torch.cat([step, least], -1)
    else:
        middle = 2 ** (of.bits - 1)
        step = _extreme(blocks) * (-1 / middle)
        codes, factors = _rounded(blocks, step, middle + 0.5, most), step
    return _bytes_of(codes.flatten(-2), of), factors.half().flatten(-2)


def _extreme(blocks: Tensor) -> Tensor:
    """The first value that is largest in size, [..., 1]; NaN beside a NaN."""
    size = blocks.abs()
    top = size.amax(-1, keepdim=True)
    at = torch.arange(BLOCK, device=blocks.device)
    first = torch.where(size == top, at, BLOCK - 1).amin(-1, keepdim=True)
    return torch.where(top.isnan(), top, blocks.gather(-1, first))


def _rounded(x: Tensor, step: Tensor, add: float, most: int) -> Tensor:
    """trunc(x / step + add) as uint8, with one rounding of product and sum: float64 holds the product."""
    inverse = torch.where(step.abs() >= LEAST_STEP, step.reciprocal(), 0.0)
    sums = (x.double() * inverse.double() + add).float()
    return sums.nan_to_num(0.0).clamp(0, most).to(torch.uint8)


def _bytes_of(codes: Tensor, of: KvType) -> Tensor:
    """codes [..., dim] uint8 -> [..., n_code]."""
    halves = codes & 15
    low = halves[..., 0::2] | halves[..., 1::2] << 4
    if of.bits == 4:
        return low
    places = 2 ** torch.arange(8, dtype=torch.uint8, device=codes.device)
    high = ((codes >> 4).unflatten(-1, (-1, 8)) * places).sum(-1, dtype=torch.uint8)
    return torch.cat([low, high], -1)


def codes_of(raw: Tensor, of: KvType) -> Tensor:
    """raw [..., n_code] uint8 -> codes [..., dim] uint8."""
    dim = raw.shape[-1] * 8 // of.bits
    low = raw[..., : dim // 2]
    codes = torch.stack([low & 15, low >> 4], -1).flatten(-2)
    if of.bits == 4:
        return codes
    places = torch.arange(8, dtype=torch.uint8, device=raw.device)
    return codes | (raw[..., dim // 2 :, None] >> places & 1).flatten(-2) << 4


def unpacked(raw: Tensor, factors: Tensor, of: KvType, dtype: torch.dtype) -> Tensor:
    """The values of 4 and 5 bits, rounded once where `dtype` does not hold them."""
    codes = codes_of(raw, of).to(dtype).unflatten(-1, (-1, BLOCK))
    by_block = factors.to(dtype).unflatten(-1, (-1, of.n_factor))
    if of.n_factor == 2:
        return torch.addcmul(by_block[..., 1:], codes, by_block[..., :1]).flatten(-2)
    found: Tensor = codes.sub_(2 ** (of.bits - 1)).mul_(by_block)
    return found.flatten(-2)


def turned(x: Tensor, n: int) -> Tensor:
    """x [..., dim] f32 times a Hadamard matrix over sqrt(n), for every n dims of a head. It is its own inverse. n: a power of two; 0: x.

    Sums and differences of pairs, near ones first: the same bits on every device.
    """
    if not n or not x.numel():
        return x
    shape, distance = x.shape, 1
    while distance < n:
        a, b = x.reshape(*shape[:-1], -1, 2, distance).unbind(-2)
        x = torch.stack([a + b, a - b], -2).reshape(shape)
        distance *= 2
    found: Tensor = x * n**-0.5
    return found
