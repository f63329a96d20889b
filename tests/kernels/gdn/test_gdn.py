"""gdn.cu and gdn_chunk.cu against the reference in float64 and themselves to the bit, for every architecture; the check (what gdn shares with mamba2: ../recurrent)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from machines import CPU, NO_FAULT, ON_CARD, Machine, cases, compiled, filled, off, same
from recurrent_cases import (
    EPS,
    KEEP,
    N_SLOT,
    Exact,
    Op,
    follow,
    gdn_shape,
    n_rows,
    seq,
    with_nobody,
)
from sampling import slow
from torch import Tensor

from pyspec.cuda import jit
from pyspec.cuda.ops.gdn import chunk as gdn_chunk
from pyspec.cuda.ops.gdn import cuda as gdn_cuda
from pyspec.cuda.ops.gdn import ref as gdn_ref
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.recurrent import launch as common
from pyspec.cuda.ops.rows.cuda import GatedRowBuffer, Rows, RowsLaunch
from pyspec.cuda.ops.rows.ref import HeadNorm
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Seq, lay_out
from pyspec.slots.table import SlotTable

pytestmark = pytest.mark.sampled(1)


SPEC = gdn_ref.GdnSpec(torch.device("cpu"), GdnShape(2, 6, 32, 4, 10 * 32), 1e-6)


def checked(change: Callable[[Tensor, int], Tensor]) -> str | None:
    """The check's answer on the reference with `change(outputs, rows of the longest sequence)`."""
    reference = gdn_ref.bind(SPEC)

    def launch(*args: object) -> Tensor:
        return change(reference(*args), max(s.width for s in args[-1].seqs))  # type: ignore[arg-type,attr-defined]

    return gdn_ref.check(launch, reference, SPEC)


def noise(size: float, *, prompts: bool) -> Callable[[Tensor, int], Tensor]:
    """Errors of `size` of a row's length, as sums of rounded products have them."""

    def change(out: Tensor, width: int) -> Tensor:
        if (width > 6) != prompts:
            return out
        return out + size * torch.randn(out.shape) * out.square().mean(-1, keepdim=True).sqrt()

    return change


def test_a_prompt_may_be_rounded_to_f16_in_its_outputs_but_a_verify_may_not() -> None:
    assert checked(lambda out, width: out) is None
    assert checked(noise(4e-4, prompts=True)) is None
    assert "outputs differ" in (checked(noise(3e-3, prompts=True)) or "")
    assert "outputs differ" in (checked(noise(3e-2, prompts=False)) or "")


@pytest.mark.parametrize("bad", [float("nan"), 1e4])
@pytest.mark.parametrize("prompts", [True, False])
@pytest.mark.sampled
def test_one_wild_output_is_enough(bad: float, prompts: bool) -> None:
    def change(out: Tensor, width: int) -> Tensor:
        if (width > 6) == prompts:
            out[-1, -1, -1] = bad
        return out

    assert "outputs differ" in (checked(change) or "")


SEEDS = (0, 1)
NEVER = common.NEVER


def op_of(n_k: int, n_v: int, grouped: bool = False, **how: int) -> Op:
    return Op(replace(gdn_shape(n_k, n_v), grouped=grouped), how=how)


def by_key(n_head: int, floor: float = 0.0, **how: int) -> Op:
    return Op(gdn_shape(n_head, n_head, by_key=True, floor=floor), how=how)


ROUNDS = [
    [seq(0, 5, True), seq(2, 1), seq(3, 3, True)],
    [seq(0, 6), seq(2, 3, fold=1), seq(3, 1)],
    [seq(2, 1, fold=3), seq(0, 2, fold=1), seq(1, 4, True), seq(3, 6, fold=1)],
    [seq(3, 1, True, fold=6), seq(0, 2, True, fold=2), seq(2, 6, fold=0), seq(1, 1)],
    [seq(3, 1, late=True), seq(1, 2, fold=1, late=True), seq(0, 1, late=True)],
    [seq(0, 1, fold=1, late=True), seq(3, 2, fold=1, late=True), seq(1, 1, fold=3, late=True)],
    [seq(0, 1, fold=2, late=True), seq(3, 6, fold=3), seq(1, 1, True, fold=4)],
    [seq(0, 1, fold=3), seq(1, 1, late=True)],
    [seq(1, 66, True, fold=1), seq(2, 25, True, fold=6), seq(0, 6)],
    [seq(0, 9, True, fold=6), seq(1, 1, True), seq(2, 6), seq(3, 2, True)],
]
ROUNDS_OF_A_CARD = [
    *ROUNDS[:4],
    [seq(1, 200, True, fold=1), seq(2, 70, True, fold=6), seq(0, 6)],
    [seq(0, 9, True, fold=6), seq(1, 1, True), seq(2, 6), seq(3, 2, True)],
]
PROMPTS = [
    [seq(0, 64, True), seq(2, 3), seq(3, 63, True)],
    [seq(2, 65, True, fold=2), seq(0, 130, True), seq(1, 6), seq(3, 2, True)],
    [seq(1, 72, True, fold=6), seq(3, 64, True)],
]
PROMPTS_OF_A_CARD = [
    [seq(0, 64, True), seq(2, 3), seq(3, 63, True)],
    [seq(2, 65, True, fold=2), seq(0, 300, True), seq(1, 6), seq(3, 2, True)],
    [seq(1, 129, True, fold=6), seq(3, 128, True), seq(0, 191, True), seq(2, 64, True)],
]


