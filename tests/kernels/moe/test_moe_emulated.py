"""The kernels of experts run thread by thread on the CPU: lists, products of every type, combined sums."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import EmulationError, needs_compiler
from sampling import few
from torch import Tensor

from pyspec.cuda import jit, streamed
from pyspec.cuda.ops.linear.cuda import random_packed
from pyspec.cuda.ops.linear.formats import CHUNKS, FORMATS
from pyspec.cuda.ops.linear.ref import rounded
from pyspec.cuda.ops.moe import check as moe_check
from pyspec.cuda.ops.moe import cuda as moe_cuda
from pyspec.cuda.ops.moe import ref as moe_ref
from pyspec.cuda.ops.moe.check import random_stacks
from pyspec.cuda.ops.moe.op import buffer_bytes
from pyspec.cuda.ops.moe.ref import Added, MoeSpec, Stack, Stacks, activate, combine
from pyspec.cuda.ops.rows import cuda as rows_cuda
from pyspec.cuda.ops.rows.ref import Norm
from pyspec.gguf import GGMLType

pytestmark = [needs_compiler, pytest.mark.sampled(1)]
Q8_0, Q4_0 = GGMLType.Q8_0, GGMLType.Q4_0


@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize(("n_row", "n_used", "n"), [(1, 3, 36), (9, 22, 1100)])
def test_sums_of_a_row_are_the_references_bit_by_bit(
    n_row: int, n_used: int, n: int, has_residual: bool, has_shared: bool
) -> None:
    y, weights = torch.randn(n_row, n_used, n), torch.randn(n_row, n_used)
    out = torch.full((n_row, n), torch.nan)
    residual = torch.randn(n_row, n) if has_residual else None
    shared, gate = (torch.randn(n_row, n), torch.rand(n_row, 1)) if has_shared else (None, None)
    with emulated_gpu():
        none = None
        given = [none if t is None else t for t in (shared, gate, residual)]
        sizes = (n_used, n // 4, int(has_shared))
        _, combine = moe_cuda.PAIRS.kernels(CPU, None)
        combine.launch((n_row, -(-n // 1024)), 256, (y, weights, *given, out, *sizes))
    assert torch.equal(out, moe_ref.combine(y, weights, Added(residual, shared, gate)))


@pytest.mark.slow
def test_experts_norm_their_rows_and_add_what_else_there_is() -> None:
    spec, gen = MoeSpec(CPU, 3, 64, 96, "swiglu", Q8_0, Q8_0), torch.Generator().manual_seed(8)
    stacks, norm = packed(spec, 6), Norm(1 + 0.1 * torch.randn(64, generator=gen), 1e-6)
    x, shared, gate = 7 * torch.randn(9, 64), torch.randn(9, 64), torch.rand(9, 1)
    ids, weights = torch.rand(9, 6).argsort(-1)[:, :3].int().contiguous(), torch.rand(9, 3)
    for added in (Added(x, shared, gate), Added(x), moe_ref.NOTHING):
        want = moe_ref.bind(spec)(stacks)(x, ids, weights, norm, added)
        with emulated_gpu():
            run = moe_cuda.bind(spec)(stacks)
            got = run(x, ids, weights, norm, added)
            alone = run(x[4:5], ids[4:5], weights[4:5], norm, added.part(slice(4, 5)))
        assert (got - want).norm() < 1e-3 * want.norm() and torch.equal(alone[0], got[4])


@pytest.mark.parametrize(
    ("n_row", "n_used", "n_expert", "per_item"), [(1, 3, 8, 8), (40, 4, 7, 8), (300, 5, 600, 32)]
)
def test_lists_name_every_pair_once_with_its_expert(
    n_row: int, n_used: int, n_expert: int, per_item: int
) -> None:
    ids = torch.rand(n_row, n_expert).argsort(-1)[:, :n_used].int().contiguous()
    ids[: n_row // 2] = ids[0]  # a crowd at some experts
    n_pair = n_row * n_used
    n_item = min(n_pair, n_expert + n_pair // per_item)
    order = torch.full((n_pair,), -1, dtype=torch.int32)
    items = torch.full((n_item, 4), -1, dtype=torch.int32)
    with emulated_gpu(seed=3):
        lists, _ = moe_cuda.PAIRS.kernels(CPU, None)
        sizes = (n_pair, n_expert, per_item, n_item)
        lists.launch((1,), moe_cuda.MAX_EXPERT, (ids, order, items, *sizes))
    assert sorted(order.tolist()) == list(range(n_pair))
    covered = []
    for expert, first, n, _ in items.tolist():
        assert 0 <= n <= per_item
        covered += range(first, first + n)
        assert all(ids.view(-1)[order[p]] == expert for p in range(first, first + n))
    assert covered == list(range(n_pair)), "places of items follow each other"


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("pieces", few([0, 1, 3], 1))
@pytest.mark.parametrize(
    ("act", "up", "down"),
    [("swiglu", Q8_0, Q8_0), ("swiglu", GGMLType.Q4_K, GGMLType.Q6_K), ("relu2", Q8_0, Q4_0), ("relu2", Q4_0, GGMLType.Q4_1),
     ("swiglu", GGMLType.IQ2_XXS, GGMLType.Q2_K)],
)  # fmt: skip
def test_experts_are_the_references(act: str, up: GGMLType, down: GGMLType, pieces: int) -> None:
    """The op's own check: spread rows and crowds, items of 8 and of 32 pairs, an expert's lower tile, a shared expert."""
    n = 256 if 256 in (up.block_size, down.block_size) else 96
    n_ff = n + (0 if n == 256 else 64)
    spec = MoeSpec(CPU, 3, n, n_ff, act, up, down, pieces=pieces)  # type: ignore[arg-type]
    with emulated_gpu():
        assert moe_check.check(moe_cuda.bind(spec), moe_ref.bind(spec), spec, n_rows=(1, 9, 40)) is None


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(("type", "limit"), [(Q8_0, 10.0), (GGMLType.Q4_K, 0.5), (Q8_0, -0.5)])
def test_activations_are_cut_at_the_limit(type: GGMLType, limit: float) -> None:
    """The op's own check, whose rows lie on both sides of a limit; without it the same rows come out otherwise."""
    n = max(64, type.block_size)
    spec = MoeSpec(CPU, 2, n, n, "swiglu", type, type, pieces=1, limit=limit)
    with emulated_gpu():
        assert moe_check.check(moe_cuda.bind(spec), moe_ref.bind(spec), spec, n_rows=(1, 9)) is None
        uncut = moe_cuda.bind(replace(spec, limit=0.0))
        assert "differ" in str(moe_check.check(uncut, moe_ref.bind(spec), spec, n_rows=(1,)))


