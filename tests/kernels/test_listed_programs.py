"""The programs listed ahead are those that launchers compile, for every kind of GPU there are kernels for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from emulated.gpu import _launchers, emulated_gpu

from pyspec.cuda import jit, survey
from pyspec.cuda.jit import GpuKind, Program
from pyspec.cuda.op import Op
from pyspec.cuda.ops.linear.op import linear, linear_many, linear_tall
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.gguf import GGMLType

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
OWN = ("cuda", "wgmma")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class _Recorded:
    """Stands for compiled code: kernels that do nothing."""

    def __init__(self, stem: str) -> None:
        self.stem = stem

    def kernel(self, symbol: str, signature: str) -> _Recorded:
        return self

    def allow_shared(self, n: int) -> _Recorded:
        return self

    def launch(self, *args: object, **more: object) -> None:
        pass


@contextmanager
def on_gpu(capability: tuple[int, int]) -> Iterator[None]:
    """As far as limits look."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        patch.setattr(jit, "missing", lambda device: None)
        yield


def compiled_by(op: Op, impl: object, spec: object, capability: tuple[int, int]) -> set[Program]:
    """The programs that binding compiles, on a fake GPU."""
    found: set[Program] = set()

    def record(
        stem: str, arch: str, defines: Mapping[str, int | str] | None = None, **_: object
    ) -> _Recorded:
        found.add(Program.of(stem, arch, defines))
        return _Recorded(stem)

    with emulated_gpu(capability, n_multiprocessor=132), pytest.MonkeyPatch.context() as patch:
        for module in _launchers():
            if getattr(module, "compile_cubin", None) is not None:
                patch.setattr(module, "compile_cubin", record)
        patch.setattr(jit, "missing", lambda device: None)
        impl.bind(spec)  # type: ignore[attr-defined]
    return found


def products() -> list[tuple[Op, object]]:
    kinds = [
        (type, epilogue)
        for type in (GGMLType.Q8_0, GGMLType.Q4_K, GGMLType.F16)
        for epilogue in Epilogue
    ]
    return [
        (op, LinearSpec(CPU, type, 272, 5120, e))
        for op in (linear, linear_tall, linear_many)
        for type, e in kinds
    ]


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"{c[0]}.{c[1]}")
def test_whatever_binding_compiles_was_listed(capability: tuple[int, int]) -> None:
    n = 0
    for op, spec in [*survey.standard(CPU), *products()]:
        for impl in op.impls:
            if impl.name not in OWN or not impl.capabilities[0] <= capability <= impl.capabilities[1]:
                continue
            with on_gpu(capability):
                if impl.limits(replace(spec, device=GPU)) is not None:  # not enough shared memory, say
                    continue
            made = compiled_by(op, impl, spec, capability)
            listed = set(impl.programs_for(spec, GpuKind(capability, 132)))
            assert made <= listed, f"{op.name} {spec}: {made - listed}"
            assert {p.arch for p in listed} == {jit.arch_of(capability)}
            assert all(p.stem in jit.stems() for p in listed)
            n += len(made)
    assert n > 100


def test_other_implementations_have_no_programs() -> None:
    for op, spec in survey.standard(CPU):
        for impl in (*op.impls, op.reference):
            has = bool(impl.programs_for(spec, GpuKind((9, 0), 132)))
            assert has == (impl.name in OWN), (op.name, impl.name)


def test_where_the_multiprocessors_are_unknown_all_ways_are_listed() -> None:
    for op, spec in survey.standard(CPU):
        for impl in op.impls:
            some = impl.programs_for(spec, GpuKind((9, 0), 132))
            assert set(some) <= set(impl.programs_for(spec, GpuKind((9, 0))))


def test_a_program_is_its_macros_as_text() -> None:
    program = GpuKind((9, 0)).program("norms", {"COLUMNS": 64, "LAYER": 0})
    assert program == Program("norms", "sm_90a", (("COLUMNS", "64"), ("LAYER", "0")))
    assert Program.of("angles", "sm_80").macros == ()
