"""CUDA kernels that double a vector, one right and the others bad; children find the op by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pyspec.cuda import jit
from pyspec.cuda.context import context_of
from pyspec.cuda.op import Impl, Op

CODE = r"""
typedef unsigned long long u64;
extern "C" __global__ void right(float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= 2.f;
}
extern "C" __global__ void wrong(float* x, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= 3.f;
}
extern "C" __global__ void wild(float* x, int n) { x[(1ll << 42) + threadIdx.x] = 2.f; }
extern "C" __global__ void trapping(float* x, int n) { asm volatile("trap;"); }
// Hangs for half a minute, much longer than its test waits: a machine that does not end it is not lost.
extern "C" __global__ void hanging(float* x, int n) {
  u64 start, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < 30000000000ull);
}
"""


@dataclass(frozen=True)
class VectorSpec:
    device: torch.device
    n: int


def launcher(name: str, spec: VectorSpec) -> Callable[[Tensor], Tensor]:
    from cuda.core import Program, ProgramOptions

    arch = jit.arch_of(torch.cuda.get_device_capability(spec.device))
    code = Program(CODE, "c++", ProgramOptions(arch=arch)).compile("cubin")
    kernel = jit.Kernel(name, code.get_kernel(name), "pi", context_of(spec.device))

    def run(x: Tensor) -> Tensor:
        y = x.clone()
        kernel.launch((-(-spec.n // 128),), 128, [y, np.int32(spec.n)])
        return y

    return run


class Bind:
    """Of one kernel; an object with a module, as functions have."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, spec: VectorSpec) -> Callable[[Tensor], Tensor]:
        return launcher(self.name, spec)


def check(
    launch: Callable[[Tensor], Tensor], reference: Callable[[Tensor], Tensor], spec: VectorSpec
) -> str | None:
    x = torch.randn(spec.n, device=spec.device)
    return None if torch.equal(launch(x), reference(x)) else "its doubles are no doubles"


def twice(spec: VectorSpec) -> Callable[[Tensor], Tensor]:
    return partial(torch.mul, other=2)


NAMES = ("wrong", "wild", "trapping", "hanging", "right")
planted: Op[VectorSpec, Callable[[Tensor], Tensor]] = Op(
    "planted", Impl("torch", twice), [Impl(n, Bind(n)) for n in NAMES], check, home=f"{__name__}:planted"
)