OF_KIMI_K3 = MoeSpec(CPU, 2, 96, 64, "situ", *2 * (GGMLType.MXFP4,), betas=(1.5, 2.0))
OF_GPT_OSS = MoeSpec(CPU, 2, 96, 64, "swiglu_oai", *2 * (GGMLType.MXFP4,), limit=7.0, biased=True)


@pytest.mark.parametrize("linear", [2.0, 0.0])
def test_gates_of_kimi_k3_are_the_references(linear: float) -> None:
    spec = replace(OF_KIMI_K3, betas=(1.5, linear))
    with emulated_gpu():
        assert moe_check.check(moe_cuda.bind(spec), moe_ref.bind(spec), spec, n_rows=(1, 9)) is None
        wrong = moe_ref.bind(replace(spec, betas=(1.6, linear)))
        assert "differ" in str(moe_check.check(moe_cuda.bind(spec), wrong, spec, n_rows=(1,)))


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(
    "spec",
    [
        OF_GPT_OSS,
        replace(OF_GPT_OSS, n_ff=96, act="geglu", up=Q8_0, down=Q8_0),
        replace(OF_GPT_OSS, n_in=256, n_ff=256, act="relu2", limit=0.0, up=GGMLType.Q4_K, down=GGMLType.Q4_K),
    ],
    ids=lambda spec: spec.act,
)  # fmt: skip
def test_experts_with_biases_are_the_references(spec: MoeSpec) -> None:
    """Gates of every kind; the check sees biases that are left out, of either product."""
    with emulated_gpu():
        assert moe_check.check(moe_cuda.bind(spec), moe_ref.bind(spec), spec, n_rows=(1, 9)) is None
        for name in ("up", "down"):

            def without(stacks: Stacks, name: str = name) -> moe_ref.ExpertsRun:
                stack: Stack = getattr(stacks, name)
                assert stack.bias is not None
                none = replace(stack, bias=torch.zeros_like(stack.bias))
                return moe_cuda.bind(spec)(replace(stacks, **{name: none}))

            assert "differ" in str(moe_check.check(without, moe_ref.bind(spec), spec, n_rows=(1,)))


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("type", few(CHUNKS, GGMLType.Q5_K, GGMLType.NVFP4))
def test_experts_of_every_type_are_the_references(type: GGMLType) -> None:
    """With an expert's second scale where there may be one."""
    n = max(64, type.block_size)
    spec = MoeSpec(CPU, 2, n, n, "swiglu", type, type, scaled=type is GGMLType.NVFP4, pieces=1)
    with emulated_gpu((8, 0)):
        assert moe_check.check(moe_cuda.bind(spec), moe_ref.bind(spec), spec, n_rows=(5,)) is None


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("type", "n_in", "n_ff", "pieces"),
    [(Q8_0, 64, 32, 2), pytest.param(GGMLType.Q4_K, 256, 256, 1, marks=pytest.mark.slow)],
)
def test_few_rows_find_those_that_took_the_same_expert(
    type: GGMLType, n_in: int, n_ff: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As lists do: 704 pairs, crowds of up to 32 at an expert, ids that are no expert's, all orders of CTAs."""
    monkeypatch.setattr(moe_cuda, "FEWEST", moe_cuda.FEW)  # crowds of more than an item has
    monkeypatch.setattr(moe_cuda, "INTEGER_FEWEST", moe_cuda.FEW)
    spec = MoeSpec(CPU, 22, n_in, n_ff, "relu2", type, type, pieces=pieces)
    stacks, x = packed(spec, 30), torch.randn(33, n_in, generator=torch.Generator().manual_seed(3))
    ids, weights = spread(33, 22, 30)
    ids[:, 0], ids[4, 3], ids[30, 1] = 7, -2, 1000
    found = []
    for seed, n_row in ((0, 33), (1, 32), (2, 31), (3, 9)):
        with emulated_gpu(seed=seed):
            found.append(moe_cuda.bind(spec)(stacks)(x[:n_row], ids[:n_row], weights[:n_row]))
    for other in found[1:]:
        assert torch.equal(other, found[0][: len(other)])
    round = as_whole if type is Q4_K else as_f16
    assert worst(found[0].double(), exact(stacks, round)(x, ids.clamp(0, 29), weights)) < 1e-4


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(
    ("n_in", "n_used", "n_row", "pieces"),
    [(64, 3, 1, 1), (2688, 2, 2, 0), (160, 14, 5, 2), (4096, 1, 3, 0)],
)
def test_sums_on_the_way_to_a_product_have_the_bits_of_those_made_before(
    n_in: int, n_used: int, n_row: int, pieces: int
) -> None:
    """With all that is added, and with nothing."""
    spec = MoeSpec(CPU, n_used, n_in, 32, "relu2", Q8_0, Q8_0, pieces=pieces)
    gen = torch.Generator().manual_seed(n_in)
    stacks, (ids, weights) = packed(spec, n_used + 2), spread(n_row, n_used, n_used + 2)
    x, residual, shared = (torch.randn(n_row, n_in, generator=gen) for _ in "xrs")
    gate = torch.rand(n_row, 1, generator=gen)
    with emulated_gpu((9, 0), seed=n_row):
        experts, launch = moe_cuda.bind(spec)(stacks), rows_cuda.RowsLaunch(CPU, n_in, (8,))
        for added in (moe_ref.NOTHING, Added(residual, None if pieces else shared, gate)):
            ready = launch(experts(x, ids, weights, None, added))
            blocks, sums, powers = ready.blocks.clone(), ready.sums.clone(), ready.powers.clone()
            for t in (ready.blocks, ready.sums, ready.powers):
                t.fill_(torch.nan)
            got = launch.summed(experts.shares(experts.x_rows(x), ids, weights, added))
            assert (got.n_row, got.pad) == (n_row, 8) and torch.equal(got.powers[:n_row], powers[:n_row])
            pairs = (
                (got.blocks.view(-1, 8, 32), blocks.view(-1, 8, 32)),
                (got.sums.view(-1, 8), sums.view(-1, 8)),
            )
            for own, other in pairs:
                assert torch.equal(own[:, :n_row], other[:, :n_row]) and own[:, n_row:].isnan().all()


@pytest.mark.slow
def test_the_product_behind_gives_the_same_for_sums_made_on_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a model whose experts work in a width of their own runs it: the way back, with a residual."""
    monkeypatch.setattr(streamed, "_tall", lambda spec: None)
    spec, gen = MoeSpec(CPU, 3, 96, 64, "relu2", Q8_0, Q8_0), torch.Generator().manual_seed(9)
    stacks, (ids, weights) = packed(spec, 6), spread(5, 3, 6)
    x, residual = torch.randn(5, 96, generator=gen), torch.randn(5, 160, generator=gen)
    with emulated_gpu((9, 0), seed=2):
        experts = moe_cuda.bind(spec)(stacks)
        up = streamed.Streamed(random_packed(Q8_0, 160, 96, CPU), CPU, False, None)
        want = up(experts(x, ids, weights), residual=residual)
        got = up(
            up.plain.rows.summed(experts.shares(experts.x_rows(x), ids, weights)), residual=residual
        )
    assert torch.equal(got, want) and want.abs().amax() > 0


@pytest.mark.parametrize("n_row", [1, 2, 5, 40])
def test_a_choice_of_none_reads_nothing_and_writes_nothing(n_row: int) -> None:
    """Found by others or listed: outputs of all other pairs have the bits that they have anyway; a record of no numbers is not read."""
    spec, n_expert = MoeSpec(CPU, 3, 64, 96, "swiglu", Q8_0, Q8_0), 6
    stacks, (ids, weights) = packed(spec, n_expert), spread(n_row, 3, n_expert - 1)
    x, none = torch.randn(n_row, 64), torch.rand(n_row, 3) < 0.4
    none[0] = torch.tensor([False, True, True])
    with emulated_gpu(seed=n_row):
        run = moe_cuda.bind(spec)(stacks)
        rows = run.x_rows(x)
        want = run.shares(rows, ids, weights).y.view(n_row, 3, -1).clone()
        run.inner.stack.records[n_expert - 1].fill_(0xFF)
        run.down.stack.records[n_expert - 1].fill_(0xFF)
        for other in (
            ids,
            torch.where(none, n_expert - 1, ids),
        ):  # whoever took none may have another's id beside it
            got = run.shares(rows, torch.where(none, -1, other), weights).y.view(n_row, 3, -1)
            assert torch.equal(got[~none], want[~none]) and bool(got[none].isnan().all())
        assert not run.shares(rows, torch.full_like(ids, -1), weights).y.isfinite().any()


def test_tickets_are_back_at_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_cuda, "FEWEST", moe_cuda.FEW)
    spec = MoeSpec(CPU, 3, 64, 96, "swiglu", Q8_0, Q8_0, pieces=1)
    stacks, (ids, weights) = packed(spec, 6), spread(20, 3, 6)
    with emulated_gpu(seed=5):
        run = moe_cuda.bind(spec)(stacks)
        first, again = (run(torch.ones(20, 64), ids, weights) for _ in "ab")
        assert torch.equal(first, again) and not run.down.tickets.any()


def test_a_shared_expert_is_cut_into_experts_that_add_up_to_it() -> None:
    spec = MoeSpec(CPU, 1, 64, 32, "swiglu", Q8_0, Q4_0, pieces=3)
    shared, x = packed(spec, 2).shared, torch.randn(5, 64)
    assert shared is not None and shared.up.n_out == 96
    pieces = moe_cuda.cut(shared, 3)
    assert pieces.n_expert == 3 and pieces.up.n_out == pieces.down.n_in == 32
    every = replace(spec, n_used=3, pieces=0)
    ids, ones = torch.arange(3, dtype=torch.int32).expand(5, 3).contiguous(), torch.ones(5, 3)
    whole = moe_ref.bind(replace(spec, pieces=0))(shared)(
        x, torch.zeros(5, 1, dtype=torch.int32), torch.ones(5, 1)
    )
    assert torch.allclose(moe_ref.bind(every)(pieces)(x, ids, ones), whole, atol=1e-4)


def test_many_rows_go_in_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_cuda, "MAX_ROWS", 8)
    monkeypatch.setattr(moe_cuda, "LONG_ROWS", 8)
    spec = MoeSpec(CPU, 2, 64, 64, "relu2", Q8_0, Q8_0, pieces=1)
    stacks, x = packed(spec, 5), torch.randn(19, 64)
    ids, weights = torch.rand(19, 5).argsort(-1)[:, :2].int().contiguous(), torch.rand(19, 2)
    with emulated_gpu():
        got = moe_cuda.bind(spec)(stacks)(x, ids, weights)
    want = moe_ref.bind(spec)(stacks)(x, ids, weights)
    assert (got - want).norm() < 1e-3 * want.norm()


def test_experts_of_whole_tiles_are_packed_at_once_and_others_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    repack = moe_cuda.repack
    monkeypatch.setattr(
        moe_cuda, "repack", lambda raw, *rest: (calls.append(raw.shape[0]), repack(raw, *rest))[1]
    )
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
    assert "packed form" in str(moe_cuda.limits(replace(cuda, up=GGMLType.IQ1_S)))
    assert moe_cuda.limits(replace(cuda, limit=10.0)) is None
    assert moe_cuda.limits(replace(cuda, limit=-10.0)) is None
    assert "limits" in str(moe_cuda.limits(replace(cuda, limit=-1e5)))
    assert "one type" in str(moe_cuda.limits(replace(cuda, up=None)))
    assert "up to 32" in str(moe_cuda.limits(replace(cuda, n_used=33)))
    assert moe_cuda.limits(replace(cuda, pieces=4)) is None
    assert "5 pieces" in str(moe_cuda.limits(replace(cuda, pieces=5)))
    assert moe_cuda.limits(replace(cuda, act="swiglu_oai", biased=True)) is None
    assert "with biases" in str(moe_cuda.limits(replace(cuda, biased=True, pieces=1)))
    assert "2 pieces of 64" in str(moe_cuda.limits(replace(cuda, down=GGMLType.Q4_K, pieces=2)))


def as_f16(x: Tensor, _: int) -> Tensor:
    return rounded(x)


def as_whole(x: Tensor, n: int) -> Tensor:
    """Whole numbers of 16 bits, whose largest each n columns is 127 * 257: put_in_planes's."""
    parts = x.unflatten(-1, (-1, n))
    power = parts.abs().amax(-1, keepdim=True) / (127 * 257)
    return ((parts / power.clamp_min(1e-35)).round() * power).flatten(-2)


def exact(
    stacks: Stacks, round: Callable[[Tensor, int], Tensor] = as_f16
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Experts in float64, with rows rounded where the kernels round them, before each product: so many columns together."""

    def matrices_of(stacks: Stacks) -> list[list[Tensor | None]]:
        three = stacks.gate, stacks.up, stacks.down
        return [
            [None if s is None else s.matrix(e).double() for s in three] for e in range(stacks.n_expert)
        ]

    matrices = matrices_of(stacks)
    shared = [] if stacks.shared is None else matrices_of(stacks.shared)

    def feed(three: list[Tensor | None], x: Tensor) -> Tensor:
        gate, up, down = three
        assert up is not None and down is not None
        return round(activate(None if gate is None else x @ gate.T, x @ up.T), 32) @ down.T

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        x, y = round(x.double(), 64), torch.empty(*ids.shape, x.shape[1], dtype=torch.float64)
        for e, three in enumerate(matrices):
            row, choice = (ids == e).nonzero(as_tuple=True)
            y[row, choice] = feed(three, x[row])
        out = combine(y, weights.double())
        return out + feed(shared[0], x) if shared else out

    return run


def worst(got: Tensor, want: Tensor) -> float:
    """Error of the row that is off most, relative to its norm."""
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).amax())


def spread(n_row: int, n_used: int, n_expert: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(n_row)
    ids = torch.rand(n_row, n_expert, generator=gen).argsort(-1)[:, :n_used].int().contiguous()
    return ids, torch.rand(n_row, n_used, generator=gen)


Q4_K = GGMLType.Q4_K


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(("type", "round"), [(GGMLType.Q5_K, as_f16), (Q4_K, as_whole)])
def test_rows_whose_outputs_cancel_are_off_by_rounding_alone(
    type: GGMLType, round: Callable[[Tensor, int], Tensor]
) -> None:
    """Random weights with minima have a mean, so where columns add up to nothing outputs nearly do: there f16 shows, and of whole
    numbers a fourth of that. 40 rows and two experts: items of 32 pairs, several an expert."""
    spec = MoeSpec(CPU, 2, 512, 256, "swiglu", type, type)
    stacks, x = packed(spec, 3), torch.randn(40, 512, generator=torch.Generator().manual_seed(0))
    x -= x.mean(-1, keepdim=True)
    ids, weights = spread(40, 2, 3)
    with emulated_gpu():
        got = moe_cuda.bind(spec)(stacks)(x, ids, weights).double()
    assert worst(got, exact(stacks, round)(x, ids, weights)) < 1e-4
    off = worst(got, exact(stacks, lambda x, n: x)(x, ids, weights))
    assert off > 1.5e-3 if round is as_f16 else off < 5e-4


def blocks_of(stack: Stack) -> Tensor:
    """[expert, row, block, bytes of one], a view."""
    return stack.data.view(stack.data.shape[0], stack.n_out, -1, Q4_K.type_size)


def wrong_block_of_up(stacks: Stacks, ids: Tensor) -> None:
    """32 columns of 16 rows have the codes of the next 32."""
    codes = blocks_of(stacks.up)[1, 16:32, 1, 16:48]
    codes.copy_(codes >> 4 | codes & 0xF0)


def wrong_block_of_down(stacks: Stacks, ids: Tensor) -> None:
    codes = blocks_of(stacks.down)[1, :16, 0, 16:48]
    codes.copy_(codes >> 4 | codes & 0xF0)


def no_minima(stacks: Stacks, ids: Tensor) -> None:
    """Of 256 columns of 16 rows."""
    blocks_of(stacks.up)[1, :16, 0, 2:4] = 0


def wrong_expert(stacks: Stacks, ids: Tensor) -> None:
    """For one row and one choice."""
    ids[-1, -1] = next(e for e in range(stacks.n_expert) if e not in ids[-1])


@pytest.mark.sampled(most=5)
@pytest.mark.parametrize(
    "mistake", [wrong_block_of_up, wrong_block_of_down, no_minima, wrong_expert, None]
)
def test_the_check_refuses_mistakes_and_not_rounding(
    mistake: Callable[[Stacks, Tensor], None] | None,
) -> None:
    """Launches are the exact sums of rounded rows; among 100 rows are some whose outputs cancel."""
    spec = MoeSpec(CPU, 3, 1024, 512, "swiglu", Q4_K, Q4_K)

    def launch(stacks: Stacks) -> moe_ref.ExpertsRun:
        def run(
            x: Tensor,
            ids: Tensor,
            weights: Tensor,
            norm: Norm | None = None,
            added: Added = moe_ref.NOTHING,
        ) -> Tensor:
            own, ids = deepcopy(stacks), ids.clone()
            if mistake is not None:
                mistake(own, ids)
            y = exact(own)(x if norm is None else norm(x), ids, weights).float()
            y = y if added.shared is None or added.gate is None else y + added.shared * added.gate
            return y if added.residual is None else added.residual + y

        return run

    said = moe_check.check(launch, moe_ref.bind(spec), spec, n_rows=(1, 40, 100))
    assert (said is None) == (mistake is None)


SHAPES = {
    "halves": MoeSpec(
        CPU, 3, 160, 96, "swiglu", Q8_0, Q8_0, pieces=2
    ),  # 2.5 and 1.5 chunks; 10 and 12 groups of rows
    # Round the ring, ending in its first stage; 2 groups, and 66
    "long": MoeSpec(CPU, 2, 1056, 32, "relu2", Q8_0, Q8_0),
    "records": MoeSpec(CPU, 2, 768, 256, "swiglu", Q4_K, Q4_K, pieces=1),
    "scaled": MoeSpec(CPU, 2, 320, 192, "relu2", GGMLType.NVFP4, GGMLType.NVFP4, scaled=True, pieces=1),
    "parts": MoeSpec(CPU, 2, 1280, 256, "swiglu", GGMLType.IQ2_XXS, GGMLType.Q2_K),  # 5 chunks, and one
    "parts of downs": MoeSpec(CPU, 2, 256, 1280, "swiglu", GGMLType.IQ2_XXS, GGMLType.Q2_K),
}


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("capability", few([(8, 6), (9, 0)], (9, 0)))
@pytest.mark.parametrize("name", SHAPES)
def test_sums_are_exact_and_a_row_has_the_same_bits_alone_and_among_others(
    name: str, capability: tuple[int, int]
) -> None:
    """Few rows and many are different builds. Columns that are no multiple of the warps' share, lower last tiles, and an
    expert that a single row took."""
    spec = SHAPES[name]
    stacks = packed(spec, 5)
    x = torch.randn(41, spec.n_in, generator=torch.Generator().manual_seed(2)).half().float()
    ids, weights = spread(41, spec.n_used, 4)
    ids[7, -1] = 4
    with emulated_gpu(capability, seed=3, n_multiprocessor=40 if name.startswith("parts") else 3):
        experts = moe_cuda.bind(spec)(stacks)
        many, few = experts(x, ids, weights), experts(x[:9], ids[:9], weights[:9])
        alone = [experts(x[7 : 7 + n], ids[7 : 7 + n], weights[7 : 7 + n]) for n in (1, 2, 3)]
    round = as_f16 if spec.up in (Q8_0, GGMLType.NVFP4) else as_whole
    assert worst(many.double(), exact(stacks, round)(x, ids, weights)) < 1e-4
    assert torch.equal(few, many[:9]) and all(torch.equal(y, many[7 : 7 + len(y)]) for y in alone)


@pytest.mark.parametrize("text", few(["copies_wait<STAGES - 2>();", "__syncthreads();"]))
def test_without_a_wait_the_product_is_wrong(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them is taken away in turn: of f16 rows or of whole numbers, or of both."""
    real = jit.source
    parts = real("moe").split(text)
    assert len(parts) > 1

    def said_of(name: str) -> str | None:
        spec = SHAPES[name]
        try:
            with emulated_gpu((8, 6), n_multiprocessor=40):
                return moe_check.check(moe_cuda.bind(spec), moe_ref.bind(spec), spec, n_rows=(1,))
        except EmulationError as e:  # the wrong block where a row's number should be
            return str(e)

    for which in range(len(parts) - 1):
        mutant = text.join(parts[: which + 1]) + ";" + text.join(parts[which + 1 :])
        monkeypatch.setattr(
            jit, "source", lambda name, text=mutant: text if name == "moe" else real(name)
        )
        assert any(said_of(name) is not None for name in ("long", "records", "parts")), which


def test_where_an_expert_would_have_few_rows_more_go_at_once() -> None:
    # of 512 rows 12 for an expert of DeepSeek-V4, 16 for one of Qwen3.6-35B, 22 for one of Nemotron-3-Super
    assert moe_cuda.rows_at_once(6, 256) == moe_cuda.rows_at_once(8, 256) == moe_cuda.LONG_ROWS
    assert moe_cuda.rows_at_once(22, 512) == moe_cuda.MAX_ROWS
    # lists count pairs in 16 bits
    of = (
        (n, n_expert)
        for n in range(1, moe_cuda.MAX_USED + 1)
        for n_expert in range(n, moe_cuda.MAX_EXPERT + 1)
    )
    assert all(n * moe_cuda.rows_at_once(n, n_expert) < 1 << 16 for n, n_expert in of)
    assert buffer_bytes(8, 256, 2048, 512) > 3 * buffer_bytes(9, 256, 2048, 512)