def within(chunked: int) -> Any:
    """Outputs of prompts in chunks may be off by f16's rounding."""
    return lambda seqs: 1e-3 if max(s.width for s in seqs) >= chunked else 1e-5


@pytest.mark.sampled(1, most=1)
@cases(
    "op, rounds",
    emulated=[
        (op_of(*heads, columns=columns, chunked=NEVER), ROUNDS)
        for heads, columns in (((1, 1), 2), ((2, 4), 4))
    ]
    + [(by_key(1, columns=2), ROUNDS), (by_key(2, -5.0, columns=4), ROUNDS)],
    card=[
        (op_of(*heads, columns=columns), ROUNDS_OF_A_CARD)
        for heads in ((1, 1), (2, 6), (3, 3), (16, 48))
        for columns in common.COLUMNS
    ]
    + [(by_key(n, floor), ROUNDS_OF_A_CARD) for n, floor in ((4, -5.0), (32, 0.0))],
    seeds=SEEDS,
)
def test_ragged_rounds_follow_the_reference(
    machine: Machine, op: Op, rounds: Sequence[Sequence[Seq]]
) -> None:
    chunked = op.how.get("chunked", common.CHUNKED)
    follow(op.on(machine), machine, rounds, within(chunked), 3e-5, states_by_head=False)


@cases(
    "op, rounds, capability",
    emulated=[
        (op_of(1, 2, columns=2, chunked=63), PROMPTS, (9, 0)),
        # One stage of keys, as on GPUs with less shared memory
        (op_of(2, 2, columns=2, chunked=63), PROMPTS, (8, 6)),
    ],
    card=[
        (op_of(*heads, chunked=64), PROMPTS_OF_A_CARD, (9, 0))
        for heads in ((1, 1), (1, 5), (2, 6), (16, 48))
    ],
    seeds=SEEDS,
    slow=True,
)
def test_chunked_prompts_follow_the_reference(
    machine: Machine, op: Op, rounds: Sequence[Sequence[Seq]], capability: tuple[int, int]
) -> None:
    # Heads that forget at once have next to nothing in their states
    follow(
        op.on(machine), machine, rounds, within(63), 3e-5, states_by_head=False, capability=capability
    )


def equal_keys_and_nothing_forgotten(rows: list[Tensor], w: list[Any]) -> Any:
    (m, alpha, beta), kd = rows, 2 * 128
    m[:, kd : 2 * kd] = m[:1, kd : 2 * kd] + 0.01 * m[:, kd : 2 * kd]
    return [m, alpha, beta.add_(30)], [torch.zeros_like(w[0]), *w[1:]]


def forgets_at_once_now_and_then(rows: list[Tensor], w: list[Any]) -> Any:
    m, alpha, beta = rows
    now = torch.rand(alpha.shape, generator=torch.Generator().manual_seed(7)) < 0.2
    alpha.copy_(alpha.where(now.to(alpha.device), -30.0))
    return [m, alpha, beta], [torch.full_like(w[0], -1e4), *w[1:]]


def values_of_all_sizes(rows: list[Tensor], w: list[Any]) -> Any:
    v = rows[0][:, 2 * 2 * 128 :]
    v.mul_(torch.logspace(-8, 6, v.shape[1]).to(v.device))
    return rows, w


def loud(rows: list[Tensor], w: list[Any]) -> Any:
    rows[0].mul_(300)
    return rows, w


