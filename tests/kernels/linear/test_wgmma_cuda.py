"""linear_wgmma.cu: warpgroup products, stages, and tiles that several CTAs sum, thread by thread on the CPU and on Hopper."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from machines import CPU, GPU, HAS_GPU, ON_CARD, Machine, cases, off
from torch import Tensor

from pyspec.cuda.ops.linear import ref as linear_ref
from pyspec.cuda.ops.linear import wgmma as linear_wgmma
from pyspec.cuda.ops.linear.cuda import random_matrix, random_packed, random_weights
from pyspec.cuda.ops.linear.formats import CHUNKS
from pyspec.cuda.ops.linear.pack import Packed, repack, unpack
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.linear.wgmma import PATIENCE, WgmmaLaunch, prepare
from pyspec.gguf import GGMLType

SEEDS, ALL_PADS = (0, 1), linear_wgmma.PADS
# All ways scales lie; test_packed_emulated has the rest
TYPES = (GGMLType.Q8_0, GGMLType.Q4_0, GGMLType.Q4_K, GGMLType.Q6_K)


hopper = pytest.mark.skipif(
    HAS_GPU and linear_wgmma.limits(LinearSpec(GPU, GGMLType.Q8_0, 64, 64)) is not None,
    reason="needs compute capability 9.0",
)


@pytest.fixture(autouse=True)
def _small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated, only builds for 64 rows, and few stages, so that matrices this small go round the rings."""
    if request.node.get_closest_marker("card"):
        return
    monkeypatch.setattr(linear_wgmma, "PADS", (64,))
    monkeypatch.setattr(linear_wgmma, "stages", lambda type, pad, many=0: (2, 2))


def matrix(spec: LinearSpec) -> Packed:
    """Emulated, quantized weights; on a card random codes, also in rows and columns of the padding, with positive scales, some denormal."""
    gen = torch.Generator().manual_seed(spec.n_out + spec.n_in)
    size = spec.n_weight_row, spec.n_in
    if spec.device.type == "cpu":
        return repack(random_weights(spec.type, *size, gen), spec.type, size)
    torch.manual_seed(spec.n_out + spec.n_in)
    return random_packed(spec.type, *size, spec.device)


def product(
    spec: LinearSpec, packed: Packed, x: Tensor, residual: Tensor | None = None, patience: int = PATIENCE
) -> Tensor:
    """The result, its output poisoned before and the memory around it checked after."""
    launch = WgmmaLaunch(spec, patience)
    guarded = torch.full((x.shape[0] + 2, spec.n_out), torch.nan, device=x.device)
    launch(x, packed, guarded[1:-1], residual)
    assert guarded[[0, -1]].isnan().all(), "wrote outside its rows"
    assert not launch.workspace.counts.any() and not launch.workspace.states.any(), "flags are left over"
    return guarded[1:-1].clone()


def exact(packed: Packed, x: Tensor) -> Tensor:
    return linear_ref.rounded(x) @ unpack(packed).double().T


N_ROWS = (1, 9, 17, 33, 47, 64, 65, 96, 100, 127, 128)


@hopper
@pytest.mark.sampled(most=1)
@cases(
    "type, n_out, n_in, n_rows",
    emulated=[(type, 264, 1024, (35,)) for type in TYPES],
    card=[
        (type, *size, N_ROWS)
        for size in ((96, 5120), (48, 1024), (300, 6144), (5120, 2048), (700, 17408), (1030, 256))
        for type in CHUNKS
    ],
)
def test_products_equal_float64(
    machine: Machine, type: GGMLType, n_out: int, n_in: int, n_rows: Sequence[int]
) -> None:
    """Emulated, a tile and a lower one, cut by three clusters that run together or one after another."""
    spec = LinearSpec(machine.device, type, n_out, n_in)
    packed = matrix(spec)
    for n_row in n_rows:
        x = torch.randn(n_row, n_in, device=machine.device)
        x *= torch.logspace(-3, 3, n_row, device=machine.device)[:, None]
        want = x.double() @ unpack(packed).double().T
        for seed in SEEDS if machine.is_emulated else (0,):
            with machine.started(seed=seed, n_multiprocessor=6):
                got = product(spec, packed, x)
                assert off(got, exact(packed, x)) < 1e-3
                if machine.name == "card":
                    assert ((got - want).norm(dim=1) / want.norm(dim=1)).max() < 2e-3


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("type", [GGMLType.Q8_0, GGMLType.NVFP4])
def test_tiles_of_an_odd_number_leave_one_cta_nothing(machine: Machine, type: GGMLType) -> None:
    """Three tiles by clusters of two: one CTA multiplies the contents of its memory, reads no scales behind the matrix and writes nothing."""
    spec = LinearSpec(CPU, type, 530, 256)
    packed, x = matrix(spec), torch.randn(33, 256)
    for n_cta in (2, 6):
        with machine.started(n_multiprocessor=n_cta):
            assert off(product(spec, packed, x), exact(packed, x)) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("n_in", [32, 96])
