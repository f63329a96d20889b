"""The reference of `linear`, on the CPU: epilogues, rounding, and the kernel's refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.ops.linear import cuda as linear_cuda
from pyspec.cuda.ops.linear import ref as linear_ref
from pyspec.cuda.ops.linear.dequant import dequantize, quantize
from pyspec.cuda.ops.linear.op import linear
from pyspec.cuda.ops.linear.pack import Packed, interleave, repack, unpack
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.gguf import GGMLType

CPU = torch.device("cpu")


def test_interleaved_gate_and_up_give_the_gated_product() -> None:
    gate, up = (quantize(torch.randn(24, 64), GGMLType.Q8_0) for _ in "gu")
    packed, x = repack(interleave(gate, up), GGMLType.Q8_0, (48, 64)), torch.randn(3, 64)
    out = torch.full((3, 24), torch.nan)
    linear_ref.bind(LinearSpec(CPU, GGMLType.Q8_0, 24, 64, Epilogue.GATED))(x, packed, out)
    g, u = (F.linear(x, dequantize(w, GGMLType.Q8_0, (24, 64))) for w in (gate, up))
    assert torch.allclose(out, F.silu(g) * u, rtol=1e-5, atol=1e-5)


def test_the_residual_may_be_the_output() -> None:
    raw = quantize(torch.randn(20, 32), GGMLType.Q4_0)
    packed, x, out = repack(raw, GGMLType.Q4_0, (20, 32)), torch.randn(2, 32), torch.ones(2, 20)
    linear_ref.bind(LinearSpec(CPU, GGMLType.Q4_0, 20, 32, Epilogue.RESIDUAL))(x, packed, out, out)
    assert torch.allclose(out, 1 + F.linear(x, dequantize(raw, GGMLType.Q4_0, (20, 32))), atol=1e-5)


def test_rounded_rows_are_off_by_at_most_one_part_in_2048() -> None:
    x = torch.randn(6, 1024) * torch.tensor([0.0, 1e-33, 1e-6, 1.0, 1e9, 1e37])[:, None]
    off = (linear_ref.rounded(x) - x.double()).abs()
    assert (off <= x.abs().double() * 2.0**-11 + x.abs().amax(1, keepdim=True).double() * 2.0**-24).all()
    assert float(off[3].norm() / x[3].double().norm()) < 2.5e-4


def test_the_cpu_runs_the_reference_and_says_why() -> None:
    spec = LinearSpec(CPU, GGMLType.Q8_0, 20, 32)
    assert dict(linear.choices(spec)) == {
        "cuda": "runs on NVIDIA GPUs only",
        "triton": "runs on GPUs only",
        "torch": None,
    }


def test_shapes_for_more_rows_follow_each_other_up_to_the_limit() -> None:
    rows = [shape.rows for shape in linear_cuda.SHAPES]
    assert rows == sorted(rows) and rows[-1] == linear_cuda.MAX_ROWS
    assert all(shape.warps_m * shape.tiles_m == 16 for shape in linear_cuda.SHAPES)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("n_in", [4096, 7168])
def test_the_check_of_cut_activations_takes_f16_weights_and_sees_a_limit_that_is_none(n_in: int) -> None:
    """Clamped products are always right: if most were clamped, the rounding of the others would seem larger than it is."""
    spec = LinearSpec(CPU, GGMLType.Q8_0, 272, n_in, Epilogue.GATED, 10.0)

    def wgmma(limit: float) -> linear_ref.Linear:
        def run(x: Tensor, packed: Packed, out: Tensor, residual: Tensor | None = None) -> None:
            y = linear_ref.rounded(x) @ unpack(packed).half().double().T
            out.copy_(linear_ref.finish(y, spec.epilogue, residual, limit))

        return run

    assert linear_cuda.check(wgmma(10.0), linear_ref.bind(spec), spec, n_rows=(40,)) is None
    for wrong in (0.0, 11.0):
        assert "differ" in str(
            linear_cuda.check(wgmma(wrong), linear_ref.bind(spec), spec, n_rows=(40,))
        )
