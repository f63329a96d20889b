"""rows.cu, rows_finish.cu and rope_kv.cu against their references on every machine, for every architecture."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulated.gpu import emulated_gpu
from emulated.machine import EmulatedKernel, emulate, needs_compiler
from machines import CPU, EMULATED, NO_FAULT, Machine, cases, compiled, filled
from sampling import slow
from torch import Tensor

from pyspec.cuda import sum_rows
from pyspec.cuda.jit import ARCHS, compile_cubin
from pyspec.cuda.ops.linear.wgmma import PADS, blocks_for_wgmma
from pyspec.cuda.ops.peer_sum import cuda as peer_sum
from pyspec.cuda.ops.rope_kv import cuda as rope_kv_cuda
from pyspec.cuda.ops.rope_kv.op import check as check_rope_kv
from pyspec.cuda.ops.rope_kv.ref import RopeKvSpec
from pyspec.cuda.ops.rope_kv.ref import bind as rope_kv_reference
from pyspec.cuda.ops.rows import cuda as rows_cuda
from pyspec.cuda.ops.rows.cuda import BLOCKED, ROW_MAJOR, TALL, RowsLaunch, defines
from pyspec.cuda.ops.rows.op import check, make, rows
from pyspec.cuda.ops.rows.ref import (
    HEAD_POWER,
    RELU2,
    GroupNorm,
    HeadNorm,
    Norm,
    PrepKind,
    RowsSpec,
    head_power,
    norm_power,
)
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.kv_types import TYPES, KvType

pytestmark = pytest.mark.sampled(1)

SEEDS = (0, 1)
DIMS = {
    "emulated": {PrepKind.HEADS: 64, PrepKind.GATE: 96, PrepKind.GROUPS: 384},
    "card": {PrepKind.HEADS: 128, PrepKind.GATE: 256, PrepKind.GROUPS: 256},
}


def spec_of(machine: Machine, kind: PrepKind, n_in: int) -> RowsSpec:
    return RowsSpec(machine.device, n_in, kind, DIMS[machine.name].get(kind, 0))


def untouched(launch: rows_cuda.RowsLaunch) -> rows_cuda.RowsLaunch:
    filled(torch.nan, launch.blocks, launch.sums, launch.powers)
    return launch


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", list(PrepKind))
@cases("n_in", emulated=[384, 2688], card=[256, 5120, 6144, 17408, 25600], seeds=SEEDS)
def test_row_major_rows_equal_the_reference(machine: Machine, n_in: int, kind: PrepKind) -> None:
    spec = spec_of(machine, kind, n_in)
    assert machine.is_emulated or rows_cuda.limits(spec) is None
    with machine.started():
        assert check(rows_cuda.WideRows(machine.device, n_in), rows.reference.bind(spec), spec) is None


@pytest.mark.sampled(most=2)
@cases(
    "n_in, kind",
    emulated=[(n_in, kind) for kind in PrepKind for n_in in (384, 2688)],
    card=[
        *((n_in, kind) for n_in in (256, 5120, 17408) for kind in PrepKind),
        *((288, kind) for kind in (PrepKind.PLAIN, PrepKind.NORM, PrepKind.GLU)),
    ],
    seeds=SEEDS,
)
def test_blocks_hold_the_same_values_and_their_sums(machine: Machine, n_in: int, kind: PrepKind) -> None:
    x, prep = make(spec_of(machine, kind, n_in), 5, torch.Generator().manual_seed(1))
    with machine.started():
        got = untouched(rows_cuda.RowsLaunch(machine.device, n_in, (8, 16)))(x, prep)
        want, powers = rows_cuda.WideRows(machine.device, n_in)(x, prep)
    n_block = -(-n_in // 256) * 8
    blocks = got.blocks[: n_block * 8 * 32].view(
        n_block, 8, 4, 2, 4
    )  # column 16 h + 4 i + j at [i, h, j]
    flat = blocks[:, :5].permute(1, 0, 3, 2, 4).reshape(5, -1)
    assert torch.equal(flat[:, :n_in], want) and not flat[:, n_in:].any()
    sums = got.sums[: n_block * 8].view(n_block, 8)[:, :5].T
    assert torch.allclose(sums, flat.float().view(5, n_block, 32).sum(-1), rtol=1e-4, atol=1e-4)
    assert powers is None or torch.equal(got.powers[:5], powers)
    assert blocks[:, 5:].isnan().all() and got.blocks[n_block * 8 * 32 :].isnan().all()


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "kind",
    [PrepKind.PLAIN, PrepKind.NORM, PrepKind.GLU, PrepKind.GEGLU, PrepKind.GROUPS, PrepKind.RELU2],
)
@pytest.mark.parametrize("n_in", [384, 2688])
def test_whole_numbers_are_off_by_half_of_one_and_padded_with_zeros(
    machine: Machine, n_in: int, kind: PrepKind, seed: int
) -> None:
    """Of 16 bits: the largest of each 64 columns is 127 * 257. Rows of very different sizes, one of zeros."""
    spec = spec_of(EMULATED, kind, n_in)
    x, prep = make(spec, 5, torch.Generator().manual_seed(1))
    x[3, :64] *= 1e4
    x[1] = 0
    n_padded = -(-n_in // 256) * 256
    with machine.started(seed=seed):
        got = untouched(rows_cuda.RowsLaunch(CPU, n_in, (8, 16), rows_cuda.PLANES))(x, prep)
        values, sums = rows_cuda.values_of(got, n_padded)
    want = x if prep is None else prep(x)
    power = want.unflatten(1, (-1, 64)).abs().amax(-1, keepdim=True) / (127 * 257)
    off = (values[:, :n_in] - want).unflatten(1, (-1, 64)).abs()
    assert bool((off <= 0.51 * power + 1e-5 * want.abs().unflatten(1, (-1, 64))).all())
    assert not values[:, n_in:].any() and not sums[:, n_in // 32 :].any() and not values[1].any()
    assert torch.allclose(
        sums, values.unflatten(1, (-1, 32)).sum(-1), atol=1e-5 * float(values.abs().amax())
    )


ALONE = (PrepKind.PLAIN, PrepKind.GATE, PrepKind.GLU, PrepKind.GEGLU, PrepKind.RELU2)


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("layout", [rows_cuda.BLOCKED, rows_cuda.ROW_MAJOR, rows_cuda.TALL])
@pytest.mark.parametrize("kind", ALONE)
@pytest.mark.parametrize("n_in", [384, 2688, 4160])
def test_ctas_that_have_a_row_together_give_the_bits_of_one(
    machine: Machine, n_in: int, kind: PrepKind, layout: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares of whole blocks, the last one short or empty; the largest number in any of them; rows of zeros and without an end."""
    x, prep = make(spec_of(EMULATED, kind, n_in - n_in % 96), 5, torch.Generator().manual_seed(1))
    n_in = x.shape[1] // kind.halves
    x[1], x[2, -40], x[3, 3], x[4, n_in // 2] = 0, 3e4, torch.inf, -2e4
    found = []
    for parts in (1, 8, 3):
        monkeypatch.setattr(rows_cuda, "PARTS", parts)
        monkeypatch.setattr(rows_cuda, "PARTS_FROM", 0)
        with machine.started(seed=seed):
            if layout == rows_cuda.ROW_MAJOR:
                blocks, powers = rows_cuda.WideRows(CPU, n_in)(x, prep)
                found.append((blocks, powers, blocks))
            else:
                got = untouched(rows_cuda.RowsLaunch(CPU, n_in, (8, 16), layout))(x, prep)
                found.append((got.blocks, got.powers, got.sums))
    assert found[0][0].nan_to_num().any()
    for one, *others in zip(*found, strict=True):
        for other in others:
            assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_many_rows_and_older_gpus_have_a_cta_a_row(machine: Machine) -> None:
    def parts(kind: PrepKind, n_row: int, layout: int = 0, of: tuple[int, int] = (9, 0)) -> int:
        return rows_cuda.parts_of(21504, kind, layout, of, n_row)

    assert parts(PrepKind.GEGLU, 3) == parts(PrepKind.PLAIN, 128, rows_cuda.TALL) == rows_cuda.PARTS
    assert parts(PrepKind.GEGLU, 129) == parts(PrepKind.NORM, 3) == parts(PrepKind.GEGLU, 3, of=(8, 9))
    assert parts(PrepKind.PLAIN, 3, rows_cuda.PLANES) == 1 == parts(PrepKind.HEADS, 3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_whole_numbers_are_none_where_64_columns_have_none(machine: Machine, bad: float) -> None:
    x = torch.randn(3, 320)
    x[1, 70] = bad
    with machine.started():
        values, sums = rows_cuda.values_of(
            rows_cuda.RowsLaunch(CPU, 320, (8,), rows_cuda.PLANES)(x), 320
        )
    assert not values[1, 64:128].isfinite().any() and not sums[1, 2:4].isfinite().any()
    others = torch.ones(3, 5, dtype=torch.bool)
    others[1, 1] = False
    assert (values.view(3, 5, 64)[others] - x.view(3, 5, 64)[others]).abs().amax() < 1e-4


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", [PrepKind.PLAIN, PrepKind.NORM, PrepKind.GLU])
@cases("n_in", emulated=[320, 2688], card=[256, 320, 5120, 17408], seeds=SEEDS)
def test_rows_for_warpgroup_products_stand_where_the_torch_function_puts_them(
    machine: Machine, n_in: int, kind: PrepKind
) -> None:
    x, prep = make(RowsSpec(machine.device, n_in, kind), 37, torch.Generator().manual_seed(4))
    with machine.started():
        got = untouched(rows_cuda.RowsLaunch(machine.device, n_in, (64, 96), rows_cuda.TALL))(x, prep)
        wide = rows_cuda.WideRows(machine.device, n_in)(x, prep)[0]
        want = blocks_for_wgmma(wide, got.pad).view(-1, got.pad, 64)
    assert torch.equal(got.blocks[: want.numel()].view_as(want)[:, :37], want[:, :37])


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("n_in", [32, 384, 2688])
def test_what_is_below_zero_is_dropped_and_the_rest_squared(
    machine: Machine, n_in: int, seed: int
) -> None:
    """Rows of all layouts, strided; one has nothing above zero, one holds NaN, one number of each is -0."""
    x = (torch.randn(9, n_in + 8) * torch.logspace(-9, 9, 9)[:, None])[:, :-8]
    x[2], x[3, 5], x[4, ::2] = -x[2].abs(), torch.nan, -0.0
    want = RELU2(x).double()
    with machine.started(seed=seed):
        got, powers = rows_cuda.WideRows(CPU, n_in)(x, RELU2)
        alone, _ = rows_cuda.WideRows(CPU, n_in)(x[7:8], RELU2)
        tall = untouched(rows_cuda.RowsLaunch(CPU, n_in, (16,), rows_cuda.TALL))(x, RELU2)
    assert powers is not None and powers[2] == 1 and not got[2].any() and torch.equal(alone[0], got[7])
    assert got[3].isnan().nonzero().tolist() == [[5]]
    rows = [i for i in range(9) if i != 3]
    assert torch.allclose(
        got[rows].double() * powers[rows].double()[:, None],
        want[rows],
        rtol=2**-10,
        atol=1e-7 * float(want[rows].amax()),
    )
    whole = blocks_for_wgmma(got, 16).view(-1, 16, 64)[:, :9]
    assert torch.equal(
        tall.blocks[: 64 * 16 * len(whole)].view(-1, 16, 64)[:, :9].nan_to_num(9.0),
        whole.nan_to_num(9.0),
    )


def test_rows_of_any_size_have_the_power_of_their_largest_value(machine: Machine) -> None:
    x = torch.randn(6, 384) * torch.tensor([1e-38, 1e-33, 0.0, 1.0, 1e30, 3e37])[:, None]
    with machine.started():
        got, powers = rows_cuda.WideRows(CPU, 384)(x)
    assert powers is not None and powers[2] == 1 and not got[2].any() and bool(got.isfinite().all())
    assert torch.allclose(got.double() * powers.double()[:, None], x.double(), rtol=2**-10, atol=0)


@cases("n_in", emulated=[384], card=[512])
def test_a_norm_of_huge_weights_has_a_power(machine: Machine, n_in: int) -> None:
    x, prep = make(RowsSpec(machine.device, n_in, PrepKind.NORM), 3, torch.Generator().manual_seed(2))
    assert isinstance(prep, Norm)
    big = Norm(prep.weight * 1e6, 1e-6)
    with machine.started():
        got, powers = rows_cuda.WideRows(machine.device, n_in)(x, big)
    assert powers is not None and big.power > 1e5
    assert torch.allclose(got.float() * powers[:, None], big(x), rtol=2e-3, atol=2e3)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e5])
