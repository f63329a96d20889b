"""`rope_latent`: norm and rope of latent attention's keys, and its keys into their pages."""

from __future__ import annotations

from dataclasses import replace

import torch

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.rope_kv.op import N_POOL, OFF
from pyspec.cuda.ops.rope_latent import cpu, cuda, ref, triton
from pyspec.cuda.ops.rope_latent.ref import RopeLatent, RopeLatentSpec
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.kv_types import Q8_0


def check(launch: RopeLatent, reference: RopeLatent, spec: RopeLatentSpec) -> str | None:
    """Strided rows into scattered pool rows; all other pool rows must stay unchanged."""
    gen, n_row = torch.Generator().manual_seed(0), 5

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=gen).to(spec.device)

    kv = drawn(n_row, spec.dim + 4)[:, : spec.dim]
    q = drawn(n_row, spec.n_head * (spec.n_plain + spec.n_rot))
    plain, norm = drawn(n_row, spec.n_head, spec.rank), 1 + 0.1 * drawn(spec.rank)
    theta = 6.0 * torch.rand(n_row, 1, spec.n_rot // 2, generator=gen).to(spec.device)
    rows = torch.randperm(N_POOL, generator=gen)[:n_row].to(spec.device)
    pools = [KVPool(N_POOL, 1, spec.dim, spec.kv, spec.device, keys_only=True) for _ in range(2)]
    for pool in pools:
        for i, plane in enumerate(pool.planes):
            plane.fill_(3.0 + i)
    got, want = (
        run(kv, q, plain, norm, (theta.cos(), theta.sin()), pool, rows)
        for run, pool in zip((launch, reference), pools, strict=True)
    )
    everywhere = torch.arange(N_POOL, device=spec.device)
    keys, right = (pool.read(everywhere, torch.float32)[0] for pool in pools)
    of = spec.kv.k
    for a, b, name, off in ((got, want, "queries", 1e-4), (keys, right, "keys", OFF[of])):
        if not torch.allclose(a, b, rtol=off, atol=off):
            return f"{name} of {of.name} differ from the reference by {(a - b).abs().max():.2g}"
    return None


def shapes(device: torch.device) -> list[RopeLatentSpec]:
    """DeepSeek-V3, and what each of 8 ranks has; with keys of 8 bits."""
    whole = RopeLatentSpec(device, 128, 128, 512, 64, neox=False, eps=1e-6)
    return [whole, replace(whole, n_head=16), replace(whole, kv=KvFormat.both(Q8_0))]


rope_latent: Op[RopeLatentSpec, RopeLatent] = declared(
    ref, cuda, triton, cpu, check=check, shapes=shapes, in_prompts=False
)
