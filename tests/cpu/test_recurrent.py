"""`gdn`, `mamba2` and `short_conv` in C++: ragged hostile rounds against the references; bits by any cut, neighbours and threads; recordings; guards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from recurrent_rig import (
    CPU,
    KEEP,
    LATE,
    N_SLOT,
    SHAPES,
    VERIFY,
    WIDTH,
    Rig,
    batch_of,
    call,
    gdn_shape,
    plain_library,
    rounds,
    using,
)
from sampling import few
from torch import Tensor

from pyspec.cpu import build
from pyspec.cpu.tape import Recorded, TapeMemory
from pyspec.cuda import faults
from pyspec.cuda.ops.gdn import cpu as gdn_cpu
from pyspec.cuda.ops.gdn.op import gdn
from pyspec.cuda.ops.mamba2.op import mamba2
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.cuda.ops.short_conv.op import short_conv
from pyspec.errors import OutOfBounds
from pyspec.slots.arena import Arena, HostArena
from pyspec.slots.batch import Seq, SeqMode
from pyspec.slots.recurrent import StateLayer

__all__ = ["plain_library"]  # a fixture

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="there is no C++ compiler")
each_shape = pytest.mark.parametrize("rig", SHAPES.values(), ids=SHAPES)
USUAL = [SHAPES["gdn-odd"], SHAPES["mamba2-odd"], SHAPES["short_conv-odd"]]
each_op = pytest.mark.parametrize("rig", USUAL, ids=["gdn", "mamba2", "short_conv"])


@pytest.fixture(autouse=True)
def _threads_stay() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def follow(rig: Rig, seed: int, n_round: int = 12) -> None:
    """Rounds on the reference and the kernels, from random states and records; every tensor of both layers at the end."""
    layers = [rig.layer(seed), rig.layer(seed)]
    launches = [rig.cpu.bind(rig.spec), rig.ref.bind(rig.spec)]
    for i, seqs in enumerate(rounds(seed, n_round)):
        got, want = (call(rig, *one, seqs, seed=i) for one in zip(launches, layers, strict=True))
        assert (got - want).norm() < 1e-5 * want.norm() + 1e-6, f"round {i}: {seqs}"
    for i, (a, b) in enumerate(zip(layers[0].tensors(), layers[1].tensors(), strict=True)):
        assert (a - b).norm() < 1e-5 * b.norm(), f"tensor {i} of the layer"


@pytest.mark.sampled(1)
@each_shape
@pytest.mark.parametrize("seed", range(3))
def test_hostile_rounds_follow_the_reference(rig: Rig, seed: int) -> None:
    follow(rig, seed)


@pytest.mark.slow
@pytest.mark.parametrize("rig", few(SHAPES.values(), *USUAL), ids=SHAPES)
def test_a_cpu_without_vectors_follows_it_too(rig: Rig, plain_library: object) -> None:
    with using(plain_library):
        assert plain_library.pyspec_isa() == b"plain"  # type: ignore[attr-defined]
        follow(rig, 5)


def test_the_op_chooses_them_on_a_cpu() -> None:
    for op, rig in zip((gdn, mamba2, short_conv), USUAL, strict=True):
        assert op.chosen(rig.spec).name == "cpu" and op.chosen(rig.spec).capturable


def pieces(rig: Rig, widths: tuple[int, ...], mode: SeqMode | None) -> list[Tensor]:
    """Tokens of slot 1 in pieces of these widths: all outputs, then state and window with all of them in. mode None: by turns."""
    launch, layer = rig.cpu.bind(rig.spec), rig.layer(3)
    whole = rig.inputs(sum(widths), 4)
    at, fold, outs = 0, 0, []
    for i, width in enumerate(widths):
        now = mode if mode is not None else (LATE, VERIFY, KEEP)[i % 3]
        if now is LATE and fold + width > WIDTH:
            now = KEEP
        seq = Seq(1, 0, [0] * width, now, 0, fold)
        outs.append(launch(*rig.part(whole, at, width), layer, batch_of([seq])))
        at, fold = at + width, seq.n_recorded(width)
    launch.folder()(layer, 1, fold)
    return [torch.cat(outs), *(t.clone() for t in layer.saved(1, at))]


@pytest.mark.parametrize(
    "rig",
    few(SHAPES.values(), SHAPES["gdn-parts"], SHAPES["mamba2-odd"], SHAPES["short_conv-odd"]),
    ids=SHAPES,
)
def test_bits_do_not_depend_on_the_cut_of_a_text(rig: Rig) -> None:
    """600 rows at once are more than a piece of the kernel; records hold 20."""
    want = pieces(rig, (600,), KEEP)
    for widths, mode in (
        ((1,) * 600, KEEP),
        ((1,) * 600, LATE),
        ((3,) * 200, VERIFY),
        ((16,) * 37 + (8,), None),
        ((100,) * 6, KEEP),
        ((1, 2, 17, 5, 7, 13, 5) * 12, None),
    ):
        for what, a, b in zip(
            ("outputs", "state", "window"), pieces(rig, widths, mode), want, strict=True
        ):
            assert torch.equal(a, b), f"{what} in pieces of {widths[:3]}, {mode}"


@each_op
@pytest.mark.parametrize("before", range(247, 259))
def test_a_sequence_behind_a_nearly_full_piece_is_as_alone(rig: Rig, before: int) -> None:
    """Its own first rows look back at the slot's window, wherever the kernel's pieces end."""
    launch = rig.cpu.bind(rig.spec)
    seqs = [Seq(0, 0, [0] * before, KEEP), Seq(1, 0, [0] * 9, KEEP, 0, 2), Seq(2, 0, [0], KEEP)]
    whole, layer, alone = rig.inputs(before + 10), rig.layer(8), rig.layer(8)
    out = launch(*whole, layer, batch_of(seqs))
    for seq, at in zip(seqs, (0, before, before + 9), strict=True):
        assert torch.equal(
            launch(*rig.part(whole, at, seq.width), alone, batch_of([seq])), out[at : at + seq.width]
        )
    assert all(map(torch.equal, layer.tensors(), alone.tensors()))


@each_op
def test_bits_depend_neither_on_neighbours_nor_on_threads(rig: Rig) -> None:
    launch = rig.cpu.bind(rig.spec)
    seqs = [
        Seq(3, 0, [0] * 7, VERIFY, 0, 4),
        Seq(0, 0, [0] * 270, KEEP, 0, 2),
        Seq(1, 0, [0], LATE, 0, 3),
        Seq(4, 0, [0] * 5, KEEP),
    ]
    whole, starts = rig.inputs(sum(s.width for s in seqs)), [0, 7, 277, 278]
    for n_thread in (1, 2, 3):
        torch.set_num_threads(n_thread)
        layer = rig.layer(8)
        out = launch(*whole, layer, batch_of(seqs))
        alone = rig.layer(8)
        for seq, at in zip(seqs, starts, strict=True):
            got = launch(*rig.part(whole, at, seq.width), alone, batch_of([seq]))
            assert torch.equal(got, out[at : at + seq.width])
        assert all(map(torch.equal, layer.tensors(), alone.tensors()))


@each_op
def test_a_slot_that_is_not_in_the_batch_is_not_touched(rig: Rig) -> None:
    layer, before = rig.layer(2), rig.layer(2)
    call(
        rig,
        rig.cpu.bind(rig.spec),
        layer,
        [Seq(1, 0, [0] * 4, VERIFY, 0, 2), Seq(3, 0, [0] * 40, KEEP, 0, 20)],
    )
    for slot in (0, 2, 4):
        assert all(
            torch.equal(a[slot], b[slot]) for a, b in zip(layer.tensors(), before.tensors(), strict=True)
        )


@each_op
def test_records_that_are_not_folded_may_hold_anything(rig: Rig) -> None:
    layer = rig.layer(2)
    for t in layer.records():
        t[:, 2:] = float("nan")
    layer.conv[:, rig.shape.n_conv - 1 + 2 :] = float("nan")
    out = call(
        rig,
        rig.cpu.bind(rig.spec),
        layer,
        [Seq(i, 0, [0] * 2, m, 0, 2) for i, m in enumerate((KEEP, VERIFY, LATE))],
    )
    assert out.isfinite().all() and layer.state.isfinite().all()


@each_op
def test_a_fold_alone_is_the_fold_before_rows(rig: Rig) -> None:
    launch = rig.cpu.bind(rig.spec)
    alone, within, reference = rig.layer(6), rig.layer(6), rig.layer(6)
    for slot, n in enumerate((0, 1, 7, WIDTH)):
        launch.folder()(alone, slot, n)
        rig.ref.flush(reference, slot, n)
        call(rig, launch, within, [Seq(slot, 0, [0], VERIFY, 0, n)])
        assert torch.equal(alone.state[slot], within.state[slot])
        for a, b in zip(alone.saved(slot, 0), reference.saved(slot, 0), strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
    with pytest.raises(OutOfBounds):
        launch.folder()(alone, 1, WIDTH + 1)


@each_op
def test_padding_of_a_bucket_gives_zeros_and_touches_nothing(rig: Rig) -> None:
    seqs = [Seq(2, 0, [0] * 3, VERIFY, 0, 1), Seq(4, 0, [0] * 2, KEEP)]
    batch = batch_of(seqs, Arena(N_SLOT, 80, CPU, WIDTH))
    assert batch.bucket == 6 and batch.n_place > len(seqs)
    padded, plain, launch = rig.layer(1), rig.layer(1), rig.cpu.bind(rig.spec)
    whole = rig.inputs(6)
    out = launch(*whole, padded, batch)
    want = launch(*rig.part(whole, 0, 5), plain, batch_of(seqs))
    assert torch.equal(out[:5], want) and not out[5:].any()
    assert all(map(torch.equal, padded.tensors(), plain.tensors()))


@each_op
def test_a_recording_reads_all_that_varies_when_it_is_replayed(rig: Rig) -> None:
    arena, layer, direct = HostArena(N_SLOT, 80), rig.layer(1), rig.layer(1)
    launch, own = rig.cpu.bind(rig.spec), rig.cpu.bind(rig.spec)
    given = rig.inputs(6)
    recorded: Recorded[Tensor] | None = None
    for i, (modes, slots, folds) in enumerate(
        (
            ((VERIFY, KEEP), (2, 0), (1, 0)),
            ((KEEP, LATE), (3, 1), (2, 3)),
            ((VERIFY, VERIFY), (1, 4), (6, 0)),
        )
    ):
        widths = ((3, 3), (5, 1), (2, 4))[i]
        seqs = [
            Seq(s, 0, [0] * w, m, 0, f) for s, w, m, f in zip(slots, widths, modes, folds, strict=True)
        ]
        batch = batch_of(seqs, arena)
        if recorded is None:
            recorded = Recorded(lambda batch=batch: launch(*given, layer, batch), TapeMemory())
            assert all(map(torch.equal, layer.tensors(), direct.tensors())), "recording runs nothing"
        for t, new in zip(given[:2], rig.inputs(6, seed=i), strict=False):
            t.copy_(new)
        assert torch.equal(recorded.replay(), own(*given, direct, batch_of(seqs)))
    assert all(map(torch.equal, layer.tensors(), direct.tensors()))


@each_op
@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [("seq_slot", 99, N_SLOT), ("seq_slot", -1, N_SLOT), ("seq_fold", WIDTH + 1, WIDTH + 1)],
)
def test_a_bad_index_is_reported_and_its_sequence_skipped(
    rig: Rig, field: str, value: int, limit: int
) -> None:
    seqs = [Seq(0, 0, [0] * 2, VERIFY), Seq(1, 0, [0] * 3, KEEP, 0, 2)]
    batch, layer, right = batch_of(seqs), rig.layer(1), rig.layer(1)
    launch = rig.cpu.bind(rig.spec)
    faults.read(CPU)
    getattr(batch, field)[0] = value
    out = launch(*rig.inputs(5), layer, batch)
    found = faults.read(CPU)
    assert found is not None and (found.op, found.index, found.limit) == (rig.name, value, limit)
    assert torch.equal(out[2:], launch(*rig.inputs(5), right, batch_of(seqs))[2:])
    assert torch.equal(layer.state[1], right.state[1]) and torch.equal(
        layer.state[0], rig.layer(1).state[0]
    )


def test_a_round_out_of_bounds_is_refused_before_anything_is_written() -> None:
    rig = USUAL[0]
    layer, launch = rig.layer(1), rig.cpu.bind(rig.spec)
    for seq in (
        Seq(0, 0, [0], KEEP, 0, WIDTH + 1),
        Seq(0, 0, [0] * (WIDTH + 1), VERIFY),
        Seq(0, 0, [0] * 2, LATE, 0, WIDTH - 1),
    ):
        with pytest.raises(OutOfBounds):
            call(rig, launch, layer, [seq])
    assert all(map(torch.equal, layer.tensors(), rig.layer(1).tensors()))


def test_limits_name_the_size() -> None:
    def why(rig: Rig) -> str:
        return rig.cpu.limits(rig.spec) or ""

    assert "12 wide" in why(Rig("gdn", gdn_shape(1, 1, 12, 4)))
    assert "520 wide" in why(Rig("gdn", gdn_shape(1, 1, 520, 4)))
    assert "9 taps" in why(Rig("gdn", gdn_shape(1, 1, 8, 9)))
    assert "3 value heads are no multiple of 2" in why(Rig("gdn", gdn_shape(2, 3, 8, 4)))
    assert "16 and 20 wide" in why(Rig("mamba2", Mamba2Shape(2, 16, 1, 20, 4)))
    assert not why(Rig("mamba2", Mamba2Shape(2, 16, 1, 24, 4)))


def test_extreme_gates_forget_all_or_nothing_and_never_give_nan() -> None:
    rig = SHAPES["gdn-usual"]
    m, alpha, beta, a, dt_bias, conv_w = rig.inputs(9)
    for raw in (1e4, -1e4, 88.0, -120.0):
        layer, launch = rig.layer(1), gdn_cpu.bind(rig.spec)
        out = launch(
            m,
            alpha * 0 + raw,
            beta * 0 + raw,
            a,
            dt_bias,
            conv_w,
            layer,
            batch_of([Seq(0, 0, [0] * 9, KEEP)]),
        )
        assert out.isfinite().all() and layer.state.isfinite().all()


def test_one_launch_serves_layers_with_weights_of_their_own() -> None:
    rig = SHAPES["gdn-odd"]
    launch, given = gdn_cpu.bind(rig.spec), rig.inputs(3)
    other = (*given[:5], given[5] + 1.0)
    batch = batch_of([Seq(0, 0, [0] * 3, KEEP)])
    outs = [launch(*g, StateLayer(rig.shape, N_SLOT, WIDTH, CPU), batch) for g in (given, other, given)]
    assert torch.equal(outs[0], outs[2]) and not torch.equal(outs[0], outs[1])
