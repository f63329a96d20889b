"""`heads` on CPUs: one call from the bytes of the file (cpu/native/heads.cpp), with the products and the rounding of `linear_cpu`."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.ops.heads.ref import Heads, HeadsRun, HeadsSpec
from pyspec.cuda.ops.linear.cpu import TYPES, table_of

_RUN = CpuKernel("pyspec_heads", "4q" + "8q")


def limits(spec: HeadsSpec) -> str | None:
    if spec.type not in TYPES:
        return f"no product for {spec.type.name}"
    return spec.shape_limit


def bind(spec: HeadsSpec) -> Heads:
    table = table_of(spec.type)
    sizes = spec.n_head, spec.n_in, spec.n_out, spec.n_out * spec.row_bytes

    def load(data: Tensor) -> HeadsRun:
        data = data.view(torch.uint8).reshape(-1)
        assert data.numel() == spec.n_head * spec.n_out * spec.row_bytes

        def heads(x: Tensor) -> Tensor:
            assert x.dtype == torch.float32 and x.shape[1:] == (spec.n_head, spec.n_in)
            assert x.stride(2) == 1, "values of a head lie together"
            y = empty(len(x), spec.n_head, spec.n_out)
            _RUN(x, data, table, y, x.stride(0), x.stride(1), int(spec.type), len(x), *sizes)
            return y

        return heads

    return load