def test_normed_heads_have_one_power_whatever_their_gates_and_weights_are(
    machine: Machine, size: float
) -> None:
    """Closed gates, usual ones, and ones of some thousands; weights that need another power than usual ones, too."""
    gen = torch.Generator().manual_seed(5)
    x, gate = torch.randn(6, 384, generator=gen), torch.randn(6, 384, generator=gen)
    gate *= torch.logspace(-2, 3, 6)[:, None]
    weight = size * (1 + 0.3 * torch.randn(128, generator=gen))
    prep = HeadNorm(weight, 1e-6, gate, head_power(weight))
    with machine.started():
        got, powers = rows_cuda.WideRows(CPU, 384)(x, prep)
    assert powers is not None
    assert (powers == prep.power).all()
    assert (prep.power == HEAD_POWER) == (size == 1.0)
    off = (got.double() * prep.power - prep(x)).abs()
    assert (off <= 2**-10 * prep(x).abs() + 2**-24 * prep.power).all()
    assert head_power(torch.zeros(4)) == head_power(torch.tensor([1.0, torch.nan])) == HEAD_POWER


@pytest.mark.parametrize("size", [1e-5, 1.0, 1e6])
def test_normed_groups_have_one_power_whatever_their_gates_and_weights_are(
    machine: Machine, size: float
) -> None:
    """A group of zeros beside others, gates of all sizes, weights that need another power than usual ones."""
    gen = torch.Generator().manual_seed(6)
    x, gate = torch.randn(5, 768, generator=gen), torch.randn(5, 768, generator=gen)
    x[2, 256:512] = 0
    gate *= torch.logspace(-3, 3, 5)[:, None]
    weight = size * (1 + 0.3 * torch.randn(768, generator=gen))
    prep = GroupNorm(weight, 1e-6, gate, 3, norm_power(weight))
    with machine.started():
        got, powers = rows_cuda.WideRows(CPU, 768)(x, prep)
    assert (powers is None) == (prep.power == 1.0) == (size == 1.0)
    assert not got[2, 256:512].any() and (powers is None or bool((powers == prep.power).all()))
    want = prep(x).double()
    assert ((got.double() * prep.power - want).abs() <= 2**-10 * want.abs() + 2**-24 * prep.power).all()