@cases(
    "kind",
    card=[equal_keys_and_nothing_forgotten, forgets_at_once_now_and_then, values_of_all_sizes, loud],
)
def test_chunked_prompts_follow_the_reference_on_hostile_rows(machine: Machine, kind: Any) -> None:
    op = op_of(2, 6, chunked=64).on(machine)
    follow(op, machine, [[seq(1, 580, True), seq(3, 120, True)]], lambda _: 3e-3, 2e-4, kind)


@pytest.mark.sampled(most=1)
@cases("op", emulated=[op_of(1, 1), op_of(2, 4), by_key(1), by_key(2, -5.0)])
def test_a_warp_for_each_sequence_makes_the_bits_that_a_block_makes(machine: Machine, op: Op) -> None:
    """Rows, folds, windows and records of ragged rounds, a sequence of padding and one that is only folded among them."""
    gen, w, layers = torch.Generator().manual_seed(1), op.weights(), [op.unwritten() for _ in "ab"]
    fold_only = [*ROUNDS, [seq(2, 5, fold=0)], [seq(2, 0, True, fold=3), seq(1, 1)]]
    with machine.started(seed=3):
        runs = [op.bind(columns=2, chunked=NEVER) for _ in layers]
        runs[1].many = 1, NEVER
        for seqs in fold_only:
            rows = op.rows(n_rows(seqs), gen)
            got = [run(*rows, *w, layer, op.laid(seqs)) for run, layer in zip(runs, layers, strict=True)]
            assert same(*got) and same(*(layer.tensors() for layer in layers))
        assert machine.faults().tolist() == NO_FAULT


@pytest.mark.slow
@cases()
def test_value_heads_grouped_by_key_head_follow_the_reference(machine: Machine) -> None:
    """Rows, folds, a prompt in chunks and rows prepared on the way; other groups than those of the reference differ."""
    right = op_of(2, 4, True, columns=2, chunked=63).on(machine)
    gen = torch.Generator().manual_seed(14)
    w = right.weights(gen)
    rounds = ([seq(0, 2, True), seq(2, 3)], [seq(2, 1, True, fold=2), seq(1, 65, True)])
    found = [(seqs, right.rows(n_rows(seqs), gen)) for seqs in rounds]
    for grouped in (True, False):
        op = replace(right, shape=replace(right.shape, grouped=grouped))
        theirs, errors = Exact(right), []
        with machine.started():
            run, mine = op.bind(), op.unwritten()
            for seqs, rows in found:
                got, want = run(*rows, *w, mine, op.laid(seqs)), theirs(rows, w, seqs)
                n = seqs[0].width
                errors += [off(got[:n], want[:n]), off(got[-65:], want[-65:])]
            assert machine.faults().tolist() == NO_FAULT
        assert (max(errors) < 1e-3 and off(mine.state, theirs.layer.state) < 3e-5) == grouped
        assert grouped or min(errors[0], errors[3]) > 0.1


@pytest.mark.sampled(most=1)
@cases("n", emulated=[192, 200, 256])
def test_a_prompt_replayed_in_a_graph_has_the_bits_that_it_has_without(machine: Machine, n: int) -> None:
    """Launched for as many rows and chunks as there is room for; how many there are stands in the arena, which was filled anew."""
    op, table, arena = op_of(1, 2, columns=2), SlotTable(N_SLOT, 64, 64), Arena(N_SLOT, 8, CPU)
    rows, w, one, two = op.rows(256), op.weights(), op.unwritten(), op.unwritten()
    arena.prompts.add(256)
    captured = lay_out(table, [Seq(2, 0, [0] * 256, mode=KEEP, n_out=1)], CPU, arena=arena)
    assert captured.prompt and captured.n_place == 1 and captured.out_rows.tolist() == [255]
    replayed = lay_out(table, [Seq(2, 0, [0] * n, mode=KEEP, n_out=1)], CPU, arena=arena)
    assert replayed.prompt and replayed.seq_start.data_ptr() == captured.seq_start.data_ptr()
    with machine.started():
        run = op.bind()
        want = run(*(x[:n] for x in rows), *w, one, op.laid([seq(2, n, True)]))
        got = run(*rows, *w, two, captured)
        assert machine.faults().tolist() == NO_FAULT
    assert torch.equal(got[:n], want)
    assert torch.equal(one.state, two.state) and torch.equal(op.window(one), op.window(two))


