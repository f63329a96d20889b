"""Rounds of 64 slots with drafts, and a prompt's many rows: every kernel that runs for them, thread by thread on the CPU (recurrences: recurrent).

A DFlash verify of blocks of 16 has 17 rows a slot, one of MTP with three drafts four, a plain round one. Here batches run as they are, without
a graph's padding.
"""

from __future__ import annotations

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler
from machines import off
from torch import Tensor

from pyspec.cuda import faults, streamed
from pyspec.cuda.kernel_context import KernelContext, use
from pyspec.cuda.ops.angles import cuda as angles_cuda
from pyspec.cuda.ops.attend import cuda as attend_cuda
from pyspec.cuda.ops.attend import ref as attend_ref
from pyspec.cuda.ops.attend.cases import TOLERANCE, Case, make, spec_of, worst
from pyspec.cuda.ops.best import cuda as best_cuda
from pyspec.cuda.ops.best.ref import BestSpec, TorchBest
from pyspec.cuda.ops.embed import cuda as embed_cuda
from pyspec.cuda.ops.embed.ref import EmbedSpec, TorchEmbed
from pyspec.cuda.ops.linear import cuda as linear_cuda
from pyspec.cuda.ops.linear import ref as linear_ref
from pyspec.cuda.ops.linear import wgmma as linear_wgmma
from pyspec.cuda.ops.linear.cuda import random_matrix
from pyspec.cuda.ops.linear.pack import unpack
from pyspec.cuda.ops.linear.ref import LinearSpec
from pyspec.cuda.ops.moe import check as moe_check
from pyspec.cuda.ops.moe import cuda as moe_cuda
from pyspec.cuda.ops.moe import ref as moe_ref
from pyspec.cuda.ops.moe.ref import MoeSpec, RouteSpec
from pyspec.cuda.ops.moe_route import cuda as moe_route_cuda
from pyspec.cuda.ops.norms import cuda as norms_cuda
from pyspec.cuda.ops.norms.ref import NormsSpec, TorchNorms
from pyspec.cuda.ops.rope_kv import cuda as rope_kv_cuda
from pyspec.cuda.ops.rope_kv.ref import RopeKvSpec
from pyspec.cuda.ops.rope_kv.ref import bind as rope_kv_reference
from pyspec.cuda.ops.rows import cuda as rows_cuda
from pyspec.cuda.ops.rows.ref import Glu, HeadNorm, Norm
from pyspec.gguf import GGMLType
from pyspec.slots.kv import KvFormat, KVPool

pytestmark = needs_compiler
N_SLOT = 64
WIDTHS = {"dflash": 17, "mtp": 4, "plain": 1}
KINDS = [pytest.param("dflash", marks=pytest.mark.slow), "mtp", "plain"]
ROWS = [
    256,
    pytest.param(1100, marks=pytest.mark.slow),
]  # of a round of 64 slots: MTP's, and more than DFlash's
Q8_0 = GGMLType.Q8_0


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- layers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_64_sequences(kind: str) -> None:
    seqs = [(i * 37 % 61, WIDTHS[kind]) for i in range(N_SLOT)]
    case = Case(2, 1, 64, torch.float16, seqs)
    made = make(case, CPU)
    want = attend_ref.bind(spec_of(case, CPU))(made.q.double(), made.pool, made.plain)
    with emulated_gpu():
        got = attend_cuda.bind(spec_of(case, CPU))(made.q, made.pool, made.batch)
        assert faults.record(CPU).tolist() == [0] * 5
    assert worst(got, want) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("kind", ["block", "more than the split kernel's"])
def test_attention_of_draft_blocks_and_of_more_sequences_than_are_split(kind: str) -> None:
    n, width = (N_SLOT, 16) if kind == "block" else (attend_cuda.MAX_SEQ + 2, 2)
    case = Case(2, 1, 64, torch.float16, [(i % 19, width) for i in range(n)], block=kind == "block")
    made = make(case, CPU)
    want = attend_ref.bind(spec_of(case, CPU))(made.q.double(), made.pool, made.plain)
    with emulated_gpu():
        got = attend_cuda.bind(spec_of(case, CPU))(made.q, made.pool, made.batch)
        assert faults.record(CPU).tolist() == [0] * 5
    assert worst(got, want) < TOLERANCE[case.dtype]


