"""`rope_latent` on CPUs (cpu/native/rope_latent.cpp): keys and queries of all rows shared by the threads."""

from __future__ import annotations

from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.ops.rope_latent.ref import Given, RopeLatent, RopeLatentSpec

MAX_DIM = 1024
_RUN = CpuKernel("pyspec_rope_latent", "6q" + "4q" + "11q" + "d")


def limits(spec: RopeLatentSpec) -> str | None:
    if spec.dim > MAX_DIM:
        return f"keys are {spec.dim} wide; the kernel takes up to {MAX_DIM}"
    if spec.n_rot % 2:
        return f"{spec.n_rot} dimensions turn; the kernel takes even numbers"
    return None


def bind(spec: RopeLatentSpec) -> RopeLatent:
    sizes = (spec.n_head, spec.n_plain, spec.rank, spec.n_rot, int(spec.neox))
    kind = spec.kv.k.kind, spec.kv.turned_k(spec.dim)

    def rope_latent(*given: *Given) -> Tensor:
        spec.check_given(*given)
        kv, q, *_, angles, pool, rows = given
        n = len(kv)
        out = empty(n, spec.n_head, spec.dim)
        counts = n, kv.stride(0), q.stride(0), pool.n_row
        _RUN(*given[:4], *angles, rows, out, pool.k, pool.k_scale, *counts, *sizes, *kind, spec.eps)
        return out

    return rope_latent
