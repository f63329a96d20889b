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

from pyspec.cuda.ops.linear import grids, planes
from pyspec.cuda.ops.linear.dequant import E2M1, IQ4, e8m0, ue4m3
from pyspec.errors import ModelError
from pyspec.gguf import GGMLType

# Code of the scale 2^7, the largest of linear_wgmma's f16 weights; no model comes near it
MXFP4_LARGEST = 127 + 7


@dataclass(frozen=True, slots=True)
class Format:
    """How matrices of a type are packed.

    code    the type's number in quants.cuh
    chunk   blocks of 32 columns in a record
    record  bytes of one
    encode  the file's blocks [group, 2, 8, chunk, block, type_size] -> records [group, chunk, record]
    decode  records -> weights [group, 2, 8, chunk, block, 32] f32
    minima  weights are scale * code - minimum: the kernels need sums of the rows, too
    scaled  a second scale for each row
    split   the file's rows [row, block, type_size] -> the rows that are encoded, and the factor of each
    moved   as `encode`, but for the bytes of a record from `raised` on, which are higher by one there; None: `encode` is that
    """

    code: int
    chunk: int
    record: int
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    minima: bool = False
    scaled: bool = False
    split: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    moved: Callable[[Tensor], Tensor] | None = None
    raised: int = 0


def _nibbles(x: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2 n]: low nibbles, then high ones."""
    return torch.cat((x & 15, x >> 4), -1)


def _eight_blocks(qs: Tensor) -> Tensor:
    """[..., 128] bytes of a K block -> [..., 8, 32] nibbles: blocks 2 i in the low ones of 32 bytes, 2 i + 1 in the high."""
    q = qs.unflatten(-1, (4, 1, 32))
    return torch.cat((q & 15, q >> 4), -2).flatten(-3, -2)


def _half(x: Tensor) -> Tensor:
    """[..., 2 n] bytes -> [..., n] float32."""
    return x.contiguous().view(torch.float16).float()


def _values(codes: Tensor, table: tuple[int, ...]) -> Tensor:
    return torch.tensor(table, dtype=torch.float32, device=codes.device)[codes.int()]


def _encode_f16(blocks: Tensor) -> Tensor:
    lanes = planes.by_lane(blocks.contiguous().view(torch.int16).flatten(-2).unflatten(-1, (-1, 32)))
    return planes.halves_in(lanes)


def _decode_f16(records: Tensor) -> Tensor:
    return planes.from_lanes(planes.halves_out(records)).contiguous().view(torch.float16).float()


def _split_bf16(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Over the power of two that brings a row's largest to 2^14 or more: f16 holds 2^15, and 2^-17 with all bits."""
    x = rows.contiguous().view(torch.bfloat16).float().flatten(1)
    exponents = torch.frexp(x.abs().amax(1)).exponent.clamp(-111, 128) - 15  # normal numbers
    powers = torch.ldexp(torch.ones_like(x[:, 0]), exponents)
    return (x / powers[:, None]).half().view(torch.uint8).view(rows.shape), powers


def _encode_q8_0(blocks: Tensor) -> Tensor:
    codes = planes.by_lane(blocks[..., 2:] ^ 128).flatten(2)
    return torch.cat((codes, planes.pairs_in(blocks[..., :2])), -1)


def _decode_q8_0(records: Tensor) -> Tensor:
    codes = planes.from_lanes(records[..., :1024].unflatten(-1, (2, 32, 2, 8)))
    return (codes.short() - 128) * _half(planes.pairs_out(records[..., 1024:], 2, 2))


def _encode_q4(n_half: int, order: tuple[int, ...] = planes.SPREAD) -> Callable[[Tensor], Tensor]:
    """Q4_0, Q4_1, IQ4_NL: n_half half floats, then nibbles."""

    def encode(blocks: Tensor) -> Tensor:
        lanes = planes.by_lane(_nibbles(blocks[..., 2 * n_half :]))
        return torch.cat(
            (planes.nibbles_in(lanes, order), planes.pairs_in(blocks[..., : 2 * n_half])), -1
        )

    return encode


def _decode_q4_0(records: Tensor) -> Tensor:
    q = planes.from_lanes(planes.nibbles_out(records[..., :1024])).short() - 8
    return q * _half(planes.pairs_out(records[..., 1024:], 4, 2))


