"""An op with implementations that are right, wrong, crash, hang or raise; children find it by the name of this module."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cuda.op import Impl, Op

Launch = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TwiceSpec:
    device: torch.device
    n: int


def right(spec: TwiceSpec) -> Launch:
    return lambda x: x * 2


def wrong(spec: TwiceSpec) -> Launch:
    return lambda x: x * 3


def raising(spec: TwiceSpec) -> Launch:
    raise ValueError("the compiler says no\nand a lot more")


def aborting(spec: TwiceSpec) -> Launch:
    def run(x: Tensor) -> Tensor:
        print("a library's last words", flush=True)  # noqa: T201
        os.abort()

    return run


def exiting(spec: TwiceSpec) -> Launch:
    os._exit(7)


def hanging(spec: TwiceSpec) -> Launch:
    def run(x: Tensor) -> Tensor:
        time.sleep(1000)
        return x

    return run


def full(spec: TwiceSpec) -> Launch:
    raise RuntimeError("CUDA error: out of memory")


def check(launch: Launch, reference: Launch, spec: TwiceSpec) -> str | None:
    x = torch.ones(spec.n)
    return None if torch.equal(launch(x), reference(x)) else "its doubles are no doubles"


BAD = (wrong, raising, aborting, exiting, hanging, full)
REFERENCE = Impl("torch", right)


def planted(*impls: Callable[[TwiceSpec], Launch], name: str) -> Op[TwiceSpec, Launch]:
    kinds = [Impl(bind.__name__, bind, native=True) for bind in impls]
    return Op("twice", REFERENCE, kinds, check, home=f"{__name__}:{name}")


twice = planted(*BAD, right, name="twice")
only_bad = planted(*BAD, name="only_bad")
