"""The meaning of `moe_route` and `moe`, against sums written out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from pyspec.cuda.ops.linear.dequant import dequantize, quantize
from pyspec.cuda.ops.moe import ref as moe_ref
from pyspec.cuda.ops.moe.op import moe
from pyspec.cuda.ops.moe.ref import Added, MoeSpec, RouteSpec, Stack, Stacks, choose
from pyspec.cuda.ops.moe_route.op import moe_route
from pyspec.cuda.ops.rows.ref import Norm
from pyspec.gguf import GGMLType

CPU = torch.device("cpu")


def logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).float()


def test_of_equal_scores_the_lower_index_is_chosen() -> None:
    spec = RouteSpec(CPU, 4, 6, 3)
    ids, weights = choose(logits([1, 2, 2, 2, 0, 2], [0, 0, 0, 0, 0, 0]), spec, None)
    assert ids.tolist() == [[1, 2, 3], [0, 1, 2]] and ids.dtype == torch.int32
    assert torch.allclose(weights, torch.full((2, 3), 1 / 3))


def test_logits_rank_where_probabilities_have_run_out_of_bits() -> None:
    """Probabilities below 1e-45 are all zero; the logits still say which expert is next."""
    ids, weights = choose(logits([200, -10, 50, -5]), RouteSpec(CPU, 4, 4, 3), None)
    assert ids.tolist() == [[0, 2, 3]] and weights.tolist() == [[1, 0, 0]]


@pytest.mark.parametrize("renorm", [True, False])
def test_softmax_is_over_all_experts(renorm: bool) -> None:
    x = torch.randn(5, 8)
    ids, weights = choose(x, RouteSpec(CPU, 4, 8, 3, renorm=renorm), None)
    for row in range(5):
        best = sorted(range(8), key=lambda e: -float(x[row, e]))[:3]
        p = x[row].exp() / x[row].exp().sum()
        want = p[best] / (p[best].sum() if renorm else 1)
        assert ids[row].tolist() == best and torch.allclose(weights[row], want)


def test_a_bias_chooses_and_does_not_weigh() -> None:
    spec = RouteSpec(CPU, 4, 4, 2, "sigmoid", renorm=True, scale=2.5, biased=True)
    ids, weights = choose(logits([0.0, 1.0, 2.0, -9.0]), spec, torch.tensor([0.0, 0.0, -1.0, 2.0]))
    p = torch.sigmoid(torch.tensor([-9.0, 1.0]))
    assert ids.tolist() == [[3, 1]]
    assert torch.allclose(weights[0], 2.5 * p / p.sum())


def test_sums_near_zero_do_not_blow_weights_up() -> None:
    _, weights = choose(logits([-40.0, -41.0, -42.0]), RouteSpec(CPU, 4, 3, 2, "sigmoid"), None)
    assert torch.allclose(weights, torch.sigmoid(logits([-40.0, -41.0])) / 2**-14)


def test_the_gate_is_the_last_row_of_the_matrix() -> None:
    x, matrix = 3 * torch.randn(6, 4), torch.randn(9, 4)
    norm, spec = 1 + torch.rand(4), RouteSpec(CPU, 4, 8, 2, eps=0.5)
    gated, plain = (
        moe_route.bind(replace(spec, gated=g))(x, norm, matrix[: 8 + g]) for g in (True, False)
    )
    n = x / ((x**2).mean(-1, keepdim=True) + 0.5).sqrt() * norm
    assert torch.allclose(gated.gate, torch.sigmoid(n @ matrix[8:].T)) and plain.gate is None
    assert torch.equal(gated.ids, plain.ids) and torch.allclose(gated.weights, plain.weights)
    assert torch.equal(plain.ids, choose(n @ matrix[:8].T, spec, None)[0])


def unpacked(n_expert: int, n_out: int, n_in: int) -> Stack:
    return Stack(torch.randn(n_expert, n_out, n_in) / n_in**0.5, None, n_out, n_in)


def stacks(n_expert: int, n: int, f: int, act: str = "swiglu") -> Stacks:
    gate = unpacked(n_expert, f, n) if act == "swiglu" else None
    return Stacks(gate, unpacked(n_expert, f, n), unpacked(n_expert, n, f))


def by_hand(s: Stacks, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Row by row, expert by expert, in float64."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for row in range(x.shape[0]):
        for e, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            v = x[row].double()
            up = s.up.matrix(e).double() @ v
            h = F.relu(up) ** 2 if s.gate is None else F.silu(s.gate.matrix(e).double() @ v) * up
            out[row] += weight * (s.down.matrix(e).double() @ h)
    return out


@pytest.mark.parametrize("act", ["swiglu", "relu2"])
@pytest.mark.parametrize(("n_row", "n_expert", "n_used"), [(1, 8, 2), (5, 3, 3), (40, 16, 6), (0, 8, 2)])
def test_rows_get_the_sum_of_their_experts(act: str, n_row: int, n_expert: int, n_used: int) -> None:
    s = stacks(n_expert, 16, 24, act)
    run = moe.bind(MoeSpec(CPU, n_used, 16, 24, act, None, None))(s)  # type: ignore[arg-type]
    x, scores = torch.randn(n_row, 16), torch.randn(n_row, n_expert)
    ids, weights = choose(scores, RouteSpec(CPU, 16, n_expert, n_used), None)
    got = run(x, ids, weights)
    assert got.shape == (n_row, 16) and torch.allclose(
        got.double(), by_hand(s, x, ids, weights), atol=1e-5
    )


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Alone, among others, and among others that all take the same expert."""
    s = stacks(8, 16, 24)
    run = moe.bind(MoeSpec(CPU, 3, 16, 24, "swiglu", None, None))(s)
    x, (ids, weights) = torch.randn(12, 16), choose(torch.randn(12, 8), RouteSpec(CPU, 16, 8, 3), None)
    together = run(x, ids, weights)
    for row in range(12):
        alone = run(x[row : row + 1], ids[row : row + 1], weights[row : row + 1])
        assert torch.allclose(alone[0], together[row], atol=1e-5)
    crowd = ids.clone()
    crowd[1:] = ids[0]
    assert torch.allclose(run(x, crowd, weights)[0], together[0], atol=1e-5)


