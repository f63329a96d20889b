"""rope_latent.cu and its launcher run thread by thread on the CPU: keys of every type, and a wild place."""

from __future__ import annotations

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler

from pyspec.cuda import faults
from pyspec.cuda.ops.rope_latent import cuda as rope_latent_cuda
from pyspec.cuda.ops.rope_latent import ref as rope_latent_ref
from pyspec.cuda.ops.rope_latent.op import check
from pyspec.cuda.ops.rope_latent.ref import RopeLatentSpec
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.kv_types import TYPES

pytestmark = [needs_compiler, pytest.mark.sampled(1)]


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("sizes", [(5, 8, 24, 8), (3, 128, 40, 24), (1, 6, 512, 64)])
@pytest.mark.parametrize("kv", TYPES)
def test_it_passes_the_ops_check(kv: str, sizes: tuple[int, int, int, int], neox: bool) -> None:
    """(heads, plain dims, rank, dims that turn): tails that begin within a block of 32, and at one."""
    spec = RopeLatentSpec(CPU, *sizes, neox, 1e-6, KvFormat.named(kv))
    with emulated_gpu(seed=int(neox)):
        assert check(rope_latent_cuda.bind(spec), rope_latent_ref.bind(spec), spec) is None
        assert not faults.record(CPU).any()


@pytest.mark.parametrize("place", [-1, 40, 1 << 40])
def test_a_wild_place_is_reported_and_nothing_is_written_there(place: int) -> None:
    spec = RopeLatentSpec(CPU, 2, 8, 24, 8, False, 1e-6)
    pool = KVPool(40, 1, 32, spec.kv, CPU, keys_only=True)
    gen = torch.Generator().manual_seed(0)
    kv, q, plain = (torch.randn(3, *of, generator=gen) for of in ((32,), (32,), (2, 24)))
    turns = torch.randn(2, 3, 1, 4, generator=gen)
    rows = torch.tensor([7, place, 9])
    with emulated_gpu():
        run = rope_latent_cuda.bind(spec)
        out = run(kv, q, plain, torch.ones(24), (turns[0], turns[1]), pool, rows)
        none = kv[:0], q[:0], plain[:0], torch.ones(24), (turns[0, :0], turns[1, :0]), pool, rows[:0]
        assert run(*none).shape == (0, 2, 32)
        index = place if place < 1 << 31 else -1
        assert faults.record(CPU).tolist() == [1, 15, 1, index, 40]
        faults.record(CPU).zero_()
    assert pool.k.any(-1).any(-1).nonzero().flatten().tolist() == [7, 9] and out.isfinite().all()
