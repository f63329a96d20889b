"""Quantised matrices in the order linear.cu streams them: repacked once at load, and unpacked for the reference.

A tile is 256 output rows, a chunk `CHUNKS[type]` blocks of 32 columns, a record 16 rows of one chunk: codes in the order of
tensor-core operands, then scales. Records lie as [tile][chunk][16 rows]; the last tile may be lower. Rows are padded to a
multiple of 16 and columns to whole chunks with zeros; nothing else grows.

Within a record, lane 4 g + t of a warp owns rows g and g + 8 and columns 4t..4t+3, 16+4t..16+4t+3 of each block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.errors import ModelError
from pyspec.gguf import GGMLType

TILE = 16  # 16-row groups of a tile
CHUNKS = {GGMLType.Q8_0: 2, GGMLType.Q4_0: 4, GGMLType.Q4_K: 8, GGMLType.Q6_K: 8}
RECORDS = {GGMLType.Q8_0: 1088, GGMLType.Q4_0: 1152, GGMLType.Q4_K: 2368, GGMLType.Q6_K: 3360}
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
    """What `repack` will allocate."""
    return n_groups(n_out) * n_chunks(type, n_in) * RECORDS[type]


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of gate and up [row, row_bytes] as 8 of one and 8 of the other: one warp then owns both of a feature."""
    if gate.shape != up.shape or gate.shape[0] % 8:
        raise ModelError(f"gate {list(gate.shape)} and up {list(up.shape)} must be equal and a multiple of 8 rows")
    pairs = torch.stack((gate.view(-1, 8, gate.shape[1]), up.view(-1, 8, up.shape[1])), 1)
    return pairs.view(-1, gate.shape[1])


