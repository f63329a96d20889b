"""Four-bit copies: the file's layout, never a worse fit than one division per block, and zeros for NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyspec.cuda.ops.linear.dequant import dequantize, quantize
from pyspec.cuda.ops.linear.fit_q4 import TYPES, fit_q4
from pyspec.cuda.ops.linear.pack import repack, unpack
from pyspec.gguf import GGMLType

Q4_0, IQ4_NL = GGMLType.Q4_0, GGMLType.IQ4_NL


def back(x: Tensor, type: GGMLType) -> Tensor:
    return dequantize(fit_q4(x, type), type, x.shape)


def error(x: Tensor, y: Tensor) -> float:
    return float((x - y).norm() / x.norm())


@pytest.mark.parametrize("type", sorted(TYPES))
def test_what_four_bits_can_hold_comes_back(type: GGMLType) -> None:
    """Blocks that are codes times a scale: their own dequantised weights, and zeros."""
    gen = torch.Generator().manual_seed(3)
    raw = torch.randint(0, 256, (40, 3, 18), generator=gen, dtype=torch.uint8)
    raw[..., :2] = torch.tensor([0.25], dtype=torch.float16).view(torch.uint8)
    # Code 0 is among them, the largest there is, and others
    raw[..., 2:4] = torch.tensor([0x08, 0xF0], dtype=torch.uint8)
    raw[7] = 0
    x = dequantize(raw, type, (40, 96))
    x[7] = 0.0
    assert error(x, back(x, type)) < 1e-3


@pytest.mark.parametrize("type", sorted(TYPES))
@pytest.mark.parametrize("size", [1.0, 1e-3, 300.0])
def test_the_fit_is_better_than_one_division_per_block(type: GGMLType, size: float) -> None:
    x = size * torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    plain = dequantize(quantize(x, Q4_0), Q4_0, x.shape)
    got = back(x, type)
    assert error(x, got) < 0.96 * error(x, plain)
    per_block = lambda y: (x - y).view(-1, 32).square().sum(1)  # noqa: E731
    if (
        type is Q4_0
    ):  # its candidates have that of the division, which differs by the rounding of its scale at most
        assert (per_block(got) <= per_block(plain) * 1.01).all()


@pytest.mark.parametrize("type", sorted(TYPES))
def test_a_fitted_matrix_is_what_the_kernels_take(type: GGMLType) -> None:
    x = torch.randn(300, 160, generator=torch.Generator().manual_seed(2))
    raw = fit_q4(x, type)
    assert raw.dtype == torch.uint8 and raw.shape == (300, 160 // 32 * 18)
    assert torch.equal(unpack(repack(raw, type, (300, 160))), back(x, type))


@pytest.mark.parametrize("type", sorted(TYPES))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
def test_blocks_that_are_no_numbers_become_zeros_and_leave_their_neighbours(
    type: GGMLType, bad: float
) -> None:
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(5))
    want = back(x, type)
    x[2, 40] = bad
    got = back(x, type)
    assert not got[2, 32:64].any()
    assert (
        torch.equal(got[2, :32], want[2, :32])
        and torch.equal(got[:2], want[:2])
        and torch.equal(got[3], want[3])
    )
