"""What runs beside a product gives what it gives behind it: the router's one launch, and DeepSeek-V4's experts around it.

The emulator runs launches one after the other. So it shows bits, tickets and rows, not who waits for whom: that takes a card.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from emulated.gpu import CPU
from emulated.machine import needs_compiler
from emulated.ways import machine_of
from torch import Tensor

from pyspec.cuda import fuse, streamed
from pyspec.cuda.jit import compile_cubin
from pyspec.cuda.ops.compress import cases as compress_cases
from pyspec.cuda.ops.compress import cuda as compress_cuda
from pyspec.cuda.ops.compress.ref import CompressSpec
from pyspec.cuda.ops.index_rows.cases import Ragged
from pyspec.cuda.ops.linear import cuda as linear_cuda
from pyspec.cuda.ops.linear.cuda import random_packed
from pyspec.cuda.ops.linear.ref import Epilogue
from pyspec.cuda.ops.moe import cuda as moe_cuda
from pyspec.cuda.ops.moe.ref import MoeSpec, RouteSpec
from pyspec.cuda.ops.moe_route import cuda as moe_route_cuda
from pyspec.cuda.ops.rows import cuda as rows_cuda
from pyspec.cuda.ops.rows.ref import Norm
from pyspec.cuda.ops.sparse_attend import cases as sparse_cases
from pyspec.cuda.ops.sparse_attend import cuda as sparse_cuda
from pyspec.cuda.ops.sparse_attend.ref import ROWS, SparseSpec
from pyspec.gguf import GGMLType
from pyspec.models.deepseek4 import StreamExperts

pytestmark = needs_compiler
ROUTES = {
    "deepseek4": RouteSpec(CPU, 64, 40, 6, "sqrtsoftplus", scale=1.5, biased=True),
    "deepseek4 by token": RouteSpec(CPU, 64, 40, 6, "sqrtsoftplus", scale=1.5, given=True),
    "parts": RouteSpec(CPU, 2080, 70, 22, "sigmoid", biased=True),
    "gated": RouteSpec(CPU, 1056, 33, 4, gated=True),
    "whole": RouteSpec(CPU, 4096, 256, 6, "sqrtsoftplus", scale=1.5, biased=True),
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", ROUTES)
@pytest.mark.parametrize("n_row", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("layout", [rows_cuda.BLOCKED, rows_cuda.PLANES])
def test_one_launch_scores_and_chooses_as_two_do(
    kind: str, n_row: int, layout: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, since tickets have to be zero again; whoever comes last."""
    spec = ROUTES[kind]
    x = drawn(n_row, spec.n_in) * torch.logspace(-2, 2, n_row)[:, None]
    norm, matrix = 0.5 + drawn(spec.n_in, seed=1).abs(), drawn(spec.n_expert + spec.gated, spec.n_in, seed=2)
    bias = drawn(spec.n_expert, seed=3) if spec.biased else None
    table = torch.stack([torch.randperm(spec.n_expert)[: spec.n_used] for _ in range(n_row)]).int()
    given = x, norm, matrix, bias, table if spec.given else None
    for seed in (0, 1):
        with machine_of("linear_pair", seed=seed):
            route, rows = moe_route_cuda.bind(spec), rows_cuda.RowsLaunch(CPU, spec.n_in, (8, 16), layout)
            into = rows.room(n_row)
            want = route(*given, into=into, power=2.0)
            places = [t.clone() for t in (into.blocks, into.sums, into.powers)]
            for early in (True, False):
                monkeypatch.setattr(moe_route_cuda, "EARLY", early)
                for t in (into.blocks, into.sums, into.powers):
                    t.fill_(torch.nan)
                taken = route.take_beside(n_row)
                assert taken is not None
                got = route(*given, into=into, power=2.0, taken=taken)
                assert got.early == early and got.ids is taken.routes.ids and not want.early
                assert torch.equal(got.ids, want.ids) and torch.equal(got.weights, want.weights)
                assert got.gate is want.gate is None or torch.equal(got.gate, want.gate)
                assert route.both is not None and not route.both[2].any(), "tickets are left over"
                values, sums = rows_cuda.values_of(into, spec.n_in)
                assert not values.isnan().any() and not sums.isnan().any()
                now = [t.clone() for t in (into.blocks, into.sums, into.powers)]
                for t, was in zip((into.blocks, into.sums, into.powers), places, strict=True):
                    t.copy_(was)
                assert torch.equal(values, rows_cuda.values_of(into, spec.n_in)[0])
                for t, new in zip((into.blocks, into.sums, into.powers), now, strict=True):
                    t.copy_(new)


