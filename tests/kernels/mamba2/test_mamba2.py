"""`mamba2`: states however tokens came, the check, and mamba2_chunk.cu against the reference in float64, for every architecture (its common part with gdn: ../recurrent)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from machines import CPU, Machine, cases, compiled, same
from recurrent_cases import Op, follow, kept, played, seq, verified
from sampling import few
from torch import Tensor

from pyspec.cuda import jit
from pyspec.cuda.ops.mamba2 import chunk as mamba2_chunk
from pyspec.cuda.ops.mamba2 import cuda as mamba2_cuda
from pyspec.cuda.ops.mamba2 import ref as mamba2_ref
from pyspec.cuda.ops.mamba2.ref import Mamba2Spec, Params
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.cuda.ops.recurrent import launch as common
from pyspec.cuda.ops.rope_kv import cuda as rope_kv_cuda
from pyspec.cuda.ops.rope_kv.ref import RopeKvSpec
from pyspec.slots.batch import Seq
from pyspec.slots.kv import KvFormat
from pyspec.slots.kv_types import type_of
from pyspec.slots.recurrent import StateLayer

SMALL_SHAPES = [
    Mamba2Shape(4, 16, 2, 16, 4),
    Mamba2Shape(8, 64, 2, 128, 4),
    Mamba2Shape(6, 32, 3, 96, 3),
]


def op_of(shape: Mamba2Shape) -> Op:
    return Op(shape, kernels=mamba2_ref)


@pytest.mark.parametrize("shape", SMALL_SHAPES)
def test_a_state_is_bit_equal_however_its_tokens_came(shape: Mamba2Shape) -> None:
    plans = *map(verified, ((12,), (1,) * 12, (5, 1, 6), (2, 8, 2))), kept(*[1] * 12)
    assert same(*(played(op_of(shape), plan, 13, 12) for plan in plans))


@pytest.mark.parametrize("shape", SMALL_SHAPES)
def test_chunks_give_the_sequential_state_to_rounding(shape: Mamba2Shape) -> None:
    whole, single = (played(op_of(shape), plan, 150, 12) for plan in (kept(150), kept(*[1] * 150)))
    for a, b in zip(whole, single, strict=True):
        assert (a - b).norm() < 1e-5 * b.norm()


@pytest.mark.parametrize("shape", SMALL_SHAPES)
def test_the_formulas_in_f64_agree(shape: Mamba2Shape) -> None:
    """The recurrence written out once more, head by head."""
    n, op = 9, op_of(shape)
    (p,), (m, dt) = op.weights(), (t.double() for t in op.rows(n, torch.Generator().manual_seed(2)))
    before = torch.cat([torch.zeros(shape.n_conv - 1, shape.n_channel), m])
    v = sum(before[t : t + n] * p.conv_w[:, t] for t in range(shape.n_conv)) + p.conv_b
    v = v * torch.sigmoid(v)
    inner, wide = shape.n_head * shape.head_dim, shape.n_group * shape.n_state
    out = torch.zeros(n, shape.n_head, shape.head_dim, dtype=torch.float64)
    for h in range(shape.n_head):
        x = v[:, h * shape.head_dim : (h + 1) * shape.head_dim]
        g = h // (shape.n_head // shape.n_group)
        b, c = (v[:, at + g * shape.n_state :][:, : shape.n_state] for at in (inner, inner + wide))
        state = torch.zeros(shape.head_dim, shape.n_state, dtype=torch.float64)
        for t in range(n):
            step = torch.log1p(torch.exp(dt[t, h] + p.dt_bias[h]))
            state = state * torch.exp(step * p.a[h]) + torch.outer(step * x[t], b[t])
            out[t, h] = state @ c[t] + p.d[h] * x[t]
    got = played(op, verified([9]), n, 12, folds=True)[0]
    assert (got.double() - out).norm() < 1e-6 * out.norm()


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("raw", [50.0, -50.0, 1e4, -1e30])
def test_extreme_steps_forget_all_or_nothing_and_never_give_nan(keep: bool, raw: float) -> None:
    op = op_of(SMALL_SHAPES[0])
    launch, layer, (m, dt), (p,) = op.bind(), op.layer(1, 40), op.rows(40), op.weights()
    layer.state.normal_()
    old = layer.state.clone()
    dt[:] = raw
    out = launch(m, dt, p, layer, op.laid([seq(0, 40, keep)], 1))
    mamba2_ref.flush(layer, 0, 0 if keep else 40)
    assert out.isfinite().all() and layer.state.isfinite().all()
    if raw < 0:
        assert torch.allclose(layer.state, old)
    else:
        spoilt, want = op.layer(1, 40), layer.state.clone()
        spoilt.state.fill_(1e6)
        launch(m, dt, replace(p, a=p.a.clamp(max=-5.0)), spoilt, op.laid([seq(0, 40, True)], 1))
        assert spoilt.state.abs().max() < 10 * want.abs().max() + 1e3 * raw


def test_one_token_that_forgets_all_does_not_blur_the_decays_after_it() -> None:
    """In chunks decays are differences of sums: a log decay of -1e6 among them must not cost the others their digits."""
    op, results = op_of(SMALL_SHAPES[0]), []
    (m, dt), (p,) = op.rows(64), op.weights()
    dt[3] = 3e3  # times a of down to -300
    for cuts in ((64,), (1,) * 64):
        launch, layer, at = op.bind(), op.layer(1, 4), 0
        for n in cuts:
            launch(m[at : at + n], dt[at : at + n], p, layer, op.laid([seq(0, n, True)], 1))
            at += n
        results.append(layer.state)
    assert (results[0] - results[1]).norm() < 1e-5 * results[1].norm()


# -- the op's own check ----------------------------------------------------------------------------------------------


def checked(change: Callable[[Tensor, StateLayer], None]) -> str | None:
    """The check's answer on the reference with `change(outputs, layer)`."""
    spec = Mamba2Spec(CPU, SMALL_SHAPES[0])
    reference = mamba2_ref.bind(spec)

    def launch(*args: object) -> Tensor:
        out = reference(*args)  # type: ignore[arg-type]
        change(out, args[3])  # type: ignore[arg-type]
        return out

    return mamba2_ref.check(launch, reference, spec)


