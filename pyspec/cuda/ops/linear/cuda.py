"""`linear` on NVIDIA GPUs: rows to f16 blocks (rows_cuda.py), then one pass over the weights (linear.cu).

A product's order of summation depends on the matrix and the device only, so a row's bits do not depend on the other rows. They depend
on the number of rows if pairs of CTAs take some numbers and not others (linear/pair.py); exact mode uses no pairs. More than 128
rows run in passes. Buffers are made at bind and shared by matrices of one device, so all launches must be on one stream. Results of
`RowsLaunch` are valid until its next call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cuda.context import per_device
from pyspec.cuda.jit import GpuKind, Kernel, Macros, Program, arch_of, compile_cubin
from pyspec.cuda.kernel_context import current
from pyspec.cuda.ops.linear import pair as linear_pair
from pyspec.cuda.ops.linear.dequant import half_floats, quantize
from pyspec.cuda.ops.linear.formats import CHUNKS, FORMATS, RECORDS
from pyspec.cuda.ops.linear.pack import TILE, Packed, n_chunks, n_groups, packed_bytes, repack, unpack
from pyspec.cuda.ops.linear.ref import Epilogue, Linear, LinearSpec, epilogue_macros
from pyspec.cuda.ops.rows.cuda import BLOCKED, MAX_COLUMNS, Rows, RowsLaunch
from pyspec.cuda.ops.rows.cuda import builds as rows_builds
from pyspec.cuda.ops.rows.ref import PrepKind
from pyspec.gguf import GGMLType

MAX_ROWS, MAX_TICKETS = 128, 1 << 16
FEW_UNITS, NEARLY_ALL = 5, 0.95  # of a CTA; of the multiprocessors
HANDED_ROWS = 32  # rows up to which a product writes the next one's rows
LATE_ROWS = 8  # rows up to which a product leaves room for other kernels: the smallest build
FEW = 16  # rows up to which memory is all that bounds a product
HALVES = (GGMLType.F16, GGMLType.BF16)
# KiB a block may have
_SHARED = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
_STATIC = 2048  # bytes of a CTA kept for the kernel's static shared memory and the driver's


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a CTA covers 256 weight rows and `rows` tokens: warps along both, 16-row and 8-token tiles of each."""

    warps_m: int
    warps_n: int
    tiles_m: int
    tiles_n: int

    @property
    def rows(self) -> int:
        return 8 * self.warps_n * self.tiles_n

    @property
    def n_warp(self) -> int:
        return self.warps_m * self.warps_n


SHAPES = tuple(Tiling(8, 1, 2, n) for n in (1, 2, 3, 4, 6, 8, 12, 16))


def stage_bytes(type: GGMLType, shape: Tiling) -> int:
    chunk = CHUNKS[type]
    sums = 4 * chunk * shape.rows if FORMATS[type].minima else 0
    return TILE * RECORDS[type] + 64 * chunk * shape.rows + sums


def n_shared(capability: tuple[int, int]) -> int:
    """Bytes of dynamic shared memory that a CTA may have."""
    return _SHARED.get(capability, 99) * 1024 - _STATIC


