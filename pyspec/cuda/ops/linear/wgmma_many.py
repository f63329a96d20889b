"""`linear` for the many rows of a prompt on Hopper: one launch of linear_wgmma.cu, whose weights come from memory once.

The rows are parts of 128, and clusters that run together multiply the same weights with all parts, so a row's order of summation
depends on their number; `--exact` takes passes of `linear_tall` instead. Weights are rounded as there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from pyspec.cuda.context import per_device
from pyspec.cuda.jit import HOPPER, GpuKind, Program
from pyspec.cuda.ops.linear import wgmma
from pyspec.cuda.ops.linear.cuda import check_product
from pyspec.cuda.ops.linear.pack import Packed, n_groups
from pyspec.cuda.ops.linear.ref import LinearSpec
from pyspec.cuda.ops.linear.wgmma import CLUSTER, PATIENCE
from pyspec.cuda.ops.rows.cuda import TALL, Rows, RowsPrep
from pyspec.cuda.ops.rows.cuda import builds as rows_builds
from pyspec.cuda.ops.rows.ref import Prep, PrepKind, of_rows

limits = wgmma.limits
PADS = (96, 112, 128, 256)  # rows of a part; 256 take tiles of half as many weights
MOST = 4096  # rows of a launch, whose powers lie in shared memory


def part_of(n_row: int) -> int:
    """Rows of a part: those that leave the fewest over, and as many as possible."""
    return min(PADS, key=lambda pad: (-(-n_row // pad) * pad, -pad))


@per_device
def bind_rows(device: torch.device, n_in: int) -> RowsPrep:
    """One launch of rows for all matrices of n_in columns."""
    return RowsPrep(device, n_in, TALL)


class ManyLaunch:
    """Multiplies any number of rows with one matrix of `spec`."""

    least = wgmma.MAX_ROWS + 1  # rows that `linear_tall` does not take in one pass

    def __init__(self, spec: LinearSpec, patience: int = PATIENCE, spare: int = 0) -> None:
        """spare: turns of all clusters that are cut as well, besides the last, which is not full."""
        self.spec, self.spare = spec, spare
        self.prepare = bind_rows(spec.device, spec.n_in)
        of_type = replace(spec, n_out=0, n_in=0)
        self.kernels = {pad: wgmma._kernel(spec.device, of_type, pad, patience, MOST) for pad in PADS}
        n_sm = torch.cuda.get_device_properties(spec.device).multi_processor_count
        self.n_group, (self.n_tile, self.n_chunk) = n_groups(spec.n_weight_row), wgmma.n_tiles(spec)
        self.n_cluster = min(n_sm, wgmma._MAX_GRID) // CLUSTER
        self.workspace = wgmma._workspace(spec.device, n_sm)

    def __call__(
        self,
        x: Tensor,
        packed: Packed,
        out: Tensor,
        residual: Tensor | None = None,
        prep: Prep | None = None,
    ) -> None:
        """See linear_ref. out and residual contiguous; residual may be `out`."""
        for first in range(0, len(x), MOST):
            part = slice(first, first + MOST)
            add = None if residual is None else residual[part]
            self.multiply(self.rows(x[part], of_rows(prep, part)), packed, out[part], add)

    def rows(self, x: Tensor, prep: Prep | None = None) -> Rows:
        """x as `multiply` reads it, in new memory."""
        n_row = len(x)
        part = part_of(n_row)
        pad = -(-n_row // part) * part
        n_in = -(-self.spec.n_in // 256) * 256
        blocks = torch.empty(pad * n_in, dtype=torch.float16, device=x.device)
        powers = torch.empty(pad, dtype=torch.float32, device=x.device)
        self.prepare(x, prep, blocks, powers, powers, pad)
        return Rows(blocks, powers, powers, n_row, part, TALL)

    def multiply(self, rows: Rows, packed: Packed, out: Tensor, residual: Tensor | None = None) -> None:
        """The product alone."""
        spec, work = self.spec, self.workspace
        check_product(spec, rows, packed, out, residual)
        n_band = -(-self.n_group // (wgmma.records_of(rows.pad) * CLUSTER))
        n_item = n_band * -(-rows.n_row // rows.pad)
        n_cluster = min(self.n_cluster, n_item * self.n_chunk)
        n_whole = max(0, n_item // n_cluster - self.spare)
        if 0 < (n_item - n_whole * n_cluster) * self.n_chunk < n_cluster:
            n_whole -= 1  # each cluster has at least a unit of the line
        tensors = (packed.data, rows.blocks, rows.powers, out if residual is None else residual, out)
        sizes = (rows.n_row, spec.n_out, self.n_group, self.n_chunk, n_whole)
        args = *tensors, work.partial, work.counts, work.states, *sizes
        shared = wgmma.shared_bytes(spec.type, rows.pad, MOST)
        grid = (CLUSTER * n_cluster,)
        n_thread = 32 * wgmma.records_of(rows.pad) + 128
        self.kernels[rows.pad].launch(grid, n_thread, args, shared, overlap=True)


def programs(spec: LinearSpec, target: GpuKind) -> Iterable[Program]:
    if target.capability != HOPPER:
        return
    for pad in PADS:
        macros = wgmma.defines(spec.type, pad, spec.epilogue, limit=spec.limit, many=MOST)
        yield Program.of("linear_wgmma", "sm_90a", macros)
    yield from rows_builds(spec.n_in, PrepKind.PLAIN, 0, TALL, target)


bind = ManyLaunch
