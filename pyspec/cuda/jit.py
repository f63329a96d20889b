"""From a `.cu` file to a launch: NVRTC through cuda-python, cubins cached on disk, arguments checked once.

Kernels are single header-free sources: `#include "x.cuh"` is replaced by the text of that file, which lies beside the kernel or in
`pyspec/cuda/include`, so the program cache sees everything it must key on. Nothing here needs a GPU until `Compiled.kernel`.
"""

from __future__ import annotations

import importlib.util
import io
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from pyspec import progress
from pyspec.cache import cache_root
from pyspec.cuda import shipped
from pyspec.cuda.checker import EXAMINATION
from pyspec.cuda.context import DeviceContext, context_of
from pyspec.cuda.machine import CUDA_PACKAGES
from pyspec.errors import DeviceError

if TYPE_CHECKING:
    from cuda.core import ObjectCode, ProgramOptions

HERE = Path(__file__).parent
HOPPER = (9, 0)
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120f")
"""Targets that the tests compile for. sm_120f is one cubin for 12.0 and 12.1."""

_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"\s*$', re.MULTILINE)
SCALARS = {"p": np.int64, "l": np.int64, "i": np.int32, "u": np.uint32, "f": np.float32}
"""Types by their letter in a signature; p is a pointer."""
Arg = torch.Tensor | float | np.generic | None
"""A tensor or no pointer, or a number of any type: the kernel's signature says which it goes as."""
Macros = dict[str, int | str]
Key = TypeVar("Key")
MOST_CONFIGS = 1024  # cached per kernel: one for each number of rows


def arch_of(capability: tuple[int, int]) -> str:
    """The target for a device: feature sets where we use them, the plain one elsewhere."""
    major, minor = capability
    return {(9, 0): "sm_90a", (10, 0): "sm_100a", (12, 0): "sm_120f", (12, 1): "sm_120f"}.get(
        capability, f"sm_{major}{minor}"
    )


def is_installed() -> bool:
    """Whether cuda-core is installed, which compiles and launches kernels."""
    try:
        return importlib.util.find_spec("cuda.core") is not None
    except ModuleNotFoundError:  # its parent package is missing, too
        return False


def missing(device: torch.device) -> str | None:
    """Why no kernel of ours runs on `device`; None if one may."""
    if device.type != "cuda" or torch.version.hip is not None:
        return "runs on NVIDIA GPUs only"
    if not is_installed():
        return f"cuda-core is not installed (pip install {CUDA_PACKAGES})"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs compute capability 8.0"
    return None


@cache
def stems() -> dict[str, Path]:
    """Every kernel's file, by its stem: they lie beside the ops they belong to."""
    return {path.stem: path for path in sorted((HERE / "ops").glob("*/*.cu"))}


@cache
def source(stem: str) -> str:
    """A kernel's file with its includes pasted in, each once: those beside it, then those that ops share."""
    seen: set[str] = set()
    path = stems()[stem]

    def paste(match: re.Match[str]) -> str:
        name = match.group(1)
        if name in seen:
            return ""
        seen.add(name)
        own = path.parent / name
        text = (own if own.exists() else HERE / "include" / name).read_text()
        return _INCLUDE.sub(paste, text.replace("#pragma once", ""))

    return _INCLUDE.sub(paste, path.read_text())


@dataclass(frozen=True)
class Resources:
    """Resources of one entry point, as ptxas reports them."""

    registers: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Compiled:
    """A cubin and its entry points."""

    stem: str
    arch: str
    code: ObjectCode
    resources: Mapping[str, Resources]  # empty when the cubin came from the cache

    def kernel(self, symbol: str, signature: str) -> Kernel:
        """Load an entry point for the thread's device (`context.per_device` makes it the right one).

        `signature` has one letter per argument: p pointer, i int32, l int64, u uint32, f float32. The driver's parameter sizes
        are compared with it here, because a launch checks nothing.
        """
        from cuda.core import Device

        context = context_of(torch.device("cuda"))
        Device(context.device.index).set_current()  # torch makes its context late
        kernel = self.code.get_kernel(symbol)
        sizes = [info.size for info in kernel.arguments_info]
        want = [np.dtype(SCALARS[c]).itemsize for c in signature]
        if sizes != want:
            raise DeviceError(
                f"kernel {symbol} takes arguments of {sizes} bytes, '{signature}' gives {want}"
            )
        return Kernel(symbol, kernel, signature, context)


