"""`norms` on CPUs (cpu/native/norms.cpp)."""

from __future__ import annotations

from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cpu.tensors import add, scaled
from pyspec.cuda.ops.norms.ref import NormsSpec

_RUN = CpuKernel("pyspec_norms", "10qd")


class CpuNorms:
    """Implements `Norms`."""

    def __init__(self, spec: NormsSpec) -> None:
        self.spec = spec

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._run(x, weight, None, empty(x.shape[0], self.spec.n))

    def added(self, x: Tensor, weight: Tensor, stream: Tensor, factor: float = 1.0) -> Tensor:
        return scaled(add(stream, self(x, weight)), factor)

    def picked(self, x: Tensor, weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return self(x, weight), self._run(x, weight, rows, empty(rows.shape[0], self.spec.n))

    def paired(self, a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor) -> Tensor:
        out = empty(a.shape[0], 2 * self.spec.n)
        self._run(a, a_weight, None, out[:, : self.spec.n])
        self._run(b, b_weight, None, out[:, self.spec.n :])
        return out

    def _run(self, x: Tensor, weight: Tensor, rows: Tensor | None, out: Tensor) -> Tensor:
        """Rows of x, or those at `rows`, into `out`, whose rows may be strided."""
        spec, n_row = self.spec, out.shape[0]
        x = x if x.stride(1) == 1 else x.contiguous()
        assert x.dtype == weight.dtype == out.dtype and weight.shape == x.shape[1:] == (spec.n,)
        assert weight.is_contiguous() and (x.shape[0] or not n_row)
        assert rows is None or rows.is_contiguous()
        strides = x.stride(0), out.stride(0)
        _RUN(x, weight, out, rows, n_row, x.shape[0], spec.n, *strides, int(spec.layer), spec.eps)
        return out


bind = CpuNorms
