"""Quantised matrices as the Triton kernel streams them: tiles of 64 rows and 64 columns, repacked once at load from the file's blocks.

A tile is contiguous, so that any way of reading it is one stretch: codes [tile, chunk, piece, 64 rows, bytes], where a piece is the part that the
kernel loads at once (so a warp's load is one stretch, too, and not every other 16 or 32 bytes), and of each row and chunk the scales
in one number. A group is as many columns as share a scale. Rows and columns are padded to whole tiles with zeros. Codes are whole: eight, four
or two bits and, of types that have more, one or two upper bits in a plane of their own; no weight is rounded. Tiles take as many bytes as the
records of the CUDA kernels (pack.py, where their sizes over the file's blocks are), so a memory plan counts those.

Sixteen columns are a quarter of a chunk. Of `bits` in a byte the lowest are those of the first columns: of four bits byte b of 32 has columns b
and b + 32; of two, byte b of 16 has one column of each quarter, as have upper bits in twos. Single upper bits lie for two chunks in one
byte: bit (i % 2) + 2 p + 4 (i / 2) of byte b is that of quarter i of chunk p.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.ops.linear.dequant import E2M1, IQ4
from pyspec.cuda.ops.linear.formats import lattice
from pyspec.cuda.ops.linear.grids import IQ2_LEVELS, IQ3_LEVELS, iq2_levels, iq3_levels
from pyspec.gguf import GGMLType, blocks
from pyspec.gguf.blocks import BlockLayout

ROWS = COLUMNS = 64  # of a tile
QUARTER = 16  # columns
BIAS = 128  # codes of eight bits, and values from a table, are this much higher than the weights
_SLICE = 1 << 26  # weights repacked at once: bounds the temporaries to about 0.5 GB


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix in parts, each in the order of columns.

    values  [row, n_in] uint8             codes
    scales  [row, group] f16 or uint8     of a group; times `supers`, if there are any
    minima  [row, group] or None          subtracted, likewise
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

    bits     8, 4 or 2, and `high` more: 0, 1 or 2
    group    columns that share a scale
    offset   taken off a code
    table    values of the codes; empty: the codes themselves
    width    bits of a scale: 16 are f16, fewer a whole number
    scale    "", or the type that a scale is a code of: "e4m3", "e8m0"
    less     taken off a scale
    span     groups that share a super-scale; 0: none
    factor   of all scales, a power of two
    """

    split: Callable[[Tensor], Codes]
    bits: int = 4
    high: int = 0
    group: int = 32
    offset: int = 0
    table: tuple[int, ...] = ()
    width: int = 16
    scale: str = ""
    less: int = 0
    span: int = 0
    minima: bool = False
    factor: float = 1.0

    @property
    def step(self) -> int:
        """Chunks that are stored together, because upper bits of two share bytes."""
        return 2 if self.high == 1 else 1

    @property
    def pieces(self) -> int:
        """Loads that a chunk's codes come in (triton_tiles.py), the first bytes of all its rows before the rest."""
        return 2 if self.bits == 8 or (self.bits == 4 and (self.group < 32 or self.high)) else 1

    def n_step(self, n_in: int) -> int:
        return -(-n_in // (COLUMNS * self.step))

    @property
    def bias(self) -> int:
        """Offset of codes, or of their values in a table, above the weights. Floats of four bits keep the places of their bits."""
        return 0 if self.table == E2M1 else BIAS if self.table or self.bits == 8 else self.offset


@dataclass(frozen=True, slots=True)
class TiledMatrix:
    """A repacked matrix of n_out rows and n_in columns.

    codes   [tile, chunk, piece, 64, 32 or 16] uint8
    high    [tile, step, 64, 16] uint8 or None
    scales  [tile, chunk, 64] int16, int32 or int64: those of a row's groups, the first lowest; then its minima
    supers  [tile, span, 64] int16 or, with those of minima above, int32; or None: f16
    row_scales  [n_out] f32 or None: the factor of each row's products
    """

    type: GGMLType
    n_out: int
    n_in: int
    codes: Tensor
    high: Tensor | None
    scales: Tensor
    supers: Tensor | None
    row_scales: Tensor | None

    @property
    def n_bytes(self) -> int:
        planes = (self.codes, self.high, self.scales, self.supers, self.row_scales)
        return sum(x.numel() * x.element_size() for x in planes if x is not None)

    def copied(self) -> TiledMatrix:
        """The same in memory of its own."""
        whole = {f.name: getattr(self, f.name) for f in fields(self)}
        own: dict[str, Any] = {
            name: x.clone() if isinstance(x, Tensor) else x for name, x in whole.items()
        }
        return TiledMatrix(**own)


def tile(
    raw: Tensor, type: GGMLType, shape: tuple[int, int], row_scales: Tensor | None = None
) -> TiledMatrix:
    """The file's bytes of a matrix [n_out, n_in] repacked, on raw's device."""
    n_out, n_in = shape
    form, rows = FORMATS[type], raw.reshape(n_out, n_in // type.block_size, type.type_size)
    step = max(1, _SLICE // (ROWS * n_in)) * ROWS
    parts = [_tiles(form, form.split(part), n_in) for part in rows.split(step)]
    joined = [
        None if p[0] is None else torch.cat(p) if len(p) > 1 else p[0] for p in zip(*parts, strict=True)
    ]
    codes, high, scales, supers = joined
    assert codes is not None and scales is not None
    return TiledMatrix(type, n_out, n_in, codes, high, scales, supers, row_scales)


def drawn(type: GGMLType, n_out: int, n_in: int, device: torch.device) -> TiledMatrix:
    """A matrix of random codes and equal scales, to measure with."""
    form, n_tile = FORMATS[type], -(-n_out // ROWS)
    n_step, kinds = form.n_step(n_in), 1 + form.minima

    def codes(n: int, width: int) -> Tensor:
        return torch.empty(n_tile, n, ROWS, width, dtype=torch.uint8, device=device).random_()

    def equal(n: int, bits: int, is_float: bool) -> Tensor:
        whole = {16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]
        field = 0x3C00 if is_float else 0x7F7F
        return torch.full((n_tile, n, ROWS), field * ((1 << bits) // 0xFFFF), dtype=whole, device=device)

    return TiledMatrix(
        type,
        n_out,
        n_in,
        codes(n_step * form.step, COLUMNS * form.bits // 8).view(
            n_tile, -1, form.pieces, ROWS, COLUMNS * form.bits // 8 // form.pieces
        ),
        codes(n_step, QUARTER) if form.high else None,
        equal(n_step * form.step, COLUMNS // form.group * kinds * form.width, form.width == 16),
        equal(-(-n_in // (form.group * form.span)), 16 * kinds, True) if form.span else None,
        None,
    )


def _tiles(form: TiledFormat, c: Codes, n_in: int) -> tuple[Tensor | None, ...]:
    wide = form.n_step(n_in) * form.step * COLUMNS
    q = _blocked(F.pad(c.values, (0, wide - n_in)), COLUMNS)  # [tile, chunk, row, 64]
    high = None
    if form.high:
        quarters = (q >> form.bits).unflatten(-1, (4, QUARTER)).unbind(-2)
        high = _merged(quarters, (0, 2, 4, 6)) if form.high == 2 else _single(quarters)
    if form.bits < 8:
        low = (q & ((1 << form.bits) - 1)).unflatten(-1, (8 // form.bits, -1)).unbind(-2)
        q = _merged(low, range(0, 8, form.bits))
    q = q.unflatten(-1, (form.pieces, -1)).transpose(2, 3)  # [tile, chunk, piece, row, bytes]
    return q.contiguous(), high, _numbers(form, c, wide), _by_rows(_supers(c))


def _blocked(x: Tensor, width: int) -> Tensor:
    """[row, n] -> [tile, chunk, 64, width], padded with zeros."""
    x = F.pad(x, (0, -x.shape[1] % width, 0, -x.shape[0] % ROWS))
    return x.view(-1, ROWS, x.shape[1] // width, width).transpose(1, 2)


def _by_rows(x: Tensor | None) -> Tensor | None:
    """[row, n] -> [tile, n, 64]."""
    if x is None:
        return None
    return (
        F.pad(x, (0, 0, 0, -x.shape[0] % ROWS)).view(-1, ROWS, x.shape[1]).transpose(1, 2).contiguous()
    )


def _merged(parts: Sequence[Tensor], places: Iterable[int]) -> Tensor:
    """Fields of bytes side by side, each from one bit on."""
    whole = torch.zeros_like(parts[0])
    for part, place in zip(parts, places, strict=True):
        whole |= part << place
    return whole.contiguous()


def single_places(parity: int) -> tuple[int, ...]:
    """Where the single upper bits of a chunk's quarters lie in a byte."""
    return tuple(i % 2 + 2 * parity + 4 * (i // 2) for i in range(4))


def _single(quarters: Sequence[Tensor]) -> Tensor:
    """Of two chunks together."""
    pairs = _merged(quarters, single_places(0)).unflatten(1, (-1, 2))
    return (pairs[:, :, 0] | pairs[:, :, 1] << 2).contiguous()


def _numbers(form: TiledFormat, c: Codes, wide: int) -> Tensor | None:
    """A row's scales and minima in a chunk as one number. wide: columns of all chunks."""
    own, wanted = COLUMNS // form.group, wide // form.group
    kinds = [
        F.pad(x, (0, wanted - x.shape[1])).unflatten(1, (-1, own))
        for x in (c.scales, c.minima)
        if x is not None
    ]
    fields = torch.cat(kinds, -1)
    if form.width == 4:
        fields = fields[..., ::2] | fields[..., 1::2] << 4
    return _by_rows(_as_one(fields))


def _supers(c: Codes) -> Tensor | None:
    if c.supers is None or c.super_minima is None:
        return None if c.supers is None else c.supers.view(torch.int16)
    return _as_one(torch.stack((c.supers, c.super_minima), -1))


def _as_one(fields: Tensor) -> Tensor:
    """The last dimension as one whole number."""
    n = fields.shape[-1] * fields.element_size()
    return fields.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[n]).squeeze(-1)


def untiled(m: TiledMatrix, first: int = 0, end: int | None = None) -> Tensor:
    """[end - first, n_in] f32: the weights of some rows; `first` is that of a tile."""
    form, end = FORMATS[m.type], m.n_out if end is None else min(end, m.n_out)
    assert first % ROWS == 0
    at = slice(first // ROWS, -(-end // ROWS))

    def rows_of(x: Tensor) -> Tensor:
        """[tile, n, 64, ...] -> [row, n * ...]."""
        return x.transpose(1, 2).flatten(0, 1).flatten(1)

    q = m.codes[at].transpose(2, 3).flatten(3)
    q = torch.cat([q >> shift & ((1 << form.bits) - 1) for shift in range(0, 8, form.bits)], -1)
    if m.high is not None:
        high = m.high[at]
        if form.high == 2:
            more = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -1)
        else:
            pair = [torch.cat([high >> i & 1 for i in single_places(parity)], -1) for parity in (0, 1)]
            more = torch.stack(pair, 2).flatten(1, 2)
        q = q | more << form.bits
    q = rows_of(q)
    values = q.short() - form.bias
    w = (
        torch.tensor(form.table, dtype=torch.float32, device=q.device)[q.long()]
        if form.table
        else values.float()
    )
    kinds = _fields_of(m.scales[at], form.width).unflatten(-1, (1 + form.minima, -1))
    supers = None if m.supers is None else _fields_of(m.supers[at], 16)

    def spread(kind: int) -> Tensor:
        s = _number(rows_of(kinds[..., kind, :]), form) * form.factor
        if supers is not None:
            s = (
                s
                * rows_of(supers[..., kind, None])
                .float()
                .repeat_interleave(form.span, 1)[:, : s.shape[1]]
            )
        return s.repeat_interleave(form.group, 1)[:, : w.shape[1]]

    by = spread(0)
    w = w[:, : by.shape[1]] * by
    if form.minima:
        w = w - spread(1)
    w = w[: end - first, : m.n_in]
    return w if m.row_scales is None else w * m.row_scales[first:end, None]


def _fields_of(x: Tensor, width: int) -> Tensor:
    """Numbers [...] -> their fields [..., n]."""
    if width == 16:
        return x.unsqueeze(-1).view(torch.float16)
    fields = x.unsqueeze(-1).view(torch.uint8)
    return torch.stack((fields & 15, fields >> 4), -1).flatten(-2) if width == 4 else fields


def _number(x: Tensor, form: TiledFormat) -> Tensor:
    if form.scale == "e4m3":
        return (x.short() << 7).view(torch.float16).float() * 128.0
    if form.scale == "e8m0":
        return (x.int() << 23).view(torch.float32) * 0.5
    return x.float() - form.less


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
    return Codes(
        _field(rows, blocks.BlockQ8_0, "qs").flatten(1) ^ BIAS, _half(rows, blocks.BlockQ8_0, "d")
    )


def _simple(
    layout: type[BlockLayout], *, has_minima: bool = False, has_high: bool = False
) -> Callable[[Tensor], Codes]:
    """Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL."""

    def split(rows: Tensor) -> Codes:
        q = _nibbles(_field(rows, layout, "qs"))
        if has_high:
            q = q | _fields(_field(rows, layout, "qh"), 1).transpose(-1, -2).flatten(-2) << 4
        return Codes(
            q.flatten(1), _half(rows, layout, "d"), -_half(rows, layout, "m") if has_minima else None
        )

    return split


def _k_scales(rows: Tensor, layout: type[BlockLayout]) -> tuple[Tensor, Tensor]:
    """[row, group] scales and minima of Q4_K and Q5_K."""
    scale, low, rest = _field(rows, layout, "scales").unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((scale & 63, (rest & 15) | ((scale >> 2) & 48)), -1)
    lows = torch.cat((low & 63, (rest >> 4) | ((low >> 2) & 48)), -1)
    return scales.flatten(1), lows.flatten(1)


def _k_four(layout: type[BlockLayout]) -> Callable[[Tensor], Codes]:
    def split(rows: Tensor) -> Codes:
        # [row, block, 8, 32]
        q = _fields(_field(rows, layout, "qs").unflatten(-1, (4, 32)), 4).flatten(-3, -2)
        if hasattr(layout, "qh"):
            q = q | _fields(_field(rows, layout, "qh"), 1) << 4
        return Codes(
            q.flatten(1), *_k_scales(rows, layout), _half(rows, layout, "d"), _half(rows, layout, "dmin")
        )

    return split


def _q6_k(rows: Tensor) -> Codes:
    layout = blocks.BlockQ6_K
    low = _fields(_field(rows, layout, "ql").unflatten(-1, (2, 64)), 4)
    high = _fields(_field(rows, layout, "qh").unflatten(-1, (2, 32)), 2)
    q = low.flatten(2) | high.flatten(2) << 4
    scales = _field(rows, layout, "scales").flatten(1) ^ 128
    return Codes(q.flatten(1), scales, None, _half(rows, layout, "d"))


def _two_bits(rows: Tensor, layout: type[BlockLayout]) -> Tensor:
    """[row, n_in] codes of two bits of Q2_K and Q3_K."""
    return _fields(_field(rows, layout, "qs").unflatten(-1, (2, 32)), 2).flatten(1)


def _q2_k(rows: Tensor) -> Codes:
    layout = blocks.BlockQ2_K
    scales = _field(rows, layout, "scales").flatten(1)
    return Codes(
        _two_bits(rows, layout),
        scales & 15,
        scales >> 4,
        _half(rows, layout, "d"),
        _half(rows, layout, "dmin"),
    )


def _q3_k(rows: Tensor) -> Codes:
    layout = blocks.BlockQ3_K
    packed = _field(rows, layout, "scales")
    low, high = _fields(packed[..., :8], 4).flatten(2), _fields(packed[..., 8:], 2).flatten(2)
    above = _fields(_field(rows, layout, "hmask"), 1).flatten(1)
    return Codes(
        _two_bits(rows, layout) | above << 2,
        (low | high << 4).flatten(1),
        None,
        _half(rows, layout, "d"),
    )


def _iq4_xs(rows: Tensor) -> Codes:
    layout = blocks.BlockIQ4_XS
    low = _fields(_field(rows, layout, "scales_l").unsqueeze(-1), 4).flatten(2)
    high = _fields(_field(rows, layout, "scales_h").unsqueeze(-1), 2).flatten(2)
    q = _nibbles(_field(rows, layout, "qs").unflatten(-1, (8, 16)))
    return Codes(q.flatten(1), (low | high << 4).flatten(1), None, _half(rows, layout, "d"))


def _iq2_xxs(rows: Tensor) -> Codes:
    groups = _field(rows, blocks.BlockIQ2_XXS, "qs").unflatten(-1, (8, 8))
    q, scales = lattice(groups[..., :4], iq2_levels(rows.device), groups[..., 4:], 4)
    return Codes(q.flatten(1), scales.flatten(1), None, _half(rows, blocks.BlockIQ2_XXS, "d"))


def _iq3_xxs(rows: Tensor) -> Codes:
    layout = blocks.BlockIQ3_XXS
    points = _field(rows, layout, "qs").unflatten(-1, (8, 8))
    words = _field(rows, layout, "signs").unflatten(-1, (8, 4))
    q, scales = lattice(points, iq3_levels(rows.device), words, 8)
    return Codes(q.flatten(1), scales.flatten(1), None, _half(rows, layout, "d"))


def _mxfp4(rows: Tensor) -> Codes:
    q = _nibbles(_field(rows, blocks.BlockMXFP4, "qs"))
    return Codes(q.flatten(1), _field(rows, blocks.BlockMXFP4, "e").flatten(1))


def _nvfp4(rows: Tensor) -> Codes:
    scales = _field(rows, blocks.BlockNVFP4, "d").flatten(1)
    q = _nibbles(_field(rows, blocks.BlockNVFP4, "qs").unflatten(-1, (4, 8)))
    return Codes(q.flatten(1), (scales & 0x7F).where(scales != 0x7F, 0))


LOOKED_UP = {  # by their code: numbers that have no order, or a sign above
    GGMLType.Q3_K: tuple(range(-4, 4)),
    GGMLType.IQ2_XXS: (*IQ2_LEVELS, 0, *(-x for x in IQ2_LEVELS), 0),
    GGMLType.IQ3_XXS: (*IQ3_LEVELS, *(-x for x in IQ3_LEVELS)),
}
FORMATS = {
    GGMLType.Q8_0: TiledFormat(_q8_0, bits=8),
    GGMLType.Q4_0: TiledFormat(_simple(blocks.BlockQ4_0), offset=8),
    GGMLType.Q4_1: TiledFormat(_simple(blocks.BlockQ4_1, has_minima=True), minima=True),
    GGMLType.Q5_0: TiledFormat(_simple(blocks.BlockQ5_0, has_high=True), high=1, offset=16),
    GGMLType.Q5_1: TiledFormat(
        _simple(blocks.BlockQ5_1, has_minima=True, has_high=True), high=1, minima=True
    ),
    GGMLType.Q4_K: TiledFormat(_k_four(blocks.BlockQ4_K), width=8, span=8, minima=True),
    GGMLType.Q5_K: TiledFormat(_k_four(blocks.BlockQ5_K), high=1, width=8, span=8, minima=True),
    GGMLType.Q6_K: TiledFormat(_q6_k, high=2, group=16, offset=32, width=8, less=128, span=16),
    GGMLType.Q2_K: TiledFormat(_q2_k, bits=2, group=16, width=4, span=16, minima=True),
    GGMLType.Q3_K: TiledFormat(
        _q3_k, bits=2, high=1, group=16, table=LOOKED_UP[GGMLType.Q3_K], width=8, less=32, span=16
    ),
    GGMLType.IQ2_XXS: TiledFormat(
        _iq2_xxs, bits=2, high=1, table=LOOKED_UP[GGMLType.IQ2_XXS], width=8, span=8, factor=0.125
    ),
    GGMLType.IQ3_XXS: TiledFormat(
        _iq3_xxs, table=LOOKED_UP[GGMLType.IQ3_XXS], width=8, span=8, factor=0.25
    ),
    GGMLType.IQ4_NL: TiledFormat(_simple(blocks.BlockIQ4_NL), table=IQ4),
    GGMLType.IQ4_XS: TiledFormat(_iq4_xs, table=IQ4, width=8, less=32, span=8),
    GGMLType.MXFP4: TiledFormat(_mxfp4, table=E2M1, width=8, scale="e8m0"),
    GGMLType.NVFP4: TiledFormat(_nvfp4, group=16, table=E2M1, width=8, scale="e4m3"),
}