class Program(NamedTuple):
    """A unit of compilation: a kernel's file, a target and macros."""

    stem: str
    arch: str
    macros: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, stem: str, arch: str, defines: Mapping[str, int | str] | None = None) -> Program:
        return cls(stem, arch, tuple((k, str(v)) for k, v in (defines or {}).items()))


@dataclass(frozen=True, slots=True)
class GpuKind:
    """A target for programs. The GPU need not be here.

    n_multiprocessor  0 if it is not known
    """

    capability: tuple[int, int]
    n_multiprocessor: int = 0

    @property
    def arch(self) -> str:
        return arch_of(self.capability)

    def program(self, stem: str, defines: Mapping[str, int | str] | None = None) -> Program:
        return Program.of(stem, self.arch, defines)


def compile_cubin(
    stem: str, arch: str, defines: Mapping[str, int | str] | None = None, *, use_cache: bool = True
) -> Compiled:
    """Compile `<stem>.cu` with macros. DeviceError with the compiler's first message if it fails."""
    program = Program.of(stem, arch, defines)
    return compiled(program) if use_cache else _compile(program, use_cache=False)


_kept: dict[Program, Future[Compiled]] = {}
_keeping, _importing = threading.Lock(), threading.Lock()


def compiled(program: Program) -> Compiled:
    """The program's code, compiled once for all threads and devices. It stays for the life of the process, because otherwise it would be
    unloaded with its last kernel, even while work is under way."""
    with _keeping:
        found = _kept.get(program)
        mine = found is None
        if found is None:
            found = _kept[program] = Future()
    if mine:
        try:
            found.set_result(_compile(program, use_cache=True))
        except BaseException as e:  # noqa: BLE001 - waiting threads get it
            with _keeping:
                del _kept[program]  # the next call tries again
            found.set_exception(e)
    return found.result()


def _compile(program: Program, *, use_cache: bool) -> Compiled:
    if use_cache and (ready := shipped.find(*program, source(program.stem))) is not None:
        return Compiled(program.stem, program.arch, ready, {})
    with _importing:  # two threads that import it at once may see it half imported
        from cuda.core import Program as Source
        from cuda.core.utils import FileStreamProgramCache

    stem, arch = program.stem, program.arch
    log = io.StringIO()
    progress.report(f"kernels of {stem}")
    store = FileStreamProgramCache(cache_folder()) if use_cache else None
    try:
        code = Source(source(stem), "c++", _options(program)).compile("cubin", logs=log, cache=store)
    except Exception as e:  # NVRTC's errors have no common base we could name
        raise DeviceError(f"{stem}.cu does not compile for {arch}: {_first_error(str(e))}") from e
    if not len(code.code):
        raise DeviceError(f"{stem}.cu compiled to nothing for {arch}")
    return Compiled(stem, arch, code, _resources(log.getvalue()))


def _options(program: Program) -> ProgramOptions:
    with _importing:
        from cuda.core import ProgramOptions

    return ProgramOptions(
        arch=program.arch,
        std="c++17",
        name=f"{program.stem}.cu",
        lineinfo=True,
        define_macro=list(program.macros) or None,
        ptxas_options=["-v"],
    )


def cache_folder() -> Path:
    return cache_root() / "cubin"


def _first_error(text: str) -> str:
    lines = [line for line in text.splitlines() if "error" in line]
    return (lines or text.splitlines() or ["no message"])[0].strip()


def _resources(log: str) -> dict[str, Resources]:
    out: dict[str, Resources] = {}
    name, spills = "", 0
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            name, spills = match.group(1), 0
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spills = int(match.group(1)) + int(match.group(2))
        elif match := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            out[name] = Resources(int(match.group(1)), spills, int(shared.group(1)) if shared else 0)
    return out