def test_the_check_lets_the_reference_pass_and_nothing_that_is_off() -> None:
    assert checked(lambda out, layer: None) is None
    assert "outputs differ" in (checked(lambda out, layer: out[-1, -1].mul_(1.01)) or "")
    assert "outputs differ" in (checked(lambda out, layer: out[0, 0, :1].fill_(float("nan"))) or "")
    assert "states differ" in (checked(lambda out, layer: layer.dt[:, -1].add_(0.1)) or "")
    assert checked(lambda out, layer: layer.state.mul_(1.001)) is not None
    assert checked(lambda out, layer: layer.conv[:, 0].add_(0.1)) is not None


SHAPE = Mamba2Shape(4, 64, 1, 128, 4)
SMALL, NANO = Mamba2Shape(8, 64, 2, 128, 4), Mamba2Shape(64, 64, 8, 128, 4)
PUZZLE = Mamba2Shape(128, 64, 8, 96, 4)
PROMPTS = [
    [seq(0, 64, True), seq(2, 3), seq(3, 63, True)],
    [seq(2, 65, True, fold=2), seq(0, 130, True), seq(1, 6), seq(3, 2, True)],
    [seq(1, 129, True, fold=6), seq(3, 127, True), seq(0, 4, True), seq(2, 1)],
]
PROMPTS_OF_A_CARD = [
    [seq(0, 129, True), seq(2, 5), seq(1, 128, True)],
    [seq(2, 300, True, fold=4), seq(1, 3), seq(0, 191, True)],
    [seq(1, 577, True, fold=2)],
]
SHAPES = {
    "128 columns": (SHAPE, (9, 0), (64, 64)),
    "groups of 96": (Mamba2Shape(4, 64, 4, 96, 4), (9, 0), (64, 64)),
    "narrow": (Mamba2Shape(8, 32, 4, 32, 4), (9, 0), (64, 32)),
    "wide heads": (Mamba2Shape(4, 128, 2, 64, 4), (9, 0), (64, 64)),
    "chunks of 32": (SHAPE, (8, 6), (32, 32)),
}


def chunked(shape: Mamba2Shape, of: int = 63) -> Op:
    return Op(shape, how={"columns": 2, "chunked": of})


@pytest.mark.sampled(1)
@pytest.mark.sampled(most=1)
@cases("name", emulated=SHAPES, seeds=(0, 1))
def test_chunked_prompts_follow_the_reference(machine: Machine, name: str) -> None:
    """Beside sequences that are not chunked, with records to fold and without."""
    shape, capability, cut = SHAPES[name]
    assert mamba2_chunk.cut(shape, jit.arch_of(capability)) == cut
    follow(chunked(shape), machine, PROMPTS, lambda _: 1e-3, 3e-6, by_head=True, capability=capability)