@cases("op", emulated=[op_of(1, 2)], card=[op_of(2, 6)])
def test_a_captured_graph_runs_other_sequences_of_the_same_count(machine: Machine, op: Op) -> None:
    op = op.on(machine)
    gen, w, eager, graphed = torch.Generator().manual_seed(5), op.weights(), op.layer(), op.layer()
    rows, batch = op.rows(12, gen), op.laid([seq(0, 6), seq(1, 6)])
    with machine.started():
        run = op.bind()
        replay, got = machine.captured(
            lambda: run(*rows, *w, graphed, batch), lambda: run(*rows, *w, op.layer(), batch)
        )
        for seqs in (
            [seq(2, 4), seq(3, 6)],
            [seq(3, 5, fold=6), seq(2, 2, fold=1)],
            [seq(2, 11, True, fold=2), seq(0, 1)],
        ):
            n, fresh = n_rows(seqs), op.laid(seqs)
            new = op.rows(n, gen)
            want = run(*new, *w, eager, fresh)
            for old, x in zip(rows, new, strict=True):
                old[:n] = x
            for name in ("seq_slot", "seq_start", "seq_fold", "seq_keep"):
                getattr(batch, name).copy_(getattr(fresh, name))
            replay()
            assert torch.equal(got[:n], want) and same(graphed.tensors(), eager.tensors())


# -- outputs that go into the rows of the next product --------------------------------------------------------------


def norm_of(op: Op, n_row: int, gen: torch.Generator) -> HeadNorm:
    """With a gate that is a slice of wider rows."""
    n_in = op.shape.n_v_head * op.shape.dim
    weight = 1 + 0.3 * torch.randn(op.shape.dim, generator=gen)
    gate = 3 * torch.randn(n_row, n_in + 32, generator=gen)
    return HeadNorm(weight.to(op.device), EPS, gate.to(op.device)[:, 32:], 32.0)


def rows_of(op: Op) -> RowsLaunch:
    """Rows for a product, all buffers holding sevens."""
    rows = RowsLaunch(op.device, op.shape.n_v_head * op.shape.dim, (8, 16, 48))
    filled(7.0, rows.blocks, rows.sums, rows.powers)
    return rows


def prepared_alike(a: Rows, b: Rows) -> bool:
    return (a.n_row, a.pad) == (b.n_row, b.pad) and same(*([x.blocks, x.sums, x.powers] for x in (a, b)))


# Up to four stages of 8 rows
PREPARED = [*ROUNDS[:4], [seq(0, 18, True, fold=1), seq(1, 25, True), seq(2, 3)]]
PREPARED_OF_A_CARD = [*PREPARED, [seq(s, 1, fold=1) for s in range(4)], *PREPARED[1:]]


@pytest.mark.sampled(most=1)
@cases(
    "op, rounds",
    emulated=[
        (op_of(*heads, columns=columns), PREPARED)
        for heads, columns in (((1, 1), 2), ((1, 3), 4), ((2, 4), 2))
    ],
    card=[
        (op_of(*heads, columns=columns), PREPARED_OF_A_CARD)
        for heads in ((1, 1), (3, 3), (2, 6), (16, 48))
        for columns in common.COLUMNS
    ],
    seeds=SEEDS,
)
def test_rows_prepared_on_the_way_have_the_bits_of_outputs_prepared_alone(
    machine: Machine, op: Op, rounds: Sequence[Sequence[Seq]]
) -> None:
    """Odd numbers of heads, too: their blocks end in zeros. All that was in the buffers stays but for the rows."""
    op, gen = op.on(machine), torch.Generator().manual_seed(11)
    w, one, two = op.weights(gen), op.unwritten(), op.unwritten()
    with machine.started():
        run, mine, theirs = op.bind(), rows_of(op), rows_of(op)
        for seqs in rounds:
            x, prep = op.rows(n_rows(seqs), gen), norm_of(op, n_rows(seqs), gen)
            machine.poison()
            got = run.prepared(*x, *w, one, op.laid(seqs), into=GatedRowBuffer(mine, prep))
            want = theirs(run(*x, *w, two, op.laid(seqs)).flatten(1), prep)
            assert prepared_alike(got, want) and same(one.tensors(), two.tensors())
        assert machine.faults().tolist() == NO_FAULT


@cases()
def test_rows_of_grouped_heads_are_prepared_on_the_way(machine: Machine) -> None:
    op, gen = op_of(2, 4, True, columns=2).on(machine), torch.Generator().manual_seed(15)
    w, seqs = op.weights(gen), [seq(1, 2), seq(0, 1, True)]
    x, prep = op.rows(3, gen), norm_of(op, 3, gen)
    with machine.started():
        run = op.bind()
        into = GatedRowBuffer(rows_of(op), prep)
        got = run.prepared(*x, *w, op.unwritten(), op.laid(seqs), into=into)
        want = rows_of(op)(run(*x, *w, op.unwritten(), op.laid(seqs)).flatten(1), prep)
        assert prepared_alike(got, want)


