"""linear.cu, linear_sm90.cu and linear_pair.cu run thread by thread on the CPU: every type, cut tiles, bands, every epilogue."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulated.gpu import CPU
from emulated.machine import needs_compiler
from emulated.ways import WAYS, machine_of
from machines import off
from torch import Tensor

from pyspec.cuda import streamed
from pyspec.cuda.kernel_context import KernelContext, use
from pyspec.cuda.ops.linear import cuda as linear_cuda
from pyspec.cuda.ops.linear import pair as linear_pair
from pyspec.cuda.ops.linear import ref as linear_ref
from pyspec.cuda.ops.linear.cuda import SHAPES, LinearLaunch, Tiling, build_of, random_weights, step
from pyspec.cuda.ops.linear.pack import Packed, repack, unpack
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.rows.cuda import values_of
from pyspec.gguf import GGMLType

pytestmark = [needs_compiler, pytest.mark.sampled(1)]
SEEDS = (0, 1)
# All ways scales lie; test_packed_emulated has the rest
TYPES = (GGMLType.Q8_0, GGMLType.Q4_0, GGMLType.Q4_K, GGMLType.Q6_K)


@pytest.fixture(autouse=True)
def _few_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that matrices this small go round the ring of stages."""
    monkeypatch.setattr(
        linear_cuda, "n_stages", lambda type, shape, capability: 2 if capability >= (9, 0) else 3
    )
    monkeypatch.setattr(linear_pair, "MAX_SLOTS", 4)


def matrix(spec: LinearSpec) -> Packed:
    gen = torch.Generator().manual_seed(spec.n_out + spec.n_in)
    size = spec.n_weight_row, spec.n_in
    return repack(random_weights(spec.type, *size, gen), spec.type, size)


