"""Norms: plain torch against formulas in float64, the check, and norms.cu on every machine and for every architecture."""

from __future__ import annotations

import pytest
import torch
from machines import CPU, NO_FAULT, ON_CARD, Machine, cases, compiled
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.jit import ARCHS
from pyspec.cuda.op import guarded_ops
from pyspec.cuda.ops.norms import cuda as norms_cuda
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec, TorchNorms
from pyspec.cuda.ops.rows import cuda as rows_cuda
from pyspec.cuda.ops.rows.cuda import RowsLaunch
from pyspec.cuda.ops.rows.ref import Norm

pytestmark = pytest.mark.sampled(1)

SPEC = NormsSpec(CPU, 96, 1e-6)


def by_formula(x: Tensor, weight: Tensor, spec: NormsSpec) -> Tensor:
    x = x.double()
    x = x - x.mean(-1, keepdim=True) if spec.layer else x
    return x / (x.square().mean(-1, keepdim=True) + spec.eps).sqrt() * weight.double()


@pytest.mark.parametrize("layer", [False, True])
def test_norms_are_what_their_formulas_say(layer: bool) -> None:
    spec, gen = NormsSpec(CPU, 96, 1e-6, layer), torch.Generator().manual_seed(1)
    own = norms.reference.bind(spec)
    assert isinstance(own, TorchNorms) and norms.chosen(spec).capturable
    a, b = (norms_cuda.rows_of(6, 96, gen) for _ in range(2))
    weights = torch.rand(2, 96, generator=gen)
    want = by_formula(a, weights[0], spec)
    assert torch.allclose(own(a, weights[0]).double(), want, rtol=1e-4, atol=1e-4)
    assert torch.equal(own.added(a, weights[0], b, 0.5), (b + own(a, weights[0])) * 0.5)
    rows = torch.tensor([5, 0, 5])
    everything, some = own.picked(a, weights[0], rows)
    assert torch.equal(everything, own(a, weights[0])) and torch.equal(some, everything[rows])
    both = torch.cat([everything, own(b, weights[1])], -1)
    assert torch.equal(own.paired(a, weights[0], b, weights[1]), both)


class Wrong(TorchNorms):
    def __init__(self, how: str) -> None:
        super().__init__(NormsSpec(CPU, 96, 1e-5 if how == "eps" else 1e-6, how == "layer"))
        self.how = how

    def added(self, x: Tensor, weight: Tensor, stream: Tensor, factor: float = 1.0) -> Tensor:
        return super().added(x, weight, stream, 1.0 if self.how == "factor" else factor)

    def picked(self, x: Tensor, weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        y, some = super().picked(x, weight, rows)
        return y, some if self.how != "rows" else super().picked(x, weight, rows.flip(0))[1]

    def paired(self, a: Tensor, a_weight: Tensor, b: Tensor, b_weight: Tensor) -> Tensor:
        y = super().paired(a, a_weight, b, a_weight if self.how == "weight" else b_weight)
        return y if self.how != "bits" else y * (1 + 2e-7)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("", None),
        ("eps", "first input differ"),
        ("layer", "first input differ"),
        ("weight", "second input differ"),
        ("bits", "other bits"),
        ("rows", "rows picked"),
        ("factor", "rows added to others differ"),
    ],
)
def test_the_check_finds_what_is_wrong(how: str, said: str | None) -> None:
    found = norms_cuda.check(Wrong(how), TorchNorms(SPEC), SPEC)
    assert found is None if said is None else said in (found or "")


@pytest.mark.parametrize("layer", [False, True])
@cases("n", emulated=[4, 100, 1184, 2048, 5376], card=[64, 2048, 2688, 4096, 5120, 16384], seeds=(0, 1))
def test_rows_are_the_references(machine: Machine, n: int, layer: bool) -> None:
    """The op's own check: one row and several, alone, picked, in pairs, and on their way to a product."""
    spec = NormsSpec(machine.device, n, 1e-6, layer and n > 4)
    assert machine.is_emulated or norms_cuda.limits(spec) is None
    with machine.started():
        assert norms_cuda.check(norms_cuda.bind(spec), TorchNorms(spec), spec) is None
        assert machine.faults().tolist() == NO_FAULT


@pytest.mark.slow
def test_the_widest_rows_on_an_older_gpu(machine: Machine) -> None:
    spec = NormsSpec(CPU, norms_cuda.MAX_COLUMNS, 1e-5, layer=True)
    with machine.started((8, 6)):
        assert norms_cuda.check(norms_cuda.bind(spec), TorchNorms(spec), spec) is None


