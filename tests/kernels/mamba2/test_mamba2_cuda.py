"""mamba2_chunk.cu against the reference in float64: prompts in chunks (what mamba2 shares with gdn: ../recurrent)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from machines import Machine, cases
from recurrent_cases import Op, follow, seq
from torch import Tensor

from pyspec.cuda import jit
from pyspec.cuda.ops.mamba2 import chunk as mamba2_chunk
from pyspec.cuda.ops.mamba2.ref import Params
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.slots.batch import Seq

pytestmark = pytest.mark.sampled(1)
SHAPE = Mamba2Shape(4, 64, 1, 128, 4)
SMALL, NANO, PUZZLE = (
    Mamba2Shape(8, 64, 2, 128, 4),
    Mamba2Shape(64, 64, 8, 128, 4),
    Mamba2Shape(128, 64, 8, 96, 4),
)
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


@pytest.mark.sampled(most=1)
@cases("name", emulated=SHAPES, seeds=(0, 1))
def test_chunked_prompts_follow_the_reference(machine: Machine, name: str) -> None:
    """Beside sequences that are not chunked, with records to fold and without."""
    shape, capability, cut = SHAPES[name]
    assert mamba2_chunk.cut(shape, jit.arch_of(capability)) == cut
    follow(chunked(shape), machine, PROMPTS, lambda _: 1e-3, 3e-6, by_head=True, capability=capability)


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
