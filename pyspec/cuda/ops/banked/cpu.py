"""`banked` on CPUs (cpu/native/banked.cpp)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.ops.banked.cuda import MOST
from pyspec.cuda.ops.banked.ref import Banked, BankedSpec

_RUN = CpuKernel("pyspec_banked", f"{MOST + 1}q" + "qqqqq" + "d")


def limits(spec: BankedSpec) -> str | None:
    return f"{spec.n_kept} kept rows; the kernel takes {MOST}" if spec.n_kept > MOST else None


def bind(spec: BankedSpec) -> Banked:
    def banked(kept: Sequence[Tensor], x: Tensor, weight: Tensor) -> Tensor:
        assert len(kept) == spec.n_kept
        assert all(t.is_contiguous() and t.shape == x.shape for t in (*kept, x))
        out = empty(*x.shape)
        nothing = (None,) * (MOST - len(kept))
        _RUN(*kept, x, *nothing, weight, out, x.shape[0], spec.n, len(kept) + 1, spec.eps)
        return out

    return banked
