"""`moe` in C++: every type and activation by the reference, hostile routes and rows, bits of a row alone, recordings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pyspec.cpu import build
from pyspec.cpu.tape import Recorded, TapeMemory
from pyspec.cuda.op import limits_of
from pyspec.cuda.ops.linear.cpu import TYPES
from pyspec.cuda.ops.moe import cpu
from pyspec.cuda.ops.moe import ref as moe_ref
from pyspec.cuda.ops.moe.op import moe
from pyspec.cuda.ops.moe.ref import NOTHING, Added, MoeSpec, Stacks
from pyspec.cuda.ops.rows.ref import Norm
from pyspec.gguf import GGMLType as G
from pyspec.models.stacks import halves

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
CPU = torch.device("cpu")
SPECS = {
    "packed": MoeSpec(CPU, 3, 512, 288, "swiglu", G.Q4_K, G.Q8_0),
    "plain": MoeSpec(CPU, 3, 37, 19, "swiglu", G.F32, G.F16),
    "plain downs": MoeSpec(CPU, 2, 96, 13, "swiglu", G.Q8_0, G.BF16),
    "plain ups": MoeSpec(CPU, 2, 9, 64, "relu2", G.BF16, G.Q4_0),
    "cut behind silu": MoeSpec(CPU, 3, 320, 64, "swiglu", G.MXFP4, G.Q5_0, limit=-0.5),
    "gates of kimi-k3": MoeSpec(CPU, 3, 320, 64, "situ", G.MXFP4, G.Q5_0, betas=(1.5, 2.0)),
    "cut": MoeSpec(CPU, 3, 320, 64, "swiglu", G.MXFP4, G.Q5_0, limit=1.0),
    "scaled": MoeSpec(CPU, 2, 128, 64, "relu2", G.NVFP4, G.NVFP4, scaled=True),
    "of two types": MoeSpec(CPU, 2, 256, 256, "swiglu", G.Q4_K, G.Q6_K, gate=G.Q5_K),
    "narrow": MoeSpec(CPU, 4, 32, 32, "swiglu", G.Q4_0, G.Q4_0),
}
N_EXPERT = 6


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def stacks(spec: MoeSpec, n_expert: int = N_EXPERT) -> Stacks:
    return cpu.stacks_for(spec, n_expert, spec.n_in, spec.n_ff, torch.Generator().manual_seed(3))


def size_of(made: Stacks) -> float:
    """Of rows whose gates and ups are of usual size."""
    return 2.0 / float((torch.randn(9, made.up.n_in) @ made.up.matrix(0).T).square().mean().sqrt())


def routed(spec: MoeSpec, n_row: int, n_expert: int = N_EXPERT) -> tuple[Tensor, Tensor]:
    ids = torch.rand(n_row, n_expert).argsort(-1)[:, : spec.n_used].int().contiguous()
    return ids, torch.rand(n_row, spec.n_used)


def close(got: Tensor, want: Tensor) -> bool:
    return float((got - want).norm() / want.norm()) < cpu.TOLERANCE


@pytest.mark.sampled(most=6)
@pytest.mark.parametrize("type", sorted(TYPES), ids=lambda t: t.name)
def test_every_type_is_the_reference(type: G) -> None:
    torch.set_num_threads(1)
    for spec in (
        MoeSpec(CPU, 8, 2048, 512, "swiglu", type, type),
        MoeSpec(CPU, 8, 2048, 512, "swiglu", type, type, limit=7.0, scaled=True),
        MoeSpec(CPU, 2, 2048, 512, "relu2", type, type, scaled=True),
    ):
        chosen = moe.chosen(spec)  # by its limits and its check
        assert chosen.name == "cpu" and chosen.capturable


def test_a_check_finds_wrong_experts_and_wrong_sums() -> None:
    torch.set_num_threads(1)
    spec = SPECS["packed"]
    right = moe_ref.bind(spec)
    wrongs: list[Any] = [
        lambda s: lambda x, ids, *rest: right(s)(x, ids.flip(0), *rest),
        lambda s: lambda *given: right(s)(*given) * 1.001,
        lambda s: (lambda x, ids, weights, norm, added: right(s)(x, ids, weights, norm, replace(added, residual=None))),
        lambda s: lambda x, ids, weights, norm, added: right(s)(x, ids, weights, None, added),
        lambda s: right(replace(s, gate=s.up)),
    ]  # fmt: skip
    for wrong in wrongs:
        assert "differ" in (cpu.check(wrong, right, spec) or "")


@pytest.mark.sampled(1, most=2)
@pytest.mark.parametrize("name", SPECS)
def test_a_row_has_the_same_bits_beside_any_others_and_with_any_threads(name: str) -> None:
    spec = SPECS[name]
    made, n_row = stacks(spec), 70
    run, x = cpu.bind(spec)(made), size_of(made) * torch.randn(n_row, spec.n_in)
    ids, weights = routed(spec, n_row)
    ids[40:] = ids[40].clone()  # some experts get many rows, and more rows than others
    whole = run(x, ids, weights)
    assert close(whole, moe_ref.bind(spec)(made)(x, ids, weights))
    for n_thread in (1, 2, 5):
        torch.set_num_threads(n_thread)
        for first, n in ((0, n_row), (0, 1), (69, 1), (3, 2), (11, 9), (38, 32), (6, 64)):
            part = slice(first, first + n)
            assert torch.equal(run(x[part], ids[part].contiguous(), weights[part]), whole[part]), (
                n_thread,
                first,
                n,
            )


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("n_row", [1, 8, 64, 129, 300])
def test_one_expert_takes_all_rows_and_others_none(n_row: int) -> None:
    spec = replace(SPECS["packed"], n_used=1)
    made = stacks(spec)
    x, ids = size_of(made) * torch.randn(n_row, spec.n_in), torch.full((n_row, 1), N_EXPERT - 1).int()
    got, want = (bind(spec)(made)(x, ids, torch.ones(n_row, 1)) for bind in (cpu.bind, moe_ref.bind))
    assert close(got, want)


def test_more_pairs_than_lie_between_the_loops_at_once() -> None:
    spec = MoeSpec(CPU, 5, 64, 32, "swiglu", G.Q8_0, G.Q8_0)
    made, n_row = stacks(spec), cpu.PAIRS // 5 + 40
    run, x = cpu.bind(spec)(made), size_of(made) * torch.randn(n_row, spec.n_in)
    ids, weights = routed(spec, n_row)
    wide = torch.randn(n_row, 2 * spec.n_in)
    added, of = Added(wide[:, : spec.n_in], wide[:, spec.n_in :], torch.rand(n_row, 1)), slice(-50, None)
    got = run(x, ids, weights, None, added)
    assert close(got, moe_ref.bind(spec)(made)(x, ids, weights, None, added))
    assert torch.equal(got[of], run(x[of], ids[of], weights[of], None, added.part(of)))


@pytest.mark.parametrize("name", ["packed", "plain", "cut", "scaled"])
def test_rows_that_are_not_finite_spoil_no_others(name: str) -> None:
    spec = SPECS[name]
    made, n_row = stacks(spec), 24
    run, x = cpu.bind(spec)(made), size_of(made) * torch.randn(n_row, spec.n_in)
    ids, weights = routed(spec, n_row)
    ids[:] = ids[0].clone()
    want = run(x, ids, weights)
    bad = torch.tensor([2, 7, 23])
    x[2], x[7, 3], x[23] = torch.nan, torch.inf, torch.nan
    got = run(x, ids, weights)
    good = torch.ones(n_row, dtype=torch.bool).index_fill(0, bad, False)
    assert torch.equal(got[good], want[good]) and got[2].isnan().all() and got[23].isnan().all()


def test_ids_outside_read_nothing_outside() -> None:
    spec = SPECS["packed"]
    made = stacks(spec)
    run, x, weights = cpu.bind(spec)(made), torch.randn(2, spec.n_in), torch.rand(2, 3)
    got = run(x, torch.tensor([[-5, 1, 2], [3, 1 << 30, 0]]).int(), weights)
    assert torch.equal(got, run(x, torch.tensor([[0, 1, 2], [3, N_EXPERT - 1, 0]]).int(), weights))


@pytest.mark.parametrize("name", ["packed", "plain downs", "of two types"])
def test_choices_of_none_add_nothing_and_change_no_other_bits(name: str) -> None:
    spec, n_row = SPECS[name], 40
    made = stacks(spec)
    run, x = cpu.bind(spec)(made), size_of(made) * torch.randn(n_row, spec.n_in)
    ids, weights = routed(spec, n_row)
    none = torch.rand(n_row, spec.n_used) < 0.4
    none[0], none[1], none[2:5] = True, False, torch.tensor([True] + [False] * (spec.n_used - 1))
    few = torch.where(none, -1, ids)
    added = Added(torch.randn(n_row, spec.n_in), torch.randn(n_row, spec.n_in), torch.rand(n_row, 1))
    for around in (NOTHING, added):
        got, whole = run(x, few, weights, None, around), run(x, ids, weights, None, around)
        want = moe_ref.bind(spec)(made)(x, few, weights, None, around)
        assert torch.allclose(got, want, atol=cpu.TOLERANCE * float(want.abs().amax()))
        full = ~none.any(-1)
        assert torch.equal(got[full], whole[full])
        for r in (0, 2, 7, 39):
            part = slice(r, r + 1)
            alone = run(x[part], few[part], weights[part], None, around.part(part))
            assert torch.equal(alone, got[part])
    assert not run(x, few, weights)[0].any()
    x[0] = torch.nan
    assert torch.equal(run(x, few, weights), run(x.nan_to_num(0), few, weights)), "nobody reads that row"


def test_fused_gates_and_ups_are_read_where_they_lie() -> None:
    spec = SPECS["packed"]
    made = stacks(spec)
    assert made.gate is not None
    both = replace(made.up, data=torch.cat((made.gate.data, made.up.data), 1), n_out=2 * spec.n_ff)
    gate, up = halves(both)
    x, (ids, weights) = torch.randn(9, spec.n_in), routed(spec, 9)
    got, want = (cpu.bind(spec)(s)(x, ids, weights) for s in (replace(made, gate=gate, up=up), made))
    assert gate.data.data_ptr() == both.data.data_ptr() and torch.equal(got, want)


def test_a_recording_reads_routes_and_rows_when_it_is_replayed() -> None:
    spec = SPECS["packed"]
    made = stacks(spec)
    run, x, (ids, weights) = cpu.bind(spec)(made), torch.randn(20, spec.n_in), routed(spec, 20)
    norm, added = Norm(torch.rand(spec.n_in), 1e-6), Added(torch.randn(20, spec.n_in))
    recorded = Recorded(lambda: run(x, ids, weights, norm, added), TapeMemory())
    for _ in range(3):
        x.normal_(), weights.uniform_(), ids.copy_(routed(spec, 20)[0])
        assert torch.equal(recorded.replay(), run(x, ids, weights, norm, added))


def test_limits_say_what_is_not_taken() -> None:
    spec = SPECS["packed"]
    assert "packed" in (cpu.limits(replace(spec, up=None)) or "")
    assert "I32" in (cpu.limits(replace(spec, gate=G.I32)) or "")
    assert "matrices of its own" in (cpu.limits(replace(spec, pieces=1)) or "")
    assert limits_of(cpu)(replace(spec, device=torch.device("meta"))) == "runs on CPUs only"
    assert moe.chosen(replace(spec, up=None, down=None)).name == "torch"