@cases("n, n_row", emulated=[(n, 3) for n in (8, 4100, 10)], card=[(n, 7) for n in (8, 5120, 16480, 10)])
def test_the_finish_of_wide_rows_scales_and_adds(machine: Machine, n: int, n_row: int) -> None:
    gen = torch.Generator().manual_seed(3)
    y, residual = (torch.randn(n_row, n, generator=gen).to(machine.device) for _ in range(2))
    powers = torch.exp2(torch.arange(float(n_row))).to(machine.device)
    with machine.started():
        wide = rows_cuda.WideRows(machine.device, 256 if machine.name == "card" else 384)
        for p in (powers, None):
            for r in (residual, None):
                want = y * (1 if p is None else p[:, None]) + (0 if r is None else r)
                assert torch.allclose(wide.finish(y.clone(), p, r), want, rtol=1e-6)


@pytest.mark.sampled(most=1)
@cases(
    "n_q, n_kv, dim, n_rot, neox, gated, norm",
    emulated=[
        (6, 2, 256, 64, True, True, True),
        (3, 1, 64, 64, False, False, False),
        (0, 2, 128, 128, True, False, True),
        (6, 1, 96, 32, False, True, True),
    ],
    card=[
        (24, 4, 256, 64, True, True, True),
        (32, 8, 128, 128, True, False, True),
        (32, 2, 64, 64, False, False, False),
        (0, 8, 128, 128, True, False, True),
        (6, 1, 96, 32, False, True, True),
    ],
    seeds=SEEDS,
)
def test_rope_kv_equals_the_reference(
    machine: Machine,
    n_q: int,
    n_kv: int,
    dim: int,
    n_rot: int,
    neox: bool,
    gated: bool,
    norm: bool,
) -> None:
    for dtype in TYPES.values():
        spec = RopeKvSpec(
            machine.device, n_q, n_kv, dim, n_rot, neox, gated, norm, 1e-6, KvFormat.both(dtype)
        )
        assert machine.is_emulated or rope_kv_cuda.limits(spec) is None
        with machine.started():
            assert check_rope_kv(rope_kv_cuda.bind(spec), rope_kv_reference(spec), spec) is None


