"""The gdn op with kernels that are wrong, crash, hang and raise in front of the reference; children find it by name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from torch import Tensor

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.gdn import ref as gdn_ref
from pyspec.cuda.ops.gdn.op import gdn as real
from pyspec.cuda.ops.gdn.ref import Gdn, GdnSpec


def wrong(spec: GdnSpec) -> Callable[..., Tensor]:
    run = gdn_ref.bind(spec)
    return lambda *args: run(*args) * 1.01


def crashing(spec: GdnSpec) -> Callable[..., Tensor]:
    return lambda *args: os.abort()


def hanging(spec: GdnSpec) -> Callable[..., Tensor]:
    return lambda *args: time.sleep(1000)  # type: ignore[arg-type, return-value]


def raising(spec: GdnSpec) -> Callable[..., Tensor]:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


planted: Op[GdnSpec, Gdn] = Op(
    "gdn",
    real.reference,
    [Impl(bind.__name__, bind, native=True) for bind in (wrong, crashing, hanging, raising)],
    real.check,
    home=f"{__name__}:planted",
)