def repack(raw: Tensor, type: GGMLType, shape: tuple[int, int]) -> Packed:
    """The file's bytes of a matrix [n_out, n_in] repacked, on raw's device.

    raw [n_bytes] uint8 in any shape, contiguous. Errors: ModelError for other types, and for bytes that do not fit.
    """
    n_out, n_in = shape
    if type not in CHUNKS:
        raise ModelError(f"matrices of {type.name} can not be repacked (can: {', '.join(t.name for t in CHUNKS)})")
    row_bytes = n_in // type.block_size * type.type_size
    if n_in % type.block_size or raw.numel() != n_out * row_bytes:
        raise ModelError(f"a {type.name} matrix of {n_out} x {n_in} has {n_out * row_bytes} bytes, got {raw.numel()}")
    rows = raw.reshape(n_out, n_in // type.block_size, type.type_size)
    out = torch.empty(packed_bytes(type, n_out, n_in), dtype=torch.uint8, device=raw.device)
    step, at = max(1, _SLICE // (TILE * 16 * n_in)) * TILE * 16, 0
    for first in range(0, n_out, step):
        for tile in _tiles(_records(rows[first : first + step], type)):
            out[at : at + tile.numel()] = tile.view(-1)
            at += tile.numel()
    return Packed(out, type, n_out, n_in)


def unpack(packed: Packed) -> Tensor:
    """[n_out, n_in] float32, equal to the file's dequantised weights bit for bit."""
    n_chunk, record = n_chunks(packed.type, packed.n_in), RECORDS[packed.type]
    tile_bytes, parts = TILE * n_chunk * record, []
    for tile in packed.data.split(tile_bytes):
        records = tile.view(n_chunk, -1, record).transpose(0, 1)
        parts.append(_DECODERS[packed.type](records))
    return torch.cat(parts)[: packed.n_out, : packed.n_in].contiguous()


def _records(rows: Tensor, type: GGMLType) -> Tensor:
    """[row, block, type_size] -> [group, chunk, record]."""
    n_row, n_block, size = rows.shape
    per_chunk = CHUNKS[type] * 32 // type.block_size
    rows = F.pad(rows, (0, 0, 0, -n_block % per_chunk, 0, -n_row % 16))
    blocks = rows.view(rows.shape[0] // 16, 2, 8, -1, per_chunk, size)
    return _ENCODERS[type](blocks)


def _tiles(records: Tensor) -> Iterator[Tensor]:
    """[group, chunk, record] -> tiles [chunk, group, record]."""
    for tile in records.split(TILE):
        yield tile.transpose(0, 1).contiguous()


def _by_lane(codes: Tensor) -> Tensor:
    """[group, 2, 8, chunk, block, 32] -> [group, chunk, block, lane, 2, 8]: what each lane multiplies."""
    x = codes.unflatten(-1, (2, 4, 4)).permute(0, 3, 4, 2, 6, 1, 5, 7)
    return x.reshape(*x.shape[:3], 32, 2, 8)


def _from_lanes(x: Tensor) -> Tensor:
    """The inverse: [group, chunk, block, lane, 2, 8] -> [group, 2, 8, chunk, block, 32]."""
    x = x.unflatten(-1, (2, 4)).unflatten(3, (8, 4))  # group chunk block g t h half i
    return x.permute(0, 5, 3, 1, 2, 6, 4, 7).flatten(-3)


def _nibbles_in(x: Tensor) -> Tensor:
    """[group, chunk, block, lane, 2, 8] codes -> bytes of their low nibbles, 16 a lane for two blocks."""
    low = x & 15
    packed = torch.stack([low[..., k] | low[..., k + 2] << 4 for k in (0, 4, 1, 5)], -1)
    return packed.unflatten(2, (-1, 2)).permute(0, 1, 2, 4, 3, 5, 6).flatten(2)


def _nibbles_out(data: Tensor, n_block: int) -> Tensor:
    x = data.unflatten(-1, (n_block // 2, 32, 2, 2, 4)).permute(0, 1, 2, 4, 3, 5, 6).flatten(2, 3)
    low, high = x & 15, x >> 4
    order = [low[..., 0], low[..., 2], high[..., 0], high[..., 2], low[..., 1], low[..., 3], high[..., 1], high[..., 3]]
    return torch.stack(order, -1)


def _crumbs_in(x: Tensor) -> Tensor:
    """[group, chunk, block, lane, 2, 8] codes -> bytes of their bits 4 and 5, 16 a lane for four blocks."""
    high = x >> 4
    even, odd = ((high[..., k] | high[..., k + 2] << 2 | high[..., k + 4] << 4 | high[..., k + 6] << 6) for k in (0, 1))
    packed = torch.cat((even, odd), -1)
    return packed.unflatten(2, (-1, 4)).permute(0, 1, 2, 4, 3, 5).flatten(2)


def _crumbs_out(data: Tensor, n_block: int) -> Tensor:
    x = data.unflatten(-1, (n_block // 4, 32, 4, 2, 2)).permute(0, 1, 2, 4, 3, 5, 6).flatten(2, 3)  # ... lane odd h
    return torch.stack([x[..., k % 2, :] >> (k // 2 * 2) & 3 for k in range(8)], -1)


def _pairs_in(x: Tensor) -> Tensor:
    """[group, 2, 8, chunk, ..., bytes] of rows -> bytes with rows g and g + 8 side by side."""
    order = (0, 3, *range(4, x.dim() - 1), 2, 1, x.dim() - 1)
    return x.permute(order).flatten(2)


def _pairs_out(data: Tensor, *shape: int) -> Tensor:
    """The inverse; `shape` are the dimensions after chunk, bytes last."""
    x = data.unflatten(-1, (*shape[:-1], 8, 2, shape[-1]))
    g = x.dim() - 3
    return x.permute(0, g + 1, g, 1, *range(2, g), g + 2)


def _encode_q8_0(blocks: Tensor) -> Tensor:
    codes = _by_lane(blocks[..., 2:] ^ 128).flatten(2)
    return torch.cat((codes, _pairs_in(blocks[..., :2])), -1)


def _encode_q4_0(blocks: Tensor) -> Tensor:
    q = blocks[..., 2:]
    return torch.cat((_nibbles_in(_by_lane(torch.cat((q & 15, q >> 4), -1))), _pairs_in(blocks[..., :2])), -1)


def _encode_q4_k(blocks: Tensor) -> Tensor:
    x = blocks.squeeze(-2)  # one block of 256 is one chunk
    q = x[..., 16:].unflatten(-1, (4, 1, 32))
    codes = torch.cat((q & 15, q >> 4), -2).flatten(-3, -2)
    scale, low, rest = x[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((scale & 63, (rest & 15) | ((scale >> 2) & 48)), -1)
    lows = torch.cat((low & 63, (rest >> 4) | ((low >> 2) & 48)), -1)
    both = torch.stack((scales, lows), -1)
    return torch.cat((_nibbles_in(_by_lane(codes)), _pairs_in(both), _pairs_in(x[..., :4])), -1)


def _encode_q6_k(blocks: Tensor) -> Tensor:
    x = blocks.squeeze(-2)
    low = x[..., :128].unflatten(-1, (2, 1, 64))
    low = torch.cat((low & 15, low >> 4), -2).flatten(-3)
    high = x[..., 128:192].unflatten(-1, (2, 1, 32))
    high = torch.cat([high >> s & 3 for s in (0, 2, 4, 6)], -2).flatten(-3)
    lanes = _by_lane((low | high << 4).unflatten(-1, (8, 32)))
    scales = x[..., 192:208].unflatten(-1, (8, 2))
    return torch.cat((_nibbles_in(lanes), _crumbs_in(lanes), _pairs_in(scales), _pairs_in(x[..., 208:])), -1)


def _half(x: Tensor) -> Tensor:
    """[..., 2 n] bytes -> [..., n] float32."""
    return x.contiguous().view(torch.float16).float()


def _to_rows(x: Tensor) -> Tensor:
    """[group, 2, 8, chunk, block, 32] -> [row, column]."""
    return x.flatten(0, 2).flatten(1)


def _decode_q8_0(records: Tensor) -> Tensor:
    codes = _from_lanes(records[..., :1024].unflatten(-1, (2, 32, 2, 8)))
    q = codes.short() - 128
    return _to_rows(q * _half(_pairs_out(records[..., 1024:], 2, 2)))


def _decode_q4_0(records: Tensor) -> Tensor:
    q = _from_lanes(_nibbles_out(records[..., :1024], 4)).short() - 8
    return _to_rows(q * _half(_pairs_out(records[..., 1024:], 4, 2)))


def _decode_q4_k(records: Tensor) -> Tensor:
    q = _from_lanes(_nibbles_out(records[..., :2048], 8))
    both = _pairs_out(records[..., 2048:2304], 8, 2)
    d = _half(_pairs_out(records[..., 2304:], 4)).unsqueeze(-2)
    return _to_rows((d[..., :1] * both[..., :1]) * q - d[..., 1:] * both[..., 1:])


def _decode_q6_k(records: Tensor) -> Tensor:
    lanes = _nibbles_out(records[..., :2048], 8) | _crumbs_out(records[..., 2048:3072], 8) << 4
    q = _from_lanes(lanes).short() - 32
    scales = _pairs_out(records[..., 3072:3328], 8, 2).contiguous().view(torch.int8)
    d = _half(_pairs_out(records[..., 3328:], 2)).unsqueeze(-2)
    return _to_rows((d * scales).repeat_interleave(16, -1) * q)


_ENCODERS: dict[GGMLType, Callable[[Tensor], Tensor]] = {
    GGMLType.Q8_0: _encode_q8_0,
    GGMLType.Q4_0: _encode_q4_0,
    GGMLType.Q4_K: _encode_q4_k,
    GGMLType.Q6_K: _encode_q6_k,
}
_DECODERS: dict[GGMLType, Callable[[Tensor], Tensor]] = {
    GGMLType.Q8_0: _decode_q8_0,
    GGMLType.Q4_0: _decode_q4_0,
    GGMLType.Q4_K: _decode_q4_k,
    GGMLType.Q6_K: _decode_q6_k,
}
