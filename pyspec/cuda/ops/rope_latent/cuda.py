"""`rope_latent` for NVIDIA GPUs: one launch, a warp for a row's key and for each of its queries (rope_latent.cu)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cuda import faults, jit
from pyspec.cuda.ops.rope_latent.ref import GUARD, Given, RopeLatent, RopeLatentSpec

WARPS = 4
MAX_DIM = 1024  # a lane holds every 32nd dim in registers


def limits(spec: RopeLatentSpec) -> str | None:
    if spec.dim % 32 or spec.dim > MAX_DIM:
        return f"keys are {spec.dim} wide; the kernel takes multiples of 32 up to {MAX_DIM}"
    if spec.n_rot % 2:
        return f"{spec.n_rot} dimensions turn; the kernel takes even numbers"
    return None


def signature(spec: RopeLatentSpec) -> str:
    return "pl" + "pl" + "ppf" + "pp" + "p" + "p" + "p" * (1 + bool(spec.kv.k.n_factor)) + "ii" + "p"


FILE = jit.KernelFile[RopeLatentSpec](
    "rope_latent",
    signature,
    lambda spec: {
        "RANK": spec.rank,
        "N_ROT": spec.n_rot,
        "PLAIN": spec.n_plain,
        "NEOX": int(spec.neox),
        "K_KIND": spec.kv.k.kind,
        "TURN_K": spec.kv.turned_k(spec.dim),
        "OP_ID": GUARD.number,
    },
)


def bind(spec: RopeLatentSpec) -> RopeLatent:
    fault, kernel = faults.record(spec.device), FILE.kernel(spec.device, spec)

    def rope_latent(*given: *Given) -> Tensor:
        spec.check_given(*given)
        kv, q, plain, norm, angles, pool, rows = given
        n = len(kv)
        out = torch.empty(n, spec.n_head, spec.dim, dtype=torch.float32, device=kv.device)
        if not n:
            return out
        args = kv, kv.stride(0), q, q.stride(0), plain, norm, spec.eps, *angles, rows, out, *pool.planes
        args = *args, spec.n_head, pool.n_row, fault
        kernel.launch((n, -(-(1 + spec.n_head) // WARPS)), 32 * WARPS, args, overlap=True)
        return out

    return rope_latent