def n_stages(type: GGMLType, shape: Tiling, capability: tuple[int, int]) -> int:
    """Chunks in shared memory at once; below 2 the shape does not fit. More were slower on Hopper (docs/log.md)."""
    most = 6 if shape.rows > FEW and capability >= (9, 0) else 8
    return min(most, n_shared(capability) // stage_bytes(type, shape))


def window(rows: int) -> tuple[int, int]:
    """Most stages in flight to a CTA: before its predecessor is over, and after. Other kernels' reads queue behind them."""
    return (2, 3) if rows <= FEW else (3, 4)


def fitting(type: GGMLType, capability: tuple[int, int]) -> tuple[Tiling, ...]:
    return tuple(s for s in SHAPES if n_stages(type, s, capability) >= 2)


capturable = False


def limits(spec: LinearSpec) -> str | None:
    if spec.type not in CHUNKS:
        return f"{spec.type.name} matrices have no packed form yet"
    if spec.n_in % 32:
        return f"{spec.n_in} columns are not a multiple of 32"
    if not fitting(spec.type, torch.cuda.get_device_capability(spec.device)):
        return f"{spec.type.name} does not fit this GPU's shared memory"
    if spec.parts > 1 and (why := _parts_limits(spec)) is not None:
        return why
    if n_tiles(spec) * max(s.n_warp for s in SHAPES) > MAX_TICKETS:
        return f"{spec.n_weight_row} rows; the kernel takes up to {MAX_TICKETS // SHAPES[0].n_warp * TILE * 16} rows"
    return None


def _parts_limits(spec: LinearSpec) -> str | None:
    n_own, odd = divmod(spec.n_weight_row, spec.parts)
    if spec.epilogue is not Epilogue.PLAIN:
        return f"{spec.parts} parts, and something is done to their product"
    if odd or n_own % (16 * TILE) or spec.n_in % 256:
        return f"parts of {n_own} rows and {spec.n_in} columns; the kernel takes multiples of {16 * TILE} and 256"
    if spec.parts * spec.n_in > MAX_COLUMNS:
        return (
            f"{spec.parts} parts of {spec.n_in} columns; the kernel takes up to {MAX_COLUMNS} together"
        )
    return None


def n_cta(n_unit: int, n_sm: int) -> int:
    """CTAs that share a matrix of `n_unit` tiles times chunks: one a multiprocessor, or a few less if all then have the same number of units, up
    to FEW_UNITS. That takes as long and cuts fewer tiles (docs/log.md)."""
    per = -(-n_unit // n_sm)
    fewer = n_unit // per
    is_even = n_unit % per == 0 and per <= FEW_UNITS and fewer >= NEARLY_ALL * n_sm
    return fewer if is_even else min(n_sm, n_unit)


def n_tiles(spec: LinearSpec) -> int:
    return -(-n_groups(spec.n_weight_row) // TILE)


def stem(capability: tuple[int, int]) -> str:
    """linear_sm90.cu on GPUs with a copy engine."""
    return "linear_sm90" if capability >= (9, 0) else "linear"


@dataclass(frozen=True, slots=True)
class Build:
    """Options of a build: see LinearSpec. part_tiles: tiles of 256 rows of each part, 0 for a single part."""

    epilogue: Epilogue
    limit: float = 0.0
    part_tiles: int = 0
    hands: float = 0.0

    def defines(self) -> Macros:
        parts: Macros = {"PART_TILES": self.part_tiles} if self.part_tiles else {}
        return parts | epilogue_macros(self.epilogue, self.limit, self.hands)


def build_of(spec: LinearSpec) -> Build:
    return Build(
        spec.epilogue, spec.limit, n_tiles(spec) // spec.parts if spec.parts > 1 else 0, spec.hands
    )


def defines(type: GGMLType, shape: Tiling, stages: int, build: Build | Epilogue) -> Macros:
    """Macros of linear.cu."""
    return {
        "TYPE": FORMATS[type].code,
        "CHUNK": CHUNKS[type],
        "RECORD": RECORDS[type],
        "WARPS_M": shape.warps_m,
        "WARPS_N": shape.warps_n,
        "TILES_M": shape.tiles_m,
        "TILES_N": shape.tiles_n,
        "STAGES": stages,
        "WINDOW": window(shape.rows)[0],
        "STEADY": min(window(shape.rows)[1], stages),
    } | (Build(build) if isinstance(build, Epilogue) else build).defines()


@dataclass(frozen=True, slots=True)
class _Built:
    """One compiled shape."""

    shape: Tiling
    kernel: Kernel
    threads: int
    shared: int


@per_device
def _steps(device: torch.device, type: GGMLType, build: Build, most: int) -> tuple[_Built, ...]:
    shapes = fitting(type, torch.cuda.get_device_capability(device))
    return tuple(step(device, type, build, shape) for shape in shapes if shape.rows <= most)


def step(device: torch.device, type: GGMLType, build: Build | Epilogue, shape: Tiling) -> _Built:
    """Compile linear.cu for one shape, with as many stages as fit."""
    capability = torch.cuda.get_device_capability(device)
    stages = n_stages(type, shape, capability)
    code = compile_cubin(stem(capability), arch_of(capability), defines(type, shape, stages, build))
    shared = stages * stage_bytes(type, shape)
    threads = 32 * (shape.n_warp + (code.stem == "linear_sm90"))  # there a warp of its own copies
    return _Built(shape, code.kernel("linear", "ppppppppiiiii").allow_shared(shared), threads, shared)


def n_partial(n_sm: int) -> int:
    """Shares of cut tiles, which all matrices of a GPU have together: two tiles of 128 rows a CTA. f32"""
    return 2 * n_sm * 256 * MAX_ROWS


@per_device
def _workspace(device: torch.device, n_sm: int) -> tuple[Tensor, Tensor]:
    """(shares of cut tiles, tickets): a ticket for each warp of the tiles a matrix may have."""
    partial = torch.empty(n_partial(n_sm), dtype=torch.float32, device=device)
    return partial, torch.zeros(MAX_TICKETS, dtype=torch.int32, device=device)


@per_device
def bind_rows(device: torch.device, type: GGMLType, n_in: int) -> RowsLaunch:
    """One launch, and one buffer, for all matrices of a type and n_in; pads are those of `linear` for the type."""
    pads = tuple(s.rows for s in fitting(type, torch.cuda.get_device_capability(device)))
    return RowsLaunch(device, n_in, pads)


def check_product(
    spec: LinearSpec, rows: Rows, packed: Packed, out: Tensor, residual: Tensor | None
) -> None:
    """Assert what kernels rely on."""
    assert out.is_contiguous() and out.shape == (rows.n_row, spec.n_out) and out.dtype == torch.float32
    assert (packed.n_out, packed.n_in, packed.type) == (spec.n_weight_row, spec.n_in, spec.type)
    assert (residual is not None) == (spec.epilogue is Epilogue.RESIDUAL)


class LinearLaunch:
    """Multiplies rows with one matrix of `spec`."""

    def __init__(self, spec: LinearSpec, steps: tuple[_Built, ...]) -> None:
        self.spec, self.steps = spec, {s.shape.rows: s for s in steps}
        self.max_rows = max(self.steps)
        self.rows = bind_rows(spec.device, spec.type, spec.n_in * spec.parts)
        n_sm = torch.cuda.get_device_properties(spec.device).multi_processor_count
        n_group, n_chunk = n_groups(spec.n_weight_row), n_chunks(spec.type, spec.n_in)
        self.grid = (n_cta(n_tiles(spec) * n_chunk, n_sm),)
        self.partial, self.tickets = _workspace(spec.device, n_sm)
        self.sizes = spec.n_out, n_group, n_chunk
        shared = n_shared(torch.cuda.get_device_capability(spec.device))
        self.pairs = {  # pairs sum in another order and can not take every number of rows
            pad: linear_pair.PairLaunch(spec, pad, n_sm, shared)
            for pad in (() if current().is_exact else self.steps)
            if spec.parts == 1 and linear_pair.takes(spec, pad, shared)
        }

    def __call__(self, x: Tensor, packed: Packed, out: Tensor, residual: Tensor | None = None) -> None:
        """See linear_ref. out and residual contiguous; residual may be `out`."""
        for first in range(0, x.shape[0], self.max_rows):
            part = slice(first, first + self.max_rows)
            rows = self.rows(x[part])
            self.multiply(rows, packed, out[part], None if residual is None else residual[part])

    def has_late(self, n_row: int) -> bool:
        """Whether `multiply` may be `late` with so many rows: another kernel fits beside it (docs/log.md)."""
        return (
            0 < n_row <= LATE_ROWS and LATE_ROWS in self.steps and self.rows.prepare.capability >= (9, 0)
        )

    def multiply(
        self, rows: Rows, packed: Packed, out: Tensor, residual: Tensor | None = None, late: bool = False
    ) -> None:
        """The product alone, for rows that several matrices share. late: see PairLaunch."""
        check_product(self.spec, rows, packed, out, residual)
        if rows.pad in self.pairs:
            return self.pairs[rows.pad](rows, packed, out, residual, late)
        self._whole(rows, packed, out if residual is None else residual, out, late)

    def hand(self, rows: Rows, packed: Packed, into: RowsLaunch) -> Rows:
        """The product alone, into the next one's rows, over `spec.hands`."""
        to = into.room(rows.n_row)
        assert self.spec.hands and to.pad == rows.pad and to.layout == BLOCKED
        assert into.n_in == self.spec.n_out
        if rows.pad in self.pairs:
            self.pairs[rows.pad](rows, packed, to.blocks, to.powers)
        else:
            self._whole(rows, packed, to.powers, to.blocks)
        return to

    def _whole(
        self, rows: Rows, packed: Packed, residual: Tensor, out: Tensor, late: bool = False
    ) -> None:
        run = self.steps[rows.pad]
        read = packed.data, rows.blocks, rows.sums, rows.powers, residual, out
        args = *read, self.partial, self.tickets, rows.n_row, *self.sizes, int(late)
        run.kernel.launch(self.grid, run.threads, args, run.shared, overlap=True)


def programs(spec: LinearSpec, target: GpuKind) -> Iterable[Program]:
    type, capability = spec.type, target.capability
    shared, shapes = n_shared(capability), fitting(type, capability)
    for shape in shapes:
        if spec.parts == 1 and linear_pair.takes(spec, shape.rows, shared):
            macros = linear_pair.defines(type, shape.rows, spec.epilogue, spec.limit, spec.hands)
            yield target.program("linear_pair", macros)
        stages = n_stages(type, shape, capability)
        yield target.program(stem(capability), defines(type, shape, stages, build_of(spec)))
    if shapes:
        yield from rows_builds(spec.n_in, PrepKind.PLAIN, 0, BLOCKED, target)


def bind(spec: LinearSpec) -> LinearLaunch:
    most = HANDED_ROWS if spec.hands else MAX_ROWS
    return LinearLaunch(spec, _steps(spec.device, spec.type, build_of(spec), most))


def check(
    launch: Linear, reference: Linear, spec: LinearSpec, n_rows: Sequence[int] = (1, 9, 33, 100)
) -> str | None:
    """Compare ragged row counts; a sentence if outputs differ."""
    gen, pack = torch.Generator().manual_seed(0), getattr(launch, "pack", None)
    raw, scales = random_rows(spec.type, spec.n_weight_row, spec.n_in, gen, spec.device)
    packed = own = repack(raw, spec.type, (spec.n_weight_row, spec.n_in), scales)
    if pack is not None:  # it has a layout of its own
        own = pack(raw, spec.type, (spec.n_weight_row, spec.n_in), scales)
    size = _below_limit(packed, spec.limit) if spec.limit else 1.0
    for n_row in n_rows:
        x = size * torch.randn(n_row, spec.parts * spec.n_in, generator=gen).to(spec.device)
        residual = torch.randn(n_row, spec.n_out, generator=gen).to(spec.device)
        got, want = (torch.full_like(residual, torch.nan) for _ in "gw")
        for run, matrix, out in ((launch, own, got), (reference, packed, want)):
            run(x, matrix, out, residual if spec.epilogue is Epilogue.RESIDUAL else None)
        off = float((got - want).norm() / want.norm())
        if not off < 1e-3:
            return f"outputs for {n_row} rows differ from the reference by {off:.2g}"
    return None


def _below_limit(packed: Packed, limit: float) -> float:
    """Size of rows for which most products lie below the limit, and some above it. If most lay above, the error would be that of the few others,
    in units no larger than the limit."""
    return abs(limit) / 2 / float(unpack(packed).square().sum(-1).mean().sqrt())


def random_matrix(
    type: GGMLType, n_out: int, n_in: int, gen: torch.Generator, device: torch.device
) -> Packed:
    """`random_rows`, repacked."""
    raw, scales = random_rows(type, n_out, n_in, gen, device)
    return repack(raw, type, (n_out, n_in), scales)


def random_rows(
    type: GGMLType, n_out: int, n_in: int, gen: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """`random_weights`, and different scales of the rows where a type has them."""
    scales = 0.5 + torch.rand(n_out, generator=gen) if FORMATS[type].scaled else None
    raw = random_weights(type, n_out, n_in, gen).to(device)
    return raw, None if scales is None else scales.to(device)


def random_packed(type: GGMLType, n_out: int, n_in: int, device: torch.device) -> Packed:
    """Random bytes in place of a repacked matrix, also where rows and columns are padding; scales are small and positive."""
    n_record, n_half = n_groups(n_out) * n_chunks(type, n_in), len(half_floats(type))
    records = torch.randint(0, 256, (n_record, RECORDS[type]), dtype=torch.uint8, device=device)
    n_block = CHUNKS[type] * 32 // type.block_size
    # All behind E2M1 codes
    at = 0 if type in HALVES else -(n_half * 32 * n_block or RECORDS[type] - 256 * CHUNKS[type])
    # Before them scales and minima of each row and block, of six bits
    if type in (GGMLType.Q4_K, GGMLType.Q5_K):
        records[:, at - 32 * CHUNKS[type] : at] &= 0x3F
    floats = records[:, at:]
    floats &= 0x1F
    if type in (GGMLType.MXFP4, GGMLType.NVFP4):
        floats |= 0x60
    ones = torch.ones((packed_bytes(type, n_out, n_in) - records.numel()) // 4, device=device)
    return Packed(torch.cat((records.view(-1), ones.view(torch.uint8))), type, n_out, n_in)


def random_weights(type: GGMLType, n_out: int, n_in: int, gen: torch.Generator) -> Tensor:
    """[n_out, row_bytes] uint8. Most types have no encoder here: random codes and scales, the half floats set."""
    if type in (*HALVES, GGMLType.Q8_0, GGMLType.Q4_0):
        return quantize(torch.randn(n_out, n_in, generator=gen), type)
    n_block = n_in // type.block_size
    blocks = torch.randint(0, 256, (n_out, n_block, type.type_size), generator=gen, dtype=torch.uint8)
    for at in half_floats(type):
        half = (torch.rand(n_out, n_block, 1, generator=gen) * 0.01).half()
        blocks[..., at : at + 2] = half.view(torch.uint8)
    if type is GGMLType.MXFP4:
        blocks[..., 0] = 120 + blocks[..., 0] % 8
    return blocks.view(n_out, -1)
