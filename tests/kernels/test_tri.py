"""Launches of Triton's kernels: through Triton once for each build, then the build itself; and who may run any. Needs no Triton."""

from __future__ import annotations

import importlib.util
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyspec.cuda import tri


class KernelOfTriton:
    """Takes (x, n, stride, SIZE, KIND); `n` may vary. Notes how it was launched."""

    def __init__(self) -> None:
        names = (
            ("x", False, False),
            ("n", True, False),
            ("stride", False, False),
            ("SIZE", False, True),
            ("KIND", False, True),
        )
        self.params = [SimpleNamespace(name=n, do_not_specialize=v, is_constexpr=c) for n, v, c in names]
        self.built: list[tuple[Any, ...]] = []
        self.ran: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **named: Any) -> SimpleNamespace:
            self.built.append((grid, args[1:], named))
            return SimpleNamespace(function="f", packed_metadata="m", run=lambda *given: self.ran.append(given))

        return launch


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(tri, "_builds", {})


def test_a_build_is_found_again_for_numbers_that_vary_and_not_for_others() -> None:
    kernel, x = KernelOfTriton(), torch.zeros(8)
    constants = {"KIND": 5, "SIZE": 64}
    tri.launch(kernel, (2,), (x, 3, 16), constants, 4)
    tri.launch(kernel, (9, 7), (x, 4, 16), constants, 4)
    assert kernel.built == [((2,), (3, 16), {**constants, "num_warps": 4})]
    ((*places, given, n, stride, size, kind),) = kernel.ran
    assert places == [9, 7, 1, 77, "f", "m", None, None, None], "as CompiledKernel.__getitem__ passes them"
    assert given is x and (n, stride, size, kind) == (4, 16, 64, 5), "constants in the kernel's order"
    others = (
        ((x, 4, 17), constants, 4),
        ((x, 4, 16), {**constants, "SIZE": 128}, 4),
        ((x, 4, 16), constants, 8),
        ((x.half(), 4, 16), constants, 4),
        ((x[1:], 4, 16), constants, 4),
    )
    for args, named, warps in others:
        tri.launch(kernel, (1,), args, named, warps)
    assert len(kernel.built) == 1 + len(others) and len(kernel.ran) == 1


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, find = torch.device("cuda", 0), importlib.util.find_spec
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(tri, "_has_compiler", lambda: True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "triton" else find(name))
    assert tri.missing(gpu) is None
    assert tri.missing(torch.device("cpu")) == "runs on GPUs only"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 8.0" in (tri.missing(gpu) or "")
    monkeypatch.setattr(tri, "_has_compiler", lambda: False)
    assert "C compiler" in (tri.missing(gpu) or "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install triton" in (tri.missing(gpu) or "")


def test_what_is_compiled_ahead_is_waited_for_and_launched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x, constants, compiled = KernelOfTriton(), torch.zeros(8), {"KIND": 5, "SIZE": 64}, []

    def warmup(*args: Any, **named: Any) -> None:
        time.sleep(0.05)
        compiled.append((args[1:], named))
        if args[1] == 4:
            raise RuntimeError("a compiler's bug")

    kernel.__dict__.update(warmup=warmup, __name__="kernel")
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(tri, "_ahead", {})
    for warps in (4, 4, 2):
        tri.compile_ahead(tri.TriLaunch(kernel, (2,), (x, 3, 16), constants, warps))
    tri.launch(kernel, (9,), (x, 5, 16), constants, 4)
    named = {**constants, "num_warps": 4}
    assert compiled[0] == ((3, 16), {"grid": (2,), **named}), "waited for"
    assert kernel.built == [((9,), (5, 16), {**named})]
    tri.compile_ahead(tri.TriLaunch(kernel, (2,), (x, 4, 32), constants, 4))
    tri.launch(kernel, (9,), (x, 5, 32), constants, 4)
    assert len(compiled) == 3 and len(kernel.built) == 2, (
        "each kind once, and what failed is built where it is launched"
    )