def product(
    spec: LinearSpec,
    packed: Packed,
    x: Tensor,
    residual: Tensor | None = None,
    shape: Tiling = SHAPES[0],
) -> Tensor:
    """The result of one build; rows of the pad hold NaN, tickets must be zero again."""
    launch = LinearLaunch(spec, (step(CPU, spec.type, build_of(spec), shape),))
    launch.rows = linear_cuda.RowsLaunch(CPU, spec.n_in, (shape.rows,))
    for t in (launch.rows.blocks, launch.rows.sums, launch.rows.powers):
        t.fill_(torch.nan)
    out = torch.full((x.shape[0], spec.n_out), torch.nan)
    launch(x, packed, out, residual)
    assert not launch.tickets.any(), "tickets are left over"
    return out


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("type", TYPES)
def test_products_equal_exact_sums_of_rounded_rows(type: GGMLType, way: str, seed: int) -> None:
    """300 rows fill a tile and a lower one; three CTAs cut both."""
    spec = LinearSpec(CPU, type, 300, 1536)
    packed = matrix(spec)
    x = torch.randn(5, spec.n_in) * torch.logspace(-3, 3, 5)[:, None]
    with machine_of(way, seed=seed):
        assert off(product(spec, packed, x), linear_ref.rounded(x) @ unpack(packed).double().T) < 3e-6


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("epilogue", "limit"),
    [(Epilogue.RESIDUAL, 0.0), (Epilogue.GATED, 0.0), (Epilogue.GATED, 2.0), (Epilogue.GATED, -1.0)],
    ids=["residual", "gated", "cut", "cut behind silu"],
)
def test_epilogues_equal_the_reference(epilogue: Epilogue, limit: float, way: str, seed: int) -> None:
    spec = LinearSpec(CPU, GGMLType.Q8_0, 136, 256, epilogue, limit)
    packed, x, want = matrix(spec), torch.randn(12, 256) / 16, torch.empty(12, 136)
    residual = torch.randn(12, 136) if epilogue is Epilogue.RESIDUAL else None
    linear_ref.bind(spec)(x, packed, want, residual)
    with machine_of(way, seed=seed):
        assert off(product(spec, packed, x, residual, SHAPES[1]), want) < 1e-3


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("way", ["linear", "linear_sm90"])
@pytest.mark.parametrize("type", [GGMLType.Q8_0, GGMLType.Q4_K])
def test_parts_have_their_own_columns(type: GGMLType, way: str) -> None:
    """Three matrices of a tile each, two chunks and more of columns; CTAs begin within parts."""
    spec = LinearSpec(CPU, type, 768, 512, parts=3)
    packed, x = matrix(spec), torch.randn(3, 1536) * torch.tensor([[1e-2], [1.0], [30.0]])
    parts = zip(unpack(packed).double().chunk(3), linear_ref.rounded(x).chunk(3, -1), strict=True)
    want = torch.cat([part @ own.T for own, part in parts], -1)
    with machine_of(way, seed=0, n_multiprocessor=5):
        launch = LinearLaunch(spec, (step(CPU, type, build_of(spec), SHAPES[0]),))
        got = torch.full((3, 768), torch.nan)
        launch(x, packed, got)
        assert not launch.tickets.any(), "tickets are left over"
    assert off(got, want) < 3e-6
    own = torch.full((3, 768), torch.nan)
    linear_ref.bind(spec)(x, packed, own)
    assert off(own, want) < 1e-3


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("epilogue", "parts"), [(Epilogue.PLAIN, 1), (Epilogue.GATED, 1), (Epilogue.PLAIN, 3)]
)
def test_products_that_go_to_the_next_ones_rows_are_those_of_a_call(
    epilogue: Epilogue, parts: int, way: str
) -> None:
    spec = LinearSpec(CPU, GGMLType.Q8_0, 768, 512, epilogue, 4.0 * (epilogue is Epilogue.GATED), parts)
    packed, power = matrix(spec), 0.25
    x = torch.randn(3, parts * 512) * torch.tensor([[1e-2], [1.0], [30.0]])
    with machine_of(way, seed=0, n_multiprocessor=5):
        want = LinearLaunch(spec, (step(CPU, spec.type, build_of(spec), SHAPES[0]),))
        out = torch.full((3, 768), torch.nan)
        want(x, packed, out)
        handing = replace(spec, hands=power)
        launch = LinearLaunch(handing, (step(CPU, spec.type, build_of(handing), SHAPES[0]),))
        into = linear_cuda.RowsLaunch(CPU, 768, (8,))
        got = launch.hand(launch.rows(x), packed, into)
        values = values_of(got, 768)[0]
        assert torch.equal(values, (out / power).half().float() * power) and not launch.tickets.any()


