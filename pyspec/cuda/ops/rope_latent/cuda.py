"""`rope_latent` for NVIDIA GPUs: one launch, a warp for a row's key and for each of its queries (rope_latent.cu)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pyspec.cuda import faults, jit
from pyspec.cuda.context import per_device
from pyspec.cuda.ops.rope_kv.ref import Angles
from pyspec.cuda.ops.rope_latent.ref import GUARD, RopeLatent, RopeLatentSpec
from pyspec.slots.kv import KVPool

WARPS = 4
MAX_DIM = 1024  # a lane holds every 32nd dim in registers
ARGS = "pl" + "pl" + "ppf" + "pp" + "p" + "pp{scale}" + "ii" + "p"


def limits(spec: RopeLatentSpec) -> str | None:
    if (why := jit.missing(spec.device)) is not None:
        return why
    if spec.dim % 32 or spec.dim > MAX_DIM:
        return f"keys are {spec.dim} wide; the kernel takes multiples of 32 up to {MAX_DIM}"
    if spec.n_rot % 2 or not spec.n_rot:
        return f"{spec.n_rot} dimensions turn; the kernel takes even numbers above 0"
    return None


def defines(spec: RopeLatentSpec) -> dict[str, int | str]:
    """Macros of rope_latent.cu."""
    return {
        "RANK": spec.rank,
        "N_ROT": spec.n_rot,
        "PLAIN": spec.n_plain,
        "NEOX": int(spec.neox),
        "K_KIND": spec.kv.k.kind,
        "TURN_K": spec.kv.turned_k(spec.dim),
        "OP_ID": GUARD.number,
    }


@per_device
def _kernel(device: torch.device, spec: RopeLatentSpec) -> jit.Kernel:
    arch = jit.arch_of(torch.cuda.get_device_capability(device))
    args = ARGS.format(scale="p" if spec.kv.k.n_factor else "")
    return jit.compile_cubin("rope_latent", arch, defines(spec)).kernel("rope_latent", args)


def programs(spec: RopeLatentSpec, target: jit.GpuKind) -> list[jit.Program]:
    return [target.program("rope_latent", defines(spec))]


def bind(spec: RopeLatentSpec) -> RopeLatent:
    overlap = torch.cuda.get_device_capability(spec.device) >= (9, 0)
    fault, kernel = faults.record(spec.device), _kernel(spec.device, spec)

    def rope_latent(
        kv: Tensor,
        q: Tensor,
        plain: Tensor,
        norm: Tensor,
        angles: Angles,
        pool: KVPool,
        rows: Tensor,
    ) -> Tensor:
        n, own = len(kv), (kv, q, plain, norm, *angles)
        spec.check_given(*own, pool, rows)
        out = torch.empty(n, spec.n_head, spec.dim, dtype=torch.float32, device=kv.device)
        if not n:
            return out
        args: list[jit.Arg] = [kv, np.int64(kv.stride(0)), q, np.int64(q.stride(0)), plain, norm]
        args += [np.float32(spec.eps), *angles, rows, out, *pool.planes]
        args += [np.int32(spec.n_head), np.int32(pool.n_row), fault]
        kernel.launch((n, -(-(1 + spec.n_head) // WARPS)), 32 * WARPS, args, overlap=overlap)
        return out

    return rope_latent
