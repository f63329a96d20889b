"""The machine as kernels see it: GPU, driver and compiler, and how fast its memory is."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import which

import torch

DRIVER = Path("/sys/module/nvidia/version")
# The last is WSL's
DRIVER_FILES = DRIVER, Path("/proc/driver/nvidia/version"), Path("/usr/lib/wsl/lib/libcuda.so.1")
CUDA_PACKAGES = "'cuda-core>=1.0' 'cuda-bindings>=13.1.1,<14' 'nvidia-cuda-nvrtc>=13'"
"""Packages that compile and launch kernels, as arguments of pip: the extra `cuda` of pyproject.toml."""
PROBE_BYTES = 1 << 30  # of the buffer whose reading is timed; far more than any cache holds
CPU_BYTES = 1 << 28
N_TIMES = 10


@dataclass(frozen=True)
class Machine:
    """The parts of a machine that a verdict on a kernel depends on; "" for a part that is missing."""

    gpu: str  # or the processor, without a GPU
    capability: str
    driver: str
    nvrtc: str
    cuda_core: str


@cache
def machine(device: torch.device) -> Machine:
    if device.type != "cuda":
        return Machine(platform.machine(), "", "", nvrtc_version(), version_of("cuda-core"))
    about = torch.cuda.get_device_properties(device)
    capability = f"{about.major}.{about.minor}"
    return Machine(about.name, capability, driver_version(), nvrtc_version(), version_of("cuda-core"))


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def has_driver() -> bool:
    """Whether there is an NVIDIA driver, even if torch can not use it."""
    return any(path.exists() for path in DRIVER_FILES) or which("nvidia-smi") is not None


def driver_version() -> str:
    """The driver's build, if the system reports it, and its CUDA version, or torch's version without cuda-python."""
    build = DRIVER.read_text().strip() if DRIVER.is_file() else ""
    try:
        from cuda.bindings import driver
    except ImportError:
        return f"{build} (torch {torch.version.cuda or torch.version.hip})".strip()
    _, number = driver.cuDriverGetVersion()
    return f"{build} (CUDA {number // 1000}.{number % 1000 // 10})".strip()


def nvrtc_version() -> str:
    """The compiler's version; the package's version is finer than the library's."""
    try:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    except Exception:  # noqa: BLE001 - not installed, or installed without its library, which has errors of its own
        return ""
    package = version_of("nvidia-cuda-nvrtc")
    return package if package.startswith(f"{major}.{minor}.") else f"{major}.{minor}"


def memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0


def bandwidth(device: torch.device, n_bytes: int = PROBE_BYTES) -> float:
    """Bytes per second. GPU: reading a large buffer, by events. CPU: a copy, reads and writes counted."""
    if device.type == "cuda":
        n_bytes = min(n_bytes, torch.cuda.mem_get_info(device)[0] // 4)
        x = torch.ones(n_bytes // 4, device=device)
        return n_bytes / statistics.median(gpu_seconds(lambda: x.sum()) for _ in range(N_TIMES))
    x = torch.ones(min(n_bytes, CPU_BYTES) // 8)
    y = torch.empty_like(x)
    return 2 * x.nbytes / statistics.median(seconds(lambda: y.copy_(x)) for _ in range(N_TIMES))


def gpu_seconds(run: Callable[[], object]) -> float:
    """Between two events around it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def seconds(run: Callable[[], object]) -> float:
    """Of the host."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


@dataclass(frozen=True)
class PeerLink:
    """From one GPU to another: whether it can read the other's memory, and the speed of a copy."""

    first: str
    second: str
    is_direct: bool
    bytes_per_s: float


def peer_links(device: torch.device) -> list[PeerLink]:
    """From `device` to all other GPUs; nothing for a CPU."""
    if device.type != "cuda":
        return []
    others = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [_link(device, other) for other in others if other.index != (device.index or 0)]


def _link(first: torch.device, second: torch.device) -> PeerLink:
    is_direct = torch.cuda.can_device_access_peer(first, second)
    try:
        source = torch.zeros(CPU_BYTES, dtype=torch.uint8, device=first)
        to = torch.empty_like(source, device=second)
    except torch.OutOfMemoryError:  # another process holds the memory: report the part that needs none
        return PeerLink(str(first), str(second), is_direct, 0.0)
    times = []
    for _ in range(N_TIMES):
        torch.cuda.synchronize(first)
        torch.cuda.synchronize(second)
        began = time.perf_counter()
        to.copy_(source, non_blocking=True)
        torch.cuda.synchronize(first)
        torch.cuda.synchronize(second)
        times.append(time.perf_counter() - began)
    return PeerLink(str(first), str(second), is_direct, CPU_BYTES / statistics.median(times))
