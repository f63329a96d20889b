"""The kernels of experts run thread by thread on the CPU: choice, lists, products of every type, combined sums."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler

from pyspec.cuda.kernels import moe_cuda, moe_ref, moe_route_cuda
from pyspec.cuda.kernels.linear_pack import CHUNKS, FORMATS
from pyspec.cuda.kernels.moe_cuda import random_stacks
from pyspec.cuda.kernels.moe_ref import MoeSpec, Routes, RouteSpec, Stacks
from pyspec.gguf import GGMLType

pytestmark = needs_compiler
Q8_0, Q4_0 = GGMLType.Q8_0, GGMLType.Q4_0
ROUTES = {
    "qwen": RouteSpec(CPU, 96, 40, 8, gated=True),
    "nemotron": RouteSpec(CPU, 64, 70, 22, "sigmoid", scale=5.0, biased=True),
    "plain": RouteSpec(CPU, 32, 6, 6, renorm=False),
    "biased softmax": RouteSpec(CPU, 32, 33, 1, biased=True),
}


@pytest.mark.parametrize("kind", ROUTES)
def test_routes_are_the_references(kind: str) -> None:
    spec = ROUTES[kind]
    for seed in range(2):
        with emulated_gpu(seed=seed):
            assert moe_route_cuda.check(moe_route_cuda.bind(spec), moe_ref.bind_route(spec), spec) is None


def route_of(spec: RouteSpec, logits: torch.Tensor, bias: torch.Tensor | None = None) -> Routes:
    """Routes of given logits: the matrix is the identity."""
    with emulated_gpu():
        return moe_route_cuda.bind(spec)(logits, torch.eye(spec.n_expert), *(() if bias is None else (bias,)))


def test_of_equal_logits_the_lower_index_is_chosen() -> None:
    logits = torch.tensor([[1.0, 2, 2, 0, 2, 2] + [0.0] * 34, [0.0] * 40, [-3.0] * 39 + [-2.0]])
    got = route_of(RouteSpec(CPU, 40, 40, 4), logits)
    assert got.ids.tolist() == [[1, 2, 4, 5], [0, 1, 2, 3], [39, 0, 1, 2]]


def test_logits_that_are_no_numbers_choose_experts_that_exist() -> None:
    logits = torch.zeros(4, 40)
    logits[0, 3], logits[1] = torch.nan, torch.nan
    logits[2] = -torch.inf
    logits[3, 7] = torch.inf
    got = route_of(RouteSpec(CPU, 40, 40, 5), logits)
    assert ((got.ids >= 0) & (got.ids < 40)).all()
    assert all(len(set(row)) == 5 for row in got.ids.tolist())


def test_a_row_is_routed_with_the_same_bits_alone_and_among_others() -> None:
    spec = ROUTES["qwen"]
    x, matrix = torch.randn(9, 96), torch.randn(41, 96)
    with emulated_gpu():
        route = moe_route_cuda.bind(spec)
        together, alone = route(x, matrix), [route(x[i : i + 1], matrix) for i in range(9)]
    for i, one in enumerate(alone):
        assert torch.equal(one.ids[0], together.ids[i]) and torch.equal(one.weights[0], together.weights[i])
        assert torch.equal(one.gate[0], together.gate[i])


@pytest.mark.parametrize(("n_row", "n_used", "n_expert", "per_item"), [(1, 3, 8, 8), (40, 4, 7, 8), (300, 5, 600, 32)])
def test_lists_name_every_pair_once_with_its_expert(n_row: int, n_used: int, n_expert: int, per_item: int) -> None:
    ids = torch.rand(n_row, n_expert).argsort(-1)[:, :n_used].int().contiguous()
    ids[: n_row // 2] = ids[0]  # a crowd at some experts
    n_pair = n_row * n_used
    n_item = min(n_pair, n_expert + n_pair // per_item)
    order, items = torch.full((n_pair,), -1, dtype=torch.int32), torch.full((n_item, 4), -1, dtype=torch.int32)
    with emulated_gpu(seed=3):
        lists, _ = moe_cuda._pair_kernels(CPU)
        sizes = [moe_cuda.np.int32(n) for n in (n_pair, n_expert, per_item, n_item)]
        lists.launch((1,), moe_cuda.MAX_EXPERT, (ids, order, items, *sizes))
    assert sorted(order.tolist()) == list(range(n_pair))
    covered = []
    for expert, first, n, _ in items.tolist():
        assert 0 <= n <= per_item
        covered += range(first, first + n)
        assert all(ids.view(-1)[order[p]] == expert for p in range(first, first + n))
    assert covered == list(range(n_pair)), "places of items follow each other"


@pytest.mark.parametrize(
    ("act", "up", "down"),
    [("swiglu", Q8_0, Q8_0), ("swiglu", GGMLType.Q4_K, GGMLType.Q6_K), ("relu2", Q8_0, Q4_0), ("relu2", Q4_0, GGMLType.Q4_1)],
)  # fmt: skip
def test_experts_are_the_references(act: str, up: GGMLType, down: GGMLType) -> None:
    """The op's own check: spread rows and crowds, items of 8 and of 32 pairs, an expert's lower tile."""
    n = 256 if GGMLType.Q4_K in (up, down) else 96
    spec = MoeSpec(CPU, 3, n, n + (0 if n == 256 else 64), act, up, down)  # type: ignore[arg-type]
    with emulated_gpu():
        assert moe_cuda.check(moe_cuda.bind(spec), moe_ref.bind(spec), spec, n_rows=(1, 9, 40)) is None


@pytest.mark.parametrize("type", CHUNKS)
def test_every_type(type: GGMLType) -> None:
    """With an expert's second scale where there may be one."""
    n = max(64, type.block_size)
    spec = MoeSpec(CPU, 2, n, n, "swiglu", type, type, scaled=type is GGMLType.NVFP4)
    with emulated_gpu((8, 0)):
        assert moe_cuda.check(moe_cuda.bind(spec), moe_ref.bind(spec), spec, n_rows=(5,)) is None


