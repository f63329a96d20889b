"""Ops whose first implementation is wrong, crashes or hangs, before the one in Triton; children find them by name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.ahead.op import ahead
from pyspec.cuda.ops.ahead.ref import AheadSpec, Kept
from pyspec.cuda.ops.attend.op import attend
from pyspec.cuda.ops.attend.ref import AttendSpec
from pyspec.cuda.ops.best.op import best
from pyspec.cuda.ops.best.ref import BestSpec
from pyspec.cuda.ops.gdn.op import gdn
from pyspec.cuda.ops.gdn.ref import GdnSpec
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.linear.op import linear
from pyspec.cuda.ops.linear.ref import LinearSpec
from pyspec.cuda.ops.mamba2.op import mamba2
from pyspec.cuda.ops.mamba2.ref import Mamba2Spec
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.cuda.ops.moe.op import moe
from pyspec.cuda.ops.moe.ref import MoeSpec, Routes, RouteSpec
from pyspec.cuda.ops.moe_route.op import moe_route
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.cuda.ops.rope_kv.op import rope_kv
from pyspec.cuda.ops.rope_kv.ref import RopeKvSpec
from pyspec.cuda.ops.rows.op import rows
from pyspec.cuda.ops.rows.ref import PrepKind, RowsSpec
from pyspec.gguf import GGMLType
from pyspec.slots.kv import KVPool

CPU = torch.device("cpu")
SPECS: dict[str, Any] = {
    "attend": AttendSpec(CPU, 1, 1, 64, 0.125),
    "gdn": GdnSpec(CPU, GdnShape(1, 1, 32, 4, 3 * 32), 1e-6),
    "mamba2": Mamba2Spec(CPU, Mamba2Shape(n_head=1, head_dim=32, n_group=1, n_state=16, n_conv=4)),
    "rope_kv": RopeKvSpec(CPU, 1, 1, 64, 32, neox=True, gated=False, has_norm=True, eps=1e-6),
    "rows": RowsSpec(CPU, 96, PrepKind.NORM),
    "norms": NormsSpec(CPU, 64, 1e-6),
    "best": BestSpec(CPU),
    "ahead": AheadSpec(CPU),
    "linear": LinearSpec(CPU, GGMLType.Q8_0, 64, 64),
    "moe": MoeSpec(CPU, 1, 64, 32, "relu2", GGMLType.Q8_0, GGMLType.Q8_0),
    "moe_route": RouteSpec(CPU, 64, 9, 2),
}


def spoilt(found: Any) -> Any:
    if isinstance(found, tuple):
        return tuple(map(spoilt, found))
    if isinstance(found, Routes):
        return replace(found, ids=found.ids.flip(-1))
    if isinstance(found, Kept):
        return replace(found, n=found.n + 1)
    return found * 1.25 + 1 if isinstance(found, torch.Tensor) and found.numel() else found


def crash(found: Any) -> Any:
    os.abort()


def hang(found: Any) -> Any:
    time.sleep(1000)


class PlantedLaunch:
    """The reference's launch; `then` gets the result of each call, or the tensor it wrote to, which `linear` is given."""

    def __init__(self, right: Any, then: Callable[[Any], Any]) -> None:
        self.right, self.then = right, then

    def __call__(self, *args: Any, **named: Any) -> Any:
        found = self.right(*args, **named)
        if (
            isinstance(found, torch.Tensor) and not found.numel()
        ):  # keys alone: the result lies in the pool
            for plane in next(arg for arg in args if isinstance(arg, KVPool)).planes:
                plane.copy_(self.then(plane.float()))
        if found is None:
            args[2].copy_(self.then(args[2]))
            return None
        if callable(found) and not isinstance(found, torch.Tensor):  # experts are loaded first
            return PlantedLaunch(found, self.then)
        return self.then(found)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.right, name)
        return lambda *args: self.then(call(*args))


KINDS = {"wrong": spoilt, "crashing": crash, "hanging": hang}
OPS = {
    op.name: op
    for op in (attend, gdn, mamba2, rope_kv, rows, norms, best, ahead, linear, moe, moe_route)
}


def _planted(op: Op[Any, Any], kind: str) -> Op[Any, Any]:
    def bind(spec: Any) -> Any:
        return PlantedLaunch(op.reference.bind(spec), KINDS[kind])

    triton = next(impl for impl in op.impls if impl.name == "triton")
    first: Impl[Any, Any] = Impl("cuda", bind, native=True)
    return Op(op.name, op.reference, [first, triton], op.check, home=f"{__name__}:{op.name}_{kind}")


for _name, _op in OPS.items():
    for _kind in KINDS:
        globals()[f"{_name}_{_kind}"] = _planted(_op, _kind)
