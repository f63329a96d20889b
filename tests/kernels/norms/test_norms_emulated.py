"""norms.cu runs thread by thread on the CPU, against the reference and itself to the bit."""

from __future__ import annotations

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler

from pyspec.cuda import faults
from pyspec.cuda.op import guarded_ops
from pyspec.cuda.ops.norms import cuda as norms_cuda
from pyspec.cuda.ops.norms.ref import NormsSpec, TorchNorms
from pyspec.cuda.ops.rows import cuda as rows_cuda
from pyspec.cuda.ops.rows.cuda import RowsLaunch
from pyspec.cuda.ops.rows.ref import Norm

pytestmark = [needs_compiler, pytest.mark.sampled(1)]


@pytest.mark.parametrize("seed", (0, 1))
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("n", [4, 100, 1184, 2048, 5376])
def test_rows_are_the_references(n: int, layer: bool, seed: int) -> None:
    """The op's own check: one row and several, alone, picked, in pairs, and on their way to a product."""
    spec = NormsSpec(CPU, n, 1e-6, layer and n > 4)
    with emulated_gpu(seed=seed):
        assert norms_cuda.check(norms_cuda.bind(spec), TorchNorms(spec), spec) is None
        assert faults.record(CPU).tolist() == [0] * 5


@pytest.mark.slow
def test_the_widest_rows_on_an_older_gpu() -> None:
    spec = NormsSpec(CPU, norms_cuda.MAX_COLUMNS, 1e-5, layer=True)
    with emulated_gpu((8, 6)):
        assert norms_cuda.check(norms_cuda.bind(spec), TorchNorms(spec), spec) is None


@pytest.mark.parametrize(("bad", "seen"), [(3, 3), (-1, -1), (1 << 40, -1)])
def test_a_row_that_does_not_exist_is_reported_and_the_others_are_right(bad: int, seen: int) -> None:
    x, weight = torch.randn(3, 64), torch.ones(64)
    with emulated_gpu():
        own = norms_cuda.bind(NormsSpec(CPU, 64, 1e-6))
        y, some = own.picked(x, weight, torch.tensor([2, bad, 1]))
        tripped, op, place, index, limit = faults.record(CPU).tolist()
        assert torch.equal(y, own(x, weight)) and torch.equal(some, y[[2, 0, 1]])
    assert (tripped, op, index, limit) == (1, norms_cuda.OP_ID, seen, 3) and guarded_ops()[
        op
    ].name == "norms"
    assert faults.Fault("norms", place, index, limit).slot([4, 5, 6], [0, 1, 2, 3]) == faults.ALL_SLOTS


def test_no_rows_are_no_launch_and_none_may_be_picked() -> None:
    x, weight, none = torch.randn(2, 64), torch.ones(64), torch.zeros(0, dtype=torch.int64)
    with emulated_gpu():
        own = norms_cuda.bind(NormsSpec(CPU, 64, 1e-6))
        assert own(x[:0], weight).shape == (0, 64)
        y, some = own.picked(x, weight, none)
        assert torch.equal(y, own(x, weight)) and some.shape == (0, 64)
        assert own.paired(x[:0], weight, x[:0], weight).shape == (0, 128)


@pytest.mark.parametrize(("n", "layout"), [(1184, rows_cuda.TALL), (5376, rows_cuda.BLOCKED)])
def test_rows_for_the_next_product_are_handed_to_it_once_and_its_padding_stays(
    n: int, layout: int
) -> None:
    gen = torch.Generator().manual_seed(2)
    x, stream = (torch.randn(5, n, generator=gen) for _ in range(2))
    x[1], stream[1], x[3] = 0, 0, 1e20
    weight, norm = torch.rand(n, generator=gen), Norm(1 + torch.rand(n, generator=gen), 1e-5)
    with emulated_gpu(seed=3):
        own, to = norms_cuda.bind(NormsSpec(CPU, n, 1e-6)), RowsLaunch(CPU, n, (8, 16), layout)
        total = own.added(x, weight, stream, 0.5)
        to(total, norm)
        want = [t.clone() for t in (to.blocks, to.sums, to.powers)]
        for place in (to.blocks, to.sums, to.powers):
            place.fill_(torch.nan)
        got = own.added_into(x, weight, stream, 0.5, to, norm)
        assert torch.equal(got, total) and to.held(got, Norm(norm.weight, 1e-5)) is None
        rows = to.held(got, norm)
        assert rows is not None and rows.n_row == 5 and to.held(got, norm) is None
        assert torch.equal(rows.powers[:5], want[2][:5]) and rows.powers[5:].isnan().all()
        assert torch.equal(rows.blocks.nan_to_num(0.0), want[0]) and want[0].any()
        assert torch.equal(rows.sums.nan_to_num(0.0), want[1])
        assert not own.takes(RowsLaunch(CPU, n, (8,), rows_cuda.PLANES))
        assert not own.takes(RowsLaunch(CPU, 256, (8,), layout))