@pytest.mark.parametrize("kind", ["keys are values", "normed", "queries alone", "behind", "bare behind"])
def test_values_normed_or_shared_queries_alone_and_late_norms(machine: Machine, kind: str) -> None:
    spec = RopeKvSpec(CPU, 3, 0 if kind == "queries alone" else 2, 64, 32, True, False, True, 1e-6)
    spec = replace(spec, norms_v=kind != "queries alone", keys_are_values=kind == "keys are values")
    spec = replace(spec, norm_behind="behind" in kind, has_norm=kind != "bare behind")
    for kv in ("f16", "q8_0", "q4_0"):
        own = replace(spec, kv=KvFormat.named(kv))
        with machine.started(seed=1):
            assert check_rope_kv(rope_kv_cuda.bind(own), rope_kv_reference(own), own) is None


@pytest.mark.slow
@pytest.mark.parametrize("of", TYPES.values(), ids=str)
def test_keys_and_values_are_rounded_as_on_the_cpu_bit_by_bit(machine: Machine, of: KvType) -> None:
    """The cache's values decide texts: numbers of all sizes, ties between two values, and NaN."""
    kv = KvFormat.both(replace(of, turns=False))  # the pool does not turn
    spec, n = RopeKvSpec(CPU, 0, 2, 64, 0, True, False, False, 1e-6, kv), 60
    gen = torch.Generator().manual_seed(5)
    y = torch.randn(n, 256, generator=gen) * torch.logspace(-12, 8, n)[:, None]
    y[3] = (torch.arange(256) - 128) / 2  # a tie in every second code
    y[4] = (torch.arange(256) - 128) / 1024  # around the smallest f8
    y[5] = torch.arange(256) * 2.0
    y[6] = 0.0
    y[7, ::7], y[8, 1::9], y[9, 2::9] = torch.nan, torch.inf, -torch.inf
    want, got = (KVPool(n, 2, 64, spec.kv, CPU) for _ in range(2))
    want.write(torch.arange(n), y[:, :128].view(n, 2, 64), y[:, 128:].view(n, 2, 64))
    angles = (torch.ones(n, 1, 0), torch.zeros(n, 1, 0))
    with machine.started():
        rope_kv_cuda.bind(spec)(y, None, None, angles, got, torch.arange(n))
    for a, b in zip(got.planes, want.planes, strict=True):
        a, b = a.float(), b.float()
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


