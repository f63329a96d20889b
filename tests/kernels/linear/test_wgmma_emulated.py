"""linear_wgmma.cu runs thread by thread on the CPU: warpgroup products, stages, and tiles that several CTAs sum."""

from __future__ import annotations

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler
from torch import Tensor

from pyspec.cuda.ops.linear import ref as linear_ref
from pyspec.cuda.ops.linear import wgmma as linear_wgmma
from pyspec.cuda.ops.linear.cuda import random_weights
from pyspec.cuda.ops.linear.pack import Packed, repack, unpack
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.linear.wgmma import PATIENCE, WgmmaLaunch, prepare
from pyspec.gguf import GGMLType

pytestmark = needs_compiler
SEEDS, ALL_PADS = (0, 1), linear_wgmma.PADS
# All ways scales lie; test_packed_emulated has the rest
TYPES = (GGMLType.Q8_0, GGMLType.Q4_0, GGMLType.Q4_K, GGMLType.Q6_K)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only builds for 64 rows, and few stages, so that matrices this small go round the rings."""
    monkeypatch.setattr(linear_wgmma, "PADS", (64,))
    monkeypatch.setattr(linear_wgmma, "stages", lambda type, pad, many=0: (2, 2))


def matrix(spec: LinearSpec) -> Packed:
    gen = torch.Generator().manual_seed(spec.n_out + spec.n_in)
    size = spec.n_weight_row, spec.n_in
    return repack(random_weights(spec.type, *size, gen), spec.type, size)


def product(
    spec: LinearSpec, packed: Packed, x: Tensor, residual: Tensor | None = None, patience: int = PATIENCE
) -> Tensor:
    launch = WgmmaLaunch(spec, patience)
    out = torch.full((x.shape[0], spec.n_out), torch.nan)
    launch(x, packed, out, residual)
    assert not launch.workspace.counts.any() and not launch.workspace.states.any(), "flags are left over"
    return out


def off(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("type", TYPES)
def test_products_equal_float64(type: GGMLType) -> None:
    """A tile and a lower one, cut by three clusters that run together or one after another."""
    spec = LinearSpec(CPU, type, 264, 1024)
    packed, x = matrix(spec), torch.randn(35, 1024) * torch.logspace(-3, 3, 35)[:, None]
    want = linear_ref.rounded(x) @ unpack(packed).double().T
    for seed in SEEDS:
        with emulated_gpu(seed=seed, n_multiprocessor=6):
            assert off(product(spec, packed, x), want) < 1e-3


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("type", [GGMLType.Q8_0, GGMLType.NVFP4])
def test_tiles_of_an_odd_number_leave_one_cta_nothing(type: GGMLType) -> None:
    """Three tiles by clusters of two: one CTA multiplies the contents of its memory, reads no scales behind the matrix and writes nothing."""
    spec = LinearSpec(CPU, type, 530, 256)
    packed, x = matrix(spec), torch.randn(33, 256)
    for n_cta in (2, 6):
        with emulated_gpu(n_multiprocessor=n_cta):
            assert (
                off(product(spec, packed, x), linear_ref.rounded(x) @ unpack(packed).double().T) < 1e-3
            )


@pytest.mark.slow
@pytest.mark.parametrize("n_in", [32, 96])
def test_columns_that_fill_no_chunk_add_nothing(n_in: int) -> None:
    """So few that a warp may end before another begins."""
    spec = LinearSpec(CPU, GGMLType.Q8_0, 24, n_in)
    packed, x = matrix(spec), torch.randn(40, n_in)
    for seed in range(24):
        with emulated_gpu(seed=seed):
            assert (
                off(product(spec, packed, x), linear_ref.rounded(x) @ unpack(packed).double().T) < 1e-3
            )


@pytest.mark.slow
@pytest.mark.parametrize("n_row", [1, 9, 17, 48, 65, 97, 128, 130])
def test_all_pads_give_the_same_bits(n_row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The narrowest build and the widest, and a second pass."""
    monkeypatch.setattr(linear_wgmma, "PADS", ALL_PADS)
    spec = LinearSpec(CPU, GGMLType.Q8_0, 40, 320)
    packed, x = matrix(spec), torch.randn(n_row, 320)
    with emulated_gpu(seed=2):
        got, few = product(spec, packed, x), product(spec, packed, x[:33])
    assert off(got, linear_ref.rounded(x) @ unpack(packed).double().T) < 1e-3
    assert torch.equal(got[: len(few)], few)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(
    ("epilogue", "limit"),
    [(Epilogue.RESIDUAL, 0.0), (Epilogue.GATED, 0.0), (Epilogue.GATED, 2.0)],
    ids=["residual", "gated", "cut"],
)
def test_epilogues_equal_the_reference(epilogue: Epilogue, limit: float) -> None:
    spec = LinearSpec(CPU, GGMLType.Q8_0, 136, 256, epilogue, limit)
    packed, x, want = matrix(spec), torch.randn(33, 256) / 16, torch.empty(33, 136)
    residual = torch.randn(33, 136) if epilogue is Epilogue.RESIDUAL else None
    linear_ref.bind(spec)(x, packed, want, residual)
    for seed in SEEDS:
        with emulated_gpu(seed=seed):
            assert off(product(spec, packed, x, residual), want) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_out", "n_in", "n_cta"),
    [(24, 640, 8), (530, 256, 4), (530, 256, 9), (264, 512, 14), (264, 512, 4)],
)
def test_bits_do_not_depend_on_who_arrives_when(n_out: int, n_in: int, n_cta: int) -> None:
    """All CTAs wait and sum a part; none waits and the last sums all; one CTA after another; some patience."""
    spec = LinearSpec(CPU, GGMLType.Q8_0, n_out, n_in)
    packed, x, found = matrix(spec), torch.randn(33, n_in), []
    for seed, (patience, resident) in enumerate(
        ((PATIENCE, n_cta), (-1, n_cta), (-1, 1), (PATIENCE, 1), (2000, n_cta), (20000, 2), (0, n_cta))
    ):
        with emulated_gpu(seed=seed, resident=resident, n_multiprocessor=n_cta):
            found.append(product(spec, packed, x, patience=patience))
    assert all(torch.equal(other, found[0]) for other in found[1:])
    assert off(found[0], linear_ref.rounded(x) @ unpack(packed).double().T) < 1e-3


def test_rows_with_nan_do_not_touch_others() -> None:
    spec = LinearSpec(CPU, GGMLType.Q8_0, 24, 256)
    packed, x = matrix(spec), torch.randn(50, 256)
    with emulated_gpu():
        clean, rows = product(spec, packed, x), prepare(x)
        rows.blocks.view(-1, 64, 8, 8)[:, 50:] = torch.nan  # rows past the count
        rows.blocks.view(-1, 64, 8, 8)[:, 3] = torch.nan
        out = torch.full_like(clean, torch.nan)
        WgmmaLaunch(spec).multiply(rows, packed, out)
    keep = [i for i in range(50) if i != 3]
    assert torch.equal(out[keep], clean[keep]) and out[3].isnan().all()