def test_sums_are_made_in_the_order_of_choice() -> None:
    """Large terms that cancel show the order of a sum: 1e8 - 1e8 + 1 is 1, 1e8 + 1 - 1e8 is not."""
    y = torch.tensor([[[1e8], [-1e8], [1.0]], [[1e8], [1.0], [-1e8]]])
    assert moe_ref.combine(y, torch.ones(2, 3)).tolist() == [[1.0], [0.0]]


def test_the_shared_expert_and_the_residual_stream_are_added_last() -> None:
    y, weights, gate = torch.tensor([[[1.0], [1.0]]]), torch.ones(1, 2), torch.tensor([[0.5]])
    added = Added(torch.tensor([[-1e8]]), torch.tensor([[2e8]]), gate)
    assert moe_ref.combine(y, weights, added).tolist() == [[0.0]], (
        "1 + 1 is lost in 1e8, then -1e8 comes"
    )
    assert moe_ref.combine(y, weights, replace(added, residual=None)).tolist() == [[1e8]]
    assert moe_ref.combine(y, weights, Added(torch.tensor([[5.0]]))).tolist() == [[7.0]]


@pytest.mark.parametrize("act", ["swiglu", "relu2"])
def test_a_shared_expert_runs_for_all_rows(act: str) -> None:
    """By its gate, or as it is; twice as wide as the others."""
    s, one = stacks(8, 16, 24, act), stacks(1, 16, 48, act)
    spec = MoeSpec(CPU, 3, 16, 24, act, None, None)  # type: ignore[arg-type]
    x, (ids, weights) = torch.randn(4, 16), choose(torch.randn(4, 8), RouteSpec(CPU, 16, 8, 3), None)
    residual, gate = torch.randn(4, 16), torch.rand(4, 1)
    run = moe.bind(replace(spec, pieces=2))(replace(s, shared=one))
    apart = moe.bind(spec)(s)(x, ids, weights)
    shared = by_hand(one, x, torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)).float()
    assert torch.allclose(run(x, ids, weights), apart + shared, atol=1e-5)
    got = run(x, ids, weights, None, Added(residual, None, gate))
    assert torch.allclose(got, residual + apart + shared * gate, atol=1e-5)


