"""In which order codes and scales lie in a record of linear_pack.py, and back.

Lane 4 g + t of a warp owns rows g and g + 8 and columns 4t..4t+3, 16+4t..16+4t+3 of each block. "Lanes" below are codes in
that order: [group, chunk, block, lane, 2 rows, 8 columns]. A lane's eight codes of a row are one word; two blocks lie
together, so that a lane reads 16 bytes. Planes are [group, chunk, bytes].

Words hold the eight codes k0..k7 so that few instructions give pairs of f16 (quants.cuh): SPREAD lets masks cut k0 k1, k2 k3,
... out of both halves of a word; NATURAL is the order of byte look-ups; E2M1's bits lie where f16 has them, or a shift away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

SPREAD = (0, 2, 4, 6, 1, 3, 5, 7)
NATURAL = (0, 1, 2, 3, 4, 5, 6, 7)
PAIRED = (0, 4, 1, 5, 2, 6, 3, 7)  # as rows of whole numbers lie (prepared.cuh)
_UNPAIRED = (0, 2, 4, 6, 1, 3, 5, 7)
# Where the sign of each pair lies in its half of a word; the other bits at 9, 6, 3 and 0
_SIGNS = 15, 12, 14, 13


@dataclass(frozen=True, slots=True)
class Plane:
    """A part of a record: `bits` bits of each code.

    put   lanes -> plane
    take  plane -> lanes, with these bits alone
    at    the lowest of them
    """

    bits: int
    put: Callable[[Tensor], Tensor]
    take: Callable[[Tensor], Tensor]
    at: int = 0


def by_lane(codes: Tensor) -> Tensor:
    """[group, 2, 8, chunk, block, 32] -> lanes: the operands of each lane."""
    x = codes.unflatten(-1, (2, 4, 4)).permute(0, 3, 4, 2, 6, 1, 5, 7)
    return x.reshape(*x.shape[:3], 32, 2, 8)


def from_lanes(x: Tensor) -> Tensor:
    """The inverse."""
    x = x.unflatten(-1, (2, 4)).unflatten(3, (8, 4))  # group chunk block g t h half i
    return x.permute(0, 5, 3, 1, 2, 6, 4, 7).flatten(-3)


def _words_in(words: Tensor) -> Tensor:
    """[group, chunk, block, lane, 2, 4 bytes] -> plane."""
    return words.unflatten(2, (-1, 2)).permute(0, 1, 2, 4, 3, 5, 6).flatten(2)


def _words_out(plane: Tensor) -> Tensor:
    return plane.unflatten(-1, (-1, 32, 2, 2, 4)).permute(0, 1, 2, 4, 3, 5, 6).flatten(2, 3)


def nibbles_in(lanes: Tensor, order: tuple[int, ...] = SPREAD) -> Tensor:
    """The four low bits of each code; nibble i of a word is that of code order[i]."""
    low = lanes & 15
    pairs = zip(order[::2], order[1::2], strict=True)
    return _words_in(torch.stack([low[..., a] | low[..., b] << 4 for a, b in pairs], -1))


def nibbles_out(plane: Tensor, order: tuple[int, ...] = SPREAD) -> Tensor:
    words = _words_out(plane)
    nibbles = torch.stack((words & 15, words >> 4), -1).flatten(-2)
    return nibbles[..., [order.index(k) for k in range(8)]]


def e2m1_in(lanes: Tensor) -> Tensor:
    """Four-bit floats at f16's place in a word: pair 0 in place, pair 1 three bits lower."""
    halves = torch.zeros((*lanes.shape[:-1], 2), dtype=torch.int16, device=lanes.device)
    for k in range(8):
        code = lanes[..., k].short()
        halves[..., k % 2] |= (code & 7) << (9 - k // 2 * 3) | (code >> 3) << _SIGNS[k // 2]
    return _words_in(halves.view(torch.uint8))


def e2m1_out(plane: Tensor) -> Tensor:
    halves = _words_out(plane).contiguous().view(torch.int16)
    codes = [
        (h >> (9 - k // 2 * 3) & 7) | (h >> _SIGNS[k // 2] & 1) << 3
        for k in range(8)
        for h in [halves[..., k % 2]]
    ]
    return torch.stack(codes, -1).to(torch.uint8)


def whole_in(lanes: Tensor) -> Tensor:
    """Codes of eight bits, 128 higher."""
    return (lanes ^ 128).flatten(2)


def whole_out(plane: Tensor) -> Tensor:
    return plane.unflatten(-1, (-1, 32, 2, 8)) ^ 128


def halves_in(lanes: Tensor) -> Tensor:
    """f16 weights as int16: a lane's operands of the first 16 columns of a block, 16 bytes, then all of the second."""
    x = lanes.unflatten(-1, (2, 2, 2))  # group chunk block lane r half pair e
    return x.permute(0, 1, 2, 5, 3, 6, 4, 7).flatten(2).contiguous().view(torch.uint8)


def halves_out(plane: Tensor) -> Tensor:
    x = plane.contiguous().view(torch.int16).unflatten(-1, (-1, 2, 32, 2, 2, 2))
    return x.permute(0, 1, 2, 4, 6, 3, 5, 7).flatten(-3)


def crumbs_in(lanes: Tensor) -> Tensor:
    """The two low bits of each code, 16 bytes a lane for four blocks.

    Byte 2 e + r of a block is of row r and of the codes k % 2 == e; bits 4 l + 2 h of it are of code 4 h + 2 l + e.
    """
    low = lanes & 3
    even, odd = (
        (low[..., k] | low[..., k + 4] << 2 | low[..., k + 2] << 4 | low[..., k + 6] << 6)
        for k in (0, 1)
    )
    packed = torch.cat((even, odd), -1)
    return packed.unflatten(2, (-1, 4)).permute(0, 1, 2, 4, 3, 5).flatten(2)


def crumbs_out(plane: Tensor) -> Tensor:
    # ... lane odd h
    x = plane.unflatten(-1, (-1, 32, 4, 2, 2)).permute(0, 1, 2, 4, 3, 5, 6).flatten(2, 3)
    return torch.stack([x[..., k % 2, :] >> (k // 4 * 2 + k // 2 % 2 * 4) & 3 for k in range(8)], -1)


def bits_in(lanes: Tensor) -> Tensor:
    """The lowest bit of each code, 4 bytes a lane for two blocks.

    Byte 2 e + b is of block b and of the codes k % 2 == e; bit 4 l + 2 r + h in it is of row r, code 4 h + 2 l + e.
    """
    # Group chunk two b lane r h l e
    x = (lanes & 1).unflatten(2, (-1, 2)).unflatten(-1, (2, 2, 2))
    x = x.permute(0, 1, 2, 4, 8, 3, 7, 5, 6).flatten(-3)
    return (x << _bit_numbers(x)).sum(-1, dtype=torch.uint8).flatten(2)


def bits_out(plane: Tensor) -> Tensor:
    x = plane.unflatten(-1, (-1, 32, 2, 2)).unsqueeze(-1)
    x = (x >> _bit_numbers(x) & 1).unflatten(-1, (2, 2, 2))  # group chunk two lane e b l r h
    return x.permute(0, 1, 2, 5, 3, 7, 8, 6, 4).flatten(-3).flatten(2, 3)


def _bit_numbers(x: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=x.device)


def levels_in(lanes: Tensor) -> Tensor:
    """The two low bits of each code, 16 bytes a lane for four blocks: nibble i of a row's 16 bits is of codes PAIRED[i] and PAIRED[4 + i]."""
    x = lanes[..., PAIRED] & 3
    nibbles = x[..., :4] | x[..., 4:] << 2
    return (
        (nibbles[..., ::2] | nibbles[..., 1::2] << 4)
        .flatten(-2)
        .unflatten(2, (-1, 4))
        .permute(0, 1, 2, 4, 3, 5)
        .flatten(2)
    )


def levels_out(plane: Tensor) -> Tensor:
    # ... lane row byte
    x = plane.unflatten(-1, (-1, 32, 4, 2, 2)).permute(0, 1, 2, 4, 3, 5, 6).flatten(2, 3)
    nibbles = torch.stack((x & 15, x >> 4), -1).flatten(-2)
    return torch.cat((nibbles & 3, nibbles >> 2), -1)[..., _UNPAIRED]


def signs_in(lanes: Tensor) -> Tensor:
    """The lowest bit of each code, 16 bytes a lane for eight blocks: a word has two blocks, bit 16 r + 4 i + 2 b + h of it is of row r, block b
    and code PAIRED[4 h + i]."""
    # Group chunk two b lane r h i i
    x = (lanes[..., PAIRED] & 1).unflatten(2, (-1, 2)).unflatten(-1, (2, 2, 2))
    x = x.permute(0, 1, 4, 2, 5, 7, 8, 3, 6).flatten(-3)
    return (x << _bit_numbers(x)).sum(-1, dtype=torch.uint8).flatten(2)


def signs_out(plane: Tensor) -> Tensor:
    x = plane.unflatten(-1, (32, -1, 2, 2)).unsqueeze(-1)
    x = (x >> _bit_numbers(x) & 1).unflatten(-1, (2, 2, 2))  # group chunk lane two r i i b h
    return x.permute(0, 1, 3, 7, 2, 4, 8, 5, 6).flatten(-3).flatten(2, 3)[..., _UNPAIRED]


def columns_in(lanes: Tensor) -> Tensor:
    """Codes of two bits, a column's in a byte, 16 bytes a lane for four blocks: bits 4 h + 2 r of byte i are of row r, code 4 h + i."""
    x = lanes.unflatten(-1, (2, 4))
    packed = x[..., 0, 0, :] | x[..., 1, 0, :] << 2 | x[..., 0, 1, :] << 4 | x[..., 1, 1, :] << 6
    return packed.unflatten(2, (-1, 4)).permute(0, 1, 2, 4, 3, 5).flatten(2)


def columns_out(plane: Tensor) -> Tensor:
    x = plane.unflatten(-1, (-1, 32, 4, 4)).permute(0, 1, 2, 4, 3, 5).flatten(2, 3)  # ... lane byte
    return torch.stack([torch.cat([x >> (4 * h + 2 * r) & 3 for h in (0, 1)], -1) for r in (0, 1)], -2)


def pairs_in(x: Tensor) -> Tensor:
    """[group, 2, 8, chunk, ..., bytes] of rows -> plane with rows g and g + 8 side by side."""
    order = (0, 3, *range(4, x.dim() - 1), 2, 1, x.dim() - 1)
    return x.permute(order).flatten(2)


def pairs_out(plane: Tensor, *shape: int) -> Tensor:
    """The inverse; `shape` are the dimensions after chunk, bytes last."""
    x = plane.unflatten(-1, (*shape[:-1], 8, 2, shape[-1]))
    g = x.dim() - 3
    return x.permute(0, g + 1, g, 1, *range(2, g), g + 2)


def bytes_in(x: Tensor) -> Tensor:
    """[group, 2, 8, chunk, block], a byte a row and block -> plane: rows g and g + 8 of two blocks are a word."""
    return x.unflatten(-1, (-1, 2)).permute(0, 3, 4, 2, 5, 1).flatten(2)


def bytes_out(plane: Tensor) -> Tensor:
    return plane.unflatten(-1, (-1, 8, 2, 2)).permute(0, 5, 3, 1, 2, 4).flatten(-2)


WHOLE, HALVES = Plane(8, whole_in, whole_out), Plane(16, halves_in, halves_out)
NIBBLES, E2M1 = Plane(4, nibbles_in, nibbles_out), Plane(4, e2m1_in, e2m1_out)
NATURAL_NIBBLES = Plane(4, partial(nibbles_in, order=NATURAL), partial(nibbles_out, order=NATURAL))
COLUMNS, LEVELS = Plane(2, columns_in, columns_out), Plane(2, levels_in, levels_out)
CRUMBS, BITS = Plane(2, crumbs_in, crumbs_out), Plane(1, bits_in, bits_out)
SIGNS = Plane(1, signs_in, signs_out, at=2)


def above(plane: Plane, at: int) -> Plane:
    """The same of bits from `at` on."""
    return replace(plane, at=at)
