"""`rope_kv` in Triton: one launch, a program a head (triton_kernels.py). Same contract as rope_kv_ref."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda import faults, tri
from pyspec.cuda.ops.attend.shared import planes_of
from pyspec.cuda.ops.rope_kv.ref import GUARD, Given, RopeKv, RopeKvSpec, check_given


def limits(spec: RopeKvSpec) -> str | None:
    if spec.kv.k.is_packed or spec.kv.v.is_packed:
        return f"keys and values are {spec.kv.name}"
    if spec.dim % 16 or spec.dim > 512:
        return f"heads are {spec.dim} wide; the kernel takes multiples of 16 up to 512"
    if spec.n_rot > spec.dim or spec.n_rot % 2:
        return f"{spec.n_rot} of {spec.dim} dimensions turn; the kernel takes even numbers up to all"
    return None


def bind(spec: RopeKvSpec) -> RopeKv:
    fault, none = faults.record(spec.device), torch.zeros(4, device=spec.device)
    n_unit = spec.n_q + 2 * spec.n_kv
    constants = {
        "N_Q": spec.n_q,
        "N_KV": spec.n_kv,
        "DIM": spec.dim,
        "BLOCKS": 1 << (-(-spec.dim // 32) - 1).bit_length(),
        "N_ROT": spec.n_rot,
        "NEOX": spec.neox,
        "STEP": spec.step,
        "HAS_NORM": spec.has_norm,
        "NORM_BEHIND": spec.norm_behind,
        "NORMS_V": spec.norms_v,
        "KEYS_ARE_VALUES": spec.keys_are_values,
        "K_KIND": spec.kv.k.kind,
        "V_KIND": spec.kv.v.kind,
        "OP": GUARD.number,
    }

    def rope_kv(*given: *Given) -> Tensor:
        from pyspec.cuda.ops.rope_kv import triton_kernels as kernels

        check_given(spec, *given)
        y, q_norm, k_norm, angles, pool, rows = given
        n = len(y)
        q = torch.empty(n, spec.n_q, spec.dim, dtype=torch.float32, device=y.device)
        if n:
            norms = (none if norm is None else norm for norm in (q_norm, k_norm))
            args = (
                y,
                *norms,
                *angles,
                rows,
                q,
                *planes_of(pool),
                fault,
                y.stride(0),
                pool.n_row,
                spec.eps,
            )
            tri.launch(kernels.rope_kv, (n, n_unit), args, constants, 1)
        return q

    return rope_kv
