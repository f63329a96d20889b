"""Rows for products on NVIDIA GPUs, prepared and rounded in one launch (rows.cu). Same contract as rows_ref.

Buffers are made at bind and shared by the matrices of a device: all launches must be on one stream, and a result is valid
until the next launch of the same size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cuda.jit import HOPPER, Arg, GpuKind, Kernel, KernelFile, Macros, Program
from pyspec.cuda.ops.rows.ref import GroupNorm, HeadGate, HeadNorm, Norm, Prep, PrepKind, RowsSpec

MAX_COLUMNS = 32768  # 16 times 4 columns in each thread's registers
# Rows.cu's layouts: for `linear`, a library, `linear_tall`, `moe`
BLOCKED, ROW_MAJOR, TALL, PLANES = range(4)
UNIT = 144  # PLANES: bytes of 64 columns of a row
ROWS_ARGS = "plpff" + "pli" + "ppp" + "i"
SUMMED_ARGS = "ppppp" + "ii" + "ppp" + "i"
MAX_SUMMED = 8192  # columns of rows that are summed on the way: more would not fit a thread's registers
STRETCH, THREADS = 4096, 512
# CTAs that have a row of at least so many columns together, from 9.0 on (1: one alone), and rows up to which they do: those of more rows
# fill the machine.
PARTS, PARTS_FROM, PARTS_ROWS = 8, 16384, 128
MAX_GRID = 65535  # CTAs along a grid's second and third side


def limits(spec: RowsSpec) -> str | None:
    if spec.n_in % 32 or spec.n_in > MAX_COLUMNS:
        return f"{spec.n_in} columns; the kernel takes multiples of 32 up to {MAX_COLUMNS}"
    if spec.kind is PrepKind.HEADS and (spec.n_in % 128 or spec.dim not in (32, 64, 128)):
        return f"heads of {spec.dim} in {spec.n_in} columns; the kernel takes heads of 32, 64 or 128"
    if spec.kind is PrepKind.GROUPS and (spec.dim % 128 or not spec.dim or spec.n_in % spec.dim):
        return f"groups of {spec.dim} in {spec.n_in} columns; the kernel takes whole groups of a multiple of 128"
    if spec.kind is PrepKind.GATE and spec.dim % 4:
        return f"heads of {spec.dim} columns; the kernel takes multiples of 4"
    return None


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows ready to be multiplied, padded to `pad`, in a layout of rows.cu. Padding rows hold garbage."""

    blocks: Tensor
    sums: Tensor
    powers: Tensor
    n_row: int
    pad: int
    layout: int = BLOCKED


@dataclass(frozen=True, slots=True)
class Shares:
    """Outputs of a row's experts, not summed yet, and the tensors that their sum is added to. See expert_sums.cuh.

    y [row * n_used, n] f32, weights [row, n_used] f32, shared [n_piece * row, n] f32, gate [row, 1] f32, residual [row, n] f32
    """

    y: Tensor
    weights: Tensor
    shared: Tensor | None
    gate: Tensor | None
    residual: Tensor | None
    n_piece: int

    def args(self) -> list[Arg]:
        return [self.weights, self.shared, self.gate, self.residual]


def defines(
    n_in: int, kind: PrepKind, dim: int, layout: int, experts: bool = False, parts: int = 1
) -> Macros:
    """Macros of rows.cu."""
    macros: Macros = {
        "COLUMNS": n_in,
        "KIND": int(kind),
        "DIM": max(dim, 1),
        "LAYOUT": layout,
        "EXPERTS": int(experts),
    }
    return macros if parts == 1 else macros | {"PARTS": parts}


def parts_of(n_in: int, kind: PrepKind, layout: int, capability: tuple[int, int], n_row: int) -> int:
    """CTAs that have one of `n_row` rows together."""
    alone = kind in (PrepKind.NORM, PrepKind.HEADS, PrepKind.GROUPS) or layout == PLANES
    return 1 if alone or capability < HOPPER or n_in < PARTS_FROM or n_row > PARTS_ROWS else PARTS


