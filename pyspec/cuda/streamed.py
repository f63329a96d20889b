"""A matrix as kernels stream it: rows are prepared and rounded, then multiplied with the packed weights, in one call.

The number of rows decides the launch: few rows go to `linear`, more to `linear_tall`, a prompt's to `linear_many` or to the library over a
copy in f16. A product may take rows that the kernel before it has prepared (fuse.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pyspec.cuda.kernel_context import current
from pyspec.cuda.ops.linear import cuda as linear_cuda
from pyspec.cuda.ops.linear import wgmma as linear_wgmma
from pyspec.cuda.ops.linear.cuda import LinearLaunch
from pyspec.cuda.ops.linear.formats import FORMATS
from pyspec.cuda.ops.linear.op import linear, linear_many, linear_tall
from pyspec.cuda.ops.linear.pack import TILE, Packed
from pyspec.cuda.ops.linear.ref import PROBE_ROWS, Epilogue, LinearSpec, PromptProduct
from pyspec.cuda.ops.linear.wgmma import WgmmaLaunch
from pyspec.cuda.ops.moe.ref import gated_halves
from pyspec.cuda.ops.rows.cuda import (
    MAX_SUMMED,
    GatedRowBuffer,
    RowBuffer,
    Rows,
    RowsLaunch,
    WideRows,
    values_of,
)
from pyspec.cuda.ops.rows.op import rows
from pyspec.cuda.ops.rows.ref import Glu, HeadNorm, Norm, Prep, PrepKind, RowsSpec, of_rows

log = logging.getLogger(__name__)

GLU = Glu()
# Up to here the kernel before prepares rows faster than a launch of their own (docs/log.md)
PLACE_ROWS = 32
FEW_ROWS = linear_wgmma.FEW  # up to here `linear` is as fast as `linear_tall` (docs/log.md)
COPY_ROWS = 48  # up to here it is faster than a library with a copy
TOP = 15  # f16's exponent of values near the bound: values of 2^-25 of it keep all their bits
COARSE = 4  # step of powers, because each power needs a build


class Streamed:
    """A weight repacked for the `linear` kernel, which reads it once for up to 128 rows.

    `linear_tall` takes more than FEW_ROWS if it runs, `linear_many` those of a prompt. wide [out, in] f16: a copy for row counts that neither
    of the first two covers in one pass, where the library's product is faster; or None. All round rows to f16 over a power of two, and sum
    in f32. limit: bound of gated activations, 0: none. With `--exact` one of the first two takes all rows: `linear_tall` where it runs.
    """

    def __init__(
        self, packed: Packed, device: torch.device, gated: bool, wide: Tensor | None, limit: float = 0.0
    ) -> None:
        wide = None if current().is_exact else wide
        self.packed, self.device, self.gated, self.wide, self.limit = packed, device, gated, wide, limit
        n_out = packed.n_out // 2 if gated else packed.n_out
        spec = LinearSpec(
            device, packed.type, n_out, packed.n_in, Epilogue.GATED if gated else Epilogue.PLAIN, limit
        )
        adding = spec if gated else replace(spec, epilogue=Epilogue.RESIDUAL)
        self.n_out, self.plain, self.added = n_out, linear_cuda.bind(spec), linear_cuda.bind(adding)
        self.tall, self.tall_added = _tall(spec), _tall(adding)
        self.many, self.many_added = (None, None) if wide is not None else (_many(spec), _many(adding))
        self.few_rows = 0 if current().is_exact and self.tall is not None else FEW_ROWS
        self.wide_rows = None if wide is None else WideRows(device, packed.n_in)
        self.wide_turned = None if wide is None else wide.T
        # Launches that prepare rows that stay f32
        self.whole: dict[RowsSpec, Callable[[Tensor, Prep], Tensor] | None] = {}
        self.max_rows = COPY_ROWS if self.tall is None else self.tall.max_rows  # without the copy

    def __call__(
        self,
        x: Tensor | Rows,
        prep: Prep | None = None,
        residual: Tensor | None = None,
        late: bool = False,
    ) -> Tensor:
        """late: see `has_late`."""
        if isinstance(x, Rows):
            return self._ready(x, residual, late)
        if self._is_wide(x):
            y = self._wide(x, prep, residual)
            return gated_halves(y, self.limit) if self.gated else y
        adds = residual is not None and not self.gated
        if (many := self._of_many(len(x), adds)) is not None:
            out = torch.empty(len(x), self.n_out, dtype=torch.float32, device=x.device)
            x, prep = self._fused(x, prep)
            many(x, self.packed, out, residual if adds else None, prep)
            return out if residual is None or adds else residual + out
        launch = self._launch(len(x), adds)
        if (held := launch.rows.held(x, prep)) is not None:
            return self._ready(held, residual, late)
        out = torch.empty(x.shape[0], self.n_out, dtype=torch.float32, device=x.device)
        for first in range(0, x.shape[0], launch.max_rows):
            part = slice(first, first + launch.max_rows)
            add = residual[part] if residual is not None and adds else None
            rows = launch.rows(*self._fused(x[part], of_rows(prep, part)))
            _multiply(launch, rows, self.packed, out[part], add, late)
        return out if residual is None or adds else residual + out

    def _launch(self, n_row: int, adds: bool) -> LinearLaunch | WgmmaLaunch:
        tall = self.tall_added if adds else self.tall
        return tall if n_row > self.few_rows and tall is not None else self.added if adds else self.plain

    def _of_many(self, n_row: int, adds: bool) -> PromptProduct | None:
        many = self.many_added if adds else self.many
        return many if many is not None and n_row >= many.least else None

    def unfinished(self, x: Tensor, prep: Prep | None = None) -> tuple[Tensor, Prep | None]:
        if self.gated and not self.limit and self._is_wide(x):
            return self._wide(x, prep, None), GLU
        return self(x, prep), None

    def place(self, n_row: int, prep: HeadNorm) -> GatedRowBuffer | None:
        """Buffer where the kernel before may write `n_row` prepared rows, as an argument of a call; None: this product prepares them."""
        to = self._rows(n_row, prep.kind, prep.dim)
        return None if to is None else GatedRowBuffer(to, prep, self.packed.data)

    def normed(self, n_row: int, norm: Norm) -> RowBuffer | None:
        """The same for rows that are normed."""
        to = self._rows(n_row, norm.kind, norm.dim)
        return None if to is None else RowBuffer(to, self.packed.data, norm.power, norm)

    def sums_of(self, n_row: int) -> RowsLaunch | None:
        """A launch that sums `n_row` rows and prepares them; None: this product takes summed rows."""
        return self._rows(n_row, PrepKind.PLAIN, 0) if self.packed.n_in <= MAX_SUMMED else None

    def _rows(self, n_row: int, kind: PrepKind, dim: int) -> RowsLaunch | None:
        is_few = 0 < n_row <= min(PLACE_ROWS, self.few_rows, self.plain.max_rows)
        spec = RowsSpec(self.device, self.packed.n_in, kind, dim)
        return self.plain.rows if is_few and rows.runs_as("cuda", spec) else None

    def most_ready(self, norm: Norm) -> int:
        """Rows up to which one launch takes a call that norms them."""
        runs = rows.runs_as("cuda", RowsSpec(self.device, self.packed.n_in, norm.kind, norm.dim))
        most = self.plain.max_rows if self.tall is None else self.tall.max_rows
        return 0 if not runs else most if self.wide is None else min(most, self.max_rows)

    def reads(self, n_row: int) -> RowsLaunch:
        """The launch of rows whose buffer a product of `n_row` rows reads."""
        return self._launch(n_row, adds=False).rows

    def has_late(self, n_row: int) -> bool:
        """Whether the launch after a product of `n_row` rows may begin at the end of all launches before it, and use their results without a wait."""
        return n_row <= self.few_rows and self.plain.has_late(n_row)

    def _ready(self, x: Rows, residual: Tensor | None, late: bool = False) -> Tensor:
        adds = residual is not None and not self.gated
        out = torch.empty(x.n_row, self.n_out, dtype=torch.float32, device=self.device)
        _multiply(self._launch(x.n_row, adds), x, self.packed, out, residual if adds else None, late)
        return out if residual is None or adds else residual + out

    def _is_wide(self, x: Tensor) -> bool:
        return self.wide is not None and x.shape[0] > self.max_rows

    def _fused(self, x: Tensor, prep: Prep | None) -> tuple[Tensor, Prep | None]:
        """Prepare rows that the kernel for rows can not take."""
        if prep is None:
            return x, None
        spec = RowsSpec(self.device, self.packed.n_in, prep.kind, prep.dim)
        return (x, prep) if rows.runs_as("cuda", spec) else (self._prepared(x, prep, spec), None)

    def _prepared(self, x: Tensor, prep: Prep, spec: RowsSpec) -> Tensor:
        """In one launch, if an implementation has one."""
        if spec not in self.whole:
            self.whole[spec] = getattr(rows.bind(spec), "full", None)
        whole = self.whole[spec]
        return prep(x) if whole is None else whole(x, prep)

    def _wide(self, x: Tensor, prep: Prep | None, residual: Tensor | None) -> Tensor:
        assert self.wide_turned is not None and self.wide_rows is not None
        half, powers = self.wide_rows(*self._fused(x, prep))
        return self.wide_rows.finish(
            torch.mm(half, self.wide_turned, out_dtype=torch.float32), powers, residual
        )


def _multiply(
    launch: LinearLaunch | WgmmaLaunch,
    rows: Rows,
    packed: Packed,
    out: Tensor,
    residual: Tensor | None,
    late: bool,
) -> None:
    if not late:
        return launch.multiply(rows, packed, out, residual)
    assert isinstance(launch, LinearLaunch)
    launch.multiply(rows, packed, out, residual, late=True)


class StreamedParts:
    """Matrices one after the other, each for its part of the input's columns, as one product of up to `max_rows` rows."""

    def __init__(self, packed: Packed, device: torch.device, parts: int) -> None:
        self.packed, self.device = packed, device
        self.product = linear_cuda.bind(
            LinearSpec(device, packed.type, packed.n_out, packed.n_in, parts=parts)
        )
        self.max_rows = self.product.max_rows

    def __call__(self, x: Tensor | Rows) -> Tensor:
        """x [row, part * n_in] f32, or the same rows prepared -> [row, n_out]"""
        rows = x if isinstance(x, Rows) else self.product.rows(x)
        out = torch.empty(rows.n_row, self.packed.n_out, dtype=torch.float32, device=self.device)
        self.product.multiply(rows, self.packed, out)
        return out

    def place(self, n_row: int, power: float) -> RowBuffer | None:
        """Buffer where the kernel before may write `n_row` rows over `power`; None: this product prepares them, each over a power of its own. The two
        round the smallest numbers differently, so in exact mode the product always prepares them."""
        takes = 0 < n_row <= self.max_rows and not current().is_exact
        return RowBuffer(self.product.rows, self.packed.data, power) if takes else None