@cases(
    "capability, chunked, most",
    emulated=[
        slow((8, 6), NEVER, 1536, id="no clusters"),
        slow((9, 0), 20, 1536, id="chunks"),
        slow((9, 0), NEVER, 3, id="many states"),
        slow((9, 0), NEVER, 4, id="few states"),
    ],
)
def test_without_clusters_with_chunks_and_of_many_states_rows_are_prepared_alone(
    machine: Machine,
    capability: tuple[int, int],
    chunked: int,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gdn_cuda, "MOST_PREPARED", most)
    op, gen = op_of(1, 2, columns=2, chunked=chunked), torch.Generator().manual_seed(12)
    w, x, prep = op.weights(gen), op.rows(24, gen), norm_of(op, 24, gen)
    seqs = [seq(1, 20, True), seq(3, 4)]
    with machine.started(capability):
        run, places = op.bind(), gdn_cuda._place
        called: list[int] = []
        monkeypatch.setattr(gdn_cuda, "_place", lambda *given: (called.append(1), places(*given))[1])
        got = run.prepared(*x, *w, op.unwritten(), op.laid(seqs), into=GatedRowBuffer(rows_of(op), prep))
        assert bool(called) == (most == 4)
        want = rows_of(op)(run(*x, *w, op.unwritten(), op.laid(seqs)).flatten(1), prep)
        assert prepared_alike(got, want)


@cases()
def test_rows_of_nobody_and_of_a_bad_sequence_keep_what_was_there(machine: Machine) -> None:
    """Some rows of a graph's bucket have no sequence; a product may read them, and its results are not used."""
    op, gen = op_of(1, 2, columns=2).on(machine), torch.Generator().manual_seed(13)
    w, x, prep = op.weights(gen), op.rows(12, gen), norm_of(op, 12, gen)
    batch = op.laid([seq(1, 4), seq(2, 3, True), seq(0, 2)])
    batch.seq_slot[1] = N_SLOT
    with machine.started():
        into = GatedRowBuffer(rows_of(op), prep)
        got = op.bind().prepared(*x, *w, op.layer(), with_nobody(batch, 1), into=into)
        machine.waited()
        assert machine.faults().tolist() == [1, 3, N_SLOT, N_SLOT, N_SLOT]
        machine.faults().zero_()
    blocks, sums = got.blocks[: 8 * 16 * 32].view(8, 16, 32), got.sums[: 8 * 16].view(8, 16)
    nobodys = [4, 5, 6, *range(9, 16)]
    assert (blocks[:, nobodys] == 7).all() and (sums[:, nobodys] == 7).all()
    assert (got.powers[nobodys] == 7).all() and (got.powers[[0, 1, 2, 3, 7, 8]] == 32).all()
    assert (sums[:, [0, 3, 7, 8]] != 7).all()


