"""`linear_cpu`: rows times packed matrices on a CPU, from the bytes of the file (pyspec/cpu/native/linear.cpp).

Rows become 16-bit whole numbers, 256 values sharing an f32 scale: within 2^-16 of the largest of them. Products with the weights' whole
numbers are exact, and sums are f32. A result's bits depend on its row and the matrix alone.

`--cpu-activations q8` gives products of 8-bit rows, 32 values sharing an f32 scale (native/eight.h), of the types where they are faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cpu import kernels
from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.cut import bounds
from pyspec.cuda.ops.linear import grids
from pyspec.cuda.ops.linear.dequant import QUANTISED, dequantize, half_floats, quantize
from pyspec.cuda.ops.rows.ref import GroupNorm, HeadGate, HeadNorm, Norm, Prep
from pyspec.gguf import GGMLType

CHUNK, N_SUM = 256, 24
ROW8 = CHUNK + 4 * (8 + N_SUM)  # bytes of 256 values of an 8-bit row: eight.h's `Row8`
PLAIN = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
TYPES = frozenset(PLAIN) | QUANTISED
TOLERANCE = 1e-4  # of the product's size
TOLERANCE_8 = 0.02  # the same of 8-bit rows whose values are no multiples of their scale; normal ones are 0.006 off

_PRODUCT = CpuKernel("pyspec_product", "qqqqqqqqqqqqqqqd")
_PRODUCT_8 = CpuKernel("pyspec_product_eight", "qqqqqqqqqqqqqqqd")
_PREPARE = CpuKernel("pyspec_prepare", "qqqqqqqqqqqqqqqd")
_GATES = CpuKernel("pyspec_gates", "qqqqqqdd")


@dataclass(frozen=True, slots=True)
class CpuLinearSpec:
    """Matrices of a type, of any size. bits: of rows as whole numbers, 16 or 8."""

    device: torch.device
    type: GGMLType
    bits: int = 16


@dataclass(frozen=True, slots=True)
class CpuRows:
    """Rows for products. x [row, n_in] f32, contiguous; q, scales, sums: product.h's `Rows`; eight: eight.h's `Row8`; or None."""

    x: Tensor
    q: Tensor | None
    scales: Tensor | None
    sums: Tensor | None
    eight: Tensor | None = None


Product = Callable[[CpuRows, Tensor, Tensor, float, Tensor | None], None]
"""product(rows, raw, out, scale, residual): raw [n_out, bytes of a row] uint8 as in the file; out and residual [row, n_out] f32, their
rows strided. Writes rows times the matrix, times `scale`, plus the residual."""


def prepared(x: Tensor, prep: Prep | None, *, whole: bool, eight: bool = False) -> CpuRows:
    """Rows x [row, columns] f32 prepared for products. whole: as 16-bit whole numbers, too, for packed types; eight: as 8-bit ones."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    n, kind = x.shape[0], 0 if prep is None else int(prep.kind)
    n_in = x.shape[1] // (2 if kind == 4 else 1)
    copies = kind != 0 or x.stride(0) != n_in
    out = empty(n, n_in) if copies else None
    q = scales = sums = None
    n_chunk = -(-n_in // CHUNK)
    of_eight = empty(n_chunk, n, ROW8, dtype=torch.uint8) if eight else None
    if whole:
        q = empty(n, n_chunk * CHUNK, dtype=torch.int16)
        scales, sums = empty(n, n_chunk), empty(n, n_chunk * N_SUM)
    weight = prep.weight if isinstance(prep, Norm | HeadNorm | GroupNorm) else None
    eps = prep.eps if isinstance(prep, Norm | HeadNorm | GroupNorm) else 0.0
    gate = prep.gate if isinstance(prep, HeadNorm | HeadGate | GroupNorm) else None
    if gate is not None and gate.stride(-1) != 1:
        gate = gate.contiguous()
    strides = (0, 0) if gate is None else (gate.stride(0), gate.stride(1))
    dim = 0 if prep is None else prep.dim
    if copies or whole or eight:
        _PREPARE(
            x,
            out,
            q,
            scales,
            sums,
            of_eight,
            weight,
            gate,
            kind,
            n,
            n_in,
            x.stride(0),
            *strides,
            dim,
            eps,
        )
    return CpuRows(x if out is None else out, q, scales, sums, of_eight)


def gates(both: Tensor, residual: Tensor | None, *, gelu: bool, limit: float) -> Tensor:
    """act(gate) * up + residual. both [row, 2 n] f32, contiguous: gates, then ups -> [row, n]"""
    n, width = both.shape[0], both.shape[1] // 2
    out = empty(n, width)
    residual = None if residual is None else residual.contiguous()
    _GATES(both, residual, out, n, width, int(gelu), *bounds(limit))
    return out


def bind(spec: CpuLinearSpec) -> Product:
    number, is_plain, table = int(spec.type), spec.type in PLAIN, table_of(spec.type)
    is_eight = spec.bits == 8
    kernel = _PRODUCT_8 if is_eight else _PRODUCT

    def product(rows: CpuRows, raw: Tensor, out: Tensor, scale: float, residual: Tensor | None) -> None:
        n, n_in, n_out = rows.x.shape[0], rows.x.shape[1], raw.shape[0]
        given = (
            (rows.eight, None, None)
            if is_eight
            else (None,) * 3
            if is_plain
            else (rows.q, rows.scales, rows.sums)
        )
        strides = out.stride(0), 0 if residual is None else residual.stride(0)
        kernel(raw, rows.x, *given, out, residual, None, table, number, n, n_in, n_out, *strides, scale)

    return product


def table_of(type: GGMLType) -> Tensor | None:
    """The lattice of a type that has one, as bytes."""
    if type not in (GGMLType.IQ2_XXS, GGMLType.IQ3_XXS):
        return None
    of_two, cpu = type is GGMLType.IQ2_XXS, torch.device("cpu")
    levels = grids.IQ2_LEVELS if of_two else grids.IQ3_LEVELS
    points = grids.iq2_levels(cpu) if of_two else grids.iq3_levels(cpu)
    return torch.tensor(levels, dtype=torch.uint8)[points.int()]


def limits(spec: CpuLinearSpec) -> str | None:
    if spec.type not in TYPES:
        return f"no product for {spec.type.name}"
    return "16-bit rows are as fast" if spec.bits == 8 and not has_eight(spec.type) else None


def has_eight(type: GGMLType) -> bool:
    """Whether 8-bit rows have a product with this type that is faster than that of 16-bit rows."""
    lib = kernels.compiled()
    return type not in PLAIN and not isinstance(lib, str) and bool(lib.pyspec_has_eight(int(type)))


def reference(spec: CpuLinearSpec) -> Product:
    """In plain torch: unpacks the matrix at each use."""

    def product(rows: CpuRows, raw: Tensor, out: Tensor, scale: float, residual: Tensor | None) -> None:
        weight = dequantize(raw.reshape(-1), spec.type, (raw.shape[0], rows.x.shape[1])) * scale
        y = F.linear(rows.x, weight)
        out.copy_(y if residual is None else y + residual)

    return product


def check(own: Product, other: Product, spec: CpuLinearSpec) -> str | None:
    """Both of some rows, few and many, and of a matrix whose sizes divide by nothing."""
    generator = torch.Generator().manual_seed(11)
    n_in = 256 * 2 if spec.type.block_size == 256 else 256 + 64
    raw = sample(spec.type, 21, n_in, generator)
    is_eight = spec.bits == 8
    for n in (1, 3, 19):
        x = torch.randn(n, n_in, generator=generator)
        if is_eight and n > 1:  # multiples of their scale, so nothing is rounded
            x = (40 * x).round().clamp(-127, 127)
            x[:, ::32] = 127.0
        most = TOLERANCE_8 if is_eight and n == 1 else TOLERANCE
        rows = prepared(x, None, whole=spec.type not in PLAIN and not is_eight, eight=is_eight)
        residual, ys = torch.randn(n, 21, generator=generator), []
        for launch in (own, other):
            ys.append(torch.full((n, 21), torch.nan))
            launch(rows, raw, ys[-1], 0.5, residual)
        off = float((ys[0] - ys[1]).norm() / ys[1].norm())
        if not off < most:
            return f"{n} rows of {spec.type.name} differ by {off:.1e} from the reference"
    return None


def sample(type: GGMLType, n_out: int, n_in: int, generator: torch.Generator) -> Tensor:
    """[n_out, bytes of a row] uint8: a matrix of the type whose numbers are of usual size."""
    x = torch.randn(n_out, n_in, generator=generator)
    if type is GGMLType.F32:
        return x.view(torch.uint8)
    if type is GGMLType.F16:
        return x.half().view(torch.uint8)
    if type in (GGMLType.BF16, GGMLType.Q8_0, GGMLType.Q4_0):
        return quantize(x, type).view(n_out, -1)
    raw = torch.randint(
        0, 256, (n_out, n_in // type.block_size * type.type_size), dtype=torch.uint8, generator=generator
    )
    return with_scales(raw, type)


def with_scales(raw: Tensor, type: GGMLType) -> Tensor:
    """Random bytes whose f16 and 8-bit scales are numbers of any sign, of sizes between a hundredth and one."""
    blocks = raw.view(raw.shape[0], -1, type.type_size)
    if type is GGMLType.MXFP4:
        blocks[..., 0] = 120 + blocks[..., 0] % 8
    elif type is GGMLType.NVFP4:
        blocks[..., :4] &= 0x3F
    else:
        for at in half_floats(type):
            blocks[..., at + 1] = (blocks[..., at + 1] & 0x83) | 0x1C
    return raw
