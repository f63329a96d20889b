"""Rows and rope_kv on a GPU against their references: every kind, layout, odd sizes, bad pool rows."""

import pytest
import torch

from pyspec.cuda import faults
from pyspec.cuda.ops.linear.wgmma import blocks_for_wgmma
from pyspec.cuda.ops.rope_kv import cuda as rope_kv_cuda
from pyspec.cuda.ops.rope_kv.op import check as check_rope_kv
from pyspec.cuda.ops.rope_kv.ref import RopeKvSpec
from pyspec.cuda.ops.rope_kv.ref import bind as rope_kv_reference
from pyspec.cuda.ops.rows import cuda as rows_cuda
from pyspec.cuda.ops.rows.op import check, make, rows
from pyspec.cuda.ops.rows.ref import PrepKind, RowsSpec
from pyspec.slots.kv import KvFormat, KVPool
from pyspec.slots.kv_types import TYPES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda", 0)


def specs(n_in: int) -> list[RowsSpec]:
    dims = {PrepKind.HEADS: 128, PrepKind.GATE: 256, PrepKind.GROUPS: 256}
    return [RowsSpec(CUDA, n_in, kind, dims.get(kind, 0)) for kind in PrepKind]


@pytest.mark.parametrize("n_in", [256, 5120, 6144, 17408, 25600])
@pytest.mark.parametrize("kind", list(PrepKind))
def test_row_major_rows_equal_the_reference(n_in: int, kind: PrepKind) -> None:
    spec = specs(n_in)[kind]
    assert rows_cuda.limits(spec) is None
    assert check(rows_cuda.WideRows(CUDA, n_in), rows.reference.bind(spec), spec) is None


@pytest.mark.parametrize(
    ("n_in", "kind"),
    [(n_in, kind) for n_in in (256, 5120, 17408) for kind in PrepKind]
    + [(288, k) for k in (PrepKind.PLAIN, PrepKind.NORM, PrepKind.GLU)],
)
def test_blocks_hold_the_same_values(n_in: int, kind: PrepKind) -> None:
    spec = specs(n_in)[kind]
    assert rows_cuda.limits(spec) is None
    x, prep = make(spec, 5, torch.Generator().manual_seed(1))
    launch = rows_cuda.RowsLaunch(CUDA, n_in, (8, 16))
    launch.blocks.fill_(torch.nan)
    got = launch(x, prep)
    n_block = -(-n_in // 256) * 8
    blocks = got.blocks[: n_block * 8 * 32].view(n_block, 8, 4, 2, 4)[
        :, :5
    ]  # column 16 h + 4 i + j at [i, h, j]
    flat = blocks.permute(1, 0, 3, 2, 4).reshape(5, -1)
    want, power = rows_cuda.WideRows(CUDA, n_in)(x, prep)
    assert torch.equal(flat[:, :n_in], want) and not flat[:, n_in:].any()
    sums = got.sums[: n_block * 8].view(n_block, 8)[:, :5].T
    assert torch.allclose(sums, flat.float().view(5, n_block, 32).sum(-1), rtol=1e-4, atol=1e-4)
    assert power is None or torch.equal(got.powers[:5], power)


@pytest.mark.parametrize("n_in", [256, 320, 5120, 17408])
@pytest.mark.parametrize("kind", [PrepKind.PLAIN, PrepKind.NORM, PrepKind.GLU])
def test_rows_for_warpgroup_products_stand_where_the_torch_function_puts_them(
    n_in: int, kind: PrepKind
) -> None:
    x, prep = make(RowsSpec(CUDA, n_in, kind), 37, torch.Generator().manual_seed(4))
    launch = rows_cuda.RowsLaunch(CUDA, n_in, (64, 96), rows_cuda.TALL)
    got = launch(x, prep)
    want = blocks_for_wgmma(rows_cuda.WideRows(CUDA, n_in)(x, prep)[0], got.pad).view(-1, got.pad, 64)
    assert torch.equal(got.blocks[: want.numel()].view_as(want)[:, :37], want[:, :37])


def test_a_norm_of_huge_weights_has_a_power() -> None:
    spec = RowsSpec(CUDA, 512, PrepKind.NORM)
    x, prep = make(spec, 3, torch.Generator().manual_seed(2))
    big = type(prep)(prep.weight * 1e6, 1e-6)  # type: ignore[union-attr, call-arg]
    got, power = rows_cuda.WideRows(CUDA, 512)(x, big)  # type: ignore[arg-type]
    assert power is not None and big.power > 1e5
    assert torch.allclose(got.float() * power[:, None], big(x), rtol=2e-3, atol=2e3)  # type: ignore[operator]


def test_the_finish_of_wide_rows_scales_and_adds() -> None:
    gen = torch.Generator().manual_seed(3)
    wide = rows_cuda.WideRows(CUDA, 256)
    for n in (8, 5120, 16480, 10):
        y, residual = (torch.randn(7, n, generator=gen).to(CUDA) for _ in range(2))
        powers = torch.exp2(torch.arange(7.0)).to(CUDA)
        for p in (powers, None):
            for r in (residual, None):
                want = y * (1 if p is None else p[:, None]) + (0 if r is None else r)
                assert torch.allclose(wide.finish(y.clone(), p, r), want, rtol=1e-6)


@pytest.mark.parametrize(
    ("n_q", "n_kv", "dim", "n_rot", "neox", "gated", "norm"),
    [
        (24, 4, 256, 64, True, True, True),
        (32, 8, 128, 128, True, False, True),
        (32, 2, 64, 64, False, False, False),
        (0, 8, 128, 128, True, False, True),
        (6, 1, 96, 32, False, True, True),
    ],
)
def test_rope_kv_is_the_references(
    n_q: int, n_kv: int, dim: int, n_rot: int, neox: bool, gated: bool, norm: bool
) -> None:
    for dtype in TYPES.values():
        spec = RopeKvSpec(CUDA, n_q, n_kv, dim, n_rot, neox, gated, norm, 1e-6, KvFormat.both(dtype))
        assert rope_kv_cuda.limits(spec) is None
        assert check_rope_kv(rope_kv_cuda.bind(spec), rope_kv_reference(spec), spec) is None


def test_a_pool_row_that_does_not_exist_is_reported() -> None:
    spec = RopeKvSpec(CUDA, 2, 1, 64, 64, True, False, False, 1e-6)
    pool = KVPool(16, 1, 64, spec.kv, CUDA)
    angles = (torch.ones(2, 1, 32, device=CUDA), torch.zeros(2, 1, 32, device=CUDA))
    faults.record(CUDA).zero_()
    rope_kv_cuda.bind(spec)(
        torch.randn(2, 256, device=CUDA),
        None,
        None,
        angles,
        pool,
        torch.tensor([3, 1 << 40], device=CUDA),
    )
    assert faults.record(CUDA).tolist() == [1, rope_kv_cuda.OP_ID, 1, -1, 16]
    faults.record(CUDA).zero_()
    assert pool.k[3].any() and not pool.k[4:].any()
