"""A matrix as kernels stream it: rows are prepared and rounded, then multiplied with the packed weights, in one call.

Which launch takes how many rows is decided here: few rows go to `linear`, more to `linear_tall` or to the library over a copy in
f16; and a product may take rows that the kernel before it has prepared (fuse.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pyspec.cuda.ops.linear import cuda as linear_cuda
from pyspec.cuda.ops.linear import wgmma as linear_wgmma
from pyspec.cuda.ops.linear.cuda import LinearLaunch
from pyspec.cuda.ops.linear.op import linear, linear_tall
from pyspec.cuda.ops.linear.pack import TILE, Packed
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.linear.wgmma import WgmmaLaunch
from pyspec.cuda.ops.moe.ref import activate
from pyspec.cuda.ops.rows.cuda import MAX_SUMMED, Into, Place, Rows, RowsLaunch, WideRows
from pyspec.cuda.ops.rows.op import rows
from pyspec.cuda.ops.rows.ref import Glu, HeadNorm, Norm, Prep, PrepKind, RowsSpec

GLU = Glu()
PROBE_ROWS = 272  # of the matrix a kernel is checked with
PLACE_ROWS = 32  # up to here it beats a launch of their own that rows are prepared by what makes them (docs/log.md)
FEW_ROWS = 48  # up to here `linear` is the fastest, then `linear_tall` where it runs (docs/log.md)


class Streamed:
    """A weight repacked for the `linear` kernel, which reads it once for up to 128 rows.

    `linear_tall` takes more than FEW_ROWS where it runs. wide [out, in] f16: a copy for what neither reads once, where the
    library's product wins; or None. All round rows to f16 over a power of two, and sum in f32. limit: where gated activations are cut, 0 nowhere.
    """

    def __init__(
        self, packed: Packed, device: torch.device, gated: bool, wide: Tensor | None, limit: float = 0.0
    ) -> None:
        self.packed, self.device, self.gated, self.wide, self.limit = packed, device, gated, wide, limit
        n_out = packed.n_out // 2 if gated else packed.n_out
        spec = LinearSpec(device, packed.type, n_out, packed.n_in, Epilogue.GATED if gated else Epilogue.PLAIN, limit)
        adding = spec if gated else replace(spec, epilogue=Epilogue.RESIDUAL)
        self.n_out, self.plain, self.added = n_out, linear_cuda.bind(spec), linear_cuda.bind(adding)
        self.tall, self.tall_added = _tall(spec), _tall(adding)
        self.wide_rows = None if wide is None else WideRows(device, packed.n_in)
        self.whole: dict[RowsSpec, Callable[[Tensor, Prep], Tensor] | None] = {}  # what prepares rows that stay f32
        self.max_rows = FEW_ROWS if self.tall is None else self.tall.max_rows  # without the copy

    def __call__(self, x: Tensor | Rows, prep: Prep | None = None, residual: Tensor | None = None) -> Tensor:
        if isinstance(x, Rows):
            return self._ready(x, residual)
        if self._is_wide(x):
            y = self._wide(x, prep, residual)
            return self._activated(y) if self.gated else y
        adds = residual is not None and not self.gated
        launch: LinearLaunch | WgmmaLaunch = self.added if adds else self.plain
        if x.shape[0] > FEW_ROWS and (tall := self.tall_added if adds else self.tall) is not None:
            launch = tall
        x, prep = self._fused(x, prep, launch.max_rows)
        out = torch.empty(x.shape[0], self.n_out, dtype=torch.float32, device=x.device)
        for first in range(0, x.shape[0], launch.max_rows):
            part = slice(first, first + launch.max_rows)
            add = residual[part] if residual is not None and adds else None
            launch.multiply(launch.rows(x[part], prep), self.packed, out[part], add)
        return out if residual is None or adds else residual + out

    def unfinished(self, x: Tensor, prep: Prep | None = None) -> tuple[Tensor, Prep | None]:
        if self.gated and not self.limit and self._is_wide(x):
            return self._wide(x, prep, None), GLU
        return self(x, prep), None

    def _activated(self, y: Tensor) -> Tensor:
        return activate(*y.chunk(2, -1), self.limit) if self.limit else GLU(y)

    def place(self, n_row: int, prep: HeadNorm) -> Into | None:
        """Where the kernel before may put so many rows prepared, for a call with them; None: this product prepares them."""
        to = self._rows(n_row, prep.kind, prep.dim)
        return None if to is None else Into(to, prep, self.packed.data)

    def normed(self, n_row: int, norm: Norm) -> Place | None:
        """The same for rows that are normed."""
        to = self._rows(n_row, norm.kind, norm.dim)
        return None if to is None else Place(to, self.packed.data, norm.power, norm)

    def sums_of(self, n_row: int) -> RowsLaunch | None:
        """What sums so many rows and prepares them in one launch, for a call with them; None: this product takes them summed."""
        return self._rows(n_row, PrepKind.PLAIN, 0) if self.packed.n_in <= MAX_SUMMED else None

    def _rows(self, n_row: int, kind: PrepKind, dim: int) -> RowsLaunch | None:
        is_few = 0 < n_row <= min(PLACE_ROWS, self.plain.max_rows)
        spec = RowsSpec(self.device, self.packed.n_in, kind, dim)
        return self.plain.rows if is_few and rows.runs_as("cuda", spec) else None

    def _ready(self, x: Rows, residual: Tensor | None) -> Tensor:
        adds = residual is not None and not self.gated
        out = torch.empty(x.n_row, self.n_out, dtype=torch.float32, device=self.device)
        (self.added if adds else self.plain).multiply(x, self.packed, out, residual if adds else None)
        return out if residual is None or adds else residual + out

    def _is_wide(self, x: Tensor) -> bool:
        return self.wide is not None and x.shape[0] > self.max_rows

    def _fused(self, x: Tensor, prep: Prep | None, n_max: int) -> tuple[Tensor, Prep | None]:
        """Prepare here what the kernel for rows can not do; the rows of gates are not cut, so several passes can not."""
        if prep is None or (x.shape[0] > n_max and not isinstance(prep, Norm)):
            return x if prep is None else prep(x), None
        spec = RowsSpec(self.device, self.packed.n_in, prep.kind, prep.dim)
        return (x, prep) if rows.runs_as("cuda", spec) else (self._prepared(x, prep, spec), None)

    def _prepared(self, x: Tensor, prep: Prep, spec: RowsSpec) -> Tensor:
        """In one launch, where an implementation has it."""
        if spec not in self.whole:
            self.whole[spec] = getattr(rows.bind(spec), "full", None)
        whole = self.whole[spec]
        return prep(x) if whole is None else whole(x, prep)

    def _wide(self, x: Tensor, prep: Prep | None, residual: Tensor | None) -> Tensor:
        assert self.wide is not None and self.wide_rows is not None
        half, powers = self.wide_rows(*self._fused(x, prep, x.shape[0]))
        return self.wide_rows.finish(torch.mm(half, self.wide.T, out_dtype=torch.float32), powers, residual)


class StreamedParts:
    """Matrices one after the other, each for its part of the input's columns, as one product of up to `max_rows` rows."""

    def __init__(self, packed: Packed, device: torch.device, parts: int) -> None:
        self.packed, self.device = packed, device
        self.product = linear_cuda.bind(LinearSpec(device, packed.type, packed.n_out, packed.n_in, parts=parts))
        self.max_rows = self.product.max_rows

    def __call__(self, x: Tensor | Rows) -> Tensor:
        """x [row, part * n_in] f32, or such rows prepared -> [row, n_out]"""
        rows = x if isinstance(x, Rows) else self.product.rows(x)
        out = torch.empty(rows.n_row, self.packed.n_out, dtype=torch.float32, device=self.device)
        self.product.multiply(rows, self.packed, out)
        return out

    def place(self, n_row: int, power: float) -> Place | None:
        """Where the kernel before may put so many rows, over `power`; None: this product prepares them."""
        return Place(self.product.rows, self.packed.data, power) if 0 < n_row <= self.max_rows else None


def in_parts(whole: Streamed, parts: int) -> StreamedParts | None:
    """The same weights as `parts` matrices, each for its part of the input; None where no kernel takes them so."""
    spec = LinearSpec(whole.device, whole.packed.type, whole.packed.n_out, whole.packed.n_in, parts=parts)
    small = replace(spec, n_out=parts * TILE * 16)  # is what is checked, since the check unpacks it
    has_own = linear_cuda.limits(spec) is None and linear.runs_as("cuda", small)
    return StreamedParts(whole.packed, whole.device, parts) if has_own else None


def _tall(spec: LinearSpec) -> WgmmaLaunch | None:
    """The product of many rows without a copy of the weight, where there is a kernel for it."""
    small = replace(spec, n_out=PROBE_ROWS)  # is what is checked, since the check unpacks it
    return linear_wgmma.bind(spec) if linear_tall.has_own(spec, checked_as=small) else None