@pytest.mark.sampled(1)
@pytest.mark.sampled(most=1)
@cases(
    "capability, lengths, size",
    emulated=[
        ((9, 0), [(63, 64, 65), (127, 128, 129), (4, 5, 300)], 64),
        ((8, 6), [(31, 32, 33), (63, 64, 65), (95, 97, 4)], 32),
    ],
    slow=True,
)
def test_lengths_around_the_ends_of_chunks_follow_the_reference(
    machine: Machine, capability: tuple[int, int], lengths: list[tuple[int, ...]], size: int
) -> None:
    shape = Mamba2Shape(4, 32, 4, 128, 4)
    assert mamba2_chunk.cut(shape, jit.arch_of(capability))[0] == size
    rounds = [[seq(i, n, True) for i, n in enumerate(group)] for group in lengths]
    op = chunked(shape, 4)
    follow(op, machine, rounds, lambda _: 1e-3, 3e-6, by_head=True, capability=capability)


# -- rows and parameters that make chunked sums hard ----------------------------------------------------------------

Hostile = Callable[[Tensor, Tensor, Params], Params | None]


def equal_directions(m: Tensor, dt: Tensor, p: Params) -> Params:
    """Nothing is forgotten, either."""
    inner = dt.shape[1] * 64
    m[:, inner:] = m[:1, inner:] + 0.01 * m[:, inner:]
    return replace(p, a=torch.full_like(p.a, -1e-7))


def nothing_forgotten(m: Tensor, dt: Tensor, p: Params) -> Params:
    return replace(p, a=torch.full_like(p.a, -1e-7))


def steps_next_to_nothing(m: Tensor, dt: Tensor, p: Params) -> None:
    dt.sub_(30)


def steps_of_50(m: Tensor, dt: Tensor, p: Params) -> None:
    dt.add_(50)


def forgets_all_now_and_then(m: Tensor, dt: Tensor, p: Params) -> Params:
    now = torch.rand(dt.shape, generator=torch.Generator().manual_seed(7)) < 0.1
    dt.copy_(torch.where(now, 50.0, -12.0))
    return replace(p, a=torch.full_like(p.a, -300.0))


def scaled(x: Tensor, low: int, dim: int) -> None:
    """By powers of ten up to 1e6, drawn along a dimension."""
    n = x.shape[dim]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(7))
    x.mul_(torch.logspace(low, 6, n)[order].to(x.device).unsqueeze(1 - dim))


def sizes_from_1e_8_to_1e6(m: Tensor, dt: Tensor, p: Params) -> None:
    scaled(m, -8, 1)


def rows_from_1e_6_to_1e6(m: Tensor, dt: Tensor, p: Params) -> None:
    scaled(m, -6, 0)


def loud(m: Tensor, dt: Tensor, p: Params) -> None:
    m.mul_(3000)


def quiet(m: Tensor, dt: Tensor, p: Params) -> Params:
    m.mul_(1e-9)
    return replace(p, conv_b=torch.zeros_like(p.conv_b))


def ordinary(m: Tensor, dt: Tensor, p: Params) -> None:
    """As they are."""


@pytest.mark.sampled(1)
@pytest.mark.sampled(most=1)
@cases(
    "op, rounds, kind, states",
    emulated=[
        (chunked(Mamba2Shape(4, 64, 2, 64, 4)), [[seq(1, 270, True), seq(3, 66, True)]], kind, 1e-5)
        for kind in (
            equal_directions,
            steps_next_to_nothing,
            steps_of_50,
            forgets_all_now_and_then,
            sizes_from_1e_8_to_1e6,
            rows_from_1e_6_to_1e6,
            loud,
            quiet,
        )
    ],
    card=[
        *(
            (Op(shape), PROMPTS_OF_A_CARD, ordinary, 3e-5)
            for shape in (NANO, PUZZLE, SMALL, Mamba2Shape(8, 32, 4, 32, 4), Mamba2Shape(8, 128, 4, 64, 4))
        ),
        *(
            (Op(SMALL), PROMPTS_OF_A_CARD, kind, 3e-5)
            for kind in (nothing_forgotten, steps_next_to_nothing, forgets_all_now_and_then, rows_from_1e_6_to_1e6, loud)
        ),
    ],
)  # fmt: skip
def test_chunked_prompts_follow_the_reference_on_hostile_rows(
    machine: Machine, op: Op, rounds: Sequence[Sequence[Seq]], kind: Hostile, states: float
) -> None:
    def spoilt(rows: list[Tensor], weights: list[Any]) -> tuple[list[Tensor], list[Any]]:
        return rows, [kind(*rows, *weights) or weights[0]]

    follow(op.on(machine), machine, rounds, lambda _: 1e-3, states, spoilt)


