"""gdn.cu, mamba2.cu and short_conv.cu: right, bit-equal however tokens came, and safe, on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from machines import NO_FAULT, ON_CARD, Machine, cases, compiled, off, same
from recurrent_cases import (
    WIDTH,
    WILD,
    Op,
    Plan,
    beside,
    check_folding_alone,
    check_padding,
    check_wild,
    gdn_shape,
    kept,
    late,
    n_rows,
    played,
    seq,
    verified,
    with_nobody,
)
from sampling import slow

from pyspec.cuda import jit
from pyspec.cuda.ops.gdn.op import gdn
from pyspec.cuda.ops.mamba2 import cuda as mamba2_cuda
from pyspec.cuda.ops.mamba2.op import mamba2
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.cuda.ops.recurrent.launch import COLUMNS
from pyspec.cuda.ops.short_conv import cuda as short_conv_cuda
from pyspec.cuda.ops.short_conv.op import short_conv
from pyspec.cuda.ops.short_conv.ref import ShortConvSpec
from pyspec.cuda.ops.short_conv.shape import ShortConvShape
from pyspec.errors import OutOfBounds
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Batch, Seq, SeqMode

pytestmark = pytest.mark.sampled(1)

GDN, MAMBA2 = Op(gdn_shape(1, 2)), Op(Mamba2Shape(4, 64, 1, 128, 4))
SHORT_CONV = Op(ShortConvShape(140, 3))  # of its second block twelve channels are real
SUPER, NANO, PUZZLE = (Op(Mamba2Shape(h, 64, 8, n, 4)) for h, n in ((128, 128), (64, 128), (128, 96)))
SMALL, LFM2 = Op(Mamba2Shape(8, 64, 2, 128, 4)), Op(ShortConvShape(2048, 3))
BY_KEY = Op(gdn_shape(1, 1, by_key=True))
OPS = (GDN, BY_KEY, MAMBA2, SHORT_CONV)


def with_columns(*shapes: Mamba2Shape, all: Sequence[int] | None = None) -> list[Op]:
    return [Op(s, how={"columns": c}) for s in shapes for c in all or mamba2_cuda.columns_of(s)]


@cases(
    "op",
    emulated=[
        slow(Op(gdn_shape(1, 2))),
        slow(Op(gdn_shape(1, 1, by_key=True, floor=-5.0))),
        *map(slow, with_columns(MAMBA2.shape, Mamba2Shape(8, 32, 4, 32, 4), Mamba2Shape(4, 128, 4, 96, 4))),
        *(Op(s) for s in (SHORT_CONV.shape, ShortConvShape(4, 2), ShortConvShape(256, 4), ShortConvShape(132, 5))),
    ],
    card=[
        *(Op(replace(gdn_shape(*heads), grouped=grouped)) for heads in ((2, 6), (16, 48)) for grouped in (False, True)),
        *(Op(gdn_shape(n, n, by_key=True, floor=floor)) for n, floor in ((4, -5.0), (32, 0.0))),
        *with_columns(SUPER.shape, NANO.shape, PUZZLE.shape, SMALL.shape, Mamba2Shape(8, 128, 4, 64, 4), all=COLUMNS),
        *(Op(s) for s in (LFM2.shape, SHORT_CONV.shape, ShortConvShape(1536, 2), ShortConvShape(132, 5))),
    ],
    seeds=(0, 1),
)  # fmt: skip
def test_kernels_pass_the_check_they_are_chosen_by(machine: Machine, op: Op) -> None:
    """Prompts of several stretches, verifies, late rows and folds, ragged and in any order."""
    op = op.on(machine)
    with machine.started():
        check = (op.cuda if op.name == "gdn" else op.ref).check
        assert check(op.bind(), op.reference(), op.spec) is None
        assert machine.faults().tolist() == NO_FAULT


@ON_CARD
def test_models_run_with_them(machine: Machine) -> None:
    for own, op in ((gdn, Op(gdn_shape(2, 6))), (mamba2, SUPER), (mamba2, NANO), (short_conv, LFM2)):
        assert own.chosen(op.on(machine).spec).name == "cuda"


RAGGED = verified([6, 2, 5, 1, 6], [3, 1, 5, 1, 2])
LONG: tuple[Plan, ...] = (
    [*verified([17] * 4), *kept(10)],
    [*kept(5), *verified([12, 1]), *kept(60)],
    kept(*[1] * 78),
    kept(78),
    late(78),
)
OF_31: dict[str, Plan] = {
    "one chunk": kept(31),
    "token by token": verified([1] * 30),
    "all accepted": verified([6] * 5),
    "one accepted": verified([6] * 30, [1] * 30),
    "ragged": verified([6, 2, 5, 1, 6, 4, 6, 3, 6, 6], [3, 1, 5, 1, 6, 2, 1, 3, 5, 3]),
}
OF_40: dict[str, Plan] = {
    "one prompt": kept(40),
    "one by one": kept(*[1] * 40),
    "verifies": [*verified([6] * 6), *kept(4)],
    "mixed": [*kept(9), *verified([1, 5]), *kept(1), *verified([6]), *kept(18)],
}


def every_way(op: Op, plans: Sequence[Plan], columns: Sequence[int]) -> list[tuple[Op, Plan, bool]]:
    return [
        (replace(op, how={"columns": c}), plan, neighbours)
        for plan in plans
        for c in columns
        for neighbours in (False, True)
    ]


CAME: dict[str, tuple[int, int, list[tuple[Op, Plan, bool]]]] = {
    "gdn": (
        15,
        WIDTH,
        [
            (Op(gdn_shape(1, 2), how={"columns": columns}), plan, neighbours)
            for columns, neighbours, plan in (
                (2, False, kept(15)),
                (2, False, late(15)),
                (2, False, verified([1] * 14)),
                (4, True, verified([6] * 2)),
                (2, False, verified([6] * 14, [1] * 14)),
                (4, True, RAGGED),
            )
        ],
    ),
    "gdn by key": (
        15,
        WIDTH,
        [
            (replace(BY_KEY, how={"columns": columns}), plan, False)
            for columns, plan in ((2, kept(15)), (4, late(15)), (2, verified([6] * 14, [1] * 14)))
        ],
    ),
    "mamba2": (78, 17, [(replace(MAMBA2, how={"columns": 2}), plan, False) for plan in LONG]),
    "mamba2, four columns": (78, 17, [(replace(MAMBA2, how={"columns": 4}), plan, False) for plan in LONG]),
    "short_conv": (78, 17, [(SHORT_CONV, plan, False) for plan in LONG]),
    "gdn of 6 heads": (31, WIDTH, every_way(Op(gdn_shape(2, 6)), list(OF_31.values()), COLUMNS)),
    "mamba2 of 8 heads": (40, WIDTH, every_way(SMALL, list(OF_40.values()), COLUMNS)),
    "LFM2": (  # three rows are kept behind the last verify, which no other would fold into the window
        1040,
        17,
        [(LFM2, plan, False) for plan in (kept(1040), verified([17] * 61), verified([1] * 1037))],
    ),
}  # fmt: skip


@cases(
    "name",
    emulated=[slow("gdn"), slow("gdn by key"), "mamba2", slow("mamba2, four columns"), "short_conv"],
    card=["gdn of 6 heads", "mamba2 of 8 heads", "LFM2"],
    seeds=(0, 1),
)
def test_states_and_outputs_do_not_depend_on_how_tokens_came_nor_on_neighbours_to_the_bit(
    machine: Machine, name: str
) -> None:
    n, width, ways = CAME[name]
    found = []
    for i, (op, plan, neighbours) in enumerate(ways):
        with machine.started(seed=machine.seed + i):
            found.append(played(op.on(machine), plan, n, width, neighbours=neighbours))
            assert machine.faults().tolist() == NO_FAULT
    assert same(*found) and found[0][0].isfinite().all()
    assert found[0][2].norm() > 0 and (ways[0][0].name == "short_conv" or found[0][1].norm() > 0)


@cases(
    "op, fold, width",
    emulated=[
        *(slow(op, fold, WIDTH) for op in (Op(gdn_shape(2, 4)), BY_KEY) for fold in (1, 3, WIDTH)),
        *((MAMBA2, fold, 17) for fold in (1, 3, 17)),
        *((SHORT_CONV, fold, 17) for fold in (1, 2, 17)),
    ],
    seeds=(0, 1),
)
def test_folding_alone_gives_the_bits_of_folding_before_rows(
    machine: Machine, op: Op, fold: int, width: int
) -> None:
    with machine.started():
        check_folding_alone(op.on(machine), fold, width)
        with pytest.raises(OutOfBounds):
            op.folder()(op.layer(3, width), 1, width + 1)
        assert machine.faults().tolist() == NO_FAULT


@cases("op", emulated=OPS, card=[Op(gdn_shape(2, 4)), SMALL, SHORT_CONV], seeds=(0, 1))
@pytest.mark.parametrize("of_a_graph", [True, False], ids=["graph", "nobody"])
def test_a_padded_batch_touches_nothing_but_its_slots(
    machine: Machine, op: Op, of_a_graph: bool
) -> None:
    """7 rows in a bucket of 8, four places for two sequences, as graphs see it; and sequences whose metadata is nonsense."""
    op = op.on(machine)

    def padded(seqs: Sequence[Seq]) -> Batch:
        if of_a_graph:
            return op.laid_in_bucket(seqs, Arena(4, 8, op.device))
        return with_nobody(op.laid(seqs))

    with machine.started():
        check_padding(op, padded, machine)


CHUNKED = {"columns": 2, "chunked": 63}
LONG_GDN = Op(gdn_shape(1, 1), how=CHUNKED)
LONG_MAMBA2 = Op(Mamba2Shape(4, 64, 4, 32, 4), how=CHUNKED)


@cases(
    "op, widths",
    emulated=[
        (Op(gdn_shape(1, 1), how={"columns": 2}), (3, 3, 3)),
        (LONG_GDN, (3, 70, 3)),
        (MAMBA2, (3, 3, 2)),
        (LONG_MAMBA2, (3, 70, 67)),
        (SHORT_CONV, (3, 3, 2)),
    ],
    card=[
        (Op(gdn_shape(2, 4)), (3, 3, 3)),
        (Op(gdn_shape(2, 4), how={"chunked": 64}), (100, 70, 100)),
    ],
    seeds=(0, 1),
)
@pytest.mark.sampled(2, most=12)
@pytest.mark.parametrize(("field", "value", "says"), WILD)
def test_a_wild_index_is_reported_and_its_sequence_writes_nothing(
    machine: Machine,
    op: Op,
    widths: tuple[int, int, int],
    field: str,
    value: int,
    says: tuple[int, int],
) -> None:
    """Of few rows, and of a prompt that is chunked."""
    with machine.started():
        check_wild(op.on(machine), field, value, says, machine, widths)


@cases("op", emulated=OPS, seeds=(0, 1))
def test_more_rows_than_there_are_or_than_are_recorded_is_reported(machine: Machine, op: Op) -> None:
    layer, w, narrow = op.layer(2), op.weights(), op.layer(2, 2)
    with machine.started():
        batch = op.laid([seq(0, 3), seq(1, 2)], 2)
        batch.seq_start[2] = 9
        op.bind()(*op.rows(5), *w, layer, batch)
        assert machine.faults().tolist() == [1, op.number, 1, 8, 5]
        assert not any(t[1].any() for t in layer.tensors()) and layer.conv[0, 2:5].any()
        if op.name == "short_conv":
            machine.faults().zero_()
            op.bind()(*op.rows(5), *w, narrow, op.laid([seq(1, 3), seq(0, 2)], 2))
            assert machine.faults().tolist() == [1, op.number, 1, 3, 3]
            assert not narrow.conv[1].any() and narrow.conv[0, 2:].any()


@cases("op", emulated=OPS)
def test_a_batch_of_no_rows_launches_nothing(machine: Machine, op: Op) -> None:
    with machine.started():
        assert len(op.bind()(*op.rows(0), *op.weights(), op.layer(), op.laid([]))) == 0


@pytest.mark.sampled(2, most=3)
@cases(
    "op, n, company, settings",
    emulated=[
        (LONG_GDN, 100, [([], []), ([seq(0, 70, True), seq(3, 4)], [seq(2, 64, True)])], {}),
        slow(  # alone, its state is cut into blocks of 32 rows on this GPU
            replace(MAMBA2, how=CHUNKED),
            100,
            [([], []), ([seq(0, 70, True), seq(3, 4)], [seq(2, 64, True)])],
            {"n_multiprocessor": 8},
        ),
    ],
    card=[
        (
            Op(gdn_shape(2, 6), how={"chunked": 64}),
            150,
            [
                ([], []),
                ([seq(0, 100, True), seq(3, 4)], [seq(2, 64, True)]),
                ([seq(3, 6)], [seq(0, 2, True)]),
            ],
            {},
        ),
        *(
            (
                op,
                400,
                [
                    ([], []),
                    ([seq(0, 150, True), seq(3, 4)], [seq(2, 130, True)]),
                    ([seq(3, 6)], [seq(0, 2, True)]),
                    ([], []),
                ],
                {},
            )
            for op in (SUPER, NANO, SMALL)
        ),
    ],
)
def test_a_chunked_prompt_does_not_depend_on_its_neighbours_nor_on_the_order_to_the_bit(
    machine: Machine,
    op: Op,
    n: int,
    company: list[tuple[list[Seq], list[Seq]]],
    settings: dict[str, int],
) -> None:
    on = op.on(machine)
    assert same(*(beside(on, machine, n, *own, seed=i, **settings) for i, own in enumerate(company)))


@cases(
    "op, width",
    emulated=[
        (op, width) for op in (GDN, Op(Mamba2Shape(4, 32, 4, 32, 4)), SHORT_CONV) for width in (1, 4, 17)
    ],
    slow=True,
)
def test_rounds_of_64_slots_are_the_references(machine: Machine, op: Op, width: int) -> None:
    """Rows of every slot in any order, after a verify of which one row up to all were kept: plain rounds, MTP's and DFlash's of blocks of 16."""
    layers, gen = [op.layer(64, width) for _ in "ab"], torch.Generator().manual_seed(width)
    order, w = torch.randperm(64, generator=gen).tolist(), op.weights()
    with machine.started():
        runs = op.bind(), op.reference()
        for step in range(2):
            folds = step > 0 and width > 1
            seqs = [seq(s, width, width == 1, s % width + 1 if folds else 0) for s in order]
            batch, rows = op.laid(seqs, 64), op.rows(64 * width, step)
            got, want = (run(*rows, *w, layer, batch) for run, layer in zip(runs, layers, strict=True))
            assert off(got, want) < 1e-5
        assert machine.faults().tolist() == NO_FAULT
    assert off(layers[0].conv, layers[1].conv) < 1e-6
    assert off(layers[0].state, layers[1].state) < 1e-5
    assert op is SHORT_CONV or layers[0].state.flatten(1).any(1).all()


# -- launches that follow each other, and graphs --------------------------------------------------------------------


@cases(
    "op, n_launch, rounds",
    card=[
        *((op, 1000, [[seq(0, 4, fold=f), seq(1, 4, fold=3 - f)] for f in range(4)]) for op in (NANO, LFM2)),
        (SMALL, 100, [[seq(0, 259, True, 3), seq(1, 4)], [seq(0, 4), seq(1, 259, True, 2)]]),
    ],
)  # fmt: skip
def test_rounds_without_waiting_give_what_waiting_rounds_give(
    machine: Machine, op: Op, n_launch: int, rounds: list[list[Seq]]
) -> None:
    """Errors of kernels that overlap show only without a wait in between."""
    op, results = op.on(machine), []
    with machine.started():
        for waits in (True, False):
            run, layer, rows, w = op.bind(), op.layer(2, 4), op.rows(n_rows(rounds[0])), op.weights()
            batches, out = [op.laid(seqs, 2) for seqs in rounds], 0
            for i in range(n_launch):
                out = out + run(*rows, *w, layer, batches[i % len(batches)])
                if waits:
                    machine.waited()
            results.append((out, layer.state, layer.conv))
    assert same(*results)


@cases("op", emulated=[MAMBA2, SHORT_CONV], card=[SMALL, SHORT_CONV])
def test_a_graph_serves_other_slots_and_widths(machine: Machine, op: Op) -> None:
    op = op.on(machine)
    layers, reference, w = [op.layer() for _ in range(2)], op.reference(), op.weights()
    arena, rows = Arena(4, 8, op.device), op.rows(8)
    rounds = (
        [seq(0, 8, True)],
        [seq(3, 5), seq(1, 3, True)],
        [seq(1, 2), seq(0, 1), seq(3, 4, fold=4)],
    )
    with machine.started():
        run, batch = op.bind(), op.laid_in_bucket(rounds[0], arena)
        replay, out = machine.captured(
            lambda: run(*rows, *w, layers[0], batch), lambda: run(*rows, *w, op.layer(), batch)
        )
        for seqs in rounds:
            batch = op.laid_in_bucket(seqs, arena)
            replay()
            n = n_rows(seqs)
            want = reference(*(x[:n] for x in rows), *w, layers[1], op.laid(seqs))
            assert torch.allclose(out[:n], want, rtol=1e-4, atol=1e-3) and not out[n:].any()
    assert torch.allclose(layers[0].state, layers[1].state, rtol=1e-4, atol=1e-4)
    assert torch.allclose(op.window(layers[0]), op.window(layers[1]), rtol=1e-5, atol=1e-6)


@cases("beside", emulated=[0, 100], seeds=(0, 1))
def test_verifies_of_more_than_a_stretch_of_rows_fold_alike(machine: Machine, beside: int) -> None:
    """A block of the convolution takes all stretches of a verify, whether others of it stand beside it or not."""
    layers, w = [MAMBA2.layer(2, 150) for _ in range(2)], MAMBA2.weights()
    with machine.started():
        for seqs in (
            [seq(0, 139), *[seq(1, beside, True)] * bool(beside)],
            [Seq(0, 131, [0] * 66, SeqMode.VERIFY, 0, 131)],
            [Seq(0, 190, [0] * 3, SeqMode.KEEP, 0, 59)],
        ):
            rows = MAMBA2.rows(n_rows(seqs))
            got, want = (
                run(*rows, *w, layer, MAMBA2.laid(seqs, 2))
                for run, layer in zip((MAMBA2.bind(), MAMBA2.reference()), layers, strict=True)
            )
            assert torch.allclose(got, want, rtol=1e-4, atol=1e-4 * float(want.std()))
    assert torch.allclose(layers[0].state, layers[1].state, atol=1e-4)
    assert torch.equal(*(MAMBA2.window(x) for x in layers))


@ON_CARD
def test_offsets_beyond_two_billion_elements(machine: Machine) -> None:
    """The last slot's state starts past 2^31 floats."""
    op = SUPER.on(machine)
    n_slot = 2**31 // (op.shape.n_head * op.shape.head_dim * op.shape.n_state) + 2
    if torch.cuda.mem_get_info()[0] < 5 * n_slot * 4 * 2**20:
        pytest.skip("needs 10 GB of the card's memory")
    large, small, rows, w = op.layer(n_slot, 2), op.layer(1, 2), op.rows(3), op.weights()
    got = op.bind()(*rows, *w, large, op.laid([seq(n_slot - 1, 3, True)], n_slot))
    want = op.bind()(*rows, *w, small, op.laid([seq(0, 3, True)], 1))
    assert not large.state[:-1].any()
    assert torch.equal(got, want) and torch.equal(large.state[-1], small.state[0])


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("arch", jit.ARCHS)
def test_the_kernel_compiles_without_spills(arch: str) -> None:
    for shape in (ShortConvShape(2048, 3), ShortConvShape(4, 2), ShortConvShape(2560, 5)):
        made = short_conv_cuda.FILE.defines(ShortConvSpec(torch.device("cpu"), shape))
        found = compiled("short_conv", arch, made)["short_conv"]
        assert 3 * 128 * found.registers <= 65536, found
