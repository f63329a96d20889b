"""`norms`, `best` and `ahead` in Triton against their references, in the interpreter."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import triton_interpreter  # noqa: F401
from triton.runtime import interpreter

from pyspec.cuda import faults, tri
from pyspec.cuda.ops.ahead import cuda as ahead_cuda
from pyspec.cuda.ops.ahead import ref as ahead_ref
from pyspec.cuda.ops.ahead import triton as ahead_triton
from pyspec.cuda.ops.ahead.ref import GUARD
from pyspec.cuda.ops.best import cuda as best_cuda
from pyspec.cuda.ops.best import ref as best_ref
from pyspec.cuda.ops.best import triton as best_triton
from pyspec.cuda.ops.norms import cuda as norms_cuda
from pyspec.cuda.ops.norms import ref as norms_ref
from pyspec.cuda.ops.norms import triton as norms_triton

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def _tripped() -> list[int]:
    fault = faults.record(CPU)
    found = fault.tolist()
    fault.zero_()
    return found


@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("n", [64, 100])
def test_norms_are_the_references(n: int, layer: bool) -> None:
    spec = norms_ref.NormsSpec(CPU, n, 1e-6, layer)
    assert norms_cuda.check(norms_triton.bind(spec), norms_ref.bind(spec), spec) is None
    assert _tripped() == [0] * 5


@pytest.mark.parametrize(
    "n_x, n_out, what", [(3, 2, "a write of 64 of 64"), (2, 3, "a read of 64 of 64"), (3, 3, "")]
)
def test_a_kernel_that_leaves_its_tensors_is_found(n_x: int, n_out: int, what: str) -> None:
    """So every test of Triton's kernels here is one of where they read and write, too: in a view of a larger tensor as well."""
    from pyspec.cuda.ops.norms import triton_kernels as kernels

    x, out, weight = torch.randn(4, 64)[:n_x], torch.empty(4, 64)[:n_out], torch.ones(64)
    fault = faults.record(CPU)
    constants = {"COLUMNS": 64, "WIDE": 64, "LAYER": False, "PICKS": False, "ADDS": False, "OP": 1}
    args = (x, weight, out, x, weight, out, fault, x, fault, 64, 64, 64, 3, 1e-6, 1.0)
    with pytest.raises(interpreter.InterpreterError, match=what) if what else nullcontext():
        tri.launch(kernels.norms, (3,), args, constants, 1)


@pytest.mark.parametrize("row", [-3, 2, 1 << 40])
def test_a_row_that_is_none_is_reported_and_read_as_the_first(row: int) -> None:
    x, weight = torch.randn(2, 32, generator=torch.Generator().manual_seed(0)), torch.ones(32)
    every, some = norms_triton.bind(norms_ref.NormsSpec(CPU, 32, 1e-6)).picked(
        x, weight, torch.tensor([1, row])
    )
    assert _tripped() == [1, norms_triton.GUARD.number, -1, row if row == 2 else -1, 2]
    assert torch.equal(some, every[[1, 0]])


@pytest.mark.parametrize(
    "sizes",
    [((1, 2050), (5, 37)), pytest.param(((12, 3000), (13, 1), (1, 150_001)), marks=pytest.mark.slow)],
)
def test_the_best_of_hostile_rows_are_the_references(sizes: tuple[tuple[int, int], ...]) -> None:
    spec = best_ref.BestSpec(CPU)
    assert best_cuda.check(best_triton.bind(spec), best_ref.bind(spec), spec, sizes) is None


@pytest.mark.parametrize("widths", [(2, 1, 5), pytest.param((17, 3, 1, 16, 40), marks=pytest.mark.slow)])
def test_what_is_kept_and_moved_is_the_references(
    widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead_cuda, "WIDTHS", (widths,))
    monkeypatch.setattr(ahead_cuda, "MANY", ())
    spec = ahead_ref.AheadSpec(CPU, 3, 8)
    assert ahead_cuda.check(ahead_triton.bind(spec), ahead_ref.bind(spec), spec) is None
    assert _tripped() == [0] * 5


def test_a_page_beyond_the_table_is_reported_by_its_sequence() -> None:
    batch, _, _ = ahead_cuda.verify((2, 3), CPU, torch.Generator().manual_seed(1))
    batch.positions[2] = 1 << 20
    ahead_triton.bind(ahead_ref.AheadSpec(CPU)).step(batch)
    found = _tripped()
    assert found[:3] == [1, GUARD.number, 1] and found[3] == ((1 << 20) + 1) // batch.page_size
