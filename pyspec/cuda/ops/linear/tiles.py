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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.ops.linear.dequant import CODINGS, E2M1, Codes, Coding, weights
from pyspec.gguf import GGMLType

ROWS = COLUMNS = 64  # of a tile
QUARTER = 16  # columns
BIAS = 128  # codes of eight bits, and values from a table, are this much higher than the weights
_SLICE = 1 << 26  # weights repacked at once: bounds the temporaries to about 0.5 GB


@dataclass(frozen=True, slots=True)
class TiledFormat(Coding):
    """A type's coding, and how its codes lie in tiles."""

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
    values = c.values ^ BIAS if form.bits == 8 else c.values
    q = _blocked(F.pad(values, (0, wide - n_in)), COLUMNS)  # [tile, chunk, row, 64]
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
    minima = -c.minima if c.minima is not None and form.added else c.minima  # kernels subtract
    kinds = [
        F.pad(x, (0, wanted - x.shape[1])).unflatten(1, (-1, own))
        for x in (c.scales, minima)
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
    q = rows_of(q)[:, : m.n_in]
    n_group, n_kind = m.n_in // form.group, 1 + form.minima
    fields = _fields_of(m.scales[at], form.width).unflatten(-1, (n_kind, -1)).unbind(-2)
    scales, minima = [*(rows_of(x)[:, :n_group] for x in fields), None][:2]
    supers = super_minima = None
    if m.supers is not None:
        halves = _fields_of(m.supers[at], 16).unsqueeze(-1).unbind(-2)
        supers, super_minima = [*(rows_of(x) for x in halves), None][:2]
    assert scales is not None
    minima = -minima if minima is not None and form.added else minima
    codes = Codes(q ^ BIAS if form.bits == 8 else q, scales, minima, supers, super_minima)
    w = weights(form, codes)[: end - first]
    return w if m.row_scales is None else w * m.row_scales[first:end, None]


def _fields_of(x: Tensor, width: int) -> Tensor:
    """Numbers [...] -> their fields [..., n]."""
    if width == 16:
        return x.unsqueeze(-1).view(torch.float16)
    fields = x.unsqueeze(-1).view(torch.uint8)
    return torch.stack((fields & 15, fields >> 4), -1).flatten(-2) if width == 4 else fields


FORMATS = {
    type: TiledFormat(**{f.name: getattr(coding, f.name) for f in fields(coding)})
    for type, coding in CODINGS.items()
}
