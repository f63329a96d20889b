"""`rope_latent` in Triton: one launch, a program for a row's key and for each of its queries (triton_kernels.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda import faults, tri
from pyspec.cuda.ops.attend.shared import planes_of
from pyspec.cuda.ops.rope_latent.ref import GUARD, Given, RopeLatent, RopeLatentSpec

MAX_DIM = 1024


def limits(spec: RopeLatentSpec) -> str | None:
    if spec.kv.k.is_packed:
        return f"keys are {spec.kv.name}"
    if spec.dim % 8 or spec.dim > MAX_DIM:
        return f"keys are {spec.dim} wide; the kernel takes multiples of 8 up to {MAX_DIM}"
    if spec.n_rot % 2:
        return f"{spec.n_rot} dimensions turn; the kernel takes even numbers"
    return None


def bind(spec: RopeLatentSpec) -> RopeLatent:
    fault = faults.record(spec.device)
    constants = {
        "RANK": spec.rank,
        "N_ROT": spec.n_rot,
        "PLAIN": spec.n_plain,
        "BLOCKS": 1 << (-(-spec.dim // 32) - 1).bit_length(),
        "NEOX": spec.neox and spec.n_rot > 0,
        "K_KIND": spec.kv.k.kind,
        "OP": GUARD.number,
    }

    def rope_latent(*given: *Given) -> Tensor:
        from pyspec.cuda.ops.rope_latent import triton_kernels as kernels

        spec.check_given(*given)
        kv, q, *_, angles, pool, rows = given
        n = len(kv)
        out = torch.empty(n, spec.n_head, spec.dim, dtype=torch.float32, device=kv.device)
        if not n:
            return out
        codes, _, scales, _ = planes_of(pool)
        args = (
            *given[:4],
            *angles,
            rows,
            out,
            codes,
            scales,
            fault,
            kv.stride(0),
            q.stride(0),
            pool.n_row,
            spec.eps,
        )
        tri.launch(kernels.rope_latent, (n, spec.n_head + 1), args, constants, 1)
        return out

    return rope_latent