@pytest.mark.slow
@cases()
def test_the_check_sees_rows_that_are_prepared_wrongly(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = op_of(1, 1).on(machine).spec
    with machine.started():
        launch, right = gdn_cuda.bind(spec), gdn_cuda.GdnLaunch.prepared

        def wrong(self: gdn_cuda.GdnLaunch, *args: object, into: GatedRowBuffer) -> Rows:
            rows = right(self, *args, into=into)  # type: ignore[call-arg, arg-type]
            rows.sums[0] += 1
            return rows

        monkeypatch.setattr(gdn_cuda.GdnLaunch, "prepared", wrong)
        assert "prepared for the next product, outputs differ" in (
            gdn_cuda.check(launch, gdn_ref.bind(spec), spec) or ""
        )


@ON_CARD
def test_a_captured_graph_prepares_rows_of_other_sequences_of_the_same_count(machine: Machine) -> None:
    """Rows without a sequence keep their contents. 200 replays: the bits are the same in any order of blocks."""
    op, gen = op_of(16, 48).on(machine), torch.Generator().manual_seed(12)
    w, eager, graphed, mine, theirs = op.weights(gen), op.layer(), op.layer(), rows_of(op), rows_of(op)
    x, prep, batch = op.rows(12, gen), norm_of(op, 12, gen), op.laid([seq(0, 6), seq(1, 6)])
    into = GatedRowBuffer(mine, prep)
    with machine.started():
        run = op.bind()
        replay, got = machine.captured(
            lambda: run.prepared(*x, *w, graphed, batch, into=into),
            lambda: run.prepared(*x, *w, op.layer(), batch, into=into),
        )
        widths = [(4, 6), (5, 2), (1, 1), (6, 6)]
        for i in range(200):
            seqs = [seq(i % 2, widths[i % 4][0]), seq(2 + i % 2, widths[i % 4][1])]
            n, fresh = n_rows(seqs), op.laid(seqs)
            for old in (*x, prep.gate):
                old[:n] = torch.randn(old[:n].shape, device=op.device)
            part = HeadNorm(prep.weight, EPS, prep.gate[:n], prep.power)
            theirs.blocks.copy_(mine.blocks), theirs.sums.copy_(mine.sums)
            theirs.powers.copy_(mine.powers)
            o = run(*(t[:n] for t in x), *w, eager, fresh)
            theirs.prepare(o.flatten(1), part, theirs.blocks, theirs.sums, theirs.powers, got.pad)
            for name in ("seq_slot", "seq_start", "seq_fold", "seq_keep"):
                getattr(batch, name).copy_(getattr(fresh, name))
            replay()
            assert prepared_alike(got, Rows(theirs.blocks, theirs.sums, theirs.powers, 12, got.pad))
            assert same(graphed.tensors(), eager.tensors())


SHAPE = GdnShape(16, 48, 128, 4, 10240)
BY_KEY = GdnShape(32, 32, 128, 4, 96 * 128, by_key=True, floor=-5.0)


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("arch", jit.ARCHS)
@pytest.mark.parametrize("shape", [SHAPE, BY_KEY], ids=["one decay", "by key"])
def test_kernels_compile_without_spills_and_leave_room_for_the_blocks_they_count_on(
    shape: GdnShape, arch: str
) -> None:
    for columns in common.COLUMNS:
        defines = gdn_cuda.defines(shape, arch, columns)
        found = compiled("gdn", arch, defines)
        clusters = not arch.startswith("sm_8") and not shape.by_key
        assert set(found) == {"gdn_conv", "gdn_conv_many", "gdn_rows"} | (
            {"gdn_rows_into"} if clusters else set()
        )
        assert all(r.shared_bytes <= 48 * 1024 for r in found.values()), found
        rows = [r.registers for name, r in found.items() if name.startswith("gdn_rows")]
        assert max(rows) * common.THREADS * int(defines["BLOCKS"]) <= 65536, found


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", jit.ARCHS)
def test_kernels_of_prompts_compile_without_spills_and_leave_room_for_two_blocks(arch: str) -> None:
    found = compiled("gdn_chunk", arch, gdn_chunk.defines(SHAPE, arch))
    assert set(found) == {"gdn_chunk_conv", "gdn_chunk_solve", "gdn_chunk_state"}
    assert found["gdn_chunk_state"].registers * gdn_chunk.THREADS * 2 <= 65536, found


@pytest.mark.slow
def test_head_counts_are_free_as_long_as_values_are_a_multiple_of_keys() -> None:
    for n_k, n_v, grouped in ((1, 1, False), (3, 6, False), (16, 32, True), (16, 64, False)):
        shape = GdnShape(n_k, n_v, 128, 4, 128 * (2 * n_k + n_v), grouped)
        for stem, arch, defines in (  # some of these spill
            ("gdn", "sm_90a", gdn_cuda.defines(shape, "sm_90a", 2)),
            ("gdn_chunk", "sm_80", gdn_chunk.defines(shape, "sm_80")),
        ):
            assert jit.compile_cubin(stem, arch, defines, use_cache=False).resources


def test_a_lane_takes_four_columns_where_that_saves_a_wave() -> None:
    assert [gdn_cuda.columns_for(SHAPE, n, "sm_90a", 132) for n in (1, 2, 4, 5, 8)] == [2, 2, 4, 4, 2]
    wider = replace(
        SHAPE, n_v_head=64
    )  # eight sequences are 3.1 waves of blocks of two columns a lane, or 1.9 of four
    assert [gdn_cuda.columns_for(wider, 8, "sm_90a", 132, prepares=p) for p in (False, True)] == [2, 4]
    assert [gdn_cuda.columns_for(SHAPE, n, "sm_90a", 132, prepares=True) for n in (8, 12, 16, 32)] == [2, 2, 4, 4]  # fmt: skip