# -- products ----------------------------------------------------------------------------------------------------


@pytest.mark.slow  # compiles a kernel for every number of tiles
@pytest.mark.parametrize("n_row", ROWS)
@pytest.mark.parametrize("tall", [False, True])
def test_products_of_many_rows(n_row: int, tall: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In passes, the last of a few rows; with a residual, which is cut as they are."""
    monkeypatch.setattr(streamed, "_tall", linear_wgmma.bind if tall else lambda spec: None)
    spec = LinearSpec(CPU, Q8_0, 40, 64)
    packed = random_matrix(Q8_0, 40, 64, torch.Generator().manual_seed(1), CPU)
    x, residual = drawn(n_row, 64), drawn(n_row, 40, seed=1)
    want = residual + linear_ref.rounded(x) @ unpack(packed).double().T
    with emulated_gpu():
        product = streamed.Streamed(packed, CPU, False, None)
        assert off(product(x, residual=residual), want) < 1e-3
        out = torch.empty(n_row, 40)
        linear_cuda.bind(spec)(x, packed, out)
        assert off(out, want - residual) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("tall", [False, True])
def test_with_exact_a_row_has_the_same_bits_among_any_number(
    tall: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products whose rows are normed by heads and gated on the way, several passes of them; without it pairs take 48 rows and others 49."""
    monkeypatch.setattr(streamed, "_tall", linear_wgmma.bind if tall else lambda spec: None)
    monkeypatch.setattr(type(streamed.rows), "runs_as", lambda self, name, spec: True)  # as on a GPU
    packed = random_matrix(Q8_0, 72, 128, torch.Generator().manual_seed(1), CPU)
    x, residual, gate = drawn(300, 128), drawn(300, 72, seed=1), drawn(300, 160, seed=2)[:, 32:]
    with emulated_gpu(n_multiprocessor=3):
        usual = streamed.Streamed(packed, CPU, False, torch.empty(72, 128, dtype=torch.float16))
        use(KernelContext(is_exact=True))
        exact = streamed.Streamed(packed, CPU, False, torch.empty(72, 128, dtype=torch.float16))
        assert usual.plain.pairs and not exact.plain.pairs and exact.wide is None
        assert (exact.place(1, HeadNorm(gate[0, :64], 1e-6, gate)) is None) == tall

        def product(n: int) -> Tensor:
            return exact(x[:n], HeadNorm(1 + x[0, :64], 1e-6, gate[:n]), residual[:n])

        whole = product(300)
        assert all(torch.equal(product(n), whole[:n]) for n in (1, 17, 48, 49, 64, 128))
    want = (
        residual + linear_ref.rounded(HeadNorm(1 + x[0, :64], 1e-6, gate)(x)) @ unpack(packed).double().T
    )
    assert off(whole, want) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("n_row", ROWS)
def test_rows_for_the_library_and_what_becomes_of_its_product(
    n_row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_cuda, "MAX_GRID", 500)  # as 65,535 cut a prompt of 65,536 rows
    x, norm, residual = drawn(n_row, 64), Norm(1 + 0.1 * drawn(32), 1e-6), drawn(n_row, 8, seed=1)
    y = drawn(n_row, 8, seed=2)
    with emulated_gpu():
        wide = rows_cuda.WideRows(CPU, 32)
        half, powers = wide(x, Glu())
        assert powers is not None and off(half.float() * powers[:, None], Glu()(x)) < 1e-3
        assert torch.allclose(
            wide.finish(y.clone(), powers, residual), torch.addcmul(residual, y, powers[:, None])
        )
        assert torch.allclose(wide.finish(y.clone(), powers, None), y * powers[:, None])
        assert off(wide(x[:, :32], norm)[0].float() * norm.power, norm(x[:, :32])) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("n_row", ROWS)
def test_experts_of_many_rows_and_who_chooses_them(n_row: int) -> None:
    spec, gen = MoeSpec(CPU, 2, 64, 32, "swiglu", Q8_0, Q8_0, pieces=1), torch.Generator().manual_seed(1)
    stacks = moe_check.random_stacks(spec, 5, gen)
    route = RouteSpec(CPU, 64, 5, 2, gated=True)
    x, norm, matrix = drawn(n_row, 64), 1 + 0.1 * drawn(64, seed=1), drawn(6, 64, seed=2)
    want_routes = moe_ref.bind_route(route)(x, norm, matrix)
    want = moe_ref.bind(spec)(stacks)(x, want_routes.ids, want_routes.weights)
    with emulated_gpu():
        routes = moe_route_cuda.bind(route)(x, norm, matrix)
        assert torch.equal(routes.ids, want_routes.ids) and torch.allclose(
            routes.weights, want_routes.weights
        )
        experts = moe_cuda.bind(spec)(stacks)
        assert off(experts(x, routes.ids, routes.weights), want) < 2e-3


# -- the ends of a forward ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_row", ROWS)
def test_a_forwards_first_and_last_launches(n_row: int) -> None:
    gen = torch.Generator().manual_seed(0)
    embed, norms = EmbedSpec(CPU, Q8_0, 32), NormsSpec(CPU, 32, 1e-6)
    raw, tokens = embed_cuda.any_bytes(Q8_0, 32, 37, gen), torch.randint(0, 37, (n_row,), generator=gen)
    positions, freq = angles_cuda.hostile(n_row, gen), angles_cuda.frequencies(3, CPU)
    weight = 1 + 0.1 * drawn(32)
    logits, x, some = drawn(n_row, 50), drawn(n_row, 32, seed=1), torch.arange(0, n_row, 3)
    with emulated_gpu():
        own, other = embed_cuda.bind(embed), TorchEmbed(embed)
        (got, turned), (want, angles) = (
            e.rows_and_angles(raw, tokens, positions, freq, 1.0) for e in (own, other)
        )
        assert torch.equal(embed_cuda.bits(got), embed_cuda.bits(want))
        assert all(torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(turned, angles, strict=True))
        all_rows, picked = norms_cuda.bind(norms).picked(x, weight, some)
        assert off(all_rows, TorchNorms(norms)(x, weight)) < 1e-5 and torch.equal(picked, all_rows[some])
        best = best_cuda.bind(BestSpec(CPU))
        assert torch.equal(best.tokens(logits), TorchBest().tokens(logits))
        assert torch.equal(best.pairs(logits), TorchBest().pairs(logits)) and not best.tickets.any()
        assert faults.record(CPU).tolist() == [0] * 5


@pytest.mark.parametrize("n_row", ROWS)
def test_keys_and_values_of_many_rows(n_row: int) -> None:
    spec = RopeKvSpec(
        CPU,
        2,
        1,
        32,
        16,
        neox=True,
        gated=True,
        has_norm=True,
        eps=1e-6,
        kv=KvFormat.named("f32"),
    )
    y, norm, rows = drawn(n_row, 2 * 64 + 2 * 32), 1 + 0.1 * drawn(32), torch.randperm(n_row)
    angles = [t[:, None] for t in (drawn(n_row, 8, seed=1).cos(), drawn(n_row, 8, seed=1).sin())]
    pools = [KVPool(n_row, 1, 32, spec.kv, CPU) for _ in "ab"]
    with emulated_gpu():
        own = rope_kv_cuda.bind(spec)(y, norm, norm, angles, pools[0], rows)
        want = rope_kv_reference(spec)(y, norm, norm, angles, pools[1], rows)
        assert faults.record(CPU).tolist() == [0] * 5
    assert off(own, want) < 1e-5
    assert off(pools[0].k, pools[1].k) < 1e-5
    assert torch.equal(pools[0].v, pools[1].v)
