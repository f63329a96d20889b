"""`linear` in Triton: rows in f16 over a power of two times whole codes on tensor cores, each group's sum times its scale (triton_kernels.py).

Weights lie in tiles of their own (tiles.py). A matrix of few tiles is split along its columns, so that all multiprocessors read; the splits
depend on the matrix and the GPU only and are summed in their order, so a row's bits do not depend on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda import tri
from pyspec.cuda.context import per_device
from pyspec.cuda.ops.linear import tiles
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.linear.tiles import COLUMNS, FORMATS, ROWS, TiledMatrix
from pyspec.cuda.ops.rows.op import rows
from pyspec.cuda.ops.rows.ref import Prep, PrepKind, RowsSpec
from pyspec.gguf import GGMLType

SCALES = {"": 0, "e4m3": 1, "e8m0": 2}
PROGRAMS = 12  # of a multiprocessor, about: what a matrix is split for
LEAST = 4  # chunks of a split
BLOCKS = (16, 32, 64)  # rows of a program
STRETCH = 512
STAGES, WARPS = 3, 4


def limits(spec: LinearSpec) -> str | None:
    if (why := tri.missing(spec.device)) is not None:
        return why
    if spec.type not in FORMATS:
        return f"{spec.type.name} matrices have no tiles"
    if spec.parts > 1:
        return "takes one matrix for all columns"
    if spec.n_in % 32:
        return f"{spec.n_in} columns are not a multiple of 32"
    return None


@per_device
def _table(device: torch.device, type: GGMLType) -> Tensor:
    return torch.tensor(FORMATS[type].table or (0,), dtype=torch.float16, device=device)


class LinearTriton:
    """Multiplies rows with one matrix of `spec`."""

    def __init__(self, spec: LinearSpec) -> None:
        form = self.form = FORMATS[spec.type]
        self.spec, self.table = spec, _table(spec.device, spec.type)
        self.n_tile, self.n_chunk = -(-spec.n_weight_row // ROWS), -(-spec.n_in // COLUMNS)
        wanted = -(-PROGRAMS * tri.n_multiprocessor(spec.device) // self.n_tile)
        self.per = max(LEAST, -(-self.n_chunk // wanted))
        self.n_split = -(-self.n_chunk // self.per)
        self.none = torch.empty(4, dtype=torch.float32, device=spec.device)
        self.value = 0 if not form.table else 2 if spec.type in (GGMLType.MXFP4, GGMLType.NVFP4) else 1

    def pack(self, raw: Tensor, type: GGMLType, shape: tuple[int, int], scales: Tensor | None = None) -> TiledMatrix:
        """Rows of the file as the CUDA kernel wants them, gates and ups interleaved, as `__call__` wants them: gates before ups."""
        raw = raw.reshape(shape[0], -1)
        if self.spec.epilogue is Epilogue.GATED:
            raw = raw.unflatten(0, (-1, 2, 8)).transpose(0, 1).flatten(0, 2)
            scales = None if scales is None else scales.unflatten(0, (-1, 2, 8)).transpose(0, 1).flatten()
        return tiles.tile(raw.contiguous(), type, shape, scales)

    def __call__(self, x: Tensor, matrix: TiledMatrix, out: Tensor, residual: Tensor | None = None) -> None:
        """See ref.py."""
        kind = RowsSpec(self.spec.device, self.spec.n_in, PrepKind.PLAIN)
        self.multiply(*rows.bind(kind)(x.float(), None), matrix, out, residual)

    def multiply(
        self, x: Tensor, powers: Tensor | None, matrix: TiledMatrix, out: Tensor, residual: Tensor | None = None
    ) -> None:
        """x [row, n_in] f16, whose rows are to be multiplied with `powers`; out and residual contiguous; residual may be `out`."""
        from pyspec.cuda.ops.linear import triton_kernels as kernels

        s, form, n_row = self.spec, self.form, x.shape[0]
        assert x.is_contiguous() and x.dtype == torch.float16 and out.is_contiguous() and out.dtype == torch.float32
        assert (matrix.n_out, matrix.n_in, matrix.type) == (s.n_weight_row, s.n_in, s.type)
        assert (residual is not None) == (s.epilogue is Epilogue.RESIDUAL)
        if not n_row:
            return
        n_wide, none = self.n_tile * ROWS, self.none
        part = torch.empty(self.n_split * n_row * n_wide, dtype=torch.float32, device=x.device)
        block = next((b for b in BLOCKS if b >= n_row), BLOCKS[-1])
        planes = (matrix.high, matrix.scales, matrix.minima, matrix.supers, matrix.super_minima)
        tri.launch(
            kernels.product,
            (self.n_tile, self.n_split, -(-n_row // block)),
            (x, matrix.codes, *(none if p is None else p for p in planes), self.table, part, n_row),
            {
                "N_IN": s.n_in,
                "N_CHUNK": self.n_chunk,
                "PER": self.per,
                "BM": block,
                "BITS": form.bits,
                "HIGH": form.high,
                "GROUP": form.group,
                "OFFSET": form.offset,
                "VALUE": self.value,
                "SCALE": SCALES[form.scale],
                "SPAN": form.span,
                "N_SPAN": 0 if matrix.supers is None else matrix.supers.shape[1],
                "MINIMA": form.minima,
                "STAGES": STAGES,
            },
            WARPS,
        )
        tri.launch(
            kernels.finish,
            (n_row, -(-s.n_out // STRETCH)),
            (
                part,
                none if powers is None else powers,
                none if matrix.row_scales is None else matrix.row_scales,
                none if residual is None else residual,
                out,
                n_row,
                n_wide,
            ),
            {
                "N_OUT": s.n_out,
                "SPLITS": self.n_split,
                "EPILOGUE": int(s.epilogue),
                "POWERS": powers is not None,
                "SCALED": matrix.row_scales is not None,
                "LIMIT": float(s.limit) if s.epilogue is Epilogue.GATED else 0.0,
            },
            4,
        )

    def rows(self, x: Tensor, prep: Prep | None) -> tuple[Tensor, Tensor | None]:
        """Prepared and rounded, with what `rows` runs as here."""
        kind, dim = (PrepKind.PLAIN, 0) if prep is None else (prep.kind, prep.dim)
        return rows.bind(RowsSpec(self.spec.device, self.spec.n_in, kind, dim))(x, prep)


def bind(spec: LinearSpec) -> LinearTriton:
    return LinearTriton(spec)
