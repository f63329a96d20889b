"""An op with implementations that are right, wrong, crash, hang or raise; children find it by the name of this module."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cuda import tri
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


def unwritable(spec: TwiceSpec) -> Launch:
    try:
        raise PermissionError(13, "Permission denied", "/home/nobody/.triton")
    except PermissionError as e:
        raise RuntimeError("a compiler's own error") from e


def killed_compiler(spec: TwiceSpec) -> Launch:
    raise RuntimeError("PTXAS error: `ptxas` failed with error code -9\nand a lot more")


def no_linker(spec: TwiceSpec) -> Launch:
    raise subprocess.CalledProcessError(1, ["gcc"])


def slow_to_compile(spec: TwiceSpec) -> Launch:
    def run(x: Tensor) -> Tensor:
        with tri.building():
            time.sleep(3.0)  # longer than a check may take, not than compiling may
        return x * 2

    return run


def hanging_behind_a_compiler(spec: TwiceSpec) -> Launch:
    def run(x: Tensor) -> Tensor:
        with tri.building():
            time.sleep(0.1)
        time.sleep(1000)
        return x

    return run


def check(launch: Launch, reference: Launch, spec: TwiceSpec) -> str | None:
    x = torch.ones(spec.n)
    return None if torch.equal(launch(x), reference(x)) else "its doubles are no doubles"


BAD = (wrong, raising, aborting, exiting, hanging, full)
REFERENCE = Impl("torch", right)


def planted(*impls: Callable[[TwiceSpec], Launch], name: str) -> Op[TwiceSpec, Launch]:
    kinds = [Impl(bind.__name__, bind, native=True) for bind in impls]
    return Op("twice", REFERENCE, kinds, check, home=f"{__name__}:{name}")


twice = planted(*BAD, right, name="twice")
compiled = planted(slow_to_compile, hanging_behind_a_compiler, name="compiled")
unlucky = planted(unwritable, killed_compiler, no_linker, full, name="unlucky")
only_bad = planted(*BAD, name="only_bad")