class Handing:
    """A product of few rows that writes the rows of the next one, over a power of two that bounds all its results."""

    def __init__(self, packed: Packed, spec: LinearSpec, into: RowsLaunch) -> None:
        self.packed, self.product, self.into = packed, linear_cuda.bind(spec), into

    def __call__(self, x: Tensor | Rows, prep: Prep | None = None) -> Rows | None:
        """None for more rows than it takes."""
        n_row = x.n_row if isinstance(x, Rows) else len(x)
        if not 0 < n_row <= min(PLACE_ROWS, self.product.max_rows):
            return None
        of = self.product.rows
        rows = x if isinstance(x, Rows) else of.held(x, prep) or of(x, prep)
        return self.product.hand(rows, self.packed, self.into)

    def gives_what(self, product: LinearLaunch) -> bool:
        """Whether the rows that it writes have the f16 bits of `product`, which the op has checked."""
        spec, gen = self.product.spec, torch.Generator().manual_seed(0)
        for n_row in (1, 3, 9, 17, 32):
            if n_row > self.product.max_rows:
                break
            x = torch.randn(n_row, spec.parts * spec.n_in, generator=gen).to(spec.device)
            want, got = torch.empty(n_row, spec.n_out, device=spec.device), self(x)
            product.multiply(product.rows(x), self.packed, want)
            rounded = (want / spec.hands).half().float() * spec.hands
            if got is None or not torch.equal(values_of(got, spec.n_out)[0], rounded):
                log.warning(
                    "rows that a product of %s hands on are not its own: others prepare them",
                    spec.type.name,
                )
                return False
        return True


