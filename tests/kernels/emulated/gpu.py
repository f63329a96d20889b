"""A GPU that is none: within `emulated_gpu`, the launchers of pyspec.cuda.ops compile and launch on the CPU, unchanged."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from emulated.machine import Emulated, emulate, order

from pyspec.cuda import context, jit

CPU = torch.device("cpu")


@contextmanager
def emulated_gpu(
    capability: tuple[int, int] = (9, 0), *, n_multiprocessor: int = 3, seed: int = 0, resident: int = 0
) -> Iterator[None]:
    """Launchers that are bound inside run emulated, on tensors of the CPU.

    Tensors of torch.empty hold NaN. Inside, the CPU has a context of its own, which is dropped at the end.
    """

    def compile_cubin(
        stem: str, arch: str, defines: Mapping[str, int | str] | None = None, **_: object
    ) -> Emulated:
        return emulate(stem, defines, arch)

    properties = SimpleNamespace(multi_processor_count=n_multiprocessor)
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        patch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        for module in _launchers():
            if getattr(module, "compile_cubin", None) is not None:
                patch.setattr(module, "compile_cubin", compile_cubin)
        patch.setattr(context, "_host", context.DeviceContext(CPU))
        order.seed, order.n_launch, order.resident = seed, 0, resident
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was_deterministic)


def _launchers() -> list[object]:
    return [jit, *(m for name, m in sys.modules.items() if name.startswith("pyspec.cuda.ops."))]