def test_more_rows_and_other_shapes_are_chosen_behind() -> None:
    with machine_of("linear_pair"):
        route = moe_route_cuda.bind(ROUTES["deepseek4"])
        assert [n for n in range(20) if route.take_beside(n) is not None] == list(range(1, 9))
        for spec in (RouteSpec(CPU, 2080, 40, 6), RouteSpec(CPU, 64, 300, 6), RouteSpec(CPU, 7168, 384, 6)):
            assert not moe_route_cuda.has_both(spec)
        assert moe_route_cuda.bind(RouteSpec(CPU, 2080, 40, 6)).take_beside(1) is None
    with machine_of("linear"):  # before 9.0 nothing starts before what is before it is over
        assert moe_route_cuda.bind(ROUTES["deepseek4"]).take_beside(1) is None


def feed(up: GGMLType, down: GGMLType, *, biased: bool) -> StreamExperts:
    """A layer's feed-forward, small, as the model makes it."""
    own, gen = object.__new__(StreamExperts), torch.Generator().manual_seed(5)
    own.norm, own.router, own.table, own.ranks = Norm(0.5 + drawn(512).abs(), 1e-6), drawn(40, 512, seed=1), None, None
    own.bias = drawn(40, seed=2) if biased else None
    own.route = moe_route_cuda.bind(RouteSpec(CPU, 512, 40, 3, "sqrtsoftplus", biased=biased, given=not biased))
    spec = MoeSpec(CPU, 3, 512, 256, "swiglu", up, down, n_expert=40, limit=7.0)
    own.experts = moe_cuda.bind(spec)(moe_cuda.random_stacks(spec, 40, gen))
    q8 = GGMLType.Q8_0
    own.gate_up = streamed.Streamed(random_packed(q8, 512, 512, CPU), CPU, True, None, 7.0)
    own.down = streamed.Streamed(random_packed(q8, 512, 256, CPU), CPU, False, None)
    own.hands = fuse.handing(own.gate_up, own.down, 49.0)
    assert own.hands is not None
    return own


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(("up", "down"), [(GGMLType.Q8_0, GGMLType.Q8_0), (GGMLType.IQ2_XXS, GGMLType.Q2_K)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_layers_experts_are_the_same_beside_and_behind(
    up: GGMLType, down: GGMLType, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1 to 17 rows: up to eight run beside the shared expert's down product, more behind it."""
    monkeypatch.setattr(streamed.rows, "runs_as", lambda *_: True)
    monkeypatch.setattr(streamed, "_tall", lambda spec: None)
    monkeypatch.setattr(streamed, "_HANDS", {})
    monkeypatch.setattr(linear_cuda, "SHAPES", linear_cuda.SHAPES[:3])
    x, table = drawn(17, 512), torch.randint(0, 40, (17, 3), generator=torch.Generator().manual_seed(1)).int()
    with machine_of("linear_pair", seed=3):
        own, late = feed(up, down, biased=biased), []
        multiply = own.down.plain.multiply  # type: ignore[union-attr]

        def told(*given: object, late_: list[bool] = late, **more: bool) -> None:
            late_.append(more.get("late", False))
            multiply(*given, **more)

        own.down.plain.multiply = told  # type: ignore[union-attr, assignment]
        for n_row in range(1, 18):
            given = x[:n_row], None if biased else table[:n_row]
            late.clear()
            got = own(*given)
            assert late == [n_row <= 8]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(moe_route_cuda, "BESIDE_ROWS", 0)
                want = own(*given)
            assert late == [n_row <= 8, False]
            assert isinstance(got, Tensor) and isinstance(want, Tensor)
            assert torch.equal(got, want) and not want.isnan().any()


COMPRESSED = CompressSpec(CPU, 4, 64, True, 16, 1e-6, torch.float16)
CASE = Ragged([(0, 1), (2, 5), (70, 2)], 16)


@pytest.mark.parametrize("spec", [COMPRESSED, CompressSpec(CPU, 128, 32, False, 32, 1e-6, torch.bfloat16)])
def test_a_compressor_leaves_the_same_beside_a_product(spec: CompressSpec) -> None:
    """With padding, whose CTAs have nothing to do."""
    made = compress_cases.make(replace(CASE, pad=(3, 2)), spec, 1)
    with machine_of("linear_sm90", seed=1):
        launch = compress_cuda.bind(spec)
        found = [made.run(run, (slice(None), made.placed.batch)) for run in (launch, partial(launch, beside=True))]
    (ring, pool), (other, same) = found
    assert torch.equal(pool.k.view(torch.int16), same.k.view(torch.int16))
    assert all(torch.equal(ring.rows[x].view(torch.int32), other.rows[x].view(torch.int32)) for x in ring.rows)


def test_two_compressors_leave_the_same_beside_a_product() -> None:
    specs = COMPRESSED, replace(COMPRESSED, dim=32)
    made, found = [compress_cases.make(CASE, spec, i) for i, spec in enumerate(specs)], []
    wide = drawn(made[0].placed.plain.n_row, 4 * 64 + 4 * 32)  # as products lie: side by side
    parts = wide[:, :256].chunk(2, -1), wide[:, 256:].chunk(2, -1)
    for beside in (False, True):
        with machine_of("linear_sm90", seed=2):
            first, second = (compress_cuda.bind(spec) for spec in specs)
            both = first.with_beside(second)
            given = [(*part, of.places, of.norm, *of.copies()) for of, part in zip(made, parts, strict=True)]
            assert both is not None
            both(given[0], given[1], made[0].freq, made[0].placed.batch, beside=beside)
        found.append([x for *_, ring, pool in given for x in (*ring.rows.values(), pool.k.view(torch.int16))])
    assert all(torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in zip(*found, strict=True))


def test_two_compressors_of_flash_have_room_beside_a_product_of_up_to_eight_rows() -> None:
    """Registers and shared memory of a multiprocessor of 9.0: each CTA has 1 KB more, which is the driver's."""
    main = CompressSpec(CPU, 4, 512, True, 64, 1e-6, torch.float16)
    beside, shape, q8 = replace(main, dim=128), linear_cuda.SHAPES[0], GGMLType.Q8_0
    macros = compress_cuda.defines(main) | {"BESIDE_DIM": beside.dim, "BESIDE_GROUPS": compress_cuda.n_group(beside)}
    both = compile_cubin("compress", "sm_90a", macros, use_cache=False).resources["compress_both"]
    stages = linear_cuda.n_stages(q8, shape, (9, 0))
    build = linear_cuda.defines(q8, shape, stages, Epilogue.PLAIN)
    product = compile_cubin("linear_sm90", "sm_90a", build, use_cache=False).resources["linear"]
    assert shape.rows == linear_cuda.LATE_ROWS and both.spill_bytes == product.spill_bytes == 0
    threads = 32 * (shape.n_warp + 1), compress_cuda.n_group(main) * main.dim // 4
    assert sum(-(-r.registers // 8) * 8 * n for r, n in zip((product, both), threads, strict=True)) <= 65536
    shared = stages * linear_cuda.stage_bytes(q8, shape) + product.shared_bytes + both.shared_bytes
    assert shared + 2 * 1024 <= 228 * 1024


@pytest.mark.parametrize(("ratio", "top_k"), [(4, 6), (0, 0)])
def test_keys_that_were_made_ahead_are_those_of_the_call(ratio: int, top_k: int) -> None:
    spec = SparseSpec(CPU, 12, 32, 12, ratio, torch.float16, 16, 1e-6)
    made = sparse_cases.make(CASE, spec, top_k)
    batch, n_row = made.placed.batch, len(made.kv)
    with machine_of("linear_sm90", seed=3):
        attend = sparse_cuda.bind(spec)
        want, kept = made.run(attend, batch)
        own = attend.take_keys(n_row)
        assert own is not None and attend.take_keys(9) is attend.take_keys(0) is None
        launched: list[str] = []
        for build, kernels in attend.kernels.items():
            attend.kernels[build] = {name: Heard(kernel, name, launched) for name, kernel in kernels.items()}
        attend.keys_beside(made.kv, made.tail, batch, own)
        for _ in "ab":  # what was made ahead is for one call
            ring = sparse_cases.copied(made.ring)
            got = attend(made.q, made.kv, made.tail, ring, made.pool, made.chosen, made.sinks, batch)
            assert torch.equal(got, want) and torch.equal(
                ring.rows[ROWS].nan_to_num(9.0), kept.rows[ROWS].nan_to_num(9.0)
            )
        assert [name for name in launched if name == "sparse_keys"] == ["sparse_keys"] * 2 and launched[
            0
        ] == "sparse_keys"
        attend.keys_beside(made.kv, made.tail, batch, own)
        other = made.kv + 1
        assert torch.equal(
            attend(made.q, other, *made_rest(made), batch), attend(made.q, other, *made_rest(made), batch)
        )


def made_rest(made: sparse_cases.Windowed) -> tuple[Any, ...]:
    return made.tail, sparse_cases.copied(made.ring), made.pool, made.chosen, made.sinks


class Heard:
    """A kernel whose launches are written down."""

    def __init__(self, kernel: Any, name: str, launched: list[str]) -> None:
        self.kernel, self.name, self.launched = kernel, name, launched

    def launch(self, *given: Any, **more: Any) -> None:
        self.launched.append(self.name)
        self.kernel.launch(*given, **more)


def test_who_has_no_launch_for_it_is_asked_for_nothing() -> None:
    """Routers, experts and products of other tiers."""
    norm, x = Norm(torch.ones(4), 1e-6), torch.ones(2, 4)
    for route in (lambda *_: None, object()):
        given = torch.ones(3, 4), None, None
        assert fuse.chosen_beside(lambda x: x, None, route, object(), x, norm, None, given) is None
        assert fuse.keys_room(route, (), lambda x: x, 2) is None