def threads_of(n_in: int, layout: int, parts: int) -> int:
    """rows.cu's kThreads, but of groups."""
    n_block = n_in // 32 if layout == ROW_MAJOR else -(-n_in // 256) * 8
    return THREADS if parts == 1 else -(-(-(-n_block // parts) * 4) // 32) * 32


Build = tuple[int, PrepKind, int, int, bool, int]  # as `defines`
FILE = KernelFile[Build](
    "rows", lambda build: SUMMED_ARGS if build[4] else ROWS_ARGS, lambda build: defines(*build)
)
FINISH: KernelFile[None] = KernelFile("rows_finish", "ppppi")


def is_aligned(x: Tensor) -> bool:
    """Whether kernels can read it four values at once."""
    steps = x.stride()
    return steps[-1] == 1 and all(n % 4 == 0 for n in steps[:-1]) and x.data_ptr() % 16 == 0


def aligned(gate: Tensor) -> Tensor:
    """As the kernel reads it: a part of a product of odd width is copied."""
    return gate if is_aligned(gate) else gate.clone(memory_format=torch.contiguous_format)


def groups_of(n_in: int, dim: int, n_row: int) -> tuple[tuple[int, int], int]:
    """Grid and threads if a CTA has a group of a row: rows.cu's kThreads."""
    return (n_row, n_in // dim), min(dim // 4, THREADS)


class RowsPrep:
    """Launches rows.cu for rows of n_in columns in one layout."""

    def __init__(self, device: torch.device, n_in: int, layout: int) -> None:
        self.device, self.n_in, self.layout = device, n_in, layout
        self.capability = torch.cuda.get_device_capability(device)
        self.none = torch.empty(4, dtype=torch.float32, device=device)
        self.kernels: dict[tuple[PrepKind, int, bool, int], Kernel] = {}
        self.kernel(PrepKind.PLAIN, 0)

    def kernel(self, kind: PrepKind, dim: int, experts: bool = False, parts: int = 1) -> Kernel:
        """experts: rows are sums of experts' shares; parts: CTAs that have a row together."""
        key = kind, dim, experts, parts
        if key not in self.kernels:
            build = self.n_in, kind, dim, self.layout, experts, parts
            self.kernels[key] = FILE.kernel(self.device, build)
        return self.kernels[key]

    def __call__(
        self, x: Tensor, prep: Prep | None, out: Tensor, sums: Tensor, powers: Tensor, pad: int
    ) -> None:
        kind, dim = (PrepKind.PLAIN, 0) if prep is None else (prep.kind, prep.dim)
        assert x.dtype == torch.float32 and x.stride(1) == 1 and x.stride(0) % 4 == 0
        assert x.shape[1] == self.n_in * kind.halves
        weight, eps, power, gate, steps = self.none, 0.0, 1.0, self.none, (0, 0)
        if isinstance(prep, (Norm, HeadNorm, GroupNorm)):
            weight, eps, power = prep.weight, prep.eps, prep.power
        if isinstance(prep, HeadNorm | GroupNorm):
            gate = aligned(prep.gate)
            steps = gate.stride(0), dim
        elif isinstance(prep, HeadGate):
            gate = aligned(prep.gate)
            steps = gate.stride(0), gate.stride(1)
        assert steps[0] % 4 == steps[1] % 4 == 0
        n_row = x.shape[0]
        parts = parts_of(self.n_in, kind, self.layout, self.capability, n_row)
        kernel = self.kernel(kind, dim, parts=parts)
        args = x, x.stride(0), weight, eps, power, gate, *steps, out, sums, powers, pad
        grid: tuple[int, ...] = (n_row,) if parts == 1 else (parts, n_row)
        n_thread = threads_of(self.n_in, self.layout, parts)
        if kind is PrepKind.GROUPS:
            grid, n_thread = groups_of(self.n_in, dim, n_row)
        kernel.launch(grid, n_thread, args, overlap=True)


def row_bytes(n_in: int, layout: int = BLOCKED) -> int:
    """Bytes of a row of n_in columns, padded to whole chunks of 256."""
    return -(-n_in // 256) * (4 * UNIT if layout == PLANES else 512)


class RowsLaunch:
    """Rows in blocks, for our own products. A result is valid until the next call."""

    def __init__(
        self, device: torch.device, n_in: int, pads: tuple[int, ...], layout: int = BLOCKED
    ) -> None:
        self.n_in, self.pads, n_block = n_in, pads, -(-n_in // 256) * 8
        self.prepare = RowsPrep(device, n_in, layout)
        self._held: tuple[Tensor, Prep, Rows] | None = None
        n_half = pads[-1] * row_bytes(n_in, layout) // 2
        self.blocks = torch.zeros(n_half, dtype=torch.float16, device=device)
        self.sums = torch.zeros(n_block * pads[-1], dtype=torch.float32, device=device)
        self.powers = torch.zeros(pads[-1], dtype=torch.float32, device=device)

    def __call__(self, x: Tensor, prep: Prep | None = None) -> Rows:
        """x [row, n_in] f32 ([row, 2 n_in] before a Glu), columns contiguous; rows at most the largest pad."""
        rows = self.room(x.shape[0])
        self.prepare(x, prep, rows.blocks, rows.sums, rows.powers, rows.pad)
        return rows

    def summed(self, shares: Shares) -> Rows:
        """The sums of `shares`, rounded."""
        (n_row, n_used), p = shares.weights.shape, self.prepare
        assert self.n_in <= MAX_SUMMED and p.layout == BLOCKED
        rows, kernel = self.room(n_row), p.kernel(PrepKind.PLAIN, 0, experts=True)
        counts = n_used, shares.n_piece
        args = shares.y, *shares.args(), *counts, rows.blocks, rows.sums, rows.powers, rows.pad
        kernel.launch((n_row,), THREADS, args, overlap=True)
        return rows

    def room(self, n_row: int) -> Rows:
        """Buffer for `n_row` rows, for a kernel that writes them as rows.cu does."""
        pad, self._held = next(p for p in self.pads if n_row <= p), None
        return Rows(self.blocks, self.sums, self.powers, n_row, pad, self.prepare.layout)

    def hold(self, x: Tensor, prep: Prep, rows: Rows) -> None:
        """Note that `rows`, written last into `room`, are x with `prep`, until others are written there."""
        self._held = x, prep, rows

    def held(self, x: Tensor, prep: Prep | None) -> Rows | None:
        """The rows already made of this x and prep, if any. They are handed out once, to the next reader."""
        held = self._held
        if held is None or held[0] is not x or held[1] is not prep:
            return None
        self._held = None
        return held[2]


def values_of(rows: Rows, n_in: int) -> tuple[Tensor, Tensor]:
    """Values of rows in blocks: (values [row, n_in], their sums over each 32 columns [row, n_in / 32]), f32."""
    if rows.layout == PLANES:
        return _values_of_planes(rows, n_in)
    n_block, power = -(-n_in // 256) * 8, rows.powers[: rows.n_row, None]
    blocks = rows.blocks[: n_block * rows.pad * 32].view(n_block, rows.pad, 4, 2, 4)[:, : rows.n_row]
    # Column 16 h + 4 i + j is at [i, h, j]
    values = blocks.permute(1, 0, 3, 2, 4).reshape(rows.n_row, -1)
    sums = rows.sums[: n_block * rows.pad].view(n_block, rows.pad)[:, : rows.n_row].T
    return values[:, :n_in].float() * power, sums[:, : n_in // 32] * power


def _values_of_planes(rows: Rows, n_in: int) -> tuple[Tensor, Tensor]:
    units = rows.blocks.view(torch.uint8).view(-1, row_bytes(n_in, PLANES) // UNIT, UNIT)[: rows.n_row]
    planes = units[..., :128].contiguous().view(torch.int8).unflatten(-1, (2, 4, 2, 2, 2, 2)).int()
    # [t, block, upper bit of j, lower one, h]: column 16 h + 4 t + j
    whole = planes[:, :, 0] * 256 + planes[:, :, 1]
    beside = units[..., 128:].contiguous().view(torch.float32).unflatten(-1, (2, 2))
    sums, powers = beside[..., 0, :].flatten(1), beside[..., 1, :].flatten(1)
    values = whole.permute(0, 1, 3, 6, 2, 4, 5).reshape(rows.n_row, -1, 32) * powers[..., None]
    return values.flatten(1)[:, :n_in], sums[:, : n_in // 32]


@dataclass(frozen=True, slots=True)
class GatedRowBuffer:
    """Buffer of a product's rows for the kernel before it, which applies `prep` and writes them. weights: the product's."""

    rows: RowsLaunch
    prep: HeadNorm
    weights: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowBuffer:
    """The same for plain or normed rows, which are divided by `power`, one that serves all of them."""

    rows: RowsLaunch
    weights: Tensor
    power: float
    norm: Norm | None = None


class WideRows:
    """Row-major rows for a library's product of many rows; `finish` scales the product."""

    def __init__(self, device: torch.device, n_in: int) -> None:
        self.n_in, self.prepare = n_in, RowsPrep(device, n_in, ROW_MAJOR)
        self.finisher = FINISH.kernel(device, None)

    def __call__(self, x: Tensor, prep: Prep | None = None) -> tuple[Tensor, Tensor | None]:
        """(rows [row, n_in] f16, powers [row] f32 to multiply products with, or None if they are 1)."""
        out = torch.empty(x.shape[0], self.n_in, dtype=torch.float16, device=x.device)
        powers = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        self.prepare(x, prep, out, powers, powers, x.shape[0])
        return out, None if isinstance(prep, Norm | GroupNorm) and prep.power == 1.0 else powers

    def finish(self, y: Tensor, powers: Tensor | None, residual: Tensor | None) -> Tensor:
        """residual + y * powers in place of y [row, n_out] f32."""
        if powers is None or y.shape[1] % 4:
            y = y if powers is None else y.mul_(powers[:, None])
            return y if residual is None else y.add_(residual)
        assert y.is_contiguous() and (residual is None or residual.is_contiguous())
        for first in range(0, len(y), MAX_GRID):
            part = slice(first, first + MAX_GRID)
            rows, add = y[part], None if residual is None else residual[part]
            grid = (-(-y.shape[1] // STRETCH), len(rows))
            args = (rows, powers[part], add, rows, y.shape[1])
            self.finisher.launch(grid, THREADS, args, overlap=True)
        return y


def builds(n_in: int, kind: PrepKind, dim: int, layout: int, target: GpuKind) -> Iterator[Program]:
    """Builds of rows.cu for any number of rows."""
    for parts in sorted({1, parts_of(n_in, kind, layout, target.capability, 1)}):
        yield target.program("rows", defines(n_in, kind, dim, layout, parts=parts))


def programs(spec: RowsSpec, target: GpuKind) -> Iterable[Program]:
    """As a library's rows, which the check compares, and as our products read them."""
    layouts = [ROW_MAJOR, BLOCKED]
    if target.capability == HOPPER:
        layouts.append(TALL)
    for kind, dim in ((PrepKind.PLAIN, 0), (spec.kind, spec.dim)):
        for layout in layouts:
            yield from builds(spec.n_in, kind, dim, layout, target)
    yield from FINISH.programs(None, target)


def bind(spec: RowsSpec) -> WideRows:
    return WideRows(spec.device, spec.n_in)
