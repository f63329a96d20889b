"""Launches of Triton's kernels: through Triton once for each build, then the build itself; and the machines that may run any. Needs no Triton."""

from __future__ import annotations

import importlib.util
import os
import time
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pyspec.cuda import jit, streamed_tiles, tri, tri_install
from pyspec.cuda.op import Impl, Op
from pyspec.cuda.ops.best.ref import BestSpec


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
            return SimpleNamespace(
                function="f", packed_metadata="m", run=lambda *given: self.ran.append(given)
            )

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
    assert places == [9, 7, 1, 77, "f", "m", None, None, None], (
        "as CompiledKernel.__getitem__ passes them"
    )
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


GPU = torch.device("cuda", 0)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with a GPU and Triton 3.6.0, whose folder this is; nothing is missing."""
    (tmp_path / "Python.h").touch()
    (tmp_path / "__init__.py").write_text('"""x"""\n__version__ = \'3.6.0\'\n')
    find, found = importlib.util.find_spec, SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: found if name == "triton" else find(name)
    )
    monkeypatch.setattr(tri_install.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    monkeypatch.setattr(tri_install.shutil, "which", lambda name: "/bin/gcc" if name == "gcc" else None)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "a" / "b"))
    tri_install._version_in.cache_clear()
    return tmp_path


def test_nothing_is_missing_where_all_is_there(machine: Path) -> None:
    assert tri.missing(GPU) is None and tri_install.version() == "3.6.0" and not (machine / "a").exists()
    assert tri.missing(torch.device("cpu")) == "runs on GPUs only"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("__version__ = '3.5.1'", "Triton 3.5.1 is too old; 3.6 or later is needed"),
        ("", "Triton of no known version is too old"),
        ('__version__ = "3.10.0+git1"', None),
        ("__version__ = '4.0'", None),
    ],
)
def test_a_version_is_that_of_the_source(text: str, said: str | None, machine: Path) -> None:
    (machine / "__init__.py").write_text(text)
    why = tri.missing(GPU)
    assert why is None if said is None else why is not None and why.startswith(said)


def test_what_is_missing_is_said(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        assert "compute capability 8.0" in (tri.missing(GPU) or "")
        patched.setattr(torch.version, "hip", "6.4")
        assert tri.missing(GPU) is None, "AMD's numbers say something else"
    with monkeypatch.context() as patched:
        patched.setattr(tri_install.shutil, "which", lambda name: None)
        assert "C compiler" in (tri.missing(GPU) or "")
        patched.setenv("CC", "/opt/cc")
        assert tri.missing(GPU) is None
    (machine / "Python.h").unlink()
    assert "python3-dev" in (tri.missing(GPU) or "")
    (machine / "Python.h").touch()
    (machine / "a").touch()
    assert f"keep what it compiles in {machine / 'a' / 'b'} (TRITON_CACHE_DIR" in (
        tri.missing(GPU) or ""
    )
    (machine / "a").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: path != machine)
        assert "TRITON_CACHE_DIR" in (tri.missing(GPU) or "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install triton" in (tri.missing(GPU) or "") and tri_install.version() is None


def test_cuda_kernels_are_not_for_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    impl = Impl("triton", lambda spec: lambda: None)
    assert jit.missing(GPU) == "runs on NVIDIA GPUs only"
    spec = BestSpec(GPU)
    assert Op("x", impl, [impl]).out_of_question(impl, spec) is None
    monkeypatch.setattr(torch.version, "hip", None)
    assert "compute capability" in (Op("x", impl, [impl]).out_of_question(impl, spec) or "")


def test_who_waits_for_a_check_hears_of_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    monkeypatch.setattr(tri.HEARS, "at", heard.append)
    kernel, x = KernelOfTriton(), torch.zeros(8)
    for n in (3, 4):
        tri.launch(kernel, (2,), (x, n, 16), {"KIND": 5, "SIZE": 64}, 4)
    assert heard == ["binding", "check"], "once: the second launch compiles nothing"


def test_a_build_ahead_that_does_not_end_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel, x, constants = KernelOfTriton(), torch.zeros(8), {"KIND": 5, "SIZE": 64}
    key = tri.TriLaunch(kernel, (2,), (x, 3, 16), constants, 4).key(0)
    monkeypatch.setattr(tri, "_ahead", {key: Future()})
    monkeypatch.setattr(tri, "AHEAD_S", 0.01)
    tri.launch(kernel, (2,), (x, 3, 16), constants, 4)
    assert len(kernel.built) == 1


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


def test_where_a_library_has_no_sums_in_f32_there_is_no_copy_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask, cpu = streamed_tiles.sums_in_f32.__wrapped__, torch.device("cpu")

    def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        return (a.float() @ b.float()).to(out_dtype)

    def none(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        raise RuntimeError("out_dtype is for CUDA only")

    monkeypatch.setattr(torch, "mm", none)
    assert ask(cpu), "made for NVIDIA's, and not asked there"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not ask(cpu)
    monkeypatch.setattr(torch, "mm", mm)
    assert ask(cpu)
