"""Quantised matrices as the Triton kernel streams them: tiles of 64 rows and 64 columns, repacked once at load from the file's blocks.

A tile lies together, so that any way of reading it is one stretch: codes [tile, chunk, 64 rows, bytes], scales [tile, group, 64 rows]. A
group is as many columns as share a scale. Rows and columns are padded to whole tiles with scales of zero. Codes are whole: four bits and,
of types that have more, two high bits in a plane of their own; no weight is rounded. Bytes over those of the file's blocks:

    Q8_0 Q4_0 Q4_1 Q6_K IQ4_NL MXFP4 NVFP4   the same
    Q4_K +2.8 %, IQ4_XS +3 %                 scales of six bits become bytes
    Q5_0, Q5_1, Q5_K +17 to 21 %             their upper bit has the place of two
    Q3_K +49 %, Q2_K +71 %                   codes of two and three bits become four
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.ops.linear.dequant import E2M1, IQ4
from pyspec.gguf import GGMLType, blocks
from pyspec.gguf.blocks import BlockLayout

ROWS = COLUMNS = 64  # of a tile
BIAS = 128  # codes of eight bits lie this much higher than what they stand for
_SLICE = 1 << 26  # weights repacked at once: bounds the temporaries to about 0.5 GB


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix in parts, each in the order of columns.

    values  [row, n_in] uint8             codes
    scales  [row, group]                  of a group; times `supers`, where there are any
    minima  [row, group] or None          what is taken off, likewise
    supers  [row, n] f16 or None          of several groups; and those of the minima
    """

    values: Tensor
    scales: Tensor
    minima: Tensor | None = None
    supers: Tensor | None = None
    super_minima: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TiledFormat:
    """How matrices of a type are held.

    bits     8, or 4 and `high` more (0 or 2)
    group    columns that share a scale
    offset   taken off a code
    table    what codes stand for, in place of themselves
    scale    "": a number; "e4m3", "e8m0": a code for one
    span     groups that share a super-scale; 0: none
    """

    split: Callable[[Tensor], Codes]
    bits: int = 4
    high: int = 0
    group: int = 32
    offset: int = 0
    table: tuple[int, ...] = ()
    scale: str = ""
    span: int = 0
    minima: bool = False


@dataclass(frozen=True, slots=True)
class TiledMatrix:
    """A repacked matrix of n_out rows and n_in columns.

    codes   [tile, chunk, 64, 64 or 32] uint8
    high    [tile, chunk, 64, 16] uint8 or None
    scales, minima              [tile, group, 64]; supers, super_minima  [tile, span, 64]
    row_scales  [n_out] f32 or None: what each row's products are multiplied with
    """

    type: GGMLType
    n_out: int
    n_in: int
    codes: Tensor
    high: Tensor | None
    scales: Tensor
    minima: Tensor | None
    supers: Tensor | None
    super_minima: Tensor | None
    row_scales: Tensor | None

    def copied(self) -> TiledMatrix:
        """The same in memory of its own."""
        whole = {f.name: getattr(self, f.name) for f in fields(self)}
        return TiledMatrix(**{name: x.clone() if isinstance(x, Tensor) else x for name, x in whole.items()})


