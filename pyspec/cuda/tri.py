"""Triton as the tier between our CUDA kernels and the torch reference: whether it runs here, and how its kernels are launched.

Triton comes with torch on Linux and needs none of CUDA's Python packages. Nothing here imports it before a kernel is bound: an op's
kernels stand in its `triton_kernels.py`, which only launches import. For tests they run on a CPU in Triton's interpreter, if
TRITON_INTERPRET is 1 from the start of the process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyspec.cache import n_cores
from pyspec.cuda import tri_install
from pyspec.cuda.checker import EXAMINATION

log = logging.getLogger(__name__)

LEAST = (8, 0)  # compute capability
# Capabilities whose multiprocessors give a program more than 100 KB of shared memory
LARGE_SHARED = ((8, 0), (9, 0), (10, 0))
AHEAD_S = 120.0  # to wait for a build begun ahead; after that the caller compiles it
MOST_COMPILERS = 8  # threads: Triton's Python part runs one after the other
INTERPRETED = 2  # multiprocessors that a CPU stands for


def interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def missing(device: torch.device) -> str | None:
    """Why no Triton kernel runs on `device`; None if one may."""
    if device.type != "cuda" and not interprets():
        return "runs on GPUs only"
    if (why := tri_install.unusable()) is not None:
        return why
    if device.type == "cuda" and (why := tri_install.cannot_build()) is not None:
        return why
    if (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) < LEAST
    ):
        return f"needs compute capability {LEAST[0]}.{LEAST[1]}"
    return None


def has_large_shared(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) in LARGE_SHARED


def has_f8(device: torch.device) -> bool:
    """Whether there are instructions for e4m3."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (8, 9)


def has_ptx(device: torch.device) -> bool:
    """Whether kernels may use NVIDIA's inline assembler."""
    return device.type == "cuda" and torch.version.hip is None


def n_multiprocessor(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else INTERPRETED
    )


class TriLaunch(NamedTuple):
    """A launch: `kernel` (a Triton function) over `grid`.

    args       arguments that are no constants, in the kernel's order; those named in `tri_guards.VARYING` may vary without a new build
    constants  the rest, which come after them in the kernel
    """

    kernel: Any
    grid: Sequence[int]
    args: Sequence[object]
    constants: Mapping[str, object]
    warps: int

    def key(self, device: int) -> tuple[object, ...]:
        return _key(self.kernel, self.args, (device, self.warps, *self.constants.values()))

    @property
    def is_compiled(self) -> bool:
        """Not interpreted."""
        return hasattr(self.kernel, "params") and torch.cuda.is_available()


def launch(
    kernel: Any, grid: Sequence[int], args: Sequence[object], constants: Mapping[str, object], warps: int
) -> None:
    """Run a `TriLaunch` on torch's current stream of the current device."""
    ask = TriLaunch(kernel, grid, args, constants, warps)
    if not EXAMINATION.is_on or not torch.cuda.is_available():
        _launch(ask)
        return
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    EXAMINATION.run(lambda: _launch(ask), torch.cuda.current_stream(device).synchronize)


def _launch(ask: TriLaunch) -> None:
    """Launch through Triton once for each build, which takes 50 us; later launches use the build found then."""
    kernel, grid, args, constants, warps = ask
    if not ask.is_compiled:
        kernel[tuple(grid)](*args, **constants, num_warps=warps)
        return
    device = torch.cuda.current_device()
    key = ask.key(device)
    build = _builds.get(key)
    if build is None:
        if (ahead := _ahead.pop(key, None)) is not None:
            wait([ahead], AHEAD_S)
        with building():
            build = kernel[tuple(grid)](*args, **constants, num_warps=warps)
        if hasattr(build, "packed_metadata") and hasattr(build, "run"):
            _builds[key] = build
        return
    first, second, third = (*grid, 1, 1)[:3]
    stream = torch.cuda.current_stream(device).cuda_stream
    values = [constants[name] for name in _constants_of(kernel)]
    # As CompiledKernel.__getitem__ does
    build.run(
        first,
        second,
        third,
        stream,
        build.function,
        build.packed_metadata,
        None,
        None,
        None,
        *args,
        *values,
    )


@contextmanager
def building() -> Iterator[None]:
    """Report "binding" while a compiler runs, because it may take much longer than a kernel."""
    HEARS.at("binding")
    yield
    HEARS.at("check")


class Hears:
    """`at` is called with the stage of a check, a name of checker.LIMITS_S. Set in processes that check kernels."""

    def __init__(self) -> None:
        self.at: Callable[[str], None] = lambda stage: None


HEARS = Hears()


def compile_ahead(ask: TriLaunch) -> None:
    """Compile in another thread the build that `launch` needs for arguments of these kinds; nothing runs. Errors come up in `launch`."""
    if not ask.is_compiled:
        return
    device = torch.cuda.current_device()
    key = ask.key(device)
    if key not in _builds and key not in _ahead:
        _ahead[key] = _compilers().submit(_compiled, device, ask)


def _compiled(device: int, ask: TriLaunch) -> None:
    """Compile into Triton's cache, where the launch finds it."""
    try:
        with torch.cuda.device(device):
            ask.kernel.warmup(*ask.args, grid=tuple(ask.grid), **ask.constants, num_warps=ask.warps)
    except Exception as e:  # noqa: BLE001 - any kind: it is compiled again where it counts
        log.debug("%s is not compiled ahead: %s", ask.kernel.__name__, e)


@cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, min(MOST_COMPILERS, n_cores() - 1)), "pyspec-triton")


_ahead: dict[tuple[object, ...], Future[None]] = {}
_builds: dict[tuple[object, ...], Any] = {}
_kinds: dict[Any, tuple[list[bool], list[str]]] = {}


def _kinds_of(kernel: Any) -> tuple[list[bool], list[str]]:
    """(for each argument, whether its value never needs another build; names of constants), in the kernel's order."""
    if kernel not in _kinds:
        varies = [p.do_not_specialize for p in kernel.params if not p.is_constexpr]
        _kinds[kernel] = varies, [p.name for p in kernel.params if p.is_constexpr]
    return _kinds[kernel]


def _constants_of(kernel: Any) -> list[str]:
    return _kinds_of(kernel)[1]


def _key(kernel: Any, args: Sequence[object], rest: tuple[object, ...]) -> tuple[object, ...]:
    """Key of the build that runs. Numbers are keyed more finely than needed, because those that may not vary hardly do."""
    key: list[object] = [kernel, *rest]
    for arg, varies in zip(args, _kinds_of(kernel)[0], strict=True):
        if isinstance(arg, Tensor):
            key += (arg.dtype, arg.data_ptr() & 15)
        else:
            key.append(type(arg) if varies else arg)
    return tuple(key)
