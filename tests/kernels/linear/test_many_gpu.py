"""Products of a prompt's rows on Hopper against float64, and matrices unpacked for a library, to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyspec.cuda.ops.linear import ref as linear_ref
from pyspec.cuda.ops.linear import wgmma_many
from pyspec.cuda.ops.linear.cuda import random_matrix
from pyspec.cuda.ops.linear.formats import CHUNKS
from pyspec.cuda.ops.linear.pack import unpack
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.linear.unpacked import UNSUITED, UnpackLaunch
from pyspec.cuda.ops.linear.wgmma_many import ManyLaunch, limits
from pyspec.cuda.ops.rows.ref import Norm
from pyspec.gguf import GGMLType

CUDA = torch.device("cuda", 0)
N_ROWS = (129, 300, 513, 2048, 4500)
USUAL = (GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.MXFP4)

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
hopper = pytest.mark.skipif(
    limits(LinearSpec(CUDA, GGMLType.Q8_0, 64, 64)) is not None, reason="needs compute capability 9.0"
)


def off(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def error(spec: LinearSpec, n_row: int, spare: int = 0) -> float:
    """Of a product into the midst of a poisoned tensor, twice with the same bits."""
    gen = torch.Generator().manual_seed(n_row)
    packed = random_matrix(spec.type, spec.n_weight_row, spec.n_in, gen, CUDA)
    x = torch.randn(n_row, spec.n_in, device=CUDA) / 16
    residual = torch.randn(n_row, spec.n_out, device=CUDA)
    residual = residual if spec.epilogue is Epilogue.RESIDUAL else None
    y = linear_ref.rounded(x) @ unpack(packed).double().T
    want = linear_ref.finish(y, spec.epilogue, residual)
    launch = ManyLaunch(spec, spare=spare)
    found = []
    for _ in range(2):
        guarded = torch.full((n_row + 2, spec.n_out), torch.nan, device=CUDA)
        launch(x, packed, guarded[1:-1], residual)
        torch.cuda.synchronize()
        assert guarded[[0, -1]].isnan().all(), "wrote outside its rows"
        found.append(guarded[1:-1].clone())
    assert not launch.workspace.counts.any() and not launch.workspace.states.any(), "flags are left over"
    assert torch.equal(*found)
    return off(found[0], want)


@hopper
@pytest.mark.parametrize("type", CHUNKS)
def test_every_type(type: GGMLType) -> None:
    assert error(LinearSpec(CUDA, type, 1030, 2048), 300) < 1e-3


@hopper
@pytest.mark.parametrize("n_row", N_ROWS)
@pytest.mark.parametrize("epilogue", Epilogue)
@pytest.mark.parametrize("type", USUAL)
def test_rows_and_epilogues(type: GGMLType, epilogue: Epilogue, n_row: int) -> None:
    for n_out, n_in in ((5120, 6144), (17408, 1024), (96, 5120)):
        spec = LinearSpec(CUDA, type, n_out, n_in, epilogue)
        assert error(spec, n_row) < 1e-3
        assert error(spec, n_row, spare=1) < 1e-3


@hopper
@pytest.mark.parametrize("epilogue", Epilogue)
def test_wide_parts_with_half_a_tile_of_weights(
    epilogue: Epilogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wgmma_many, "PADS", (256,))
    for n_out, n_in in ((5120, 6144), (1096, 1024), (96, 5120)):
        for n_row in (257, 2048):
            assert error(LinearSpec(CUDA, GGMLType.Q8_0, n_out, n_in, epilogue), n_row) < 1e-3


@hopper
def test_a_graph_replays_with_new_rows() -> None:
    """Rows are normed on the way, into memory of the graph."""
    spec, gen = LinearSpec(CUDA, GGMLType.Q8_0, 5120, 1024), torch.Generator().manual_seed(1)
    packed, launch = random_matrix(spec.type, 5120, 1024, gen, CUDA), ManyLaunch(spec)
    norm = Norm(torch.rand(1024, device=CUDA) + 0.5, 1e-6)
    x, out = torch.randn(300, 1024, device=CUDA), torch.empty(300, 5120, device=CUDA)
    launch(x, packed, out, prep=norm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            launch(x, packed, out, prep=norm)
    weights = unpack(packed).double()
    for _ in range(5):
        x.copy_(torch.randn(300, 1024, device=CUDA))
        graph.replay()
        assert off(out, norm(x).double() @ weights.T) < 1e-3


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("type", [t for t in CHUNKS if t not in UNSUITED])
def test_unpacked_rows_are_the_files_rounded_once(type: GGMLType, gated: bool) -> None:
    n_out, n_in = (1040 if gated else 1033), 5120
    packed = random_matrix(type, n_out, n_in, torch.Generator().manual_seed(1), CUDA)
    launch, want = UnpackLaunch(CUDA, type, gated), unpack(packed).half()
    for first, end in ((0, n_out), (272, 1024), (1024, n_out)):
        out, own = torch.empty(end - first, n_in, dtype=torch.float16, device=CUDA), want[first:end]
        launch(packed, first, end, out)
        if gated:
            own = own.unflatten(0, (-1, 2, 8)).transpose(0, 1).flatten(0, 2)
        assert torch.equal(out, own)