def rope_kv_into(machine: Machine, rows: list[int]) -> tuple[KVPool, Tensor, list[int]]:
    """A pool of 16 rows after keys and values went to `rows`; the queries; the fault record."""
    spec, n = RopeKvSpec(machine.device, 2, 1, 64, 64, True, False, False, 1e-6), len(rows)
    pool = KVPool(16, 1, 64, spec.kv, machine.device)
    one, zero = (torch.full((n, 1, 32), x, device=machine.device) for x in (1.0, 0.0))
    y, at = torch.randn(n, 256).to(machine.device), torch.tensor(rows, device=machine.device)
    with machine.started():
        q = rope_kv_cuda.bind(spec)(y, None, None, (one, zero), pool, at)
        machine.waited()
        fault = machine.faults().tolist()
        machine.faults().zero_()
    return pool, q, fault


@cases(
    "bad, seen",
    emulated=[(16, 16), (-1, -1), (1 << 40, -1), (-(1 << 40), -1), (2**31, -1)],
    card=[(1 << 40, -1)],
)
def test_a_pool_row_that_does_not_exist_is_reported_and_nothing_is_written(
    machine: Machine, bad: int, seen: int
) -> None:
    pool, q, fault = rope_kv_into(machine, [3, bad, 7])
    assert fault == [1, rope_kv_cuda.GUARD.number, 1, seen, 16]
    others = [i for i in range(16) if i not in (3, 7)]
    for t in (pool.k, pool.v):
        assert t[[3, 7]].any(-1).all() and not t[others].any()
    assert q.isfinite().all()


