"""Products on Hopper against float64: every type, ragged rows, sizes that fill no tile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyspec.cuda.ops.linear import ref as linear_ref
from pyspec.cuda.ops.linear.cuda import random_matrix, random_packed
from pyspec.cuda.ops.linear.formats import CHUNKS
from pyspec.cuda.ops.linear.pack import Packed, unpack
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.linear.wgmma import PATIENCE, WgmmaLaunch, limits, prepare
from pyspec.gguf import GGMLType

CUDA = torch.device("cuda", 0)
N_ROWS = (1, 9, 17, 33, 47, 64, 65, 96, 100, 127, 128)

if limits(LinearSpec(CUDA, GGMLType.Q8_0, 64, 64)) is not None:
    pytest.skip("needs compute capability 9.0", allow_module_level=True)


def matrix(type: GGMLType, n_out: int, n_in: int) -> Packed:
    """Random codes, also in rows and columns of the padding; the scales are positive and small, some denormal."""
    torch.manual_seed(n_out + n_in)
    return random_packed(type, n_out, n_in, CUDA)


def quantized(type: GGMLType, n_out: int, n_in: int) -> Packed:
    return random_matrix(type, n_out, n_in, torch.Generator().manual_seed(n_out + n_in), CUDA)


def product(
    spec: LinearSpec, packed: Packed, x: Tensor, residual: Tensor | None = None, patience: int = PATIENCE
) -> Tensor:
    """The result, its output poisoned before and the memory around it checked after."""
    launch = WgmmaLaunch(spec, patience)
    guarded = torch.full((x.shape[0] + 2, spec.n_out), torch.nan, device=CUDA)
    launch(x, packed, guarded[1:-1], residual)
    torch.cuda.synchronize()
    assert guarded[[0, -1]].isnan().all(), "wrote outside its rows"
    assert not launch.workspace.counts.any() and not launch.workspace.states.any(), "flags are left over"
    return guarded[1:-1].clone()


def off(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("type", CHUNKS)
@pytest.mark.parametrize(
    ("n_out", "n_in"), [(96, 5120), (48, 1024), (300, 6144), (5120, 2048), (700, 17408), (1030, 256)]
)
def test_products_equal_float64(type: GGMLType, n_out: int, n_in: int) -> None:
    packed, spec = matrix(type, n_out, n_in), LinearSpec(CUDA, type, n_out, n_in)
    weights = unpack(packed).double()
    for n_row in N_ROWS:
        x = torch.randn(n_row, n_in, device=CUDA) * torch.logspace(-3, 3, n_row, device=CUDA)[:, None]
        got = product(spec, packed, x)
        want = x.double() @ weights.T
        assert off(got, linear_ref.rounded(x) @ weights.T) < 1e-3
        assert ((got - want).norm(dim=1) / want.norm(dim=1)).max() < 2e-3


@pytest.mark.parametrize("n_in", [32, 64, 96, 2688])
def test_columns_that_fill_no_chunk_add_nothing(n_in: int) -> None:
    for type in (GGMLType.Q8_0, GGMLType.Q4_0):
        packed, spec = quantized(type, 300, n_in), LinearSpec(CUDA, type, 300, n_in)
        x = torch.randn(40, n_in, device=CUDA).bfloat16().float()
        assert off(product(spec, packed, x), linear_ref.rounded(x) @ unpack(packed).double().T) < 1e-3


@pytest.mark.parametrize("type", CHUNKS)
def test_a_row_has_the_same_bits_whatever_runs_beside_it(type: GGMLType) -> None:
    packed, spec = matrix(type, 5000, 2048), LinearSpec(CUDA, type, 5000, 2048)
    x = torch.randn(200, 2048, device=CUDA)
    all_rows = product(spec, packed, x)
    for n_row in N_ROWS:
        assert torch.equal(product(spec, packed, x[:n_row]), all_rows[:n_row])
    assert torch.equal(product(spec, packed, x.flip(0)).flip(0), all_rows)


@pytest.mark.parametrize(("n_out", "n_in"), [(300, 6144), (5120, 6144), (34816, 512), (16480, 1024)])
def test_bits_do_not_depend_on_who_arrives_when(n_out: int, n_in: int) -> None:
    """Without patience no CTA waits and the last to arrive sums a tile; with it each sums a part."""
    packed, spec = matrix(GGMLType.Q8_0, n_out, n_in), LinearSpec(CUDA, GGMLType.Q8_0, n_out, n_in)
    x = torch.randn(128, n_in, device=CUDA)
    want = product(spec, packed, x)
    for turn in range(30):
        assert torch.equal(product(spec, packed, x, patience=(PATIENCE, -1, 2000)[turn % 3]), want)


def test_rows_with_nan_do_not_touch_others() -> None:
    packed, spec = matrix(GGMLType.Q8_0, 300, 1024), LinearSpec(CUDA, GGMLType.Q8_0, 300, 1024)
    x = torch.randn(50, 1024, device=CUDA)
    clean, rows = product(spec, packed, x), prepare(x)
    rows.blocks.view(-1, 64, 8, 8)[:, 50:] = torch.nan  # rows past the count
    rows.blocks.view(-1, 64, 8, 8)[:, 3] = torch.nan
    out = torch.full_like(clean, torch.nan)
    WgmmaLaunch(spec).multiply(rows, packed, out)
    keep = [i for i in range(50) if i != 3]
    assert torch.equal(out[keep], clean[keep]) and out[3].isnan().all()


@pytest.mark.parametrize("epilogue", [Epilogue.RESIDUAL, Epilogue.GATED])
def test_epilogues_equal_the_reference(epilogue: Epilogue) -> None:
    for n_out, n_in in ((1096, 1024), (96, 5120), (17408, 1024)):
        spec = LinearSpec(CUDA, GGMLType.Q8_0, n_out, n_in, epilogue)
        packed = matrix(GGMLType.Q8_0, spec.n_weight_row, n_in)
        for n_row in (33, 65, 128):
            x = torch.randn(n_row, n_in, device=CUDA) / 16
            residual = torch.randn(n_row, n_out, device=CUDA) if epilogue is Epilogue.RESIDUAL else None
            want = torch.empty(n_row, n_out, device=CUDA)
            linear_ref.bind(spec)(x, packed, want, residual)
            assert off(product(spec, packed, x, residual), want) < 1e-3


def test_a_captured_product_replays_with_new_rows() -> None:
    packed, spec = matrix(GGMLType.Q8_0, 5120, 1024), LinearSpec(CUDA, GGMLType.Q8_0, 5120, 1024)
    launch, rows, out = (
        WgmmaLaunch(spec),
        prepare(torch.randn(64, 1024, device=CUDA)),
        torch.empty(64, 5120, device=CUDA),
    )
    launch.multiply(rows, packed, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            launch.multiply(rows, packed, out)
    for _ in range(20):
        x = torch.randn(64, 1024, device=CUDA)
        fresh = prepare(x)
        rows.blocks.copy_(fresh.blocks)
        rows.powers.copy_(fresh.powers)
        graph.replay()
        assert torch.equal(out, product(spec, packed, x))
