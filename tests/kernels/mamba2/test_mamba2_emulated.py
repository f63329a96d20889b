"""mamba2.cu and its launcher run thread by thread on the CPU: right, bit-equal however tokens came, and safe."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.ops.mamba2 import cuda as mamba2_cuda
from pyspec.cuda.ops.mamba2 import ref as mamba2_ref
from pyspec.cuda.ops.mamba2.ref import Mamba2, Mamba2Spec, make_params
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.errors import OutOfBounds
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Batch, Seq, SeqMode, lay_out
from pyspec.slots.recurrent import StateLayer
from pyspec.slots.table import SlotTable

pytestmark = [needs_compiler, pytest.mark.sampled(1)]
SHAPE = Mamba2Shape(4, 64, 1, 128, 4)
SHAPES = [SHAPE, Mamba2Shape(8, 32, 4, 32, 4), Mamba2Shape(4, 128, 4, 96, 4)]


@pytest.fixture(autouse=True, params=[0, 1])
def _gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """In two orders of threads and blocks. Unwritten memory holds NaN."""
    torch.set_num_threads(1)
    with emulated_gpu(seed=request.param):
        faults.record(CPU).zero_()
        yield


def bound(shape: Mamba2Shape, columns: int = 2) -> Mamba2:
    return mamba2_cuda.bind(Mamba2Spec(CPU, shape), columns=columns)


def rows_of(n: int, shape: Mamba2Shape, seed: int = 0) -> tuple[Tensor, Tensor]:
    wide = torch.randn(n, shape.n_channel + shape.n_head, generator=torch.Generator().manual_seed(seed))
    m, dt = wide.split([shape.n_channel, shape.n_head], 1)
    return m, dt


@pytest.mark.slow
@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(
    ("shape", "columns"), [(s, c) for s in SHAPES for c in mamba2_cuda.columns_of(s)]
)
def test_mamba2_passes_the_ops_check(shape: Mamba2Shape, columns: int) -> None:
    """Prompts of several stretches, verifies, folds, ragged and in any order."""
    spec = Mamba2Spec(CPU, shape)
    assert mamba2_ref.check(bound(shape, columns), mamba2_ref.bind(spec), spec) is None
    assert not faults.record(CPU).any()


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("columns", mamba2_cuda.COLUMNS)
def test_a_state_is_bit_equal_however_its_tokens_came(columns: int) -> None:
    p, (m, dt), results = (
        make_params(SHAPE, torch.Generator().manual_seed(1), CPU),
        rows_of(78, SHAPE),
        [],
    )
    one, two = ((17, False),) * 4 + ((10, True),), ((5, True), (12, False), (1, False), (60, True))
    late = ((1, None),) * 3 + ((1, True),)  # rows that wait, and one that writes the state
    for cuts in (one, two, ((1, True),) * 78, ((78, True),), late * 19 + ((2, True),)):
        launch, layer, table, at, fold, outs = (
            bound(SHAPE, columns),
            StateLayer(SHAPE, 3, 17, CPU),
            SlotTable(3, 16, 16),
            0,
            0,
            [],
        )
        for width, keep in cuts:
            waits = keep is None
            batch = lay_out(
                table,
                [
                    Seq(
                        1,
                        at,
                        [0] * width,
                        SeqMode.LATE if waits else SeqMode.KEEP if bool(keep) else SeqMode.VERIFY,
                        0,
                        fold,
                    )
                ],
                CPU,
            )
            outs.append(launch(m[at : at + width], dt[at : at + width], p, layer, batch))
            at, fold = at + width, 0 if keep else width + fold * waits
        assert not layer.state[[0, 2]].any() and not layer.conv[[0, 2]].any()
        results.append((torch.cat(outs), layer.state, layer.conv[:, :3]))
    for other in results[1:]:
        for what, a, b in zip(("output", "state", "window"), results[0], other, strict=True):
            assert torch.equal(a, b), f"{what} differs"


@pytest.mark.parametrize("beside", [0, 100])
def test_verifies_of_more_than_a_stretch_of_rows_fold_alike(beside: int) -> None:
    """A block of the convolution takes all stretches of a verify, whether others of it stand beside it or not."""
    p, spec = make_params(SHAPE, torch.Generator().manual_seed(1), CPU), Mamba2Spec(CPU, SHAPE)
    layers = [StateLayer(SHAPE, 2, 150, CPU) for _ in range(2)]
    for seqs in (
        [Seq(0, 0, [0] * 139)] + [Seq(1, 0, [0] * beside, SeqMode.KEEP)] * bool(beside),
        [Seq(0, 131, [0] * 66, SeqMode.VERIFY, 0, 131)],
        [Seq(0, 190, [0] * 3, SeqMode.KEEP, 0, 59)],
    ):
        m, dt = rows_of(sum(s.width for s in seqs), SHAPE)
        got, want = (
            run(m, dt, p, layer, lay_out(SlotTable(2, 64, 16), seqs, CPU))
            for run, layer in zip((bound(SHAPE), mamba2_ref.bind(spec)), layers, strict=True)
        )
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-4 * float(want.std()))
    assert torch.allclose(layers[0].state, layers[1].state, atol=1e-4) and torch.equal(
        *(x.conv[:, :3] for x in layers)
    )


@pytest.mark.parametrize("fold", [1, 3, 17])
def test_folding_alone_gives_the_bits_of_folding_before_rows(fold: int) -> None:
    p, run, alone = (
        make_params(SHAPE, torch.Generator().manual_seed(1), CPU),
        bound(SHAPE),
        mamba2_cuda.folder(Mamba2Spec(CPU, SHAPE)),
    )
    layers = [StateLayer(SHAPE, 3, 17, CPU) for _ in range(2)]
    for layer in layers:
        for t in layer.tensors():
            t.copy_(torch.rand(t.shape, generator=torch.Generator().manual_seed(5)))
        run(*rows_of(17, SHAPE), p, layer, lay_out(SlotTable(3, 64, 16), [Seq(1, 0, [0] * 17)], CPU))
    others = [t[[0, 2]].clone() for t in layers[0].tensors()]
    alone(layers[0], 1, fold)
    alone(layers[0], 2, 0)
    outs = [
        run(
            *rows_of(2, SHAPE, 3),
            p,
            layer,
            lay_out(SlotTable(3, 64, 16), [Seq(1, fold, [0] * 2, SeqMode.KEEP, 0, n)], CPU),
        )
        for layer, n in zip(layers, (0, fold), strict=True)
    ]
    assert torch.equal(*outs) and torch.equal(*(layer.state for layer in layers))
    assert torch.equal(*(layer.conv[1, :3] for layer in layers))
    assert all(torch.equal(t[[0, 2]], old) for t, old in zip(layers[0].tensors(), others, strict=True))
    with pytest.raises(OutOfBounds):
        alone(layers[0], 1, 18)
    assert not faults.record(CPU).any()


def filled_arena(seqs: list[Seq], n_seq: int) -> Batch:
    batch = lay_out(SlotTable(4, 64, 16), seqs, CPU, arena=Arena(n_seq, 8, CPU))
    assert batch.bucket is not None
    return batch


def test_a_padded_batch_touches_nothing_but_its_slots() -> None:
    """As graphs see it: 7 rows in a bucket of 8, four places for two sequences. State of others is NaN and stays."""
    p, seqs = (
        make_params(SHAPE, torch.Generator().manual_seed(1), CPU),
        [Seq(3, 0, [0] * 4), Seq(1, 0, [0] * 3, SeqMode.KEEP)],
    )
    (m, dt), layer, want = rows_of(8, SHAPE), StateLayer(SHAPE, 4, 6, CPU), StateLayer(SHAPE, 4, 6, CPU)
    for t in layer.tensors():
        t[[0, 2]] = float("nan")
    for t in layer.records():
        t.fill_(float("nan"))
    got = bound(SHAPE)(m, dt, p, layer, filled_arena(seqs, 4))
    reference = mamba2_ref.bind(Mamba2Spec(CPU, SHAPE))
    expected = reference(m[:7], dt[:7], p, want, lay_out(SlotTable(4, 64, 16), seqs, CPU))
    assert torch.allclose(got[:7], expected, atol=1e-4) and not got[7:].any()
    assert torch.allclose(layer.state[[1, 3]], want.state[[1, 3]], atol=1e-5)
    assert torch.equal(layer.conv[1, :3], want.conv[1, :3]) and torch.equal(
        layer.conv[3, :7], want.conv[3, :7]
    )
    assert all(t[[0, 2]].isnan().all() for t in layer.tensors())
    assert all(t[1].isnan().all() and t[3, 4:].isnan().all() for t in layer.records())


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("seq_fold", -1, (0, -1, 7)),
        ("seq_fold", 7, (0, 7, 7)),
        ("seq_fold", 2**31 - 1, (0, 2**31 - 1, 7)),
        ("seq_slot", 4, (4, 4, 4)),
        ("seq_slot", -1, (-1, -1, 4)),
    ],
)
def test_s3_a_wild_index_is_reported_and_its_sequence_writes_nothing(
    field: str, value: int, says: tuple[int, int, int]
) -> None:
    p = make_params(SHAPE, torch.Generator().manual_seed(1), CPU)
    (m, dt), layer = rows_of(5, SHAPE), StateLayer(SHAPE, 4, 6, CPU)
    for t in layer.tensors():
        t.normal_(generator=torch.Generator().manual_seed(2))
    before = [t.clone() for t in layer.tensors()]
    batch = lay_out(
        SlotTable(4, 64, 16), [Seq(0, 0, [0] * 3), Seq(2, 0, [0] * 2, SeqMode.VERIFY, 0, 1)], CPU
    )
    getattr(batch, field)[0] = value
    out = bound(SHAPE)(m, dt, p, layer, batch)
    slot, index, limit = says
    assert faults.record(CPU).tolist() == [1, 7, slot, index, limit]
    assert all(
        torch.equal(a[[0, 1, 3]], b[[0, 1, 3]]) for a, b in zip(before, layer.tensors(), strict=True)
    )
    assert out[3:].isfinite().all() and not torch.equal(before[0][2], layer.state[2])


def test_more_rows_than_there_are_is_reported() -> None:
    p, layer = make_params(SHAPE, torch.Generator().manual_seed(1), CPU), StateLayer(SHAPE, 2, 6, CPU)
    batch = lay_out(SlotTable(2, 64, 16), [Seq(0, 0, [0] * 3), Seq(1, 0, [0] * 2)], CPU)
    batch.seq_start[2] = 9
    bound(SHAPE)(*rows_of(5, SHAPE), p, layer, batch)
    assert faults.record(CPU).tolist() == [1, 7, 1, 8, 5]
    assert not layer.b[1].any() and layer.b[0, :3].any()


def test_a_batch_of_no_rows_launches_nothing() -> None:
    p, layer = make_params(SHAPE, torch.Generator().manual_seed(1), CPU), StateLayer(SHAPE, 2, 6, CPU)
    assert bound(SHAPE)(*rows_of(0, SHAPE), p, layer, lay_out(SlotTable(2, 64, 16), [], CPU)).shape == (
        0,
        4,
        64,
    )