def test_the_first_and_the_last_pool_row_exist(machine: Machine) -> None:
    pool, _, fault = rope_kv_into(machine, [15, 0])
    assert fault == NO_FAULT
    assert pool.k[[0, 15]].any(-1).all() and not pool.k[1:15].any()


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_rows_compile_everywhere(arch: str) -> None:
    for kind in PrepKind:
        for n_in, layout in (
            (5120, rows_cuda.BLOCKED),
            (25600, rows_cuda.ROW_MAJOR),
            (17408, rows_cuda.TALL),
        ):
            macros = rows_cuda.defines(n_in, kind, 128, layout)
            compiled("rows", arch, macros)
    compiled("rows_finish", arch)


@pytest.mark.parametrize("layout", [rows_cuda.BLOCKED, rows_cuda.TALL])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120f"])
def test_rows_of_several_ctas_leave_room_for_a_product_beside_them(arch: str, layout: int) -> None:
    """Two of them, as 32 rows of 132 multiprocessors need, in half of the registers."""
    for n_in, kind in ((21504, PrepKind.GEGLU), (17408, PrepKind.PLAIN)):
        macros = rows_cuda.defines(n_in, kind, 0, layout, parts=rows_cuda.PARTS)
        found = compiled("rows", arch, macros)["rows"]
        assert 2 * found.registers * rows_cuda.threads_of(n_in, layout, rows_cuda.PARTS) <= 32768


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", ARCHS)
def test_rope_kv_compiles_everywhere(arch: str) -> None:
    for of in TYPES.values():
        spec = RopeKvSpec(CPU, 24, 4, 256, 64, True, True, True, 1e-6, KvFormat.both(of))
        compiled("rope_kv", arch, rope_kv_cuda.FILE.defines(spec))
        compiled("rope_kv", arch, rope_kv_cuda.FILE.defines(replace(spec, norm_behind=True)))


FEW = 4  # rows of the product that reads blocks
TURN = threading.Lock()  # the machine runs one launch at a time


class Product:
    """Of few rows it reads blocks, of more those of warpgroup products."""

    def __init__(self, n_in: int, most: int = 9) -> None:
        self.blocked, self.tall = RowsLaunch(CPU, n_in, (8,)), RowsLaunch(CPU, n_in, PADS, TALL)
        self.most, self.packed = most, SimpleNamespace(type=None, n_in=n_in)

    def reads(self, n_row: int) -> RowsLaunch:
        return self.blocked if n_row <= FEW else self.tall

    def most_ready(self, norm: Norm) -> int:
        return self.most


class Ranks:
    """Threads that meet: launches of one come between those of the others, and none waits for another's."""

    def __init__(self, n: int) -> None:
        self.n, self.meeting, self.parts = n, threading.Barrier(n, timeout=60), [torch.empty(0)] * n
        self.places = []
        self.layout = peer_sum.Places(n, blocks=12, place=3 * peer_sum.CHUNK)
        for _ in range(n):
            place = torch.zeros(self.layout.n_bytes // 4)
            place[: self.layout.n_number] = -0.0
            self.places.append(place)

    def of(self, rank: int) -> Any:
        kernel = emulate("peer_sum", self.layout.defines).kernel("peer_sum", peer_sum.SIGNATURE)
        late = torch.zeros(1, dtype=torch.int32)
        peers = peer_sum.PeerSum(
            kernel, kernel, rank, self.places, late, lambda: self.meeting.wait() and None
        )
        peers.layout = self.layout
        own = SimpleNamespace(peers=peers, sum=peers, gather=partial(self.gather, rank))
        own.distrust_peers = lambda: setattr(own, "peers", None)
        return own

    def gather(self, rank: int, x: Tensor) -> list[Tensor]:
        self.parts[rank] = x
        self.meeting.wait()
        found = list(self.parts)
        self.meeting.wait()
        return found

    def run(self, do: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.n) as pool:
            return [f.result() for f in [pool.submit(do, rank) for rank in range(self.n)]]


@contextmanager
def kernels() -> Iterator[None]:
    with emulated_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sum_rows, "compile_cubin", lambda stem, arch, macros: emulate(stem, macros, arch))
        launch = EmulatedKernel.launch

        def one_at_a_time(*args: Any, **how: Any) -> None:
            with TURN:
                launch(*args, **how)

        patch.setattr(EmulatedKernel, "launch", one_at_a_time)
        yield


