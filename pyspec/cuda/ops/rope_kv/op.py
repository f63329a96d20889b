"""`rope_kv`: head norms, rope, keys and values into their pages."""

from __future__ import annotations

from dataclasses import replace

import torch

from pyspec.cuda.op import Op, declared
from pyspec.cuda.ops.rope_kv import cpu, cuda, ref, triton
from pyspec.cuda.ops.rope_kv.ref import RopeKv, RopeKvSpec
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.kv_types import BF16, F8, F16, F32, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0

N_POOL = 40  # rows of the pool that is checked with
OFF = {
    F32: 1e-5,
    F16: 2e-3,
    BF16: 2e-2,
    Q8_0: 5e-2,
    F8: 0.13,
    Q5_1: 0.3,
    Q5_0: 0.4,
    Q4_1: 0.5,
    Q4_0: 0.8,
}
"""Relative error of rounding to the next value; q8_0's step is a 127th of the largest of its block."""


def check(launch: RopeKv, reference: RopeKv, spec: RopeKvSpec) -> str | None:
    """Strided rows into scattered pool rows; all other pool rows must stay unchanged."""
    gen, n_row = torch.Generator().manual_seed(0), 5
    n = spec.n_column
    y = torch.randn(n_row, n + 4, generator=gen).to(spec.device)[:, :n]
    theta = torch.rand(n_row, 1, spec.n_rot // 2, generator=gen).to(spec.device) * 6.0
    q_norm, k_norm = (
        1 + 0.1 * torch.randn(spec.dim, generator=gen).to(spec.device) if spec.has_norm else None
        for _ in "qk"
    )
    if not spec.n_q:
        q_norm = None
    rows = torch.randperm(N_POOL, generator=gen)[:n_row].to(spec.device)
    pools = [KVPool(N_POOL, max(1, spec.n_kv), spec.dim, spec.kv, spec.device) for _ in range(2)]
    for pool in pools:
        for i, plane in enumerate(pool.planes):
            plane.fill_(3.0 + i)
    got, want = (
        run(y, q_norm, k_norm, (theta.cos(), theta.sin()), pool, rows)
        for run, pool in zip((launch, reference), pools, strict=True)
    )
    (k, v), (k_want, v_want) = (
        pool.read(torch.arange(N_POOL, device=spec.device), torch.float32) for pool in pools
    )
    of_k, of_v = spec.kv.k, spec.kv.v
    for a, b, name, off in (
        (got, want, "q", 1e-4),
        (k, k_want, "k", OFF[of_k]),
        (v, v_want, "v", OFF[of_v]),
    ):
        if not torch.allclose(a, b, rtol=off, atol=off):
            return f"{name} of {spec.kv.name} differs from the reference by {(a - b).abs().max():.2g}"
    return None


def shapes(device: torch.device) -> list[RopeKvSpec]:
    """Heads of 27B, of 8B, of Nemotron 3 Super, which has no rope, of gemma-4 31B and of Hunyuan 7B; 27B with keys and values of 8 and 4 bits."""
    gemma = RopeKvSpec(device, 32, 4, 512, 512, neox=True, gated=False, has_norm=True, eps=1e-6)
    whole = [
        RopeKvSpec(device, 24, 4, 256, 64, neox=True, gated=True, has_norm=True, eps=1e-6),
        RopeKvSpec(device, 32, 8, 128, 128, neox=True, gated=False, has_norm=True, eps=1e-6),
        RopeKvSpec(device, 32, 2, 128, 0, neox=False, gated=False, has_norm=False, eps=1e-5),
        replace(gemma, norms_v=True, keys_are_values=True),
        RopeKvSpec(
            device, 32, 8, 128, 128, neox=True, gated=False, has_norm=True, eps=1e-5, norm_behind=True
        ),
    ]
    few_bits = [KvFormat.both(Q8_0), KvFormat.both(F8), KvFormat(Q8_0, Q4_0)]
    return whole + [replace(whole[0], kv=kv) for kv in few_bits]


rope_kv: Op[RopeKvSpec, RopeKv] = declared(ref, cuda, triton, cpu, check=check, shapes=shapes)
