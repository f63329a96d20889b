"""`norms` in Triton: always one launch, a program for every row written (triton_kernels.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda import faults, tri
from pyspec.cuda.ops.norms.ref import GUARD, NormsSpec

MAX_COLUMNS = 32768


def limits(spec: NormsSpec) -> str | None:
    if not 0 < spec.n <= MAX_COLUMNS:
        return f"{spec.n} columns; the kernel takes up to {MAX_COLUMNS}"
    return None


class NormsTriton:
    """Implements `Norms`."""

    def __init__(self, spec: NormsSpec) -> None:
        self.n, self.eps, self.fault = spec.n, spec.eps, faults.record(spec.device)
        wide = 1 << (spec.n - 1).bit_length()
        self.warps = max(1, min(16, wide // 256))
        self.constants = {"COLUMNS": spec.n, "WIDE": wide, "LAYER": spec.layer, "OP": GUARD.number}

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        out = x.new_empty(x.shape)
        self._run((x, weight, out), (x, weight, out), None, self.n, 0)
        return out

    def added(self, x: Tensor, weight: Tensor, stream: Tensor, factor: float = 1.0) -> Tensor:
        out = x.new_empty(x.shape)
        assert stream.dtype == torch.float32 and stream.is_contiguous() and stream.shape == x.shape
        self._run((x, weight, out), (x, weight, out), None, self.n, 0, (stream, factor))
        return out

    def picked(self, x: Tensor, weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        out, some = x.new_empty(x.shape), x.new_empty(rows.shape[0], self.n)
        assert rows.dtype == torch.int64 and rows.is_contiguous() and (x.shape[0] or not rows.shape[0])
        self._run((x, weight, out), (x, weight, some), rows, self.n, rows.shape[0])
        return out, some

    def paired(self, a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor) -> Tensor:
        out = a.new_empty(a.shape[0], 2 * self.n)
        assert a.shape == b.shape
        self._run((a, a_weight, out), (b, b_weight, out[:, self.n :]), None, 2 * self.n, b.shape[0])
        return out

    def _run(
        self,
        first: tuple[Tensor, Tensor, Tensor],
        second: tuple[Tensor, Tensor, Tensor],
        rows: Tensor | None,
        step: int,
        n_second: int,
        after: tuple[Tensor, float] | None = None,
    ) -> None:
        """Rows of the first input, then of the second; `step` is the distance of rows in both outputs. after: what is added to the first
        ones, and then multiplies them."""
        from pyspec.cuda.ops.norms import triton_kernels as kernels

        for x, weight in (first[:2], second[:2]):
            assert x.dtype == weight.dtype == torch.float32 and weight.shape == x.shape[1:] == (self.n,)
            assert x.stride(1) == 1 and weight.is_contiguous()
        n_first = first[0].shape[0]
        if n_first + n_second:
            picks = self.fault if rows is None else rows
            stream, factor = after or (first[0], 1.0)
            steps = first[0].stride(0), second[0].stride(0), step
            args = (*first, *second, picks, stream, self.fault, *steps, n_first, self.eps, factor)
            constants = {**self.constants, "PICKS": rows is not None, "ADDS": after is not None}
            tri.launch(kernels.norms, (n_first + n_second,), args, constants, self.warps)


bind = NormsTriton
