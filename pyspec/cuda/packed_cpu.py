"""Matrices on a CPU that stay packed: rows are prepared and multiplied with the bytes of the file by C++ kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyspec.cpu.kernels import empty, is_foretold
from pyspec.cuda.kernel_context import current
from pyspec.cuda.op import Op, op_named
from pyspec.cuda.ops.linear.cpu import PLAIN, CpuLinearSpec, gates, has_eight, prepared
from pyspec.cuda.ops.linear.op import linear_cpu
from pyspec.cuda.ops.moe.ref import MoeSpec
from pyspec.cuda.ops.rows.ref import Prep
from pyspec.gguf import GGMLType

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class CpuGates:
    """The first half of a matrix's rows are gates, the second half ups: act(gate) * up. limit as in models.weights."""

    gelu: bool = False
    limit: float = 0.0


def runs_packed(type: GGMLType) -> bool:
    """True if kernels multiply with matrices of this type."""
    spec = CpuLinearSpec(CPU, type)
    return _runs(linear_cpu, spec) if is_foretold() else linear_cpu.runs_as("cpu", spec)


def runs_experts(type: GGMLType) -> bool:
    """True if kernels run experts with matrices of this type. The op does not count it as a choice: no layer has the sizes of the question."""
    n = type.block_size
    return _runs(op_named("moe"), MoeSpec(CPU, 1, n, n, "swiglu", type, type))


def _runs(op: Op[Any, Any], spec: object) -> bool:
    """True if the op's C++ kernel takes `spec`; checked where there is a library to check."""
    own = next(impl for impl in op.impls if impl.name == "cpu")
    return (op.out_of_question if is_foretold() else op.refusal)(own, spec) is None


def spec_of(type: GGMLType) -> CpuLinearSpec:
    """The product with matrices of this type under this thread's settings."""
    if current().cpu_rows == "q8" and has_eight(type):
        eight = CpuLinearSpec(CPU, type, 8)
        if linear_cpu.runs_as("cpu", eight):
            return eight
    return CpuLinearSpec(CPU, type)


class CpuMatrix:
    """Matrices of one input, their outputs side by side. parts: (bytes [n_out, bytes of a row], type, factor)."""

    def __init__(
        self, parts: Sequence[tuple[Tensor, GGMLType, float]], after: CpuGates | None = None
    ) -> None:
        self.parts, self.after = list(parts), after
        specs = [spec_of(type) for _, type, _ in parts]
        self.products = [linear_cpu.bind(spec) for spec in specs]
        self.widths = [raw.shape[0] for raw, _, _ in parts]
        self.n_out = sum(self.widths)
        self.whole = any(spec.type not in PLAIN and spec.bits == 16 for spec in specs)
        self.eight = any(spec.bits == 8 for spec in specs)

    def __call__(self, x: Tensor, prep: Prep | None = None, residual: Tensor | None = None) -> Tensor:
        rows = prepared(x, prep, whole=self.whole, eight=self.eight)
        y = empty(x.shape[0], self.n_out)
        added = (
            [None] * len(self.parts)
            if residual is None or self.after
            else residual.split(self.widths, 1)
        )
        outs = y.split(self.widths, 1) if len(self.parts) > 1 else [y]
        for product, (raw, _, factor), out, own in zip(
            self.products, self.parts, outs, added, strict=True
        ):
            product(rows, raw, out, factor, own)
        return (
            y if self.after is None else gates(y, residual, gelu=self.after.gelu, limit=self.after.limit)
        )


class CpuGroups:
    """Matrices [n_out, n_in] that lie one after the other, each for its part of the input: [row, group * n_in] -> [row, group * n_out].

    Its uses are those of models.grouped.Grouped. raw: bytes [group * n_out, bytes of a row]
    """

    few = None

    def __init__(self, raw: Tensor, type: GGMLType, factor: float, n_group: int) -> None:
        self.raws, self.factor, self.whole = raw.chunk(n_group), factor, type not in PLAIN
        self.product = linear_cpu.bind(CpuLinearSpec(CPU, type))

    def reach(self) -> float:
        """No bound of its outputs: nothing on a CPU hands them on."""
        return 0.0

    def __call__(self, x: Tensor) -> Tensor:
        n_group = len(self.raws)
        y = empty(len(x), n_group * len(self.raws[0]))
        for raw, part, out in zip(self.raws, x.chunk(n_group, 1), y.chunk(n_group, 1), strict=True):
            self.product(prepared(part, None, whole=self.whole), raw, out, self.factor, None)
        return y
