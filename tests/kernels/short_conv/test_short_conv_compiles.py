"""short_conv.cu compiles for every architecture without spills, and the limits of its launcher. Needs a compiler, no GPU."""

from __future__ import annotations

import pytest
import torch
from machines import compiled

from pyspec.cuda import jit
from pyspec.cuda.ops.short_conv import cuda as short_conv_cuda
from pyspec.cuda.ops.short_conv.ref import ShortConvSpec
from pyspec.cuda.ops.short_conv.shape import ShortConvShape

pytest.importorskip("cuda.core")


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", jit.ARCHS)
def test_the_kernel_compiles_without_spills(arch: str) -> None:
    for shape in (ShortConvShape(2048, 3), ShortConvShape(4, 2), ShortConvShape(2560, 5)):
        made = short_conv_cuda.defines(shape)
        found = compiled("short_conv", arch, made)["short_conv"]
        assert 3 * 128 * found.registers <= 65536, found


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (ShortConvShape(2050, 3), "2050 channels; the kernel takes multiples of 4"),
        (ShortConvShape(2048, 6), "6 taps; the kernel takes 2 to 5"),
        (ShortConvShape(2048, 1), "1 taps"),
    ],
)
def test_shapes_it_is_not_built_for_are_refused_with_their_numbers(
    shape: ShortConvShape, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert says in (short_conv_cuda.limits(ShortConvSpec(torch.device("cuda"), shape)) or "")
    usual = ShortConvSpec(torch.device("cuda"), ShortConvShape(2048, 3))
    assert short_conv_cuda.limits(usual) is None
