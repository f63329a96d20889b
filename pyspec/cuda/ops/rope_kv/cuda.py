"""`rope_kv` for NVIDIA GPUs: one launch, a warp a head (rope_kv.cu). Same contract as rope_kv_ref."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pyspec.cuda import faults, jit
from pyspec.cuda.context import per_device
from pyspec.cuda.ops.attend.cuda import n_scales
from pyspec.cuda.ops.rope_kv.ref import GUARD, Angles, RopeKv, RopeKvSpec
from pyspec.slots.kv import KVPool

OP_ID = GUARD.number
WARPS = 4
ARGS = "pl" + "ppf" + "pp" + "p" + "p{planes}" + "iii" + "p"


def limits(spec: RopeKvSpec) -> str | None:
    if (why := jit.missing(spec.device)) is not None:
        return why
    if spec.dim % 32 or spec.dim > 512:
        return f"heads are {spec.dim} wide; the kernel takes multiples of 32 up to 512"
    if spec.n_rot > spec.dim or spec.n_rot % 2:
        return f"{spec.n_rot} of {spec.dim} dimensions turn; the kernel takes even numbers up to all"
    return None


def defines(spec: RopeKvSpec) -> dict[str, int | str]:
    """Macros of rope_kv.cu."""
    return {
        "DIM": spec.dim,
        "N_ROT": spec.n_rot,
        "NEOX": int(spec.neox),
        "HAS_NORM": int(spec.has_norm),
        "NORM_BEHIND": int(spec.norm_behind),
        "NORMS_V": int(spec.norms_v),
        "KEYS_ARE_VALUES": int(spec.keys_are_values),
        "Q_STEP": spec.step,
        "K_KIND": spec.kv.k.kind,
        "V_KIND": spec.kv.v.kind,
        "TURN_K": spec.kv.turned_k(spec.dim),
        "TURN_V": spec.kv.turned_v(spec.dim),
        "OP_ID": OP_ID,
    }


@per_device
def _kernel(device: torch.device, spec: RopeKvSpec) -> jit.Kernel:
    arch = jit.arch_of(torch.cuda.get_device_capability(device))
    return jit.compile_cubin("rope_kv", arch, defines(spec)).kernel(
        "rope_kv", ARGS.format(planes="pp" + "p" * n_scales(spec.kv))
    )


def programs(spec: RopeKvSpec, target: jit.GpuKind) -> list[jit.Program]:
    return [target.program("rope_kv", defines(spec))]


def bind(spec: RopeKvSpec) -> RopeKv:
    overlap = torch.cuda.get_device_capability(spec.device) >= (9, 0)
    fault = faults.record(spec.device)
    none = torch.zeros(4, device=spec.device)
    kernel = _kernel(spec.device, spec)
    n_column, n_unit = spec.n_column, spec.n_q + 2 * spec.n_kv

    def rope_kv(
        y: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        angles: Angles,
        pool: KVPool,
        rows: Tensor,
    ) -> Tensor:
        n = y.shape[0]
        cos, sin = angles
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
        norms = (
            none if q_norm is None else q_norm,
            none if k_norm is None else k_norm,
            np.float32(spec.eps),
        )
        counts = (np.int32(spec.n_q), np.int32(spec.n_kv), np.int32(pool.n_row))
        args: tuple[jit.Arg, ...] = (
            y,
            np.int64(y.stride(0)),
            *norms,
            cos,
            sin,
            rows,
            q,
            *pool.planes,
            *counts,
            fault,
        )
        kernel.launch((n, -(-n_unit // WARPS)), 32 * WARPS, args, overlap=overlap)
        return q

    return rope_kv
