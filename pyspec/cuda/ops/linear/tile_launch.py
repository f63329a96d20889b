"""Shared by launchers of kernels over tiles (triton_tiles.py): constants of a build, and the planes of a matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda import tri
from pyspec.cuda.context import per_device
from pyspec.cuda.ops.linear import tile_codes
from pyspec.cuda.ops.linear.dequant import E2M1
from pyspec.cuda.ops.linear.tiles import FORMATS, TiledMatrix
from pyspec.gguf import GGMLType

SCALES = {"": 0, "e4m3": 1, "e8m0": 2}
AT_ONCE = 4  # columns of a row that a thread loads at once: see triton_tiles.columns
BLOCKS = {8: 1, 16: 1, 32: 2, 64: 2}
"""Rows of a program, and its warps: four would multiply by another instruction on some GPUs, in another order."""


def block_of(n_row: int) -> tuple[int, int]:
    """(rows of a program, warps) for so many."""
    return next((item for item in BLOCKS.items() if item[0] >= n_row), list(BLOCKS.items())[-1])


def value_of(table: tuple[int, ...]) -> int:
    return 0 if not table else 2 if table == E2M1 else 1


@per_device
def table_of(device: torch.device, type: GGMLType) -> Tensor:
    """The table that codes are looked up in, by its number in tile_codes.py."""
    form = FORMATS[type]
    return (
        torch.tensor(form.table or (0,), dtype=torch.int16, device=device)
        .add_(form.bias)
        .view(torch.float16)
    )


@per_device
def nothing(device: torch.device) -> Tensor:
    """Stands for a plane that a type does not have."""
    return torch.zeros(4, dtype=torch.float32, device=device)


def constants(device: torch.device, type: GGMLType, n_in: int) -> dict[str, object]:
    """Of chunk_sums."""
    form = FORMATS[type]
    return {
        "N_IN": n_in,
        "N_CHUNK": form.n_step(n_in) * form.step,
        "STEP": form.step,
        "N_SPAN": -(-n_in // (form.group * form.span)) if form.span else 0,
        "BITS": form.bits,
        "SPLIT": form.pieces,
        "HIGH": form.high,
        "GROUP": form.group,
        "BIAS": form.bias,
        "VALUE": value_of(form.table),
        "WIDTH": form.width,
        "SCALE": SCALES[form.scale],
        "LESS": form.less,
        "SPAN": form.span,
        "MINIMA": form.minima,
        "ASM": tile_codes.text(form) if tri.has_ptx(device) else "",
        "AT_ONCE": AT_ONCE,
    }


def planes(matrix: TiledMatrix, table: Tensor, none: Tensor) -> tuple[Tensor, ...]:
    """codes, high, scales, supers, table of chunk_sums; table, none: `table_of` its type, `nothing`."""
    rest = (matrix.high, matrix.scales, matrix.supers)
    return matrix.codes, *(none if p is None else p for p in rest), table
