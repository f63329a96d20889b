"""`rope_kv` for NVIDIA GPUs: one launch, a warp a head (rope_kv.cu). Same contract as rope_kv_ref."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda import faults, jit
from pyspec.cuda.ops.attend.cuda import n_scales
from pyspec.cuda.ops.rope_kv.ref import GUARD, Given, RopeKv, RopeKvSpec, check_given

WARPS = 4


def limits(spec: RopeKvSpec) -> str | None:
    if spec.dim % 32 or spec.dim > 512:
        return f"heads are {spec.dim} wide; the kernel takes multiples of 32 up to 512"
    if spec.n_rot > spec.dim or spec.n_rot % 2:
        return f"{spec.n_rot} of {spec.dim} dimensions turn; the kernel takes even numbers up to all"
    return None


def signature(spec: RopeKvSpec) -> str:
    return "pl" + "ppf" + "pp" + "p" + "p" + "pp" + "p" * n_scales(spec.kv) + "iii" + "p"


FILE = jit.KernelFile[RopeKvSpec](
    "rope_kv",
    signature,
    lambda spec: {
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
        "OP_ID": GUARD.number,
    },
)


def bind(spec: RopeKvSpec) -> RopeKv:
    fault, kernel = faults.record(spec.device), FILE.kernel(spec.device, spec)
    none, n_unit = torch.zeros(4, device=spec.device), spec.n_q + 2 * spec.n_kv

    def rope_kv(*given: *Given) -> Tensor:
        check_given(spec, *given)
        y, q_norm, k_norm, angles, pool, rows = given
        n = len(y)
        q = torch.empty(n, spec.n_q, spec.dim, dtype=torch.float32, device=y.device)
        norms = (none if norm is None else norm for norm in (q_norm, k_norm))
        args = y, y.stride(0), *norms, spec.eps, *angles, rows, q, *pool.planes
        args = *args, spec.n_q, spec.n_kv, pool.n_row, fault
        kernel.launch((n, -(-n_unit // WARPS)), 32 * WARPS, args, overlap=True)
        return q

    return rope_kv
