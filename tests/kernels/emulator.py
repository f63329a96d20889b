"""Sources of kernels compiled for this CPU and run there (emulator.h), behind the launcher that a GPU would have.

For sources without tensor cores whose inline assembly stands in the functions that emulator.h has, too.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from pyspec.cuda import jit

HERE = Path(__file__).parent
TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_longlong, "i": ctypes.c_int, "f": ctypes.c_float}
ASSEMBLY = re.compile(r"\basm\s*(?:volatile)?\s*\((?:[^;\"]|\"[^\"]*\")*\)\s*;")
OWN = re.compile(r"^(?:__device__ __forceinline__ void) (copy16|copy4|copies_commit|copies_wait_but_last)\b", re.M)
KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(([^)]*)\)')


@dataclass
class Kernel:
    """Like jit.Kernel."""

    function: ctypes._NamedFuncPointer  # type: ignore[name-defined]
    signature: str

    def launch(
        self, grid: Sequence[int], block: int, args: Sequence[jit.Arg], shared: int = 0, *, overlap: bool = False
    ) -> None:
        assert len(args) == len(self.signature) and shared == 0
        values = [a.data_ptr() if isinstance(a, torch.Tensor) else a.item() for a in args]
        for a, kind in zip(args, self.signature, strict=True):
            wanted = {"p": torch.Tensor, "l": np.int64, "i": np.int32, "f": np.float32}[kind]
            assert isinstance(a, wanted), f"{a} for '{kind}'"
        typed = [TYPES[kind](value) for kind, value in zip(self.signature, values, strict=True)]
        self.function(*[ctypes.c_int(n) for n in (*grid, block)], *typed)


@dataclass
class Compiled:
    """Like jit.Compiled."""

    library: ctypes.CDLL

    def kernel(self, symbol: str, signature: str) -> Kernel:
        return Kernel(self.library[f"launch_{symbol}"], signature)


def compile_for_cpu(stem: str, defines: Mapping[str, int | str], folder: Path) -> Compiled:
    """`kernels/<stem>.cu` as a library with a `launch_<kernel>` for each kernel."""
    text = jit.source(stem)
    launchers = []
    for name, parameters in KERNEL.findall(text):
        names = ", ".join(re.sub(r"^.*\W", "", p.strip()) for p in parameters.split(","))
        launchers.append(
            f'extern "C" void launch_{name}(int gx, int gy, int gz, int n_thread, {parameters}) {{\n'
            f"  run_grid({{gx, gy, gz}}, n_thread, [=] {{ {name}({names}); }});\n}}\n"
        )
    assert launchers, f"{stem}.cu has no kernels"
    text = OWN.sub(r"__device__ __forceinline__ void on_gpu_\1", ASSEMBLY.sub("", text))
    macros = "".join(f"#define {k} {v}\n" for k, v in defines.items())
    source, library = folder / f"{stem}.cpp", folder / f"{stem}-{abs(hash(macros))}.so"
    source.write_text("\n".join((f'#include "{HERE / "emulator.h"}"', macros, text, *launchers)))
    flags = ["-std=c++17", "-O1", "-w", "-fpermissive", "-ffp-contract=off", "-shared", "-fPIC"]
    done = subprocess.run(["g++", *flags, str(source), "-o", str(library)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    return Compiled(ctypes.CDLL(str(library)))


def as_gpu(monkeypatch: pytest.MonkeyPatch, folder: Path, capability: tuple[int, int] = (9, 0)) -> None:
    """From here on launchers compile for the CPU, and believe it to be a GPU."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    properties = type("Properties", (), {"multi_processor_count": 4})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(
        jit, "compile_cubin", lambda stem, arch, defines=None: compile_for_cpu(stem, defines or {}, folder)
    )
