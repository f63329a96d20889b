"""Numbers between host and device, by kernels where a GPU reaches the host's memory."""

from __future__ import annotations

import pytest
import torch

from pyspec.slots import pinned
from pyspec.slots.pinned import Pinned

DEVICES = [
    torch.device("cpu"),
    pytest.param(
        torch.device("cuda"), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    ),
]


@pytest.mark.parametrize("small", [pinned.SMALL, 0], ids=["by a kernel", "by the driver"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.type)
def test_numbers_come_as_they_are(
    device: torch.device, dtype: torch.dtype, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "SMALL", small)
    own, gen = Pinned(1000, dtype, device), torch.Generator().manual_seed(0)
    assert not own.here.any() and (own.there is not None) == (device.type == "cuda")
    for n in (1, 7, 512, 1000):
        numbers = torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max, (n,), dtype=dtype, generator=gen)
        own.here.fill_(5)
        own.here[:n] = numbers
        to = torch.zeros(n, dtype=dtype, device=device)
        own.send(to)
        assert torch.equal(to.cpu(), numbers)
        own.here.zero_()
        here = own.fetch(to)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(here, numbers) and not own.here[n:].any()
        assert here.data_ptr() == own.here.data_ptr()


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.type)
def test_shapes_gaps_and_bits_that_are_no_number_are_kept(device: torch.device) -> None:
    own = Pinned(64, torch.int64, device)
    x = torch.tensor([[1.5, float("nan"), -0.0, 5e-324], [float("inf"), -1.0, 0.0, 2.0]], dtype=torch.float64)
    x.view(torch.int64)[0, 1] = -1  # a NaN with all of its bits set, as a token that is nobody's looks
    wide = torch.zeros(2, 9, dtype=torch.float64, device=device)
    wide[:, :4] = x.to(device)
    here = own.fetch(wide[:, :4].view(torch.int64))
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert here.shape == (2, 4) and torch.equal(here, x.view(torch.int64))


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.type)
def test_it_may_be_made_and_used_in_any_mode(device: torch.device) -> None:
    with torch.inference_mode():
        own, x = Pinned(4, torch.int64, device), torch.arange(4, device=device)
        own.fetch(x)
    own.fetch(torch.ones(4, dtype=torch.int64, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert own.here.tolist() == [1] * 4
    with torch.inference_mode():
        own.send(x)
    assert x.tolist() == [1] * 4
