"""`moe_route` for CPUs in C++ (pyspec/cpu/native/moe_route.cpp): norm, scores and choice in one call.

Same contract as moe_ref. A row's bits do not depend on other rows. Bound by the memory of the matrix of few rows.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.ops.moe.ref import Route, Router, Routes, RouteSpec

MOST = 1024  # experts, as in the kernel
ROUTE = CpuKernel("pyspec_moe_route", "qq" + "qqqqqq" + "qqq" + "qqqqqqqq" + "dd")
ROUTERS = get_args(Router)  # in the kernel's order


def limits(spec: RouteSpec) -> str | None:
    if spec.n_in % 8:
        return f"rows are {spec.n_in} wide; the kernel takes multiples of 8"
    if not spec.n_used <= spec.n_expert <= MOST:
        return f"{spec.n_used} of {spec.n_expert} experts; the kernel takes up to {MOST}"
    return None


def bind(spec: RouteSpec) -> Route:
    router, n_out = ROUTERS.index(spec.router), spec.n_expert + spec.gated

    def route(
        x: Tensor,
        norm: Tensor,
        matrix: Tensor,
        bias: Tensor | None = None,
        given: Tensor | None = None,
        shift: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> Routes:
        assert x.dtype == norm.dtype == matrix.dtype == torch.float32 and x.stride(1) == 1
        assert matrix.shape == (n_out, spec.n_in) and matrix.is_contiguous() and norm.is_contiguous()
        spec.check_beside(bias, given, shift, factors)
        named = None if given is None else given.int().contiguous()
        n, k = len(x), spec.n_used
        ids, weights = empty(n, k, dtype=torch.int32), empty(n, k)
        gate = empty(n, 1) if spec.gated else None
        outs, groups = (ids, weights, gate), (spec.n_group, spec.n_group_used)
        numbers = n, spec.n_in, spec.n_expert, k, router, spec.renorm, *groups, spec.scale, spec.eps
        ROUTE(x, x.stride(0), norm, matrix, bias, shift, factors, named, *outs, *numbers)
        return Routes(ids, weights, gate)

    return route