def test_experts_norm_their_rows_on_the_way() -> None:
    s, norm = stacks(8, 16, 24), Norm(1 + torch.rand(16), 1e-5)
    run = moe.bind(MoeSpec(CPU, 3, 16, 24, "swiglu", None, None))(s)
    x, (ids, weights) = 5 * torch.randn(4, 16), choose(torch.randn(4, 8), RouteSpec(CPU, 16, 8, 3), None)
    shared, gate = torch.randn(4, 16), torch.rand(4, 1)
    got = run(x, ids, weights, norm, Added(x, shared, gate))
    assert torch.allclose(got, x + shared * gate + run(norm(x), ids, weights), atol=1e-5)


@pytest.mark.parametrize("type", [GGMLType.Q8_0, GGMLType.Q4_0, GGMLType.F16, GGMLType.BF16])
def test_packed_experts_equal_unpacked_ones_and_only_those_in_use_are_unpacked(
    type: GGMLType, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_expert, n, f = 9, 64, 32
    gate, up, down = (torch.randn(n_expert, *shape) for shape in ((f, n), (f, n), (n, f)))

    def packed(x: torch.Tensor) -> Stack:
        return Stack(quantize(x, type).view(n_expert, -1), type, x.shape[1], x.shape[2])

    def plain(s: Stack) -> Stack:
        return Stack(dequantize(s.data, type, (n_expert, s.n_out, s.n_in)), None, s.n_out, s.n_in)

    p = Stacks(packed(gate), packed(up), packed(down))
    assert p.gate is not None
    q = Stacks(plain(p.gate), plain(p.up), plain(p.down))
    x, ids = torch.randn(4, n), torch.tensor([[1, 7], [7, 3], [1, 3], [3, 7]], dtype=torch.int32)
    weights = torch.rand(4, 2)
    seen: list[int] = []
    matrix = Stack.matrix
    monkeypatch.setattr(Stack, "matrix", lambda self, e: (seen.append(e), matrix(self, e))[1])
    got = moe_ref.bind(MoeSpec(CPU, 2, n, f, "swiglu", type, type))(p)(x, ids, weights)
    assert sorted(seen) == [1, 1, 1, 3, 3, 3, 7, 7, 7]
    assert torch.equal(got, moe.bind(MoeSpec(CPU, 2, n, f, "swiglu", None, None))(q)(x, ids, weights))


def test_second_level_scales_multiply_products_before_the_activation() -> None:
    s = stacks(4, 16, 24, "relu2")
    scales = torch.tensor([1.0, 0.5, 2.0, 3.0])
    scaled = Stacks(None, replace(s.up, scale=scales), replace(s.down, scale=scales.flip(0)))
    x, ids = torch.randn(3, 16), torch.tensor([[0, 1], [2, 3], [3, 1]], dtype=torch.int32)
    weights = torch.rand(3, 2)
    got = moe.bind(MoeSpec(CPU, 2, 16, 24, "relu2", None, None, scaled=True))(scaled)(x, ids, weights)
    want = torch.zeros(3, 16)
    for row in range(3):
        for e, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            h = F.relu(scales[e] * (s.up.data[e] @ x[row])) ** 2
            want[row] += weight * scales[3 - e] * (s.down.data[e] @ h)
    assert torch.allclose(got, want, atol=1e-4)