def test_columns_that_fill_no_chunk_add_nothing(machine: Machine, n_in: int) -> None:
    """So few that a warp may end before another begins."""
    spec = LinearSpec(CPU, GGMLType.Q8_0, 24, n_in)
    packed, x = matrix(spec), torch.randn(40, n_in)
    for seed in range(24):
        with machine.started(seed=seed):
            assert off(product(spec, packed, x), exact(packed, x)) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("n_row", [1, 9, 17, 48, 65, 97, 128, 130])
def test_all_pads_give_the_same_bits(
    machine: Machine, n_row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The narrowest build and the widest, and a second pass."""
    monkeypatch.setattr(linear_wgmma, "PADS", ALL_PADS)
    spec = LinearSpec(CPU, GGMLType.Q8_0, 40, 320)
    packed, x = matrix(spec), torch.randn(n_row, 320)
    with machine.started(seed=2):
        got, few = product(spec, packed, x), product(spec, packed, x[:33])
    assert off(got, exact(packed, x)) < 1e-3
    assert torch.equal(got[: len(few)], few)


@hopper
@pytest.mark.sampled(most=1)
@cases(
    "epilogue, limit, n_rows, sizes",
    emulated=[
        pytest.param(Epilogue.RESIDUAL, 0.0, (33,), [(136, 256)], id="residual"),
        pytest.param(Epilogue.GATED, 0.0, (33,), [(136, 256)], id="gated"),
        pytest.param(Epilogue.GATED, 2.0, (33,), [(136, 256)], id="cut"),
    ],
    card=[
        (epilogue, 0.0, (33, 65, 128), [(1096, 1024), (96, 5120), (17408, 1024)])
        for epilogue in (Epilogue.RESIDUAL, Epilogue.GATED)
    ],
    seeds=SEEDS,
)
def test_epilogues_equal_the_reference(
    machine: Machine,
    epilogue: Epilogue,
    limit: float,
    n_rows: Sequence[int],
    sizes: Sequence[tuple[int, int]],
) -> None:
    for n_out, n_in in sizes:
        spec = LinearSpec(machine.device, GGMLType.Q8_0, n_out, n_in, epilogue, limit)
        packed = matrix(spec)
        for n_row in n_rows:
            x = torch.randn(n_row, n_in, device=machine.device) / 16
            want = torch.empty(n_row, n_out, device=machine.device)
            residual = torch.randn_like(want) if epilogue is Epilogue.RESIDUAL else None
            linear_ref.bind(spec)(x, packed, want, residual)
            with machine.started():
                assert off(product(spec, packed, x, residual), want) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_out", "n_in", "n_cta"),
    [(24, 640, 8), (530, 256, 4), (530, 256, 9), (264, 512, 14), (264, 512, 4)],
)
def test_bits_do_not_depend_on_who_arrives_when(
    machine: Machine, n_out: int, n_in: int, n_cta: int
) -> None:
    """All CTAs wait and sum a part; none waits and the last sums all; one CTA after another; some patience."""
    spec = LinearSpec(CPU, GGMLType.Q8_0, n_out, n_in)
    packed, x, found = matrix(spec), torch.randn(33, n_in), []
    for seed, (patience, resident) in enumerate(
        ((PATIENCE, n_cta), (-1, n_cta), (-1, 1), (PATIENCE, 1), (2000, n_cta), (20000, 2), (0, n_cta))
    ):
        with machine.started(seed=seed, resident=resident, n_multiprocessor=n_cta):
            found.append(product(spec, packed, x, patience=patience))
    assert all(torch.equal(other, found[0]) for other in found[1:])
    assert off(found[0], exact(packed, x)) < 1e-3


@hopper
@cases("n_out, n_in", emulated=[(24, 256)], card=[(300, 1024)])
def test_rows_with_nan_do_not_touch_others(machine: Machine, n_out: int, n_in: int) -> None:
    spec = LinearSpec(machine.device, GGMLType.Q8_0, n_out, n_in)
    packed, x = matrix(spec), torch.randn(50, n_in, device=machine.device)
    with machine.started():
        clean, rows = product(spec, packed, x), prepare(x)
        rows.blocks.view(-1, 64, 8, 8)[:, 50:] = torch.nan  # rows past the count
        rows.blocks.view(-1, 64, 8, 8)[:, 3] = torch.nan
        out = torch.full_like(clean, torch.nan)
        WgmmaLaunch(spec).multiply(rows, packed, out)
    keep = [i for i in range(50) if i != 3]
    assert torch.equal(out[keep], clean[keep]) and out[3].isnan().all()


@hopper
@ON_CARD
@pytest.mark.parametrize("n_in", [32, 64, 96, 2688])
def test_columns_of_a_cards_matrices_that_fill_no_chunk_add_nothing(machine: Machine, n_in: int) -> None:
    for type in (GGMLType.Q8_0, GGMLType.Q4_0):
        spec = LinearSpec(machine.device, type, 300, n_in)
        gen = torch.Generator().manual_seed(300 + n_in)
        packed = random_matrix(type, 300, n_in, gen, machine.device)
        x = torch.randn(40, n_in, device=machine.device).bfloat16().float()
        assert off(product(spec, packed, x), exact(packed, x)) < 1e-3


@hopper
@ON_CARD
@pytest.mark.parametrize("type", CHUNKS)
def test_a_row_has_the_same_bits_whatever_runs_beside_it(machine: Machine, type: GGMLType) -> None:
    spec = LinearSpec(machine.device, type, 5000, 2048)
    packed = matrix(spec)
    x = torch.randn(200, 2048, device=machine.device)
    all_rows = product(spec, packed, x)
    for n_row in N_ROWS:
        assert torch.equal(product(spec, packed, x[:n_row]), all_rows[:n_row])
    assert torch.equal(product(spec, packed, x.flip(0)).flip(0), all_rows)


@hopper
@ON_CARD
@pytest.mark.parametrize(("n_out", "n_in"), [(300, 6144), (5120, 6144), (34816, 512), (16480, 1024)])
def test_bits_of_large_matrices_do_not_depend_on_who_arrives_when(
    machine: Machine, n_out: int, n_in: int
) -> None:
    """Without patience no CTA waits and the last to arrive sums a tile; with it each sums a part."""
    spec = LinearSpec(machine.device, GGMLType.Q8_0, n_out, n_in)
    packed = matrix(spec)
    x = torch.randn(128, n_in, device=machine.device)
    want = product(spec, packed, x)
    for turn in range(30):
        assert torch.equal(product(spec, packed, x, patience=(PATIENCE, -1, 2000)[turn % 3]), want)


@hopper
@ON_CARD
def test_a_captured_product_replays_with_new_rows(machine: Machine) -> None:
    spec = LinearSpec(machine.device, GGMLType.Q8_0, 5120, 1024)
    packed = matrix(spec)
    launch, rows = WgmmaLaunch(spec), prepare(torch.randn(64, 1024, device=machine.device))
    out = torch.empty(64, 5120, device=machine.device)
    replay, _ = machine.captured(lambda: [launch.multiply(rows, packed, out) for _ in range(5)])
    for _ in range(20):
        x = torch.randn(64, 1024, device=machine.device)
        fresh = prepare(x)
        rows.blocks.copy_(fresh.blocks)
        rows.powers.copy_(fresh.powers)
        replay()
        assert torch.equal(out, product(spec, packed, x))