def _decode_q4_1(records: Tensor) -> Tensor:
    q = planes.from_lanes(planes.nibbles_out(records[..., :1024]))
    d = _half(planes.pairs_out(records[..., 1024:], 4, 4))
    return d[..., :1] * q + d[..., 1:]


def _decode_iq4_nl(records: Tensor) -> Tensor:
    q = planes.from_lanes(planes.nibbles_out(records[..., :1024], planes.NATURAL))
    return _half(planes.pairs_out(records[..., 1024:], 4, 2)) * _values(q, IQ4)


def _encode_q5(n_half: int) -> Callable[[Tensor], Tensor]:
    """Q5_0, Q5_1: n_half half floats, 32 high bits, then nibbles."""

    def encode(blocks: Tensor) -> Tensor:
        at = 2 * n_half
        shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device)
        high = (blocks[..., at : at + 4].unsqueeze(-1) >> shifts & 1).flatten(-2)
        lanes = planes.by_lane(_nibbles(blocks[..., at + 4 :]) | high << 4)
        return torch.cat(
            (planes.nibbles_in(lanes), planes.bits_in(lanes), planes.pairs_in(blocks[..., :at])), -1
        )

    return encode


def _five_out(records: Tensor, n_block: int) -> Tensor:
    low, high = records[..., : n_block * 256], records[..., n_block * 256 : n_block * 320]
    return planes.from_lanes(planes.nibbles_out(low) | planes.bits_out(high) << 4)


def _decode_q5_0(records: Tensor) -> Tensor:
    return (_five_out(records, 4).short() - 16) * _half(planes.pairs_out(records[..., 1280:], 4, 2))


def _decode_q5_1(records: Tensor) -> Tensor:
    d = _half(planes.pairs_out(records[..., 1280:], 4, 4))
    return d[..., :1] * _five_out(records, 4) + d[..., 1:]


def _six_bit_scales(x: Tensor) -> Tensor:
    """[..., 8, 2] scales and minima of the 12 bytes of Q4_K and Q5_K."""
    scale, low, rest = x.unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((scale & 63, (rest & 15) | ((scale >> 2) & 48)), -1)
    lows = torch.cat((low & 63, (rest >> 4) | ((low >> 2) & 48)), -1)
    return torch.stack((scales, lows), -1)


def _encode_q4_k(blocks: Tensor) -> Tensor:
    x = blocks.squeeze(-2)  # one block of 256 is one chunk
    lanes = planes.by_lane(_eight_blocks(x[..., 16:]))
    scales = planes.pairs_in(_six_bit_scales(x[..., 4:16]))
    return torch.cat((planes.nibbles_in(lanes), scales, planes.pairs_in(x[..., :4])), -1)


def _encode_q5_k(blocks: Tensor) -> Tensor:
    x = blocks.squeeze(-2)
    high = torch.stack([x[..., 16:48] >> i & 1 for i in range(8)], -2)
    lanes = planes.by_lane(_eight_blocks(x[..., 48:]) | high << 4)
    scales = planes.pairs_in(_six_bit_scales(x[..., 4:16]))
    return torch.cat(
        (planes.nibbles_in(lanes), planes.bits_in(lanes), scales, planes.pairs_in(x[..., :4])), -1
    )


def _scaled_less_minima(q: Tensor, scales: Tensor) -> Tensor:
    both = planes.pairs_out(scales[..., :256], 8, 2)
    d = _half(planes.pairs_out(scales[..., 256:], 4)).unsqueeze(-2)
    return (d[..., :1] * both[..., :1]) * q - d[..., 1:] * both[..., 1:]


def _decode_q4_k(records: Tensor) -> Tensor:
    q = planes.from_lanes(planes.nibbles_out(records[..., :2048]))
    return _scaled_less_minima(q, records[..., 2048:])


def _decode_q5_k(records: Tensor) -> Tensor:
    return _scaled_less_minima(_five_out(records, 8), records[..., 2560:])