@pytest.mark.parametrize(("bad", "seen"), [(3, 3), (-1, -1), (1 << 40, -1)])
def test_a_row_that_does_not_exist_is_reported_and_the_others_are_right(
    machine: Machine, bad: int, seen: int
) -> None:
    x, weight = torch.randn(3, 64), torch.ones(64)
    with machine.started():
        own = norms_cuda.bind(NormsSpec(CPU, 64, 1e-6))
        y, some = own.picked(x, weight, torch.tensor([2, bad, 1]))
        tripped, op, place, index, limit = machine.faults().tolist()
        assert torch.equal(y, own(x, weight)) and torch.equal(some, y[[2, 0, 1]])
    assert (tripped, op, index, limit) == (1, norms_cuda.GUARD.number, seen, 3) and guarded_ops()[
        op
    ].name == "norms"
    assert faults.Fault("norms", place, index, limit).slot([4, 5, 6], [0, 1, 2, 3]) == faults.ALL_SLOTS


def test_no_rows_are_no_launch_and_none_may_be_picked(machine: Machine) -> None:
    x, weight, none = torch.randn(2, 64), torch.ones(64), torch.zeros(0, dtype=torch.int64)
    with machine.started():
        own = norms_cuda.bind(NormsSpec(CPU, 64, 1e-6))
        assert own(x[:0], weight).shape == (0, 64)
        y, some = own.picked(x, weight, none)
        assert torch.equal(y, own(x, weight)) and some.shape == (0, 64)
        assert own.paired(x[:0], weight, x[:0], weight).shape == (0, 128)


@pytest.mark.parametrize(("n", "layout"), [(1184, rows_cuda.TALL), (5376, rows_cuda.BLOCKED)])
def test_rows_for_the_next_product_are_handed_to_it_once_and_its_padding_stays(
    machine: Machine, n: int, layout: int
) -> None:
    gen = torch.Generator().manual_seed(2)
    x, stream = (torch.randn(5, n, generator=gen) for _ in range(2))
    x[1], stream[1], x[3] = 0, 0, 1e20
    weight, norm = torch.rand(n, generator=gen), Norm(1 + torch.rand(n, generator=gen), 1e-5)
    with machine.started(seed=3):
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


@ON_CARD
def test_a_row_has_the_same_bits_among_any_number_of_others(machine: Machine) -> None:
    own = norms_cuda.bind(NormsSpec(machine.device, 5120, 1e-6))
    x, weight = torch.randn(2048, 5120, device=machine.device), torch.rand(5120, device=machine.device)
    every, some = own.picked(x, weight, torch.tensor([2047, 0, 777], device=machine.device))
    assert torch.equal(some, every[[2047, 0, 777]])
    for row in (0, 1, 777, 2047):
        assert torch.equal(own(x[row : row + 1], weight)[0], every[row])


@ON_CARD
def test_graphs_replay_it_on_new_rows_and_launches_behind_each_other_wait(machine: Machine) -> None:
    """A chain of launches that start early, each on the output of the one before."""
    own, gen = norms_cuda.bind(NormsSpec(machine.device, 5120, 1e-6)), torch.Generator().manual_seed(3)
    x = torch.zeros(5, 5120, device=machine.device)
    rows = torch.zeros(2, dtype=torch.int64, device=machine.device)
    weight = (0.5 + torch.rand(5120, generator=gen)).to(machine.device)

    def chain(launch: norms_cuda.NormsLaunch | TorchNorms) -> tuple[torch.Tensor, torch.Tensor]:
        y = x
        for _ in range(20):
            y = launch.paired(y, weight, x, weight)[:, :5120].contiguous()
            y = launch(launch(y, weight), weight)
        return launch.picked(y, weight, rows)

    replay, (every, some) = machine.captured(lambda: chain(own))
    for _ in range(10):
        x.copy_(torch.randn(5, 5120, generator=gen))
        rows.copy_(torch.randint(0, 5, (2,), generator=gen))
        replay()
        want, picked = chain(TorchNorms(NormsSpec(machine.device, 5120, 1e-6)))
        assert torch.allclose(every, want, rtol=1e-4, atol=1e-4) and torch.equal(some, every[rows])
        assert torch.allclose(some, picked, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_norms_compile_for_every_architecture(arch: str) -> None:
    for n in (4, 2048, 5120, norms_cuda.MAX_COLUMNS):
        for layer in (False, True):
            found = compiled("norms", arch, norms_cuda.defines(n, layer))["norms"]
            assert found.registers * norms_cuda.threads_for(n) <= 65536, (
                n,
                found,
            )
            assert found.registers * norms_cuda.threads_for(n) <= 32768 or n > 8192, (
                n,
                found,
            )  # beside a product


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_norms_that_write_rows_compile_for_every_architecture(arch: str) -> None:
    for n in (2816, 5376, norms_cuda.MAX_INTO):
        for layout in (0, 2) if arch == "sm_90a" else (0,):
            macros = norms_cuda.defines(n, False, layout)
            found = compiled("norms", arch, macros)["norms"]
            assert found.registers <= 64 or n > 5376, (n, found)  # beside a product


def test_a_row_has_a_thread_for_four_columns_up_to_as_many_as_other_rows_have() -> None:
    assert [norms_cuda.threads_for(n) for n in (4, 128, 1152, 2048, 5120, 16384)] == [
        *(32, 32, 288, 512, 512, rows_cuda.THREADS)
    ]
