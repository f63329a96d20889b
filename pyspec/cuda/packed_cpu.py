"""A matrix on a CPU that stays packed: rows are prepared and multiplied with the bytes of the file by C++ kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cpu.kernels import empty
from pyspec.cuda.ops.linear.cpu import PLAIN, CpuLinearSpec, gates, prepared
from pyspec.cuda.ops.linear.op import linear_cpu
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
    return linear_cpu.runs_as("cpu", CpuLinearSpec(CPU, type))


class CpuMatrix:
    """Matrices of one input, their outputs side by side. parts: (bytes [n_out, bytes of a row], type, factor)."""

    def __init__(self, parts: Sequence[tuple[Tensor, GGMLType, float]], after: CpuGates | None = None) -> None:
        self.parts, self.after = list(parts), after
        self.products = [linear_cpu.bind(CpuLinearSpec(CPU, type)) for _, type, _ in parts]
        self.widths = [raw.shape[0] for raw, _, _ in parts]
        self.n_out = sum(self.widths)
        self.whole = any(type not in PLAIN for _, type, _ in parts)

    def __call__(self, x: Tensor, prep: Prep | None = None, residual: Tensor | None = None) -> Tensor:
        rows = prepared(x, prep, whole=self.whole)
        y = empty(x.shape[0], self.n_out)
        added = [None] * len(self.parts) if residual is None or self.after else residual.split(self.widths, 1)
        outs = y.split(self.widths, 1) if len(self.parts) > 1 else [y]
        for product, (raw, _, factor), out, own in zip(self.products, self.parts, outs, added, strict=True):
            product(rows, raw, out, factor, own)
        return y if self.after is None else gates(y, residual, gelu=self.after.gelu, limit=self.after.limit)
