"""Limits of a kernel are known before it is used, and not found in a round."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from pyspec.cuda import jit
from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.gdn import cuda as gdn_cuda
from pyspec.cuda.ops.gdn.ref import GdnSpec
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.linear import cuda as linear_cuda
from pyspec.cuda.ops.linear import wgmma as linear_wgmma
from pyspec.cuda.ops.linear.ref import LinearSpec
from pyspec.cuda.ops.moe import cuda as moe_cuda
from pyspec.cuda.ops.moe.ref import MoeSpec
from pyspec.gguf import GGMLType

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def _an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(jit, "missing", lambda device: None)


@dataclass(frozen=True)
class Sized:
    device: torch.device
    n: int


def test_a_small_check_speaks_for_a_large_spec_within_the_limits() -> None:
    def limits(spec: Sized) -> str | None:
        return None if spec.n <= 100 else f"{spec.n} rows; the kernel takes up to 100"

    asked: list[int] = []

    def check(launch: object, reference: object, spec: Sized) -> None:
        asked.append(spec.n)

    own = Impl("own", lambda spec: None, limits)
    op: Op[Sized, None] = Op("sized", Impl("torch", lambda spec: None), [own], check)
    small = Sized(CPU, 3)
    assert op.has_own(Sized(CPU, 100), checked_as=small) and asked == [3]
    assert not op.has_own(Sized(CPU, 101), checked_as=small) and asked == [3]
    refusing = replace(op, check=lambda *_: "it is wrong", verdicts={}, _decided={})
    assert not refusing.has_own(Sized(CPU, 100), checked_as=small)


def test_products_say_how_many_rows_of_weights_they_take() -> None:
    spec = LinearSpec(GPU, GGMLType.Q8_0, 248_320, 5120)
    for limits, most in ((linear_cuda.limits, 1 << 21), (linear_wgmma.limits, 1 << 22)):
        assert limits(spec) is None
        assert limits(replace(spec, n_out=most)) is None
        assert f"takes up to {most} rows" in (limits(replace(spec, n_out=most + 1)) or "")
    assert "kernel takes up to" in (
        linear_wgmma.limits(replace(spec, n_out=1 << 22, n_in=1 << 16)) or ""
    )


def test_experts_say_how_many_they_may_be() -> None:
    spec = MoeSpec(GPU, 8, 2048, 512, "swiglu", GGMLType.Q8_0, GGMLType.Q8_0, n_expert=1024)
    assert moe_cuda.limits(spec) is None
    assert "8 of 1025 experts" in (moe_cuda.limits(replace(spec, n_expert=1025)) or "")
    assert repr(spec) == repr(replace(spec, n_expert=1025)), "verdicts are of shapes"


def test_an_odd_number_of_value_heads_is_refused_before_their_rows_are_met() -> None:
    """Gates lie behind them in a row of the projection, which would not begin at 16 bytes."""
    shape = GdnShape(n_k_head=1, n_v_head=3, dim=128, n_conv=4, n_channel=128 * 5)
    assert "3 value heads" in (gdn_cuda.limits(GdnSpec(GPU, shape, 1e-6)) or "")
    assert gdn_cuda.limits(GdnSpec(GPU, replace(shape, n_v_head=4, n_channel=128 * 6), 1e-6)) is None
