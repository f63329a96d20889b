"""`linear` in Triton: rows in f16 over a power of two times whole codes on tensor cores, each group's sum times its scale (triton_tiles.py).

Weights lie in tiles of their own (tiles.py). A matrix of few tiles is split along its columns, so that all multiprocessors read; the splits
depend on the matrix and the GPU only and are summed in their order by whoever is last, so a row's bits do not depend on the other rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda import tri
from pyspec.cuda.context import per_device
from pyspec.cuda.ops.linear import tile_codes, tiles
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.linear.tile_launch import block_of, constants, nothing, planes, table_of
from pyspec.cuda.ops.linear.tiles import FORMATS, ROWS, TiledMatrix
from pyspec.cuda.ops.rows.op import rows
from pyspec.cuda.ops.rows.ref import Prep, PrepKind, RowsSpec
from pyspec.gguf import GGMLType

PROGRAMS = 12  # of a multiprocessor, about: what a matrix is split for
LEAST = 4  # chunks of a split
STRETCH = 512
STAGES = 3
MAX_TICKETS = 1 << 16
IN_PAIRS: tuple[GGMLType, ...] = ()


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
def tickets_of(device: torch.device) -> Tensor:
    """Who comes last: how many programs have brought their share of a tile, 0 between launches."""
    return torch.zeros(MAX_TICKETS, dtype=torch.int32, device=device)


class LinearTriton:
    """Multiplies rows with one matrix of `spec`."""

    def __init__(self, spec: LinearSpec) -> None:
        self.spec, self.none, self.table = spec, nothing(spec.device), table_of(spec.device, spec.type)
        form = FORMATS[spec.type]
        self.n_tile, n_step = -(-spec.n_weight_row // ROWS), form.n_step(spec.n_in)
        wanted = -(-PROGRAMS * tri.n_multiprocessor(spec.device) // self.n_tile)
        per = max(-(-LEAST // form.step), -(-n_step // wanted))
        self.n_split = -(-n_step // per)
        is_gated = spec.epilogue is Epilogue.GATED
        self.n_unit = self.n_tile // 2 if is_gated else self.n_tile  # of which one is the last
        self.fuses = not is_gated or spec.n_out % ROWS == 0
        self.tickets = tickets_of(spec.device)
        self.constants = constants(spec.device, spec.type, spec.n_in) | {
            "UNIT": tile_codes.unit(form),
            "PER": per,
        }

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

        s, n_row, none = self.spec, x.shape[0], self.none
        assert x.is_contiguous() and x.dtype == torch.float16 and out.is_contiguous() and out.dtype == torch.float32
        assert (matrix.n_out, matrix.n_in, matrix.type) == (s.n_weight_row, s.n_in, s.type)
        assert (residual is not None) == (s.epilogue is Epilogue.RESIDUAL)
        if not n_row:
            return
        n_wide = self.n_tile * ROWS
        part = torch.empty(self.n_split * n_row * n_wide, dtype=torch.float32, device=x.device)
        block, warps = block_of(n_row)
        warps = max(warps, 1 + (s.type in IN_PAIRS))
        n_block = -(-n_row // block)
        fuses = self.fuses and n_block * self.n_unit <= MAX_TICKETS
        ends = [none if t is None else t for t in (powers, matrix.row_scales, residual)]
        ending: dict[str, object] = {
            "N_OUT": s.n_out,
            "SPLITS": self.n_split,
            "EPILOGUE": int(s.epilogue),
            "POWERS": powers is not None,
            "SCALED": matrix.row_scales is not None,
            "LIMIT": float(s.limit) if s.epilogue is Epilogue.GATED else 0.0,
        }
        tri.launch(
            kernels.product,
            (self.n_tile, self.n_split, n_block),
            (x, *planes(matrix, self.table, none), part, self.tickets, *ends, out, n_row),
            {**self.constants, "BN": block, "STAGES": STAGES, "FUSED": fuses, **ending},
            warps,
        )
        if not fuses:
            grid = (n_row, -(-s.n_out // STRETCH))
            tri.launch(kernels.finish, grid, (part, *ends, out, n_row, n_wide), ending, 4)

    def rows(self, x: Tensor, prep: Prep | None) -> tuple[Tensor, Tensor | None]:
        """Prepared and rounded, with what `rows` runs as here."""
        kind, dim = (PrepKind.PLAIN, 0) if prep is None else (prep.kind, prep.dim)
        return rows.bind(RowsSpec(self.spec.device, self.spec.n_in, kind, dim))(x, prep)


def bind(spec: LinearSpec) -> LinearTriton:
    return LinearTriton(spec)
