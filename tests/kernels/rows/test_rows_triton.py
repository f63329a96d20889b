"""`rope_kv` and `rows` in Triton against their references, in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton_interpreter  # noqa: F401

from pyspec.cuda import faults
from pyspec.cuda.ops.rope_kv import op as rope_kv_op
from pyspec.cuda.ops.rope_kv import ref as rope_kv_ref
from pyspec.cuda.ops.rope_kv import triton as rope_kv_triton
from pyspec.cuda.ops.rope_kv.ref import RopeKvSpec
from pyspec.cuda.ops.rows import op as rows_op
from pyspec.cuda.ops.rows import triton as rows_triton
from pyspec.cuda.ops.rows.ref import PrepKind, RowsSpec
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.kv_types import TYPES

NUMBERS = [t for t in TYPES.values() if not t.is_packed]
CPU = torch.device("cpu")
GATED = RopeKvSpec(CPU, 4, 2, 64, 32, neox=True, gated=True, has_norm=True, eps=1e-6)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(
    "spec",
    [
        GATED,
        replace(GATED, n_q=0, gated=False, n_rot=64),
        replace(GATED, gated=False, norms_v=True, keys_are_values=True),
        replace(GATED, gated=False, norms_v=True, n_q=2, n_kv=1, dim=96),
        replace(GATED, gated=False, n_kv=0),
        replace(GATED, gated=False, norm_behind=True, dim=96, neox=False),
        replace(GATED, norm_behind=True, has_norm=False, norms_v=True),
        pytest.param(RopeKvSpec(CPU, 4, 2, 96, 96, neox=False, gated=False, has_norm=False, eps=1e-6), marks=pytest.mark.slow),
        pytest.param(RopeKvSpec(CPU, 2, 1, 128, 0, neox=False, gated=False, has_norm=False, eps=1e-5), marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_heads_are_normed_turned_and_kept_as_the_reference_does(spec: RopeKvSpec) -> None:
    mixed = KvFormat.named("f16", "q8_0"), KvFormat.named("f8_e4m3", "bf16")
    for kv in (*map(KvFormat.both, NUMBERS), *mixed):
        own = replace(spec, kv=kv)
        assert rope_kv_op.check(rope_kv_triton.bind(own), rope_kv_ref.bind(own), own) is None


@pytest.mark.parametrize(
    "kv",
    [*map(KvFormat.both, NUMBERS), KvFormat.named("q8_0", "f16")],
    ids=lambda kv: kv.name,
)
def test_what_is_kept_has_the_bits_of_the_pools_own_rounding(kv: KvFormat) -> None:
    """Zeros, ends of the range, beyond it, halves between two values, and NaN."""
    spec = RopeKvSpec(CPU, 0, 1, 64, 0, neox=True, gated=False, has_norm=False, eps=1e-6, kv=kv)
    gen = torch.Generator().manual_seed(0)
    y = torch.randn(6, 128, generator=gen) * torch.logspace(-6, 3, 6)[:, None]
    y[0, :40] = 0.0
    y[1, 3], y[2, 70], y[3, 5], y[4, 100] = torch.nan, 1e30, 0.0068359375, -448.0
    y[3, 64:96] = torch.arange(32) * 0.5 * 2.0**-9
    pools = [KVPool(8, 1, 64, kv, CPU) for _ in "ab"]
    none, rows = torch.zeros(6, 1, 0), torch.tensor([5, 0, 7, 2, 3, 1])
    for op, pool in zip((rope_kv_triton, rope_kv_ref), pools, strict=True):
        op.bind(spec)(y, None, None, (none, none), pool, rows)
    for got, want in zip(pools[0].planes, pools[1].planes, strict=True):
        if got.dtype is torch.float8_e4m3fn:
            got, want = (t.view(torch.uint8).masked_fill(t.float().isnan(), 0x7F) for t in (got, want))
        assert torch.equal(got.nan_to_num(3.0), want.nan_to_num(3.0))


@pytest.mark.parametrize("row", [-1, 1 << 40, 40])
def test_a_row_out_of_the_pool_is_reported_and_nothing_is_written_for_it(row: int) -> None:
    spec = replace(GATED, n_q=0, n_kv=1, gated=False)
    pool, angle, norm = KVPool(40, 1, 64, spec.kv, CPU), torch.zeros(2, 1, 16), torch.ones(64)
    rope_kv_triton.bind(spec)(
        torch.ones(2, 128), None, norm, (angle, angle), pool, torch.tensor([row, 3])
    )
    fault = faults.record(CPU)
    tripped = fault.tolist()
    fault.zero_()
    assert tripped == [1, rope_kv_triton.GUARD.number, 0, row if row == 40 else -1, 40]
    assert pool.v[3].any() and not pool.v[:3].any() and not pool.v[4:].any()


@pytest.mark.parametrize(
    "spec",
    [
        RowsSpec(CPU, 512, PrepKind.NORM),
        RowsSpec(CPU, 96, PrepKind.PLAIN),
        RowsSpec(CPU, 512, PrepKind.HEADS, 128),
        RowsSpec(CPU, 512, PrepKind.GATE, 64),
        RowsSpec(CPU, 320, PrepKind.GLU),
        RowsSpec(CPU, 320, PrepKind.GEGLU),
        RowsSpec(CPU, 512, PrepKind.GROUPS, 128),
        RowsSpec(CPU, 96, PrepKind.RELU2),
    ],
    ids=lambda spec: spec.kind.name,
)
def test_rows_are_prepared_as_the_reference_does(spec: RowsSpec) -> None:
    launch = rows_triton.bind(spec)
    assert rows_op.check(launch, rows_op._reference(spec), spec) is None
    x, prep = rows_op.make(spec, 3, torch.Generator().manual_seed(1))
    if prep is not None:
        assert torch.allclose(launch.full(x, prep), prep(x), rtol=1e-5, atol=1e-6)
    zeros, powers = (
        launch(torch.zeros(1, x.shape[1]))[:2]
        if spec.kind is PrepKind.PLAIN
        else (torch.zeros(1), torch.ones(1))
    )
    assert not zeros.any() and powers.tolist() == [1.0]
