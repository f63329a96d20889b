"""`rope_kv` on CPUs (cpu/native/rope_kv.cpp): one pass over the products, heads of all rows shared by the threads."""

from __future__ import annotations

from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.ops.rope_kv.ref import Given, RopeKv, RopeKvSpec, check_given

MAX_DIM = 1024
_RUN = CpuKernel("pyspec_rope_kv", "5q" + "2q" + "4q" + "16q" + "d")


def limits(spec: RopeKvSpec) -> str | None:
    if spec.dim > MAX_DIM:
        return f"heads are {spec.dim} wide; the kernel takes up to {MAX_DIM}"
    if spec.n_rot > spec.dim or spec.n_rot % 2:
        return f"{spec.n_rot} of {spec.dim} dimensions turn; the kernel takes even numbers up to all"
    return None


def bind(spec: RopeKvSpec) -> RopeKv:
    sizes = (spec.n_q, spec.n_kv, spec.dim, spec.n_rot, int(spec.neox), spec.step)
    kinds = (
        *(spec.kv.k.kind, spec.kv.v.kind, spec.kv.turned_k(spec.dim), spec.kv.turned_v(spec.dim)),
        *(int(spec.norms_v), int(spec.keys_are_values), int(spec.norm_behind)),
    )

    def rope_kv(*given: *Given) -> Tensor:
        y, q_norm, k_norm, angles, pool, rows = given
        n, y = len(y), y if y.stride(1) == 1 else y.contiguous()
        check_given(spec, y, *given[1:])
        q = empty(n, spec.n_q, spec.dim)
        planes = (pool.k, pool.v, pool.k_scale, pool.v_scale)
        counts = n, y.stride(0), pool.n_row
        _RUN(y, q_norm, k_norm, *angles, rows, q, *planes, *counts, *sizes, *kinds, spec.eps)
        return q

    return rope_kv