def handing(first: Streamed | StreamedParts, next: Streamed, bound: float) -> Handing | None:
    """bound: of the magnitudes that `first` gives. None where no kernel does it."""
    # Rows over a bound round otherwise than those over their own largest, which more than PLACE_ROWS have
    if current().is_exact:
        return None
    of = first.plain if isinstance(first, Streamed) else first.product
    n = of.spec.n_out
    pads = [[pad for pad in launch.rows.pads if pad <= PLACE_ROWS] for launch in (of, next.plain)]
    runs = rows.runs_as("cuda", RowsSpec(next.device, n))
    if of.rows is next.plain.rows:  # it would overwrite rows that it still reads
        return None
    if (
        not runs
        or n != next.packed.n_in
        or n % 256
        or pads[0] != pads[1]
        or FORMATS[next.packed.type].minima
    ):
        return None
    if not 0.0 < bound < torch.inf or of.rows.prepare.layout != next.plain.rows.prepare.layout:
        return None
    exponent = math.ceil((math.ceil(math.log2(bound)) - TOP) / COARSE) * COARSE
    spec = replace(of.spec, hands=2.0**exponent)
    if _HANDS.get(spec) is False:
        return None
    try:
        made = Handing(first.packed, spec, next.plain.rows)
        if spec not in _HANDS:
            _HANDS[spec] = made.gives_what(of)
    except Exception as e:  # noqa: BLE001 - as in an op's check: rows are then prepared by a launch of their own
        log.warning("products of %s do not hand on their rows: %s", spec.type.name, e)
        _HANDS[spec] = False
    return made if _HANDS[spec] else None


