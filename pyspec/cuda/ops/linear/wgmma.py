"""`linear` for 33 rows and more on Hopper, for any number with `--exact`: one pass over the packed weights for 128 rows (linear_wgmma.cu).

Where linear_cuda scales sums in float32, this rounds weights to f16 first: 2^-12 of each at most, 4e-4 of an output in
relative L2 norm together with the rows' own rounding (linear_ref.py). F16, BF16, NVFP4 and MXFP4 weights are not rounded. A
product's order of summation depends on the matrix and the device only, so a row's bits do not depend on the other rows nor on
their number.

Rows come as rows.cu's f16 values over a power of two, in the order of `blocks_for_wgmma`. More than 128 run in passes.
Buffers are made at bind and shared by the matrices of a device: all launches must be on one stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.context import per_device
from pyspec.cuda.jit import HOPPER, GpuKind, Kernel, Macros, Program, compile_cubin
from pyspec.cuda.kernel_context import current
from pyspec.cuda.ops.linear.cuda import check_product, n_partial
from pyspec.cuda.ops.linear.formats import CHUNKS, FORMATS, RECORDS
from pyspec.cuda.ops.linear.pack import TILE, Packed, n_chunks, n_groups
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec, epilogue_macros
from pyspec.cuda.ops.rows.cuda import TALL, Rows, RowsLaunch
from pyspec.cuda.ops.rows.cuda import builds as rows_builds
from pyspec.cuda.ops.rows.ref import PrepKind, power_of
from pyspec.gguf import GGMLType

PADS = (8, 16, 32, 48, 64, 80, 96, 112, 128)
CLUSTER = 2  # CTAs that share the rows they read
FEW = 32  # rows that `linear` takes, unless bits shall not depend on their number
MAX_ROWS = PADS[-1]
WINDOW = 2  # most weight stages in flight before the predecessor's end (linear_cuda.window says why)
PATIENCE = 1 << 22  # clocks, 2 ms: far more than the sharers of a tile lie apart
_SHARED = 226 * 1024  # of 227 KiB: the rest is the kernel's static shared memory
_THREADS = 640  # four multiplying warpgroups, one for copies
_MAX_TILES, _MAX_GRID = 1 << 14, 256  # whole clusters of each
# a block of 64 columns: which column stands at each place; both halves are in the order of quants.cuh's operands
_ORDER = tuple(
    16 * s + 4 * t + 2 * h + e for s in range(4) for h in range(2) for t in range(4) for e in range(2)
)


def blocks_for_wgmma(x: Tensor, pad: int) -> Tensor:
    """[row, n_in] f16 -> [block][pad][64] f16 flat, up to a whole number of 256 columns, zero outside x.

    A block is 64 columns of all rows. Place 16 s + 8 h + 2 t + e of a row holds column 16 s + 4 t + 2 h + e: each 16 columns
    are in the order 0 1 4 5 8 9 12 13, 2 3 6 7 10 11 14 15. Then the eight parts of 8 halves (16 bytes) of row n change
    places: part c goes to place c ^ (n % 8). So element (row n, block b, place p) lies at half
    (b * pad + n) * 64 + ((p // 8) ^ (n % 8)) * 8 + p % 8.
    """
    x = F.pad(x, (0, -x.shape[1] % 256, 0, pad - x.shape[0]))
    parts = (
        x.view(pad, -1, 64)
        .transpose(0, 1)[..., torch.tensor(_ORDER, device=x.device)]
        .unflatten(-1, (8, 8))
    )
    place = torch.arange(8, device=x.device) ^ (torch.arange(pad, device=x.device) % 8)[:, None]
    return parts.gather(2, place[None, :, :, None].expand_as(parts)).reshape(-1)


def prepare(x: Tensor) -> Rows:
    """[row, n_in] rounded as linear_rows rounds it, at most MAX_ROWS rows, in plain torch."""
    pad = next(p for p in PADS if x.shape[0] <= p)
    power = power_of(x.float())
    blocks = blocks_for_wgmma((x.float() / power).half(), pad)
    return Rows(blocks, power, F.pad(power.view(-1), (0, pad - x.shape[0])), x.shape[0], pad)


capturable = False


def limits(spec: LinearSpec) -> str | None:
    major, minor = torch.cuda.get_device_capability(spec.device)
    if (major, minor) != (9, 0):
        return f"needs compute capability 9.0, this GPU has {major}.{minor}"
    if spec.parts > 1:
        return "takes one matrix for all columns"
    if spec.type not in CHUNKS:
        return f"{spec.type.name} matrices have no packed form yet"
    if spec.n_in % 32:
        return f"{spec.n_in} columns are not a multiple of 32"
    n_tile, n_chunk = n_tiles(spec)
    # 32-bit arithmetic, of places in the work and in the outputs
    if (
        n_tile > _MAX_TILES
        or n_tile * n_chunk * _MAX_GRID >= 1 << 31
        or MAX_ROWS * spec.n_out >= 1 << 31
    ):
        return f"{spec.n_weight_row} rows of {spec.n_in} columns; the kernel takes up to {_MAX_TILES * TILE * 16} rows"
    return None


def n_tiles(spec: LinearSpec) -> tuple[int, int]:
    """(tiles of 256 rows, chunks of each)."""
    return -(-n_groups(spec.n_weight_row) // TILE), n_chunks(spec.type, spec.n_in)


def records_of(pad: int) -> int:
    """16-row records of a tile: sums of more than 128 rows leave room for half."""
    return TILE if pad <= MAX_ROWS else TILE // 2


def stages(type: GGMLType, pad: int, many: int = 0) -> tuple[int, int]:
    """(weight stages of a chunk, row stages of 64 columns): as many columns of each as fit, at most 8 stages."""
    weight, row, steps = records_of(pad) * RECORDS[type], pad * 128, CHUNKS[type] // 2
    shared = _SHARED - 4 * many  # the powers of all rows
    n_weight = max(2, min(8, shared // (weight + steps * row)))
    return n_weight, min(8, (shared - n_weight * weight) // row)


def shared_bytes(type: GGMLType, pad: int, many: int = 0) -> int:
    n_weight, n_row = stages(type, pad, many)
    return n_weight * records_of(pad) * RECORDS[type] + n_row * pad * 128


def defines(
    type: GGMLType,
    pad: int,
    epilogue: Epilogue,
    patience: int = PATIENCE,
    limit: float = 0.0,
    many: int = 0,
) -> Macros:
    """Macros of linear_wgmma.cu. many: rows that a launch takes in parts; 0: one part."""
    n_weight, n_row = stages(type, pad, many)
    return (
        {
            "TYPE": FORMATS[type].code,
            "CHUNK": CHUNKS[type],
            "RECORD": RECORDS[type],
            "CLUSTER": CLUSTER,
            "PAD": pad,
            "WINDOW": WINDOW,
            "WEIGHT_STAGES": n_weight,
            "ROW_STAGES": n_row,
            "PATIENCE": patience,
        }
        | ({"MANY": many} if many else {})
        | epilogue_macros(epilogue, limit)
    )


@per_device
def _kernel(device: torch.device, spec: LinearSpec, pad: int, patience: int, many: int = 0) -> Kernel:
    type, epilogue = spec.type, spec.epilogue
    macros = defines(type, pad, epilogue, patience, spec.limit, many)
    code = compile_cubin("linear_wgmma", "sm_90a", macros)
    signature = "ppppppppiiii" + ("i" if many else "")
    return code.kernel("linear_wgmma", signature).allow_shared(shared_bytes(type, pad, many))


@dataclass(frozen=True, slots=True)
class _Workspace:
    """Shares of cut tiles, two a CTA; the count of arrivals at each tile; the flag of each CTA. The last two return to zero."""

    partial: Tensor
    counts: Tensor
    states: Tensor


@per_device
def _workspace(device: torch.device, n_sm: int) -> _Workspace:
    partial = torch.empty(n_partial(n_sm), dtype=torch.float32, device=device)
    counts, states = (torch.zeros(n, dtype=torch.int32, device=device) for n in (_MAX_TILES, _MAX_GRID))
    return _Workspace(partial, counts, states)


@per_device
def bind_rows(device: torch.device, n_in: int, pads: tuple[int, ...]) -> RowsLaunch:
    """One launch, and one buffer, for all matrices of n_in columns."""
    return RowsLaunch(device, n_in, pads, TALL)


class WgmmaLaunch:
    """Multiplies rows with one matrix of `spec`."""

    max_rows = MAX_ROWS

    def __init__(self, spec: LinearSpec, patience: int = PATIENCE, least: int = 0) -> None:
        """least: rows up to which there is no build."""
        self.spec = spec
        pads = tuple(pad for pad in PADS if pad > least)
        self.rows = bind_rows(spec.device, spec.n_in, pads)
        self.kernels = {
            pad: _kernel(spec.device, replace(spec, n_out=0, n_in=0), pad, patience) for pad in pads
        }
        n_sm = torch.cuda.get_device_properties(spec.device).multi_processor_count
        n_group, (n_tile, n_chunk) = n_groups(spec.n_weight_row), n_tiles(spec)
        self.grid = (CLUSTER * min(min(n_sm, _MAX_GRID) // CLUSTER, -(-n_tile // CLUSTER) * n_chunk),)
        self.workspace = _workspace(spec.device, n_sm)
        self.sizes = spec.n_out, n_group, n_chunk

    def __call__(self, x: Tensor, packed: Packed, out: Tensor, residual: Tensor | None = None) -> None:
        """See linear_ref. out and residual contiguous; residual may be `out`."""
        for first in range(0, x.shape[0], MAX_ROWS):
            part = slice(first, first + MAX_ROWS)
            add = None if residual is None else residual[part]
            self.multiply(self.rows(x[part]), packed, out[part], add)

    def multiply(self, rows: Rows, packed: Packed, out: Tensor, residual: Tensor | None = None) -> None:
        """The product alone, for rows that several matrices share. Reads rows.blocks as `blocks_for_wgmma` makes them."""
        check_product(self.spec, rows, packed, out, residual)
        assert rows.blocks.numel() >= rows.pad * (-(-self.spec.n_in // 256) * 256)
        work = self.workspace
        tensors = (packed.data, rows.blocks, rows.powers, out if residual is None else residual, out)
        args = (*tensors, work.partial, work.counts, work.states, rows.n_row, *self.sizes)
        shared = shared_bytes(self.spec.type, rows.pad)
        self.kernels[rows.pad].launch(self.grid, _THREADS, args, shared, overlap=True)


def programs(spec: LinearSpec, target: GpuKind) -> Iterable[Program]:
    if target.capability != HOPPER:
        return
    for pad in PADS:
        yield Program.of(
            "linear_wgmma", "sm_90a", defines(spec.type, pad, spec.epilogue, limit=spec.limit)
        )
    yield from rows_builds(spec.n_in, PrepKind.PLAIN, 0, TALL, target)


def bind(spec: LinearSpec) -> WgmmaLaunch:
    return WgmmaLaunch(spec, least=0 if current().is_exact else FEW)
