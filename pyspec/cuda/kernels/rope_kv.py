"""`rope_kv`: head norms, rope, keys and values into their pages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyspec.cuda.kernels import rope_kv_cuda, rope_kv_ref
from pyspec.cuda.kernels.rope_kv_ref import RopeKvSpec
from pyspec.cuda.op import Impl, Op
from pyspec.slots.memory import KVPool

N_POOL = 40  # rows of the pool that is checked with


def check(launch: Callable[..., Tensor], reference: Callable[..., Tensor], spec: RopeKvSpec) -> str | None:
    """Strided rows into scattered pool rows, in every KV dtype; rows that nobody names must stay as they are."""
    gen, n_row = torch.Generator().manual_seed(0), 5
    n = spec.n_q * spec.dim * (2 if spec.gated else 1) + 2 * spec.n_kv * spec.dim
    y = torch.randn(n_row, n + 4, generator=gen).to(spec.device)[:, :n]
    theta = torch.rand(n_row, 1, spec.n_rot // 2, generator=gen).to(spec.device) * 6.0
    norms = [1 + 0.1 * torch.randn(spec.dim, generator=gen).to(spec.device) if spec.has_norm else None for _ in "qk"]
    if not spec.n_q:
        norms[0] = None
    rows = torch.randperm(N_POOL, generator=gen)[:n_row].to(spec.device)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        pools = [KVPool(N_POOL, spec.n_kv, spec.dim, dtype, spec.device) for _ in range(2)]
        for pool in pools:
            pool.k.fill_(3.0)
            pool.v.fill_(4.0)
        got, want = (
            run(y, *norms, (theta.cos(), theta.sin()), pool, rows)
            for run, pool in zip((launch, reference), pools, strict=True)
        )
        step = 1e-5 if dtype is torch.float32 else 2e-3 if dtype is torch.float16 else 2e-2
        for a, b, name, off in (
            (got, want, "q", 1e-4),
            (pools[0].k, pools[1].k, "k", step),
            (pools[0].v, pools[1].v, "v", step),
        ):
            if not torch.allclose(a.float(), b.float(), rtol=off, atol=off):
                return f"{name} differs from the reference by {(a.float() - b.float()).abs().max():.2g}"
    return None


rope_kv: Op[RopeKvSpec] = Op(
    "rope_kv",
    Impl("torch", rope_kv_ref.bind),
    [Impl("cuda", rope_kv_cuda.bind, rope_kv_cuda.limits, capturable=True)],
    check,
)
