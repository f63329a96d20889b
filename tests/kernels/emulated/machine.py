"""Kernels on the CPU, thread by thread: the interface of pyspec.cuda.jit's Compiled and Kernel, for torch's CPU tensors.

`emulate(stem, defines)` compiles jit.source(stem) with g++ against device.h. A launch copies its tensors between protected
pages, runs all blocks in an order drawn from the seed, and copies back. EmulationError reports errors that a GPU would not:
accesses outside of the tensors, deadlocks, warps that diverge where they must meet, shared memory outside of the requested
size, more threads than the launch bounds. Unwritten shared memory holds NaN.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from emulated.translate import translated

from pyspec.cuda import jit
from pyspec.errors import DeviceError

HERE = Path(__file__).parent
COMPILER = os.environ.get("CXX", "g++")
FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-w",
    "-march=native",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-U_FORTIFY_SOURCE",
)
KERNEL_FLAGS = (
    "-O1",
    "-g1",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-gnu-unique",
    "-fno-asynchronous-unwind-tables",
)
LIBRARY = ("-shared", *FLAGS, *KERNEL_FLAGS, "-Wl,-Bsymbolic")
KEPT_S = 14 * 86400.0
CTYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "i": ctypes.c_int32, "u": ctypes.c_uint32, "f": ctypes.c_float}  # fmt: skip

needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"no C++ compiler ({COMPILER}) on this machine"
)


class EmulationError(AssertionError):
    """A kernel broke a rule of the device."""


@dataclass(slots=True)
class Order:
    """The schedule: the seed, the number of launches so far, and blocks resident at once (0: drawn, up to 4)."""

    seed: int = 0
    n_launch: int = 0
    resident: int = 0

    def draw(self, n_block: int) -> tuple[int, int]:
        """(seed of the next launch, its resident blocks)."""
        self.n_launch += 1
        resident = self.resident or (self.seed + self.n_launch) * 7 % 4 + 1
        return (self.seed << 20) + self.n_launch, min(resident, n_block)


order = Order()
_COMPILING = threading.Lock()


@cache
def _folder() -> Path:
    """Where compiled kernels are kept for later runs: `.emulated` of this checkout, without those that no run has used for two weeks.

    A folder of this process, if the checkout can not be written.
    """
    folder = HERE.parents[2] / ".emulated"
    try:
        folder.mkdir(exist_ok=True)
        for path in folder.glob("*.so"):
            if time.time() - path.stat().st_mtime > KEPT_S:
                path.unlink(missing_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        own = tempfile.mkdtemp(prefix="emulated-")
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        return Path(own)


@cache
def _compiler() -> str:
    """All that changes a kernel's code beside its text: the compiler and this processor, as macros show them; the emulator's files."""
    macros = _run("-march=native", "-dM", "-E", "-x", "c++", "-", text="")
    return macros + "".join(
        path.read_text() for path in sorted(HERE.glob("*.*")) if path.suffix in (".h", ".cpp", ".py")
    )


def _library(name: str, key: object, build: Callable[[Path], None]) -> Path:
    """The library of this name and key: an earlier run's, or one that `build` writes to the given path."""
    digest = hashlib.sha256(repr((key, _compiler())).encode()).hexdigest()[:24]
    library = _folder() / f"{name}-{digest}.so"
    if library.exists():
        os.utime(library)
        return library
    with tempfile.TemporaryDirectory(dir=_folder(), prefix="new-") as own:
        built = Path(own) / library.name
        build(built)
        os.replace(built, library)  # whole, or not there: other workers look, too
    return library


def _run(*command: str, text: str | None = None) -> str:
    done = subprocess.run([COMPILER, *command], input=text, capture_output=True, text=True, check=False)
    if done.returncode:  # the error that jit gives, too
        raise DeviceError(
            "\n".join(x for x in done.stderr.splitlines() if "error" in x)[:4000] or done.stderr
        )
    return done.stdout


