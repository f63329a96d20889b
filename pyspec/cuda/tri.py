"""Triton as the tier between our CUDA kernels and the torch reference: whether it runs here, and how its kernels are launched.

Triton comes with torch on Linux and needs nothing of CUDA's Python packages. Nothing here imports it before a kernel is bound:
kernels of an op lie in its `triton_kernels.py`, which only launches import. On a CPU they run in Triton's interpreter, for tests:
where TRITON_INTERPRET is 1 from the start of the process on.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyspec.cuda.examine import EXAMINATION

LEAST = (8, 0)  # compute capability
LARGE_SHARED = ((8, 0), (9, 0), (10, 0))  # whose multiprocessors give a program more than 100 KB of shared memory
INTERPRETED = 2  # multiprocessors that a CPU counts as


def interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def missing(device: torch.device) -> str | None:
    """Why no Triton kernel runs on `device`; None if one may."""
    if device.type != "cuda" and not interprets():
        return "runs on GPUs only"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < LEAST:
        return f"needs compute capability {LEAST[0]}.{LEAST[1]}"
    return None


def has_large_shared(device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) in LARGE_SHARED


def n_multiprocessor(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else INTERPRETED


def launch(
    kernel: Any, grid: Sequence[int], args: Sequence[object], constants: Mapping[str, object], warps: int
) -> None:
    """Run `kernel` [a function of Triton's] over `grid` on torch's current stream of the device that is current."""
    if not EXAMINATION.is_on or not torch.cuda.is_available():
        kernel[tuple(grid)](*args, **constants, num_warps=warps)
        return
    device = next(arg.device for arg in args if isinstance(arg, Tensor))
    EXAMINATION.run(
        lambda: kernel[tuple(grid)](*args, **constants, num_warps=warps), torch.cuda.current_stream(device).synchronize
    )
