"""`rope_latent` in C++ and rope_latent.cu thread by thread: keys of every type, a wild place."""

from __future__ import annotations

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler

from pyspec.cpu import build
from pyspec.cpu.tape import Recorded, TapeMemory
from pyspec.cuda import faults
from pyspec.cuda.ops.rope_latent import cpu as rope_latent_cpu
from pyspec.cuda.ops.rope_latent import cuda as rope_latent_cuda
from pyspec.cuda.ops.rope_latent import ref as rope_latent_ref
from pyspec.cuda.ops.rope_latent.op import check, rope_latent
from pyspec.cuda.ops.rope_latent.ref import RopeLatentSpec
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.kv_types import TYPES


@pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("sizes", [(5, 8, 24, 8), (3, 128, 40, 24), (1, 6, 512, 64), (2, 6, 64, 0)])
@pytest.mark.parametrize("kv", TYPES)
def test_cpp_passes_the_ops_check(kv: str, sizes: tuple[int, int, int, int], neox: bool) -> None:
    spec = RopeLatentSpec(CPU, *sizes, neox, 1e-6, KvFormat.named(kv))
    assert rope_latent.chosen(spec).name == "cpu"
    assert check(rope_latent_cpu.bind(spec), rope_latent_ref.bind(spec), spec) is None


@pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
def test_odd_sizes_replays_and_places_out_of_the_pool() -> None:
    """Dims that are no multiple of eight; a recording reads its rows anew; no row is written where there is none."""
    spec = RopeLatentSpec(CPU, 3, 5, 12, 6, False, 1e-6)
    pool, other = (KVPool(40, 1, 18, spec.kv, CPU, keys_only=True) for _ in range(2))
    pool.k.zero_(), other.k.zero_()
    gen = torch.Generator().manual_seed(0)
    kv, q, plain = (torch.randn(3, *of, generator=gen) for of in ((18,), (33,), (3, 12)))
    turns = torch.randn(2, 3, 1, 3, generator=gen)
    rows = torch.tensor([7, 40, 9])
    run, angles, norm = rope_latent_cpu.bind(spec), (turns[0], turns[1]), torch.ones(12)
    recorded = Recorded(lambda: run(kv, q, plain, norm, angles, pool, rows), TapeMemory())
    for _ in range(2):
        kv.normal_(generator=gen), q.normal_(generator=gen)
        got = recorded.replay()
        right = torch.tensor([7, 30, 9])
        want = rope_latent_ref.bind(spec)(kv, q, plain, norm, angles, other, right)
        assert torch.allclose(got, want, atol=1e-5)
        assert torch.allclose(pool.k[[7, 9]].float(), other.k[[7, 9]].float(), atol=4e-3)
    assert pool.k.any(-1).any(-1).nonzero().flatten().tolist() == [7, 9]


@needs_compiler
@pytest.mark.sampled(1)
@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("sizes", [(5, 8, 24, 8), (3, 128, 40, 24), (1, 6, 512, 64), (2, 6, 64, 0)])
@pytest.mark.parametrize("kv", TYPES)
def test_it_passes_the_ops_check(kv: str, sizes: tuple[int, int, int, int], neox: bool) -> None:
    """(heads, plain dims, rank, dims that turn): tails that begin within a block of 32, and at one."""
    spec = RopeLatentSpec(CPU, *sizes, neox, 1e-6, KvFormat.named(kv))
    with emulated_gpu(seed=int(neox)):
        assert check(rope_latent_cuda.bind(spec), rope_latent_ref.bind(spec), spec) is None
        assert not faults.record(CPU).any()


@needs_compiler
@pytest.mark.sampled(1)
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
