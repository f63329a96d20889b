"""linear_wgmma.cu with the many rows of a prompt in one launch, thread by thread on the CPU."""

from __future__ import annotations

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler
from torch import Tensor

from pyspec.cuda import streamed
from pyspec.cuda.kernel_context import KernelContext, within
from pyspec.cuda.ops.linear import ref as linear_ref
from pyspec.cuda.ops.linear import unpacked, wgmma, wgmma_many
from pyspec.cuda.ops.linear.cuda import random_matrix
from pyspec.cuda.ops.linear.pack import unpack
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.linear.unpacked import UnpackedProduct
from pyspec.cuda.ops.linear.wgmma_many import ManyLaunch
from pyspec.cuda.ops.rows.ref import Norm
from pyspec.gguf import GGMLType

pytestmark = needs_compiler
Q8_0, Q4_K, NVFP4 = GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.NVFP4


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 64 rows, and few stages, so that matrices this small go round the rings."""
    monkeypatch.setattr(wgmma_many, "PADS", (64,))
    monkeypatch.setattr(wgmma, "stages", lambda type, pad, many=0: (2, 2))


def off(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def product(spec: LinearSpec, n_row: int, n_cta: int, *, spare: int = 0, seed: int = 0) -> float:
    """Error of a product of rows of all sizes, against one in float64."""
    gen = torch.Generator().manual_seed(n_row)
    packed = random_matrix(spec.type, spec.n_weight_row, spec.n_in, gen, CPU)
    x = torch.randn(n_row, spec.n_in, generator=gen) * torch.logspace(-3, 0, n_row)[:, None]
    residual = torch.randn(n_row, spec.n_out) if spec.epilogue is Epilogue.RESIDUAL else None
    y = linear_ref.rounded(x) @ unpack(packed).double().T
    want = linear_ref.finish(y, spec.epilogue, residual)
    with emulated_gpu(seed=seed, n_multiprocessor=n_cta):
        launch = ManyLaunch(spec, spare=spare)
        guarded = torch.full((n_row + 2, spec.n_out), torch.nan)
        launch(x, packed, guarded[1:-1], residual)
        work = launch.workspace
    assert not work.counts.any() and not work.states.any(), "flags are left over"
    assert guarded[[0, -1]].isnan().all(), "wrote outside its rows"
    return off(guarded[1:-1], want)


@pytest.mark.parametrize(
    ("type", "n_out", "n_in", "n_row", "n_cta"),
    [
        (Q8_0, 530, 320, 150, 6),  # six items, two each of three clusters
        (Q8_0, 530, 320, 150, 8),  # four in turn, two cut by all
    ],
)
def test_products_equal_float64(type: GGMLType, n_out: int, n_in: int, n_row: int, n_cta: int) -> None:
    for seed in (0, 1):
        assert product(LinearSpec(CPU, type, n_out, n_in), n_row, n_cta, seed=seed) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("epilogue", Epilogue)
@pytest.mark.parametrize("n_out", [264, 392])
@pytest.mark.parametrize("n_cta", [2, 6, 10])
def test_wide_parts_with_half_a_tile_of_weights(
    n_out: int, n_cta: int, epilogue: Epilogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 rows by 128 weight rows; the last tile is half of one that is lower."""
    monkeypatch.setattr(wgmma_many, "PADS", (256,))
    spec = LinearSpec(CPU, Q8_0, n_out, 192, epilogue)
    assert product(spec, 300, n_cta, seed=n_cta) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("epilogue", Epilogue)
@pytest.mark.parametrize("type", [Q8_0, Q4_K, NVFP4])
def test_types_and_epilogues(type: GGMLType, epilogue: Epilogue) -> None:
    spec = LinearSpec(CPU, type, 264, 512, epilogue)
    assert product(spec, 200, 6) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("n_cta", [2, 4, 6, 10, 18, 34])
