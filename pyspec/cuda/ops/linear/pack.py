"""Quantised matrices in the order linear.cu streams them: repacked once at load, and unpacked for the reference.

A tile is 256 output rows, a chunk `CHUNKS[type]` blocks of 32 columns, a record 16 rows of one chunk (formats.py). Records lie as
[tile][chunk][16 rows]; the last tile may be lower. Rows are padded to a multiple of 16 and columns to whole chunks with zeros.

Behind the records of NVFP4 and BF16 lies a scale for each row, f32, rows padded to whole tiles. NVFP4 has such a second scale
in the file, one a tensor, and a matrix may be made of several tensors. BF16 weights become f16 over a power of two, that of
their row: no bit is lost of those larger than 2^-32 times the row's largest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.ops.linear.formats import CHUNKS, FORMATS, RECORDS, decode, encode
from pyspec.errors import ModelError
from pyspec.gguf import GGMLType

TILE = 16  # 16-row groups of a tile
_SLICE = 1 << 26  # weights repacked at once: bounds the temporaries to about 0.5 GB


@dataclass(frozen=True, slots=True)
class Packed:
    """A repacked matrix. data [n_bytes] uint8; n_out rows of n_in columns of `type`."""

    data: Tensor
    type: GGMLType
    n_out: int
    n_in: int


def n_chunks(type: GGMLType, n_in: int) -> int:
    return -(-n_in // (32 * CHUNKS[type]))


def n_groups(n_out: int) -> int:
    return -(-n_out // 16)


def packed_bytes(type: GGMLType, n_out: int, n_in: int) -> int:
    """Bytes that `repack` allocates."""
    return _record_bytes(type, n_out, n_in) + (4 * _scale_rows(n_out) if FORMATS[type].scaled else 0)


def _record_bytes(type: GGMLType, n_out: int, n_in: int) -> int:
    return n_groups(n_out) * n_chunks(type, n_in) * RECORDS[type]


def _scale_rows(n_out: int) -> int:
    return -(-n_out // (TILE * 16)) * TILE * 16


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of gate and up [row, row_bytes] as 8 of one and 8 of the other: one warp then owns both of a feature."""
    if gate.shape != up.shape or gate.shape[0] % 8:
        raise ModelError(
            f"gate {list(gate.shape)} and up {list(up.shape)} must be equal and a multiple of 8 rows"
        )
    pairs = torch.stack((gate.view(-1, 8, gate.shape[1]), up.view(-1, 8, up.shape[1])), 1)
    return pairs.view(-1, gate.shape[1])


def repack(
    raw: Tensor,
    type: GGMLType,
    shape: tuple[int, int],
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Packed:
    """The file's bytes of a matrix [n_out, n_in] repacked, on raw's device.

    raw     [n_bytes] uint8  in any shape, contiguous
    scales  [n_out] f32      the factor of each row, for types that have a second scale; None: ones
    out     [packed_bytes] uint8  the destination; None: new memory
    Errors: ModelError for other types, for bytes that do not fit, and for scales out of range.
    """
    n_out, n_in = shape
    if type not in CHUNKS:
        raise ModelError(
            f"matrices of {type.name} can not be repacked (can: {', '.join(t.name for t in CHUNKS)})"
        )
    row_bytes = n_in // type.block_size * type.type_size
    if n_in % type.block_size or raw.numel() != n_out * row_bytes:
        raise ModelError(
            f"a {type.name} matrix of {n_out} x {n_in} has {n_out * row_bytes} bytes, got {raw.numel()}"
        )
    kind = FORMATS[type]
    assert scales is None or (kind.scaled and scales.shape == (n_out,))
    rows = raw.reshape(n_out, n_in // type.block_size, type.type_size)
    if out is None:
        out = torch.empty(packed_bytes(type, n_out, n_in), dtype=torch.uint8, device=raw.device)
    assert out.shape == (packed_bytes(type, n_out, n_in),) and out.is_contiguous()
    packed = Packed(out, type, n_out, n_in)
    if kind.scaled:
        _behind(packed).zero_()
        row_scales(packed).copy_(torch.ones(()) if scales is None else scales)
    step, at = max(1, _SLICE // (TILE * 16 * n_in)) * TILE * 16, 0
    for first in range(0, n_out, step):
        part = rows[first : first + step]
        if kind.split is not None:
            part, powers = kind.split(part)
            row_scales(packed)[first : first + step] *= powers
        for tile in _tiles(_records(part, type)):
            packed.data[at : at + tile.numel()] = tile.view(-1)
            at += tile.numel()
    return packed


def row_scales(packed: Packed) -> Tensor:
    """[n_out] f32: the second scale of each row, for types that have one."""
    return _behind(packed)[: packed.n_out]


def _behind(packed: Packed) -> Tensor:
    return packed.data[_record_bytes(packed.type, packed.n_out, packed.n_in) :].view(torch.float32)


def unpack(packed: Packed, first: int = 0, end: int | None = None) -> Tensor:
    """[n_out, n_in] float32, equal to the file's dequantised weights, times the row's second scale, bit for bit.

    Of rows [first, end) only, for matrices that would not fit at once; `first` is a multiple of a tile's rows.
    """
    assert first % (TILE * 16) == 0
    end = packed.n_out if end is None else min(end, packed.n_out)
    kind, n_chunk = FORMATS[packed.type], n_chunks(packed.type, packed.n_in)
    tile_bytes, parts = TILE * n_chunk * kind.record, []
    records = packed.data[: _record_bytes(packed.type, packed.n_out, packed.n_in)]
    tiles = slice(first // (TILE * 16) * tile_bytes, -(-end // (TILE * 16)) * tile_bytes)
    for tile in records[tiles].split(tile_bytes):
        rows = tile.view(n_chunk, -1, kind.record).transpose(0, 1)
        parts.append(decode(rows, packed.type).flatten(0, 2).flatten(1))
    whole = torch.cat(parts)[: end - first, : packed.n_in].contiguous()
    return whole * row_scales(packed)[first:end, None] if kind.scaled else whole


def _records(rows: Tensor, type: GGMLType) -> Tensor:
    """[row, block, type_size] -> [group, chunk, record]."""
    n_row, n_block, size = rows.shape
    per_chunk = CHUNKS[type] * 32 // type.block_size
    rows = F.pad(rows, (0, 0, 0, -n_block % per_chunk, 0, -n_row % 16))
    return encode(rows.view(rows.shape[0] // 16, 2, 8, -1, per_chunk, size), type)


def _tiles(records: Tensor) -> Iterator[Tensor]:
    """[group, chunk, record] -> tiles [chunk, group, record]."""
    for tile in records.split(TILE):
        yield tile.transpose(0, 1).contiguous()
