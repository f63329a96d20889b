"""linear_wgmma.cu with the many rows of a prompt in one launch, thread by thread on the CPU."""

from __future__ import annotations

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler
from torch import Tensor

from pyspec.cuda.ops.linear import ref as linear_ref
from pyspec.cuda.ops.linear import wgmma, wgmma_many
from pyspec.cuda.ops.linear.cuda import random_matrix
from pyspec.cuda.ops.linear.pack import unpack
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.linear.wgmma_many import ManyLaunch
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