@pytest.mark.parametrize("n_row", [64, 65, 129, 300])
@pytest.mark.parametrize("spare", [0, 1])
def test_any_number_of_clusters_and_parts(n_row: int, n_cta: int, spare: int) -> None:
    spec = LinearSpec(CPU, Q8_0, 530, 192)
    assert product(spec, n_row, n_cta, spare=spare, seed=n_cta) < 1e-3


def test_parts_leave_the_fewest_rows_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma_many, "PADS", (96, 112, 128))
    of = {129: 96, 200: 112, 256: 128, 288: 96, 300: 112, 2048: 128}
    assert {n: wgmma_many.part_of(n) for n in of} == of


@pytest.fixture
def a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's product with f32 sums, which a CPU has not."""

    def mm(a: Tensor, b: Tensor, out_dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
        y = (a.float() @ b.float()).to(out_dtype)
        return y if out is None else out.copy_(y)

    monkeypatch.setattr(torch, "mm", mm)


@pytest.mark.usefixtures("a_library")
@pytest.mark.parametrize(
    ("epilogue", "limit"),
    [(Epilogue.PLAIN, 0.0), (Epilogue.RESIDUAL, 0.0), (Epilogue.GATED, 0.0), (Epilogue.GATED, 0.5)],
    ids=["plain", "residual", "gated", "cut"],
)
def test_slices_of_unpacked_rows(
    epilogue: Epilogue, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three slices, the last of them lower; a residual that is the output."""
    monkeypatch.setattr(unpacked, "SCRATCH_BYTES", 256 * 2 * 192)
    spec = LinearSpec(CPU, Q8_0, 305 if epilogue is Epilogue.RESIDUAL else 304, 192, epilogue, limit)
    packed = random_matrix(Q8_0, spec.n_weight_row, 192, torch.Generator().manual_seed(1), CPU)
    x, out = torch.randn(35, 192) / 16, torch.randn(35, spec.n_out)
    residual = out if epilogue is Epilogue.RESIDUAL else None
    y = linear_ref.rounded(x) @ unpack(packed).double().T
    want = linear_ref.finish(y, epilogue, None if residual is None else residual.double(), limit)
    with emulated_gpu((8, 0)):
        UnpackedProduct(spec)(x, packed, out, residual)
    assert off(out, want) < 1e-3


@pytest.mark.slow
@pytest.mark.usefixtures("a_library")
@pytest.mark.parametrize("bind", [ManyLaunch, UnpackedProduct], ids=["wgmma", "unpacked"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_matrix_takes_prompts_with_it(
    bind: type[ManyLaunch], gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From so many rows on, rows that are normed on the way, and a residual; a matrix of `--exact` does not."""
    taken: list[int] = []

    class Seen(bind):  # type: ignore[misc, valid-type]
        least = 67

        def __call__(self, x: Tensor, *given: object, **named: object) -> None:
            taken.append(len(x))
            super().__call__(x, *given, **named)

    monkeypatch.setattr(streamed, "_tall", lambda spec: None)
    monkeypatch.setattr(streamed, "_many", lambda spec: Seen(spec))
    monkeypatch.setattr(type(streamed.rows), "runs_as", lambda self, name, spec: True)  # as on a GPU
    packed = random_matrix(Q8_0, 48, 96, torch.Generator().manual_seed(1), CPU)
    x, norm, n_out = torch.randn(67, 96), Norm(1 + 0.1 * torch.randn(96), 1e-6), 24 if gated else 48
    residual = torch.randn(67, n_out)
    y = linear_ref.rounded(norm(x)) @ unpack(packed).double().T
    want = residual + linear_ref.finish(y, Epilogue.GATED if gated else Epilogue.PLAIN, None)
    with emulated_gpu():
        product = streamed.Streamed(packed, CPU, gated, None)
        assert off(product(x, norm, residual), want) < 1e-3 and taken == [67]
        assert off(product(x[:66], norm, residual[:66]), want[:66]) < 1e-3 and taken == [67]


def test_exact_products_have_passes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(streamed.linear_many), "has_own", lambda *asked, **how: True)
    spec = LinearSpec(CPU, Q8_0, 48, 96)
    with within(KernelContext(is_exact=True)):
        assert streamed._many(spec) is None