_HANDS: dict[LinearSpec, bool] = {}  # whether products of a spec were found to write rows right


def in_parts(whole: Streamed, parts: int) -> StreamedParts | None:
    """The same weights as `parts` matrices, each for its part of the input; None if no kernel takes them so."""
    spec = LinearSpec(
        whole.device, whole.packed.type, whole.packed.n_out, whole.packed.n_in, parts=parts
    )
    # The check runs on this, because it unpacks the matrix
    small = replace(spec, n_out=parts * TILE * 16)
    has_own = linear_cuda.limits(spec) is None and linear.runs_as("cuda", small)
    return StreamedParts(whole.packed, whole.device, parts) if has_own else None


def _tall(spec: LinearSpec) -> WgmmaLaunch | None:
    """The product of many rows without a copy of the weight, if there is a kernel for it."""
    small = replace(spec, n_out=PROBE_ROWS)  # the check runs on this, because it unpacks the matrix
    return linear_wgmma.bind(spec) if linear_tall.has_own(spec, checked_as=small) else None


def _many(spec: LinearSpec) -> PromptProduct | None:
    """The product of a prompt's rows, if there is one; its order of summation depends on their number, so `--exact` has none."""
    small = replace(spec, n_out=PROBE_ROWS)
    if current().is_exact or not linear_many.has_own(spec, checked_as=small):
        return None
    made: PromptProduct = linear_many.chosen(small).bind(spec)
    return made
