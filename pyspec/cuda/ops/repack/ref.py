"""Matrices as in the file into the records that products stream (linear/pack.py), and which bit of a record is which of the file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from pyspec.cuda.ops.linear.formats import CHUNKS, FORMATS, encode
from pyspec.cuda.ops.linear.pack import packed_bytes, repack
from pyspec.gguf import GGMLType

ROWS = 16  # of a record
N_TRIED = 4  # random records that a table is compared with
SHAPES = ((277, 3), (512, 5), (16, 1))  # rows, and blocks of a row, of the check

Repack = Callable[[Tensor, tuple[int, int]], Tensor]
"""repack(raw, (n_out, n_in)): raw [n_out * bytes of a row] uint8 in any shape, contiguous -> records [packed_bytes] uint8"""


@dataclass(frozen=True, slots=True)
class RepackSpec:
    """Matrices of one type."""

    device: torch.device
    type: GGMLType


def bind(spec: RepackSpec) -> Repack:
    return lambda raw, shape: repack(raw, spec.type, shape).data


def row_bytes(type: GGMLType) -> int:
    """Of a row in a chunk."""
    return CHUNKS[type] * 32 // type.block_size * type.type_size


@cache
def bits_of(type: GGMLType) -> tuple[Tensor, Tensor] | None:
    """Where each bit of a record comes from [bits of a record] int32, the number of the bits of 16 rows for those that are always zero; and
    whether it is the other way [bits of a record] uint8; before bytes are raised (`Format.raised`). None: records of the type are more than
    its bits in another order."""
    if FORMATS[type].scaled:
        return None
    n = 8 * ROWS * row_bytes(type)
    number = torch.arange(n)
    flips, ones = (_encoded(torch.full((n,), bit, dtype=torch.uint8), type) for bit in (0, 1))
    places = torch.zeros(len(flips), dtype=torch.int32)
    for k in range(n.bit_length()):
        places |= (_encoded((number >> k & 1).to(torch.uint8), type) ^ flips).int() << k
    places[flips == ones] = n
    generator = torch.Generator().manual_seed(7)
    for _ in range(N_TRIED):
        x = torch.randint(0, 2, (n + 1,), generator=generator, dtype=torch.uint8)
        x[n] = 0
        if not torch.equal(x[places.clamp(max=n).long()] ^ flips, _encoded(x[:n], type)):
            return None
    return places, flips


def _encoded(bits: Tensor, type: GGMLType) -> Tensor:
    """Bits of one record [16 rows * bytes * 8] uint8, each byte's least first -> those of the packed one."""
    weights = 1 << torch.arange(8, dtype=torch.uint8)
    raw = (bits.view(-1, 8) * weights).sum(-1, dtype=torch.uint8)
    per_chunk = CHUNKS[type] * 32 // type.block_size
    record = encode(raw.view(1, 2, 8, 1, per_chunk, type.type_size), type, raises=False).flatten()
    return (record[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten()


def check(launch: Repack, reference: Repack, spec: RepackSpec) -> str | None:
    """Of any bytes, with rows and blocks that fill no tile and no chunk."""
    generator = torch.Generator().manual_seed(5)
    for n_out, n_block in SHAPES:
        n_in = n_block * spec.type.block_size
        most = 128 if FORMATS[spec.type].raised else 256  # scales of usual size
        size = n_out, n_block * spec.type.type_size
        raw = torch.randint(0, most, size, generator=generator, dtype=torch.uint8).to(spec.device)
        got, want = (run(raw, (n_out, n_in)) for run in (launch, reference))
        if got.shape != (packed_bytes(spec.type, n_out, n_in),) or not torch.equal(got, want):
            return f"records of {n_out} rows of {n_in} columns differ from the reference's"
    return None
