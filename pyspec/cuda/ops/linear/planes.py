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

import torch
from torch import Tensor

from pyspec.cuda.context import per_device

SPREAD = (0, 2, 4, 6, 1, 3, 5, 7)
NATURAL = (0, 1, 2, 3, 4, 5, 6, 7)
PAIRED = (0, 4, 1, 5, 2, 6, 3, 7)  # as rows of whole numbers lie (prepared.cuh)
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


@per_device
def _numbers(device: torch.device, values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, device=device)


Place = Callable[[int, int, int], tuple[int, int]]
"""(block, row, code of eight) -> the byte of the lane's, and the lowest bit in it"""


def fields(bits: int, blocks: int, place: Place, at: int = 0) -> Plane:
    """Codes as fields of bytes, where `place` says. blocks: that a lane's bytes hold together."""
    codes = [(b, r, k) for b in range(blocks) for r in (0, 1) for k in range(8)]
    (to, shifts), mask = zip(*(place(*code) for code in codes), strict=True), (1 << bits) - 1
    n_byte = len(codes) * bits // 8

    def put(lanes: Tensor) -> Tensor:
        x = (lanes & mask).unflatten(2, (-1, blocks)).movedim(3, 4).flatten(4)  # [..., lane, code]
        whole = x.new_zeros(*x.shape[:-1], n_byte)
        for shift in range(0, 8, bits):
            own = sorted((byte, i) for i, byte in enumerate(to) if shifts[i] == shift)
            whole |= x.index_select(-1, _numbers(x.device, tuple(i for _, i in own))) << shift
        return whole.flatten(2)

    def take(plane: Tensor) -> Tensor:
        x = plane.unflatten(-1, (-1, 32, n_byte)).index_select(-1, _numbers(plane.device, to))
        x = x >> _numbers(x.device, shifts).to(torch.uint8) & mask
        return x.unflatten(-1, (blocks, 2, 8)).movedim(4, 3).flatten(2, 3)

    return Plane(bits, put, take, at)


def e2m1_in(lanes: Tensor) -> Tensor:
    """Four-bit floats at f16's place in a word: pair 0 in place, pair 1 three bits lower."""
    halves = torch.zeros((*lanes.shape[:-1], 2), dtype=torch.int16, device=lanes.device)
    for k in range(8):
        code = lanes[..., k].short()
        halves[..., k % 2] |= (code & 7) << (9 - k // 2 * 3) | (code >> 3) << _SIGNS[k // 2]
    words = halves.view(torch.uint8).unflatten(2, (-1, 2))  # group chunk two block lane row byte
    return words.permute(0, 1, 2, 4, 3, 5, 6).flatten(2)


def e2m1_out(plane: Tensor) -> Tensor:
    words = plane.unflatten(-1, (-1, 32, 2, 2, 4)).permute(0, 1, 2, 4, 3, 5, 6).flatten(2, 3)
    halves = words.contiguous().view(torch.int16)
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
E2M1 = Plane(4, e2m1_in, e2m1_out)


def nibbles(order: tuple[int, ...] = SPREAD) -> Plane:
    """The four low bits of each code; nibble i of a word is that of code order[i]."""

    def place(block: int, row: int, k: int) -> tuple[int, int]:
        i = order.index(k)
        return 8 * block + 4 * row + i // 2, i % 2 * 4

    return fields(4, 2, place)


def _crumb(block: int, row: int, k: int) -> tuple[int, int]:
    return 4 * block + k % 2 * 2 + row, k // 2 % 2 * 4 + k // 4 * 2


def _bit(block: int, row: int, k: int) -> tuple[int, int]:
    return k % 2 * 2 + block, k // 2 % 2 * 4 + row * 2 + k // 4


def _level(block: int, row: int, k: int) -> tuple[int, int]:
    """Nibble i of a row's 16 bits is of codes PAIRED[i] and PAIRED[4 + i]."""
    i = PAIRED.index(k)
    return 4 * block + 2 * row + i % 4 // 2, i % 2 * 4 + i // 4 * 2


def _sign(block: int, row: int, k: int) -> tuple[int, int]:
    """Two blocks are a word."""
    i = PAIRED.index(k)
    return block // 2 * 4 + 2 * row + i % 4 // 2, i % 2 * 4 + block % 2 * 2 + i // 4


def _column(block: int, row: int, k: int) -> tuple[int, int]:
    """Codes of a column are a byte."""
    return 4 * block + k % 4, k // 4 * 4 + row * 2


NIBBLES, NATURAL_NIBBLES = nibbles(), nibbles(NATURAL)
CRUMBS, BITS = fields(2, 4, _crumb), fields(1, 2, _bit)
LEVELS, SIGNS, COLUMNS = fields(2, 4, _level), fields(1, 8, _sign, at=2), fields(2, 4, _column)


def above(plane: Plane, at: int) -> Plane:
    """The same of bits from `at` on."""
    return replace(plane, at=at)