def _encode_q6_k(blocks: Tensor) -> Tensor:
    x = blocks.squeeze(-2)
    low = x[..., :128].unflatten(-1, (2, 1, 64))
    low = torch.cat((low & 15, low >> 4), -2).flatten(-3)
    high = x[..., 128:192].unflatten(-1, (2, 1, 32))
    high = torch.cat([high >> s & 3 for s in (0, 2, 4, 6)], -2).flatten(-3)
    lanes = planes.by_lane((low | high << 4).unflatten(-1, (8, 32)))
    scales = planes.pairs_in(x[..., 192:208].unflatten(-1, (8, 2)))
    return torch.cat(
        (planes.nibbles_in(lanes), planes.crumbs_in(lanes), scales, planes.pairs_in(x[..., 208:])), -1
    )


def _decode_q6_k(records: Tensor) -> Tensor:
    lanes = planes.nibbles_out(records[..., :2048]) | planes.crumbs_out(records[..., 2048:3072]) << 4
    q = planes.from_lanes(lanes).short() - 32
    scales = planes.pairs_out(records[..., 3072:3328], 8, 2).contiguous().view(torch.int8)
    d = _half(planes.pairs_out(records[..., 3328:], 2)).unsqueeze(-2)
    return (d * scales).repeat_interleave(16, -1) * q


def _encode_iq4_xs(blocks: Tensor) -> Tensor:
    x = blocks.squeeze(-2)
    high = torch.stack([x[..., 2:4] >> s & 3 for s in (0, 2, 4, 6)], -1).flatten(-2)
    low = torch.stack((x[..., 4:8] & 15, x[..., 4:8] >> 4), -1).flatten(-2)
    lanes = planes.by_lane(_nibbles(x[..., 8:].unflatten(-1, (8, 16))))
    scales = planes.bytes_in((low | high << 4) - 32)  # int8 from here on
    return torch.cat((planes.nibbles_in(lanes, planes.NATURAL), scales, planes.pairs_in(x[..., :2])), -1)


def _decode_iq4_xs(records: Tensor) -> Tensor:
    q = planes.from_lanes(planes.nibbles_out(records[..., :2048], planes.NATURAL))
    scales = planes.bytes_out(records[..., 2048:2176]).contiguous().view(torch.int8)
    return (_half(planes.pairs_out(records[..., 2176:], 2)) * scales).unsqueeze(-1) * _values(q, IQ4)


def _two_bits(qs: Tensor) -> Tensor:
    """[..., 64] bytes of a K block -> [..., 8, 32] codes 0..3."""
    q = qs.unflatten(-1, (2, 1, 32))
    return torch.cat([q >> s & 3 for s in (0, 2, 4, 6)], -2).flatten(-3, -2)


def _encode_q2_k(blocks: Tensor) -> Tensor:
    x = blocks.squeeze(-2)
    scales = planes.pairs_in(x[..., :16].unflatten(-1, (8, 2)))
    codes = planes.columns_in(planes.by_lane(_two_bits(x[..., 16:80])))
    return torch.cat((codes, scales, planes.pairs_in(x[..., 80:])), -1)


def _decode_q2_k(records: Tensor) -> Tensor:
    q = planes.from_lanes(planes.columns_out(records[..., :1024]))
    both = planes.pairs_out(records[..., 1024:1280], 8, 2)
    d = _half(planes.pairs_out(records[..., 1280:], 4)).unsqueeze(-2)
    scale, low = d[..., :1] * (both & 15), d[..., 1:] * (both >> 4)
    return scale.repeat_interleave(16, -1) * q - low.repeat_interleave(16, -1)


def _encode_q3_k(blocks: Tensor) -> Tensor:
    x = blocks.squeeze(-2)
    high = torch.stack([x[..., :32] >> i & 1 for i in range(8)], -2)
    lanes = planes.by_lane(_two_bits(x[..., 32:96]) | high << 2)
    low, rest = _nibbles(x[..., 96:104]), x[..., 104:108]
    scales = (low | torch.cat([rest >> s & 3 for s in (0, 2, 4, 6)], -1) << 4) - 32  # int8 from here on
    scales = planes.pairs_in(scales.unflatten(-1, (8, 2)))
    return torch.cat(
        (planes.crumbs_in(lanes, 0), planes.bits_in(lanes, 2), scales, planes.pairs_in(x[..., 108:])), -1
    )