def test_parts_that_do_not_fill_tiles_are_refused() -> None:
    gpu = torch.device("cuda", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        good = LinearSpec(gpu, GGMLType.Q8_0, 8192, 4096, parts=8)
        assert linear_cuda.limits(good) is None
        for change in ({"n_out": 8 * 128}, {"n_in": 4000 // 32 * 32}, {"parts": 3}, {"n_in": 8192}):
            assert "part" in (linear_cuda.limits(replace(good, **change)) or "")
        assert "something is done" in (linear_cuda.limits(replace(good, epilogue=Epilogue.GATED)) or "")


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("n_in", [32, 96])
def test_columns_that_fill_no_chunk_add_nothing(n_in: int, way: str) -> None:
    spec = LinearSpec(CPU, GGMLType.Q8_0, 40, n_in)
    packed, x = matrix(spec), torch.randn(3, n_in)
    for seed in range(4):
        with machine_of(way, seed=seed):
            assert (
                off(product(spec, packed, x), linear_ref.rounded(x) @ unpack(packed).double().T) < 3e-6
            )


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("way", WAYS)
def test_bits_depend_neither_on_the_build_nor_on_neighbours_nor_on_the_order(way: str) -> None:
    spec = LinearSpec(CPU, GGMLType.Q8_0, 530, 320)
    packed, x = matrix(spec), torch.randn(33, 320)
    found = []
    for seed, shape, n_row in (
        (0, SHAPES[0], 8),
        (1, SHAPES[0], 3),
        (2, SHAPES[4], 33),
        (3, Tiling(16, 1, 1, 1), 8),
    ):
        with machine_of(way, seed=seed, n_multiprocessor=7):
            found.append(product(spec, packed, x[:n_row], shape=shape))
    for other in found[1:]:
        n = min(len(other), len(found[0]))
        assert torch.equal(other[:n], found[0][:n])


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("way", WAYS)
def test_a_tile_cut_among_many_has_the_same_bits_in_many_orders(way: str) -> None:
    spec = LinearSpec(CPU, GGMLType.Q8_0, 24, 384)
    packed, x, found = matrix(spec), torch.randn(3, 384), []
    for seed in range(60):
        with machine_of(way, seed=seed, n_multiprocessor=5, resident=5):
            found.append(product(spec, packed, x))
    assert all(torch.equal(other, found[0]) for other in found[1:])


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("way", WAYS)
def test_the_launcher_takes_many_rows_in_passes_of_the_shapes_that_fit(way: str) -> None:
    """The op's own check, on a matrix of one tile: 1, 9 and 33 rows in one pass each, 135 in two."""
    spec = LinearSpec(CPU, GGMLType.Q8_0, 24, 64)
    with machine_of(way):
        launch = linear_cuda.bind(spec)
        assert linear_cuda.check(launch, linear_ref.bind(spec), spec, n_rows=(1, 9, 33, 135)) is None


def test_a_matrix_is_cut_evenly_where_that_leaves_nearly_all_multiprocessors_some() -> None:
    for n_unit, want in (
        (512, 128),
        (640, 128),
        (2720, 132),
        (480, 132),
        (128, 128),
        (7, 7),
        (392, 132),
    ):
        assert linear_cuda.n_cta(n_unit, 132) == want


@pytest.mark.slow
def test_what_is_bounded_is_handed_on_where_it_does_not_write_what_it_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_cuda, "SHAPES", SHAPES[:1])
    monkeypatch.setattr(streamed.rows, "runs_as", lambda *_: True)
    monkeypatch.setattr(streamed, "_tall", lambda spec: None)
    monkeypatch.setattr(streamed, "_HANDS", {})
    gen = torch.Generator().manual_seed(0)

    def packed(n_out: int, n_in: int) -> Packed:
        return repack(random_weights(GGMLType.Q8_0, n_out, n_in, gen), GGMLType.Q8_0, (n_out, n_in))

    with machine_of("linear_sm90", seed=0):
        behind = streamed.Streamed(packed(64, 768), CPU, False, None)
        x = torch.randn(3, 512, generator=gen)
        for first, bound in (
            (streamed.StreamedParts(packed(768, 256), CPU, 1), 1000.0),
            (streamed.Streamed(packed(1536, 512), CPU, True, None, 4.0), 16.0),
        ):
            given = x[:, : first.packed.n_in].contiguous()
            hands = streamed.handing(first, behind, bound)
            assert hands is not None and hands(given.repeat(11, 1)) is None, "of more rows than it takes"
            want = behind(first(given))
            assert off(behind(hands(given)), want) < 1e-3
            assert streamed.handing(first, behind, 0.0) is None, "nothing is known of what it gives"
        same = streamed.StreamedParts(
            packed(768, 256), CPU, 3
        )  # its rows and the next one's lie in one place
        assert streamed.handing(same, behind, 1000.0) is None
        assert same.place(3, 8.0) is not None and streamed.handing(first, behind, bound) is not None
        use(KernelContext(is_exact=True))
        assert same.place(3, 8.0) is None and streamed.handing(first, behind, bound) is None, (
            "small numbers round otherwise"
        )
