"""`rope_latent` in Triton against the reference, in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton_interpreter  # noqa: F401
from sampling import few

from pyspec.cuda import faults
from pyspec.cuda.ops.rope_latent import ref as rope_latent_ref
from pyspec.cuda.ops.rope_latent import triton as rope_latent_triton
from pyspec.cuda.ops.rope_latent.op import check
from pyspec.cuda.ops.rope_latent.ref import RopeLatentSpec
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.kv_types import TYPES

CPU = torch.device("cpu")
NUMBERS = [name for name, of in TYPES.items() if not of.is_packed]
SIZES = [(5, 8, 24, 8), (3, 128, 40, 24), (1, 6, 512, 64), (2, 6, 64, 0)]
CASES = [(kv, sizes, neox) for kv in NUMBERS for sizes in SIZES for neox in (False, True)]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("case", few(CASES, *CASES[::5]), ids=str)
def test_it_passes_the_ops_check(case: tuple[str, tuple[int, int, int, int], bool]) -> None:
    kv, sizes, neox = case
    spec = RopeLatentSpec(CPU, *sizes, neox, 1e-6, KvFormat.named(kv))
    assert check(rope_latent_triton.bind(spec), rope_latent_ref.bind(spec), spec) is None
    assert not faults.record(CPU).any()


def test_odd_sizes_and_a_wild_place() -> None:
    spec = RopeLatentSpec(CPU, 2, 5, 24, 8, False, 1e-6)
    pool = KVPool(40, 1, 32, spec.kv, CPU, keys_only=True)
    pool.k.zero_()
    gen = torch.Generator().manual_seed(0)
    kv, q, plain = (torch.randn(3, *of, generator=gen) for of in ((32,), (26,), (2, 24)))
    turns = torch.randn(2, 3, 1, 4, generator=gen)
    run = rope_latent_triton.bind(spec)
    out = run(kv, q, plain, torch.ones(24), (turns[0], turns[1]), pool, torch.tensor([7, 1 << 40, 9]))
    assert faults.record(CPU).tolist() == [1, 15, 1, -1, 40]
    faults.record(CPU).zero_()
    assert pool.k.any(-1).any(-1).nonzero().flatten().tolist() == [7, 9] and out.isfinite().all()


def test_what_it_does_not_take_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    spec = RopeLatentSpec(CPU, 2, 5, 24, 8, False, 1e-6)
    assert rope_latent_triton.limits(spec) is None
    assert "q4_0" in (rope_latent_triton.limits(replace(spec, kv=KvFormat.named("q4_0"))) or "")
    assert "36 wide" in (rope_latent_triton.limits(replace(spec, rank=28)) or "")