def _decode_q3_k(records: Tensor) -> Tensor:
    q = (
        planes.from_lanes(
            planes.crumbs_out(records[..., :1024]) | planes.bits_out(records[..., 1024:1536]) << 2
        ).short()
        - 4
    )
    scales = planes.pairs_out(records[..., 1536:1792], 8, 2).contiguous().view(torch.int8)
    d = _half(planes.pairs_out(records[..., 1792:], 2)).unsqueeze(-2)
    return (d * scales).repeat_interleave(16, -1) * q


def lattice(points: Tensor, grid: Tensor, words: Tensor, plus: int) -> tuple[Tensor, Tensor]:
    """Codes of the values of lattice points, and the scales, odd numbers.

    points  [..., 8, n] uint8   of 32 weights each
    grid    [256, 32 / n] uint8 levels of a point
    words   [..., 8, 4] uint8   signs and scales
    plus    the amount that a minus adds to a level
    """
    levels = grid[points.int()].flatten(-2)
    word = words.contiguous().view(torch.int32)
    signs = torch.tensor(
        [b.bit_count() % 2 << 7 | b for b in range(128)], dtype=torch.uint8, device=points.device
    )
    picked = signs[torch.cat([word >> s & 127 for s in (0, 7, 14, 21)], -1)]
    minus = torch.stack([picked >> k & 1 for k in range(8)], -1).flatten(-2)
    return levels + plus * minus, ((word >> 28 & 15) * 2 + 1).squeeze(-1).to(torch.uint8)


def _encode_iq2_xxs(blocks: Tensor) -> Tensor:
    x = blocks.squeeze(-2)
    groups = x[..., 2:].unflatten(-1, (8, 8))
    codes, scales = lattice(groups[..., :4], grids.iq2_levels(x.device), groups[..., 4:], 4)
    lanes = planes.by_lane(codes)
    return torch.cat(
        (
            planes.levels_in(lanes),
            planes.signs_in(lanes),
            planes.bytes_in(scales),
            planes.pairs_in(x[..., :2]),
        ),
        -1,
    )


def _decode_iq2_xxs(records: Tensor) -> Tensor:
    q = planes.from_lanes(
        planes.levels_out(records[..., :1024]) | planes.signs_out(records[..., 1024:1536]) << 2
    )
    scales = planes.bytes_out(records[..., 1536:1664]).contiguous().view(torch.int8)
    table = (*grids.IQ2_LEVELS, 0, *(-x for x in grids.IQ2_LEVELS), 0)
    return (_half(planes.pairs_out(records[..., 1664:], 2)) * 0.125 * scales).unsqueeze(-1) * _values(
        q, table
    )


def _encode_iq3_xxs(blocks: Tensor) -> Tensor:
    x = blocks.squeeze(-2)
    points, words = x[..., 2:66].unflatten(-1, (8, 8)), x[..., 66:].unflatten(-1, (8, 4))
    codes, scales = lattice(points, grids.iq3_levels(x.device), words, 8)
    lanes = planes.by_lane(codes)
    return torch.cat(
        (planes.nibbles_in(lanes, planes.NATURAL), planes.bytes_in(scales), planes.pairs_in(x[..., :2])),
        -1,
    )


def _decode_iq3_xxs(records: Tensor) -> Tensor:
    q = planes.from_lanes(planes.nibbles_out(records[..., :2048], planes.NATURAL))
    scales = planes.bytes_out(records[..., 2048:2176]).contiguous().view(torch.int8)
    table = (*grids.IQ3_LEVELS, *(-x for x in grids.IQ3_LEVELS))
    return (_half(planes.pairs_out(records[..., 2176:], 2)) * 0.25 * scales).unsqueeze(-1) * _values(
        q, table
    )


def _encode_mxfp4(blocks: Tensor) -> Tensor:
    if (blocks[..., 0] > MXFP4_LARGEST).any():
        raise ModelError(
            f"an MXFP4 scale of 2^{int(blocks[..., 0].max()) - 127}; up to 2^7 the kernels can hold"
        )
    records = _moved_mxfp4(blocks)
    # So that the smallest scale, a denormal number in f32, is a normal one as well
    records[..., 1024:] += 1
    return records