def made(ranks: Ranks, n_in: int, most: Callable[[int], int] = lambda rank: 9) -> list[tuple[Any, Any]]:
    """Each rank, and its launch for a reader; with a sum that has no reader."""
    weight = 1 + 0.1 * torch.randn(n_in, generator=torch.Generator().manual_seed(9))

    def load(rank: int) -> tuple[Any, Any]:
        own = ranks.of(rank)
        reader: Any = (Product(n_in, most(rank)), Norm(weight, 1e-6))
        found = sum_rows.sums_into(own, [None, reader])
        assert found[0] is None
        return own, found[1]

    return ranks.run(load)


@needs_compiler
@pytest.mark.parametrize("n_rank, n_in", [slow(2, 384), (3, 2688), slow(2, 2720)])
def test_the_sum_and_the_rows_are_those_of_two_launches(n_rank: int, n_in: int) -> None:
    """Bound, which compares them in all sizes; and then as a model runs it: sums of other kinds and sizes between."""
    with kernels():
        ranks = Ranks(n_rank)
        own = made(ranks, n_in)
        gen = torch.Generator().manual_seed(1)
        for n_row in (1, 9, 4, 5, 10, 2):
            x = torch.randn(n_rank, n_row, n_in, generator=gen)
            want = x[0]
            for part in x[1:]:
                want = want + part

            def go(rank: int, x: Tensor = x, want: Tensor = want, n_row: int = n_row) -> None:
                group, into = own[rank]
                total, launch = into(x[rank].clone()), into.product.reads(n_row)
                assert torch.equal(total, want)
                rows = launch.held(total, into.norm)
                assert (rows is None) == (n_row > into.most), "more go by a sum alone"
                if rows is not None:
                    got = rows.blocks.clone()
                    assert launch.held(total, into.norm) is None, "once"
                    launch(total, into.norm)
                    assert torch.equal(got.view(torch.int16), rows.blocks.view(torch.int16))
                assert torch.equal(group.sum(x[rank]), want), "a sum alone uses the same places"

            ranks.run(go)


@pytest.mark.slow
@needs_compiler
def test_ranks_agree_on_how_many_rows_go_so() -> None:
    with kernels():
        assert [into.most for _, into in made(Ranks(2), 384, lambda rank: (9, 5)[rank])] == [5, 5]
        assert [into for _, into in made(Ranks(2), 384, lambda rank: (9, 0)[rank])] == [None, None]


@needs_compiler
def test_a_kernel_that_is_wrong_on_one_rank_is_left_out_on_all(caplog: pytest.LogCaptureFixture) -> None:
    inner = sum_rows.SumRows.__call__

    def wrong(self: sum_rows.SumRows, x: Tensor, limit: int = 0) -> Tensor:
        out = inner(self, x, limit)
        if self.peers.rank == 1:
            self.product.reads(len(x)).blocks[0] += 1
        return out

    with kernels(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sum_rows.SumRows, "__call__", wrong)
        found = made(Ranks(2), 384)
    assert [(group.peers, into) for group, into in found] == [(None, None)] * 2, (
        "numbers may lie where the next sum finds them"
    )
    assert "rank 1: 1 rows are not those of a sum and a launch behind it" in caplog.text


@needs_compiler
def test_rows_that_others_overwrote_are_not_held() -> None:
    with kernels():
        launch, x, norm = RowsLaunch(CPU, 384, (8,)), torch.randn(2, 384), Norm(torch.ones(384), 1e-6)
        launch.hold(x, norm, launch(x, norm))
        assert launch.held(x.clone(), norm) is None and launch.held(x, None) is None
        launch(x, norm)  # and this prepares rows there
        assert launch.held(x, norm) is None


@pytest.mark.parametrize("arch", ARCHS)
def test_it_compiles_for_every_architecture(arch: str) -> None:
    for n_in, n_rank, layout in ((5120, 2, BLOCKED), (3072, 2, TALL), (7168, 8, ROW_MAJOR)):
        macros = defines(n_in, PrepKind.NORM, 0, layout) | peer_sum.Places(n_rank).defines
        assert not compile_cubin("rows", arch, macros, use_cache=False).resources["rows"].spill_bytes