@cache
def _machine() -> ctypes.CDLL:
    """The machine itself, which all kernels share."""
    # One file takes half the time
    both = "".join(f'#include "{HERE / name}.cpp"\n' for name in ("machine", "launch", "units"))
    command = ("-shared", "-O2", *FLAGS, "-x", "c++", "-")
    out = _library("libmachine", command, lambda path: _run(*command, "-o", str(path), text=both))
    library = ctypes.CDLL(str(out), ctypes.RTLD_GLOBAL)
    library.emulator_guard.restype = ctypes.c_void_p
    library.emulator_guard.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.emulator_take_back.restype = ctypes.c_int64
    library.emulator_take_back.argtypes = [ctypes.c_int, ctypes.c_void_p]
    pointers = [ctypes.c_void_p] * 4
    counts = [ctypes.c_int] * 3
    library.emulator_run.argtypes = [*pointers, *counts, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_int]
    return library


@dataclass(frozen=True)
class Emulated:
    """A kernel file, compiled. `lines` are those that messages count."""

    stem: str
    arch: str
    code: ctypes.CDLL
    lines: Sequence[str]

    def kernel(self, symbol: str, signature: str) -> EmulatedKernel:
        """As jit.Compiled.kernel: `signature` has one letter per argument."""
        start = getattr(self.code, f"emulator_start_{symbol}")
        sizes = (ctypes.c_int * 128)()
        getattr(self.code, f"emulator_sizes_{symbol}")(sizes)
        n = next(i for i, size in enumerate(sizes) if not size)
        if (found := list(sizes[:n])) != [ctypes.sizeof(CTYPES[c]) for c in signature]:
            raise EmulationError(
                f"kernel {symbol} takes arguments of {found} bytes, '{signature}' gives others"
            )
        cluster = tuple(map(getattr(self.code, f"emulator_cluster_{symbol}"), range(3)))
        return EmulatedKernel(
            symbol, signature, self, start, getattr(self.code, f"emulator_bound_{symbol}")(), cluster
        )


def emulate(stem: str, defines: Mapping[str, int | str] | None = None, arch: str = "sm_90a") -> Emulated:
    """Compile `kernels/<stem>.cu` for the CPU, once in a process."""
    with _COMPILING:
        return _compiled(
            stem, tuple(sorted((k, str(v)) for k, v in (defines or {}).items())), arch, jit.source(stem)
        )


def emulate_text(text: str, defines: Mapping[str, int | str] | None = None) -> Emulated:
    """The same for a kernel that is no file."""
    return _compiled(
        "text", tuple(sorted((k, str(v)) for k, v in (defines or {}).items())), "sm_90a", text
    )


@cache
def _compiled(stem: str, defines: tuple[tuple[str, str], ...], arch: str, text: str) -> Emulated:
    capability = int("".join(c for c in arch if c.isdigit())) * 10
    macros = [f"-D{k}={v}" for k, v in defines]
    machine = _machine()._name

    def build(library: Path) -> None:
        plain = _run("-E", "-x", "c++", *macros, f"-D__CUDA_ARCH__={capability}", "-", text=text)
        source = library.with_suffix(".cpp")
        source.write_text(f'#include "{HERE / "device.h"}"\n#line 1 "{stem}.cu"\n{translated(plain)}')
        _run(*LIBRARY, str(source), machine, "-o", str(library))

    library = _library(stem, (text, macros, capability, LIBRARY, machine), build)
    return Emulated(stem, arch, ctypes.CDLL(str(library)), text.splitlines())