def _moved_mxfp4(blocks: Tensor) -> Tensor:
    """Scales as they are in the file, of any size."""
    lanes = planes.by_lane(_nibbles(blocks[..., 1:]))
    return torch.cat((planes.e2m1_in(lanes), planes.bytes_in(blocks[..., 0])), -1)


def _decode_mxfp4(records: Tensor) -> Tensor:
    q = planes.from_lanes(planes.e2m1_out(records[..., :1024]))
    return e8m0(q.device)[planes.bytes_out(records[..., 1024:]).int() - 1].unsqueeze(-1) * _values(
        q, E2M1
    )


def _encode_nvfp4(blocks: Tensor) -> Tensor:
    scales = blocks[..., :4]
    # 0x7f counts as zero; 0xff, of no use, as 480
    scales = torch.where(scales == 0x7F, 0, scales & 0x7F)
    codes = _nibbles(blocks[..., 4:].unflatten(-1, (4, 8))).flatten(-2)  # two blocks of 32
    lanes = planes.by_lane(codes.unflatten(-1, (2, 32)).flatten(-3, -2))
    scales = planes.pairs_in(_e5m3(scales).unflatten(-1, (2, 2)).flatten(-3, -2))
    return torch.cat((planes.e2m1_in(lanes), scales), -1)


def _decode_nvfp4(records: Tensor) -> Tensor:
    q = planes.from_lanes(planes.e2m1_out(records[..., :1024]))
    scales = (planes.pairs_out(records[..., 1024:], 4, 2).short() << 7).view(torch.float16).float() / 2
    return scales.repeat_interleave(16, -1) * _values(q, E2M1)


def _e5m3(scales: Tensor) -> Tensor:
    """Scales of the file (e4m3 without a sign) as the upper bits of their f16, whose exponents are longer: denormals end."""
    exact = 2 * ue4m3(scales.device)[scales.int() | 0x80]
    return (exact.half().view(torch.int16) >> 7).to(torch.uint8)


FORMATS: dict[GGMLType, Format] = {
    GGMLType.Q8_0: Format(0, 2, 1088, _encode_q8_0, _decode_q8_0),
    GGMLType.Q4_0: Format(1, 4, 1152, _encode_q4(1), _decode_q4_0),
    GGMLType.Q4_1: Format(2, 4, 1280, _encode_q4(2), _decode_q4_1, minima=True),
    GGMLType.Q5_0: Format(3, 4, 1408, _encode_q5(1), _decode_q5_0),
    GGMLType.Q5_1: Format(4, 4, 1536, _encode_q5(2), _decode_q5_1, minima=True),
    GGMLType.Q4_K: Format(5, 8, 2368, _encode_q4_k, _decode_q4_k, minima=True),
    GGMLType.Q5_K: Format(6, 8, 2880, _encode_q5_k, _decode_q5_k, minima=True),
    GGMLType.Q6_K: Format(7, 8, 3360, _encode_q6_k, _decode_q6_k),
    GGMLType.IQ4_NL: Format(8, 4, 1152, _encode_q4(1, planes.NATURAL), _decode_iq4_nl),
    GGMLType.IQ4_XS: Format(9, 8, 2208, _encode_iq4_xs, _decode_iq4_xs),
    GGMLType.MXFP4: Format(10, 4, 1088, _encode_mxfp4, _decode_mxfp4, moved=_moved_mxfp4, raised=1024),
    GGMLType.NVFP4: Format(11, 4, 1152, _encode_nvfp4, _decode_nvfp4, scaled=True),
    GGMLType.F16: Format(12, 2, 2048, _encode_f16, _decode_f16),
    GGMLType.Q2_K: Format(14, 8, 1344, _encode_q2_k, _decode_q2_k),
    GGMLType.Q3_K: Format(15, 8, 1824, _encode_q3_k, _decode_q3_k),
    GGMLType.IQ2_XXS: Format(16, 8, 1696, _encode_iq2_xxs, _decode_iq2_xxs),
    GGMLType.IQ3_XXS: Format(17, 8, 2208, _encode_iq3_xxs, _decode_iq3_xxs),
    GGMLType.BF16: Format(13, 2, 2048, _encode_f16, _decode_f16, scaled=True, split=_split_bf16),
}
CHUNKS = {type: kind.chunk for type, kind in FORMATS.items()}
RECORDS = {type: kind.record for type, kind in FORMATS.items()}
