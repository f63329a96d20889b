"""`linear` in Triton: rows in f16 over a power of two times whole codes on tensor cores, each group's sum times its scale (triton_tiles.py).

Weights lie in tiles of their own (tiles.py). A matrix of few tiles is split along its columns, so that all multiprocessors read; the splits
depend on the matrix and the GPU only, and the last program sums them in their order, so a row's bits do not depend on the other rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from pyspec.cuda import tri, verdicts
from pyspec.cuda.context import per_device
from pyspec.cuda.cut import bounds
from pyspec.cuda.machine import gpu_seconds
from pyspec.cuda.ops.linear import tile_codes, tiles
from pyspec.cuda.ops.linear.ref import PROBE_ROWS, Epilogue, LinearSpec
from pyspec.cuda.ops.linear.tile_launch import BLOCKS, block_of, constants, nothing, planes, table_of
from pyspec.cuda.ops.linear.tiles import FORMATS, ROWS, TiledMatrix
from pyspec.cuda.ops.rows.op import rows
from pyspec.cuda.ops.rows.ref import Prep, PrepKind, RowsSpec
from pyspec.cuda.verdicts import Candidate
from pyspec.gguf import GGMLType

Ends = tuple[Tensor | None, Tensor | None, Tensor | None]
HOME = "pyspec.cuda.ops.linear.op:linear"

CHOICES = ((1, 16), (2, 12), (1, 12))
"""Warps of a program for few rows, and programs of a multiprocessor, roughly, that a matrix is split for; the first if nothing was measured."""
SAME = 1e-4  # relative difference that another order of sums may give
WORTH = 0.97  # another choice must take less than this share of the first one's time
# Rows and bytes of the measured matrices, which together exceed a cache
TUNED_ROWS, TUNED_BYTES = 8192, 200 << 20
FEWEST, MOST = 0.7, 1.1  # share of the wanted programs that is accepted if it makes them even
BESIDE = 0.25  # fixed cost of a program, in steps
FEW = 8  # rows of the smallest block
LEAST = 4  # chunks of a split
STRETCH = 512
STAGES = 3
MAX_TICKETS = 1 << 16
MOST_ROWS = max(BLOCKS)
MOST_SUMS = 1 << 25  # partial sums that one launch writes; more rows run in several launches


def limits(spec: LinearSpec) -> str | None:
    if spec.type not in FORMATS:
        return f"{spec.type.name} matrices have no tiles"
    if spec.parts > 1:
        return "takes one matrix for all columns"
    if spec.n_in % 32:
        return f"{spec.n_in} columns are not a multiple of 32"
    return None


@per_device
def tickets_of(device: torch.device) -> Tensor:
    """Tickets that find the last program: the number of programs that have brought their share of a tile, 0 between launches."""
    return torch.zeros(MAX_TICKETS, dtype=torch.int32, device=device)


@cache
def steps_of(n_tile: int, n_step: int, least: int, programs: int, n_sm: int) -> int:
    """Steps of a program, so that a multiprocessor has about `programs` of them and none has much more work than others."""
    most, fewest = MOST * programs * n_sm, FEWEST * programs * n_sm
    around = [per for per in range(least, n_step + 1) if fewest <= n_tile * -(-n_step // per) <= most]

    def last(per: int) -> float:
        """Steps of the busiest multiprocessor, and a part of a step for the fixed cost of each program."""
        lengths = [min(per, n_step - first) for first in range(0, n_step, per)]
        loads: list[float] = [0] * n_sm
        for i, length in enumerate(length for length in lengths for _ in range(n_tile)):
            loads[i % n_sm] += length + BESIDE
        return max(loads)

    if not around:  # no number of programs is near enough: take the most allowed
        return next((per for per in range(least, n_step) if n_tile * -(-n_step // per) <= most), n_step)
    return min(around, key=lambda per: (last(per), -per))


def _small(spec: LinearSpec) -> LinearSpec:
    """The spec that is checked for all matrices with as many columns."""
    return LinearSpec(spec.device, spec.type, PROBE_ROWS, spec.n_in)


@cache
def _kept(small: LinearSpec) -> tuple[int, int]:
    kept = verdicts.load(verdicts.key_of(Candidate("linear", HOME, "triton", __name__, small)))
    found = [choice for choice in CHOICES if kept is not None and _name(choice) == kept.choice]
    return (*found, CHOICES[0])[0]


def _name(choice: tuple[int, int]) -> str:
    return " ".join(map(str, choice))


def tune(spec: LinearSpec) -> str:
    """The choice that is fastest with one row and with eight, as `_kept` reads it. One whose sums are not the first one's is left out."""
    if spec != _small(spec):
        return ""
    large = replace(spec, n_out=TUNED_ROWS)
    one = tiles.drawn(spec.type, large.n_out, large.n_in, spec.device)
    matrices = [one, *(one.copied() for _ in range(min(15, TUNED_BYTES // one.n_bytes)))]
    x = torch.randn(FEW, spec.n_in, device=spec.device).half()
    outs = [torch.empty(FEW, large.n_out, dtype=torch.float32, device=spec.device) for _ in CHOICES]
    times = []
    for choice, out in zip(CHOICES, outs, strict=True):
        run = LinearTriton(large, choice)
        took = sum(
            _fastest([partial(run.multiply, x[:n], None, m, out[:n]) for m in matrices])
            for n in (1, FEW)
        )
        is_same = bool((out - outs[0]).norm() <= SAME * outs[0].norm())
        times.append(took if is_same else math.inf)
    best = min(times)
    return _name(CHOICES[times.index(best)] if best < WORTH * times[0] else CHOICES[0])


def _fastest(launches: Sequence[Callable[[], object]]) -> float:
    """Seconds of running all once, the best of some rounds; in a graph, to leave out the host's time."""
    for launch in launches:  # the first one compiles
        launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return min(gpu_seconds(graph.replay) for _ in range(6))


class LinearTriton:
    """Multiplies rows with one matrix of `spec`. choice: one of CHOICES; None: the fastest on this machine."""

    def __init__(self, spec: LinearSpec, choice: tuple[int, int] | None = None) -> None:
        self.warps, programs = choice or _kept(_small(spec))
        self.spec, self.none, self.table = spec, nothing(spec.device), table_of(spec.device, spec.type)
        form = FORMATS[spec.type]
        self.n_tile, n_step = -(-spec.n_weight_row // ROWS), form.n_step(spec.n_in)
        per = steps_of(
            self.n_tile, n_step, -(-LEAST // form.step), programs, tri.n_multiprocessor(spec.device)
        )
        self.n_split = -(-n_step // per)
        is_gated = spec.epilogue is Epilogue.GATED
        # Units of work, each with a last program
        self.n_unit = self.n_tile // 2 if is_gated else self.n_tile
        self.fuses = not is_gated or spec.n_out % ROWS == 0
        self.tickets = tickets_of(spec.device)
        self.constants = constants(spec.device, spec.type, spec.n_in) | {
            "UNIT": tile_codes.unit(form),
            "PER": per,
        }

    def pack(
        self, raw: Tensor, type: GGMLType, shape: tuple[int, int], scales: Tensor | None = None
    ) -> TiledMatrix:
        """The file's rows from the CUDA kernel's order, gates and ups interleaved, to that of `__call__`, gates before ups."""
        raw = raw.reshape(shape[0], -1)
        if self.spec.epilogue is Epilogue.GATED:
            raw = raw.unflatten(0, (-1, 2, 8)).transpose(0, 1).flatten(0, 2)
            scales = (
                None if scales is None else scales.unflatten(0, (-1, 2, 8)).transpose(0, 1).flatten()
            )
        return tiles.tile(raw.contiguous(), type, shape, scales)

    def __call__(
        self, x: Tensor, matrix: TiledMatrix, out: Tensor, residual: Tensor | None = None
    ) -> None:
        """See ref.py."""
        kind = RowsSpec(self.spec.device, self.spec.n_in, PrepKind.PLAIN)
        self.multiply(*rows.bind(kind)(x.float(), None), matrix, out, residual)

    def multiply(
        self,
        x: Tensor,
        powers: Tensor | None,
        matrix: TiledMatrix,
        out: Tensor,
        residual: Tensor | None = None,
    ) -> None:
        """x [row, n_in] f16, whose rows are to be multiplied with `powers`; out and residual contiguous; residual may be `out`."""
        s, n_row = self.spec, x.shape[0]
        assert x.is_contiguous() and x.dtype == torch.float16 and out.is_contiguous()
        assert out.dtype == torch.float32
        assert (matrix.n_out, matrix.n_in, matrix.type) == (s.n_weight_row, s.n_in, s.type)
        assert (residual is not None) == (s.epilogue is Epilogue.RESIDUAL)
        step = self.at_once
        for first in range(0, n_row, step):
            part = slice(first, first + step)
            own = (
                None if powers is None else powers[part],
                matrix.row_scales,
                None if residual is None else residual[part],
            )
            self._multiply(x[part], matrix, own, out[part])

    @property
    def at_once(self) -> int:
        """Most rows of a launch: whole blocks, whose partial sums fit the memory planned for forwards."""
        blocks = MOST_SUMS // (self.n_split * self.n_tile * ROWS * MOST_ROWS)
        return max(1, blocks) * MOST_ROWS

    def _multiply(self, x: Tensor, matrix: TiledMatrix, ends: Ends, out: Tensor) -> None:
        from pyspec.cuda.ops.linear import triton_kernels as kernels

        n_row, n_wide = x.shape[0], self.n_tile * ROWS
        part = torch.empty(self.n_split * n_row * n_wide, dtype=torch.float32, device=x.device)
        tri.launch(*self._product(x, matrix, part, ends, out, n_row))
        if not self._fuses(n_row):
            grid = (n_row, -(-self.spec.n_out // STRETCH))
            given = [self.none if t is None else t for t in ends]
            tri.launch(kernels.finish, grid, (part, *given, out, n_row, n_wide), self._ending(ends), 4)

    def compile_ahead(self, matrix: TiledMatrix, most: int) -> None:
        """Compile in other threads, while a load goes on, the builds that rounds of up to `most` rows are likely to launch."""
        some = torch.empty(4, dtype=torch.float32, device=self.spec.device)
        # Others' rows come from a norm, without powers
        end = some if self.spec.epilogue is Epilogue.RESIDUAL else None
        for n_row in (n for n in BLOCKS if n <= block_of(most)[0]):
            tri.compile_ahead(
                self._product(some.half(), matrix, some, (end, matrix.row_scales, end), some, n_row)
            )

    def _fuses(self, n_row: int) -> bool:
        return self.fuses and -(-n_row // block_of(n_row)[0]) * self.n_unit <= MAX_TICKETS

    def _ending(self, ends: Ends) -> dict[str, object]:
        s, (powers, row_scales, _) = self.spec, ends
        gates, ups = bounds(s.limit if s.epilogue is Epilogue.GATED else 0.0)
        return {
            "N_OUT": s.n_out,
            "SPLITS": self.n_split,
            "EPILOGUE": int(s.epilogue),
            "POWERS": powers is not None,
            "SCALED": row_scales is not None,
            "GATE_LIMIT": gates,
            "LIMIT": ups,
        }

    def _product(
        self, x: Tensor, matrix: TiledMatrix, part: Tensor, ends: Ends, out: Tensor, n_row: int
    ) -> tri.TriLaunch:
        """The launch for so many rows. ends: powers, row scales, residual."""
        from pyspec.cuda.ops.linear import triton_kernels as kernels

        block, warps = block_of(n_row)
        given = [self.none if t is None else t for t in ends]
        return tri.TriLaunch(
            kernels.product,
            (self.n_tile, self.n_split, -(-n_row // block)),
            (x, *planes(matrix, self.table, self.none), part, self.tickets, *given, out, n_row),
            {
                **self.constants,
                "BN": block,
                "STAGES": STAGES,
                "FUSED": self._fuses(n_row),
                **self._ending(ends),
            },
            max(warps, self.warps),
        )

    def rows(self, x: Tensor, prep: Prep | None) -> tuple[Tensor, Tensor | None]:
        """Prepared and rounded, by the implementation of `rows` on this machine."""
        kind, dim = (PrepKind.PLAIN, 0) if prep is None else (prep.kind, prep.dim)
        return rows.bind(RowsSpec(self.spec.device, self.spec.n_in, kind, dim))(x, prep)


bind = LinearTriton