def tile(raw: Tensor, type: GGMLType, shape: tuple[int, int], row_scales: Tensor | None = None) -> TiledMatrix:
    """The file's bytes of a matrix [n_out, n_in] repacked, on raw's device."""
    n_out, n_in = shape
    form, rows = FORMATS[type], raw.reshape(n_out, n_in // type.block_size, type.type_size)
    step = max(1, _SLICE // (ROWS * n_in)) * ROWS
    parts = [_tiles(form, form.split(part), n_in) for part in rows.split(step)]
    joined = [None if p[0] is None else torch.cat(p) if len(p) > 1 else p[0] for p in zip(*parts, strict=True)]
    codes, high, scales, *rest = joined
    assert codes is not None and scales is not None
    return TiledMatrix(type, n_out, n_in, codes, high, scales, *rest, row_scales)


def _tiles(form: TiledFormat, c: Codes, n_in: int) -> tuple[Tensor | None, ...]:
    q = _blocked(c.values, COLUMNS)  # [tile, chunk, row, 64]
    high = None
    if form.bits == 4:
        low, high_bits = (q & 15).unflatten(-1, (2, 32)), q >> 4
        high = _high(high_bits, form.high) if form.high else None
        q = low[..., 0, :] | low[..., 1, :] << 4
    of_groups = [None if x is None else _by_group(x, n_in // form.group, form.group) for x in (c.scales, c.minima)]
    spans = [
        None if x is None else _by_group(x, x.shape[1], form.group * form.span) for x in (c.supers, c.super_minima)
    ]
    return q.contiguous(), high, *of_groups, *spans


def _blocked(x: Tensor, width: int) -> Tensor:
    """[row, n] -> [tile, chunk, 64, width], padded with zeros."""
    x = F.pad(x, (0, -x.shape[1] % width, 0, -x.shape[0] % ROWS))
    return x.view(-1, ROWS, x.shape[1] // width, width).transpose(1, 2)


def _by_group(x: Tensor, n: int, columns: int) -> Tensor:
    """[row, n] -> [tile, n, 64], with as many groups as whole chunks have."""
    more = -(n * columns) % COLUMNS // columns if columns < COLUMNS else 0
    x = F.pad(x, (0, more, 0, -x.shape[0] % ROWS))
    return x.view(-1, ROWS, x.shape[1]).transpose(1, 2).contiguous()


def _high(q: Tensor, n: int) -> Tensor:
    """[..., 64] codes of n bits -> [..., 8 n] bytes: byte b has those of columns b, b + 8 n, b + 16 n, ..."""
    parts = q.unflatten(-1, (8 // n, 8 * n))
    out = parts[..., 0, :].clone()
    for i in range(1, 8 // n):
        out |= parts[..., i, :] << (n * i)
    return out.contiguous()


def untiled(m: TiledMatrix, first: int = 0, end: int | None = None) -> Tensor:
    """[end - first, n_in] f32: the weights of some rows; `first` is that of a tile."""
    form, end = FORMATS[m.type], m.n_out if end is None else min(end, m.n_out)
    assert first % ROWS == 0
    at = slice(first // ROWS, -(-end // ROWS))

    def rows_of(x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1).flatten(1)

    q = m.codes[at]
    if form.bits == 4:
        q = torch.cat((q & 15, q >> 4), -1)
        if m.high is not None:
            n = form.high
            parts = [(m.high[at] >> (n * i)) & ((1 << n) - 1) for i in range(8 // n)]
            q = q | torch.cat(parts, -1) << 4
    q = rows_of(q)
    values = q.short() - (BIAS if form.bits == 8 else form.offset)
    w = torch.tensor(form.table, dtype=torch.float32, device=q.device)[q.long()] if form.table else values.float()

    def spread(x: Tensor, by: Tensor | None) -> Tensor:
        s = _number(rows_of(x[at, :, :, None]), form.scale)
        if by is not None:
            s = s * rows_of(by[at, :, :, None]).float().repeat_interleave(form.span, 1)[:, : s.shape[1]]
        return s.repeat_interleave(form.group, 1)

    w = w * spread(m.scales, m.supers)
    if m.minima is not None:
        w = w - spread(m.minima, m.super_minima)
    w = w[: end - first, : m.n_in]
    return w if m.row_scales is None else w * m.row_scales[first:end, None]


def _number(x: Tensor, kind: str) -> Tensor:
    if kind == "e4m3":
        return (x.short() << 7).view(torch.float16).float() * 128.0
    if kind == "e8m0":
        return (x.int() << 23).view(torch.float32) * 0.5
    return x.float()


# -- the types ---------------------------------------------------------------------------------------------------


def _field(rows: Tensor, layout: type[BlockLayout], name: str) -> Tensor:
    """[row, block, bytes] of a field."""
    field = getattr(layout, name)
    return rows[..., field.offset : field.offset + field.size]


def _half(rows: Tensor, layout: type[BlockLayout], name: str) -> Tensor:
    """[row, block] f16."""
    return _field(rows, layout, name).contiguous().view(torch.float16).squeeze(-1)


def _nibbles(x: Tensor) -> Tensor:
    """[..., w] bytes -> [..., 2 w]: low nibbles, then high ones."""
    return torch.cat((x & 15, x >> 4), -1)


def _fields(x: Tensor, n: int) -> Tensor:
    """[..., w] bytes -> [..., 8 // n, w]: fields of n bits, lowest first."""
    return torch.stack([x >> (n * i) & ((1 << n) - 1) for i in range(8 // n)], -2)


def _q8_0(rows: Tensor) -> Codes:
    return Codes(_field(rows, blocks.BlockQ8_0, "qs").flatten(1) ^ BIAS, _half(rows, blocks.BlockQ8_0, "d"))


def _simple(
    layout: type[BlockLayout], *, has_minima: bool = False, has_high: bool = False
) -> Callable[[Tensor], Codes]:
    """Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL."""

    def split(rows: Tensor) -> Codes:
        q = _nibbles(_field(rows, layout, "qs"))
        if has_high:
            q = q | _fields(_field(rows, layout, "qh"), 1).transpose(-1, -2).flatten(-2) << 4
        return Codes(q.flatten(1), _half(rows, layout, "d"), -_half(rows, layout, "m") if has_minima else None)

    return split


def _k_scales(rows: Tensor, layout: type[BlockLayout]) -> tuple[Tensor, Tensor]:
    """[row, group] scales and minima of Q4_K and Q5_K."""
    scale, low, rest = _field(rows, layout, "scales").unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((scale & 63, (rest & 15) | ((scale >> 2) & 48)), -1)
    lows = torch.cat((low & 63, (rest >> 4) | ((low >> 2) & 48)), -1)
    return scales.flatten(1), lows.flatten(1)


def _k_four(layout: type[BlockLayout]) -> Callable[[Tensor], Codes]:
    def split(rows: Tensor) -> Codes:
        q = _fields(_field(rows, layout, "qs").unflatten(-1, (4, 32)), 4).flatten(-3, -2)  # [row, block, 8, 32]
        if hasattr(layout, "qh"):
            q = q | _fields(_field(rows, layout, "qh"), 1) << 4
        return Codes(q.flatten(1), *_k_scales(rows, layout), _half(rows, layout, "d"), _half(rows, layout, "dmin"))

    return split


def _q6_k(rows: Tensor) -> Codes:
    layout = blocks.BlockQ6_K
    low = _fields(_field(rows, layout, "ql").unflatten(-1, (2, 64)), 4)
    high = _fields(_field(rows, layout, "qh").unflatten(-1, (2, 32)), 2)
    q = low.flatten(2) | high.flatten(2) << 4
    return Codes(
        q.flatten(1),
        _field(rows, layout, "scales").contiguous().view(torch.int8).flatten(1),
        None,
        _half(rows, layout, "d"),
    )


def _two_bits(rows: Tensor, layout: type[BlockLayout]) -> Tensor:
    """[row, n_in] codes of two bits of Q2_K and Q3_K."""
    return _fields(_field(rows, layout, "qs").unflatten(-1, (2, 32)), 2).flatten(1)


def _q2_k(rows: Tensor) -> Codes:
    layout = blocks.BlockQ2_K
    scales = _field(rows, layout, "scales").flatten(1)
    return Codes(
        _two_bits(rows, layout), scales & 15, scales >> 4, _half(rows, layout, "d"), _half(rows, layout, "dmin")
    )


def _q3_k(rows: Tensor) -> Codes:
    layout = blocks.BlockQ3_K
    packed = _field(rows, layout, "scales")
    low, high = _fields(packed[..., :8], 4).flatten(2), _fields(packed[..., 8:], 2).flatten(2)
    scales = ((low | high << 4).view(torch.int8) - 32).flatten(1)
    above = _fields(_field(rows, layout, "hmask"), 1).flatten(1)
    return Codes(_two_bits(rows, layout) | above << 2, scales, None, _half(rows, layout, "d"))


def _iq4_xs(rows: Tensor) -> Codes:
    layout = blocks.BlockIQ4_XS
    low = _fields(_field(rows, layout, "scales_l").unsqueeze(-1), 4).flatten(2)
    high = _fields(_field(rows, layout, "scales_h").unsqueeze(-1), 2).flatten(2)
    q = _nibbles(_field(rows, layout, "qs").unflatten(-1, (8, 16)))
    return Codes(q.flatten(1), ((low | high << 4).view(torch.int8) - 32).flatten(1), None, _half(rows, layout, "d"))


def _mxfp4(rows: Tensor) -> Codes:
    q = _nibbles(_field(rows, blocks.BlockMXFP4, "qs"))
    return Codes(q.flatten(1), _field(rows, blocks.BlockMXFP4, "e").flatten(1))


def _nvfp4(rows: Tensor) -> Codes:
    scales = _field(rows, blocks.BlockNVFP4, "d").flatten(1)
    q = _nibbles(_field(rows, blocks.BlockNVFP4, "qs").unflatten(-1, (4, 8)))
    return Codes(q.flatten(1), (scales & 0x7F).where(scales != 0x7F, 0))


FORMATS = {
    GGMLType.Q8_0: TiledFormat(_q8_0, bits=8),
    GGMLType.Q4_0: TiledFormat(_simple(blocks.BlockQ4_0), offset=8),
    GGMLType.Q4_1: TiledFormat(_simple(blocks.BlockQ4_1, has_minima=True), minima=True),
    GGMLType.Q5_0: TiledFormat(_simple(blocks.BlockQ5_0, has_high=True), high=2, offset=16),
    GGMLType.Q5_1: TiledFormat(_simple(blocks.BlockQ5_1, has_minima=True, has_high=True), high=2, minima=True),
    GGMLType.Q4_K: TiledFormat(_k_four(blocks.BlockQ4_K), span=8, minima=True),
    GGMLType.Q5_K: TiledFormat(_k_four(blocks.BlockQ5_K), high=2, span=8, minima=True),
    GGMLType.Q6_K: TiledFormat(_q6_k, high=2, group=16, offset=32, span=16),
    GGMLType.Q2_K: TiledFormat(_q2_k, group=16, span=16, minima=True),
    GGMLType.Q3_K: TiledFormat(_q3_k, group=16, offset=4, span=16),
    GGMLType.IQ4_NL: TiledFormat(_simple(blocks.BlockIQ4_NL), table=IQ4),
    GGMLType.IQ4_XS: TiledFormat(_iq4_xs, table=IQ4, span=8),
    GGMLType.MXFP4: TiledFormat(_mxfp4, table=E2M1, scale="e8m0"),
    GGMLType.NVFP4: TiledFormat(_nvfp4, group=16, table=E2M1, scale="e4m3"),
}