def packed(spec: MoeSpec, n_expert: int) -> Stacks:
    return random_stacks(spec, n_expert, torch.Generator().manual_seed(1))


def test_bits_depend_neither_on_neighbours_nor_on_the_order() -> None:
    spec = MoeSpec(CPU, 3, 64, 96, "swiglu", Q8_0, Q8_0)
    stacks, x = packed(spec, 8), torch.randn(40, 64)
    ids, weights = torch.rand(40, 8).argsort(-1)[:, :3].int().contiguous(), torch.rand(40, 3)
    found = []
    for seed, n_row in ((0, 40), (1, 40), (2, 33), (3, 5), (4, 1)):
        with emulated_gpu(seed=seed):
            found.append(moe_cuda.bind(spec)(stacks)(x[:n_row], ids[:n_row], weights[:n_row]))
    for other in found[1:]:
        assert torch.equal(other, found[0][: len(other)])


def test_many_rows_go_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_cuda, "MAX_ROWS", 8)
    spec = MoeSpec(CPU, 2, 64, 64, "relu2", Q8_0, Q8_0)
    stacks, x = packed(spec, 5), torch.randn(19, 64)
    ids, weights = torch.rand(19, 5).argsort(-1)[:, :2].int().contiguous(), torch.rand(19, 2)
    with emulated_gpu():
        got = moe_cuda.bind(spec)(stacks)(x, ids, weights)
    want = moe_ref.bind(spec)(stacks)(x, ids, weights)
    assert (got - want).norm() < 1e-3 * want.norm()


def test_experts_of_whole_tiles_are_packed_at_once_and_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    repack = moe_cuda.repack
    monkeypatch.setattr(moe_cuda, "repack", lambda raw, *rest: (calls.append(raw.shape[0]), repack(raw, *rest))[1])
    for n_out, want in ((256, [512]), (96, [96, 96])):
        for type in (Q8_0, GGMLType.NVFP4):
            calls.clear()
            n = MoeSpec(CPU, 1, 64, n_out, "relu2", type, type, FORMATS[type].scaled)
            got = moe_cuda.pack(packed(n, 2).up)
            assert calls == want and got.records.shape[0] == got.scales.shape[0] == 2


def test_fused_and_separate_stacks_are_packed_alike() -> None:
    spec = MoeSpec(CPU, 1, 64, 32, "swiglu", Q8_0, Q8_0)
    s = packed(spec, 4)
    assert s.gate is not None
    both = torch.stack((s.gate.data, s.up.data), 1).view(4, -1)
    gate, up = (replace(s.up, data=half) for half in both.chunk(2, 1))
    assert torch.equal(moe_cuda.pack(gate, up).records, moe_cuda.pack(s.gate, s.up).records)


def test_what_the_kernel_can_not_take_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    cuda = MoeSpec(torch.device("cuda"), 2, 64, 64, "swiglu", Q8_0, Q8_0)
    assert moe_cuda.limits(cuda) is None
    assert "multiples of 32" in str(moe_cuda.limits(replace(cuda, n_ff=48)))
    assert "second scales" in str(moe_cuda.limits(replace(cuda, scaled=True)))
    assert "packed form" in str(moe_cuda.limits(replace(cuda, up=GGMLType.Q2_K)))
    assert "one type" in str(moe_cuda.limits(replace(cuda, up=None)))
    assert "up to 32" in str(moe_cuda.limits(replace(cuda, n_used=33)))