def _spans(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """(first byte, end) of the memory of each group of tensors that overlap."""
    out: list[tuple[int, int]] = []
    for first, end in sorted(map(_span, tensors)):
        if out and first < out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((first, end))
    return out


def _span(t: torch.Tensor) -> tuple[int, int]:
    if not t.numel():
        return t.data_ptr(), t.data_ptr()
    last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


@dataclass(frozen=True)
class EmulatedKernel:
    """An entry point; `bound` is the most threads a block may have, `cluster` its blocks along x, y and z."""

    symbol: str
    signature: str
    code: Emulated
    start: object
    bound: int
    cluster: tuple[int, ...]
    allowed_shared: int = field(default=48 * 1024)

    def allow_shared(self, n_bytes: int) -> EmulatedKernel:
        if n_bytes > 227 * 1024:
            raise EmulationError(f"no GPU gives a block {n_bytes} bytes of shared memory")
        return replace(self, allowed_shared=max(n_bytes, self.allowed_shared))

    def launch(
        self,
        grid: Sequence[int],
        block: int,
        args: Sequence[jit.Arg],
        shared: int = 0,
        *,
        overlap: bool = False,
    ) -> None:
        """As jit.Kernel.launch, but it returns when the kernel has ended."""
        assert len(args) == len(self.signature), (
            f"{self.symbol}: {len(args)} arguments for '{self.signature}'"
        )
        if (
            block > self.bound
            or shared > self.allowed_shared
            or not all(0 < n < 65536 for n in grid[1:])
        ):
            raise EmulationError(
                f"{self.symbol}: launched with grid {grid}, {block} threads, {shared} bytes"
            )
        if any(n % of for n, of in zip([*grid, 1, 1], self.cluster, strict=False)):
            raise EmulationError(
                f"{self.symbol}: a grid of {grid} is no whole number of clusters of {self.cluster}"
            )
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        assert all(t.device.type == "cpu" for t in tensors)
        spans, library = _spans(tensors), _machine()
        try:
            homes = [library.emulator_guard(first, end - first) for first, end in spans]
            values = [self._value(c, a, spans, homes) for c, a in zip(self.signature, args, strict=True)]
            message = self._run([*grid, 1, 1][:3], block, shared, values)
            for i, (first, end) in enumerate(spans):
                if not message and (at := library.emulator_take_back(i, first)) >= 0:
                    where = f"{at - (1 << 62)} bytes before" if at >> 62 else f"at byte {at} of"
                    message = f"wrote {where} memory {i}, which has {end - first} bytes"
            if message:
                raise EmulationError(f"{self.symbol}: {self._told(message, args, spans)}")
        finally:
            library.emulator_forget()

    def _value(self, kind: str, arg: jit.Arg, spans: list[tuple[int, int]], homes: list[int]) -> object:
        if not isinstance(arg, torch.Tensor):
            if kind == "p":
                assert arg is None or arg == 0, f"{self.symbol}: a pointer that is no tensor's"
                return ctypes.c_void_p(None)
            is_right = isinstance(arg, float if kind == "f" else int)
            if isinstance(arg, np.generic):  # in its own type
                is_right = arg.dtype.itemsize == ctypes.sizeof(CTYPES[kind])
            assert is_right, f"{self.symbol}: {arg!r} for '{kind}'"
            return CTYPES[kind](jit.SCALARS[kind](arg).item())
        assert kind == "p", f"{self.symbol}: a tensor for '{kind}'"
        at = arg.data_ptr()
        i = next(
            i
            for i, (first, end) in enumerate(spans)
            if first <= at <= end and (at < end or first == end)
        )
        return ctypes.c_void_p(homes[i] + at - spans[i][0])

    def _run(self, grid: list[int], block: int, shared: int, values: list[object]) -> str:
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))  # type: ignore[arg-type]
        seed, resident = order.draw(grid[0] * grid[1] * grid[2])
        text = ctypes.create_string_buffer(4096)
        start = ctypes.cast(self.start, ctypes.c_void_p)  # type: ignore[arg-type]
        shape = (ctypes.c_int * 3)(*grid), (ctypes.c_int * 3)(*self.cluster)
        _machine().emulator_run(start, pointers, *shape, block, shared, resident, seed, text, len(text))
        return text.value.decode()

    def _told(self, message: str, args: Sequence[jit.Arg], spans: list[tuple[int, int]]) -> str:
        """The message with the arguments that lie in a memory, and the text of the lines it names."""

        def whose(match: re.Match[str]) -> str:
            first, end = spans[int(match[1])]
            at = [
                i
                for i, a in enumerate(args)
                if isinstance(a, torch.Tensor) and first <= a.data_ptr() < end
            ]
            return f"argument {' and '.join(map(str, at))}"

        out = [re.sub(r"memory (\d+)", whose, message)]
        for number in dict.fromkeys(map(int, re.findall(r"line (\d+)", message))):
            if 0 < number <= len(self.code.lines):
                out.append(f"  {number}: {self.code.lines[number - 1].strip()}")
        return "\n".join(out)