@dataclass(frozen=True)
class Kernel:
    """An entry point, loaded for the device of its context."""

    symbol: str
    handle: Any  # of cuda.core, which has no types
    signature: str
    context: DeviceContext
    configs: dict[tuple[object, ...], object] = field(default_factory=dict, compare=False, repr=False)
    convert: Callable[..., list[object]] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "convert", _converter(self.signature))

    def allow_shared(self, n_bytes: int) -> Kernel:
        """Raise the limit of dynamic shared memory above 48 KiB."""
        from cuda.bindings import driver

        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        device = driver.CUdevice(self.context.device.index)
        (err,) = driver.cuKernelSetAttribute(
            attribute, n_bytes, driver.CUkernel(int(self.handle.handle)), device
        )
        if err != driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(
                f"kernel {self.symbol} can not have {n_bytes} bytes of shared memory: {err.name}"
            )
        return self

    def launch(
        self,
        grid: tuple[int, ...],
        block: int,
        args: Sequence[Any],
        shared: int = 0,
        *,
        overlap: bool = False,
    ) -> None:
        """Start on its device, on torch's current stream there. Tensors go as pointers, None as no pointer, numbers in the signature's type.

        `overlap`: from 9.0 on, start as soon as the kernel before allows it (programmatic dependent launch). Only for kernels
        that wait (`griddepcontrol.wait`) before they touch the output of that kernel.
        """
        assert len(args) == len(self.signature), (
            f"{self.symbol}: {len(args)} arguments for '{self.signature}'"
        )
        values = self.convert(*args)
        config = self.configs.get((grid, block, shared, overlap))
        if config is None:
            config = self._configured(grid, block, shared, overlap)
        stream = self.context.stream()
        if EXAMINATION.is_on:
            EXAMINATION.run(lambda: _starter()(stream, config, self.handle, *values), stream.sync)
            return
        _starter()(stream, config, self.handle, *values)

    def _configured(self, grid: tuple[int, ...], block: int, shared: int, overlap: bool) -> object:
        """Cached, because a prompt takes thousands of launches."""
        from cuda.core import LaunchConfig

        config = LaunchConfig(grid=grid, block=block, shmem_size=shared)
        early = overlap and torch.cuda.get_device_capability(self.context.device) >= HOPPER
        if early and hasattr(config, "programmatic_stream_serialization"):  # newer cuda-core only
            config.programmatic_stream_serialization = True
        if len(self.configs) >= MOST_CONFIGS:
            self.configs.clear()
        self.configs[grid, block, shared, overlap] = config
        return config


def _converter(signature: str) -> Callable[..., list[object]]:
    """Arguments as the driver takes them. One expression, made as text: a prompt has thousands of launches, and a loop takes 1 to 2 us more."""
    names = [f"a{i}" for i in range(len(signature))]
    values = (
        f"{a}.data_ptr() if type({a}) is T else pointer({a})"
        if letter == "p"
        else f"{a} if type({a}) is {letter} else {letter}({a})"
        for a, letter in zip(names, signature, strict=True)
    )
    text = f"lambda {', '.join(names)}: [{', '.join(values)}]"
    made: Callable[..., list[object]] = eval(text, {"T": torch.Tensor, "pointer": _pointer, **SCALARS})
    return made


def _pointer(a: Any) -> Any:
    return 0 if a is None else a if type(a) is SCALARS["p"] else a.data_ptr()


@dataclass(frozen=True, eq=False)
class KernelFile(Generic[Key]):
    """A kernel file of an op, compiled and loaded once on a device for each key: a spec, or what of a spec the kernels depend on.

    entries  signatures by entry point, as in `Compiled.kernel`; a signature alone is that of the entry point with the file's name
    defines  the macros of a key
    """

    stem: str
    entries: str | Mapping[str, str] | Callable[[Key], str | Mapping[str, str]]
    defines: Callable[[Key], Macros] = lambda key: {}

    def kernels(self, device: torch.device, key: Key) -> tuple[Kernel, ...]:
        """The entry points in order."""
        return context_of(device).once(self._load, key)

    def kernel(self, device: torch.device, key: Key) -> Kernel:
        """The entry point, of a file with one."""
        (found,) = self.kernels(device, key)
        return found

    def named(self, device: torch.device, key: Key) -> dict[str, Kernel]:
        """The entry points by name, of a file that names them."""
        assert isinstance(self.entries, Mapping)
        return dict(zip(self.entries, self.kernels(device, key), strict=True))

    def programs(self, key: Key, target: GpuKind) -> list[Program]:
        """What `kernels` compiles on such a GPU."""
        return [target.program(self.stem, self.defines(key))]

    def _load(self, device: torch.device, key: Key) -> tuple[Kernel, ...]:
        arch = arch_of(torch.cuda.get_device_capability(device))
        code = compile_cubin(self.stem, arch, self.defines(key))
        entries = self.entries(key) if callable(self.entries) else self.entries
        if isinstance(entries, str):
            entries = {self.stem: entries}
        return tuple(code.kernel(symbol, signature) for symbol, signature in entries.items())


@cache
def _starter() -> Callable[..., None]:
    from cuda.core import launch

    return launch
