"""`rope_kv` in Triton: one launch, a program a head (triton_kernels.py). Same contract as rope_kv_ref."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda import faults, tri
from pyspec.cuda.ops.attend.shared import planes_of
from pyspec.cuda.ops.rope_kv.ref import GUARD, Angles, RopeKv, RopeKvSpec
from pyspec.slots.kv import KVPool

OP_ID = GUARD.number


def limits(spec: RopeKvSpec) -> str | None:
    if (why := tri.missing(spec.device)) is not None:
        return why
    if spec.kv.k.is_packed or spec.kv.v.is_packed:
        return f"keys and values are {spec.kv.name}"
    if spec.dim % 16 or spec.dim > 512:
        return f"heads are {spec.dim} wide; the kernel takes multiples of 16 up to 512"
    if spec.n_rot > spec.dim or spec.n_rot % 2:
        return f"{spec.n_rot} of {spec.dim} dimensions turn; the kernel takes even numbers up to all"
    return None


def bind(spec: RopeKvSpec) -> RopeKv:
    fault, none = faults.record(spec.device), torch.zeros(4, device=spec.device)
    n_column, n_unit = spec.n_column, spec.n_q + 2 * spec.n_kv
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
        "OP": OP_ID,
    }

    def rope_kv(
        y: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        angles: Angles,
        pool: KVPool,
        rows: Tensor,
    ) -> Tensor:
        from pyspec.cuda.ops.rope_kv import triton_kernels as kernels

        n, (cos, sin) = y.shape[0], angles
        assert y.dtype == torch.float32 and y.stride(1) == 1 and y.shape[1] == n_column
        assert (
            cos.is_contiguous()
            and sin.is_contiguous()
            and cos.shape == sin.shape == (n, 1, spec.n_rot // 2)
        )
        assert rows.dtype == torch.int64 and rows.is_contiguous() and len(rows) == n
        assert all(plane.is_contiguous() for plane in pool.planes) and pool.kv == spec.kv
        assert not spec.n_kv or (pool.n_head, pool.head_dim) == (spec.n_kv, spec.dim)
        assert (k_norm is not None or q_norm is not None) == spec.has_norm
        q = torch.empty(n, spec.n_q, spec.dim, dtype=torch.float32, device=y.device)
        if not n:
            return q
        norms = (none if q_norm is None else q_norm, none if k_norm is None else k_norm)
        tri.launch(
            kernels.rope_kv,
            (n, n_unit),
            (
                y,
                *norms,
                cos,
                sin,
                rows,
                q,
                *planes_of(pool),
                fault,
                y.stride(0),
                pool.n_row,
                spec.eps,
            ),
            constants,
            1,
        )
        return q

    return rope_kv