@pytest.mark.sampled(1)
@cases()
def test_slots_of_nobody_and_records_are_not_touched_by_a_prompt(machine: Machine) -> None:
    op = chunked(SHAPE).on(machine)
    layer, others = op.unwritten(), [0, 2, 3]
    for t in layer.tensors():
        t[others] = torch.nan
    with machine.started():
        got = op.bind()(*op.rows(70), *op.weights(), layer, op.laid([seq(1, 70, True)]))
    assert all(x.isfinite().all() for x in (got, layer.state[1], op.window(layer, 1)))
    assert all(t[others].isnan().all() for t in layer.tensors())
    assert all(t.isnan().all() for t in (*layer.records(), layer.conv[:, 3:]))


SUPER = Mamba2Shape(128, 64, 8, 128, 4)


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", jit.ARCHS)
def test_kernels_compile_without_spills_and_leave_room_for_the_blocks_they_count_on(arch: str) -> None:
    for columns in common.COLUMNS:
        found = compiled("mamba2", arch, mamba2_cuda.defines(SUPER, arch, columns))
        assert set(found) == {"mamba2_conv", "mamba2_rows"}
        assert all(r.shared_bytes <= 48 * 1024 for r in found.values()), found
        assert (
            found["mamba2_rows"].registers * common.THREADS * common.blocks_for(arch, columns) <= 65536
        ), found


@pytest.mark.slow
@pytest.mark.parametrize("arch", few(jit.ARCHS, "sm_90a"))
def test_kernels_of_prompts_compile_without_spills_and_fit_their_multiprocessors(arch: str) -> None:
    for shape, narrowed in ((SUPER, False), (NANO, False), (NANO, True), (PUZZLE, False)):
        chunk, most = mamba2_chunk.cut(shape, arch)
        rows = 32 if narrowed else most
        made = mamba2_chunk.defines(shape, chunk, rows)
        found = compiled("mamba2_chunk", arch, made)
        assert set(found) == {"mamba2_chunk_group", "mamba2_chunk_state"}
        group = mamba2_chunk.group_shared(shape, chunk) + found["mamba2_chunk_group"].shared_bytes
        assert mamba2_chunk.shared_for(shape, chunk, rows) <= mamba2_chunk.shared_limit(arch)
        # Two blocks, and the driver's share of each
        assert 2 * (group + 1024) <= mamba2_chunk.shared_limit(arch) + 1024
        assert found["mamba2_chunk_state"].registers * 4 * rows <= 65536
        assert found["mamba2_chunk_group"].registers * mamba2_chunk.GROUP_THREADS * 2 <= 65536


def test_blocks_of_prompts_are_as_large_as_they_may_be_and_narrow_for_few_heads() -> None:
    cuts = [
        mamba2_chunk.cut(s, arch) for s in (SUPER, PUZZLE) for arch in ("sm_90a", "sm_80", "sm_120f")
    ]
    assert cuts == [(64, 64), (32, 64), (32, 32), (64, 64), (64, 64), (32, 64)]
    assert [mamba2_chunk.narrow(s, n, 132) for s, n in ((SUPER, 1), (NANO, 1), (NANO, 2))] == [False, True, False]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", few([NANO, PUZZLE, Mamba2Shape(8, 32, 4, 32, 4), Mamba2Shape(4, 128, 2, 64, 4)], PUZZLE)
)
def test_kernels_of_other_shapes_compile_without_spills(shape: Mamba2Shape) -> None:
    for columns in mamba2_cuda.columns_of(shape):
        compiled("mamba2", "sm_90a", mamba2_cuda.defines(shape, "sm_90a", columns))
    made = mamba2_chunk.defines(shape, *mamba2_chunk.cut(shape, "sm_90a"))
    compiled("mamba2_chunk", "sm_90a", made)


def test_a_lane_takes_four_columns_where_that_saves_a_wave() -> None:
    assert [mamba2_cuda.columns_for(SUPER, n, "sm_90a", 132) for n in (1, 2, 3, 4, 5, 8)] == [2, 2, 4, 4, 2, 2]  # fmt: skip


@pytest.mark.parametrize("arch", jit.ARCHS)
def test_heads_that_do_not_turn_compile(arch: str) -> None:
    spec = RopeKvSpec(
        torch.device("cuda"), 32, 2, 128, 0, neox=False, gated=False, has_norm=False, eps=1e-5
    )
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        macros = rope_kv_cuda.FILE.defines(replace(spec, kv=KvFormat.both(type_of(dtype))))
        compiled("rope_kv", arch, macros)
