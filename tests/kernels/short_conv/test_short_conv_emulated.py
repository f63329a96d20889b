"""short_conv.cu and its launcher run thread by thread on the CPU: the reference's rows, bit-equal however tokens came, and safe."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from emulated.gpu import CPU, emulated_gpu
from emulated.machine import needs_compiler
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.ops.short_conv import cuda as short_conv_cuda
from pyspec.cuda.ops.short_conv import ref as short_conv_ref
from pyspec.cuda.ops.short_conv.ref import ShortConvSpec
from pyspec.cuda.ops.short_conv.shape import ShortConvShape
from pyspec.errors import OutOfBounds
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Seq, SeqMode, lay_out
from pyspec.slots.recurrent import StateLayer
from pyspec.slots.table import SlotTable

pytestmark = [needs_compiler, pytest.mark.sampled(1)]
SHAPE = ShortConvShape(140, 3)  # of its second block twelve channels are real


@pytest.fixture(autouse=True, params=[0, 1])
def _gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """In two orders of threads and blocks. Unwritten memory holds NaN."""
    with emulated_gpu(seed=request.param):
        faults.record(CPU).zero_()
        yield


def rows_of(n: int, shape: ShortConvShape = SHAPE, seed: int = 0) -> Tensor:
    """Slices of wider rows that are NaN elsewhere."""
    wide = torch.full((n, 3 * shape.n_channel + 8), torch.nan)
    wide[:, 4:-4] = torch.randn(n, 3 * shape.n_channel, generator=torch.Generator().manual_seed(seed))
    return wide[:, 4:-4]


def taps_of(shape: ShortConvShape = SHAPE) -> Tensor:
    return torch.randn(shape.n_channel, shape.n_conv, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize(
    "shape", [SHAPE, ShortConvShape(4, 2), ShortConvShape(256, 4), ShortConvShape(132, 5)]
)
def test_rounds_are_the_references(shape: ShortConvShape) -> None:
    """The op's own check: prompts of several stretches, verifies, late rows and folds, ragged and in any order."""
    spec = ShortConvSpec(CPU, shape)
    run = short_conv_cuda.bind(spec)
    assert short_conv_ref.check(run, short_conv_ref.bind(spec), spec) is None
    assert not faults.record(CPU).any()


def test_outputs_and_windows_have_the_same_bits_however_tokens_came() -> None:
    m, w, run, found = rows_of(78), taps_of(), short_conv_cuda.bind(ShortConvSpec(CPU, SHAPE)), []
    late = ((1, None),) * 3 + ((1, True),)  # rows that wait, and one that writes the window
    plans: list[tuple[tuple[int, bool | None], ...]] = [
        ((17, False),) * 4 + ((10, True),),
        ((5, True), (12, False), (1, False), (60, True)),
        ((1, True),) * 78,
        ((78, True),),
        (*late * 19, (2, True)),
    ]
    for plan in plans:
        layer, table = StateLayer(SHAPE, 3, 17, CPU), SlotTable(3, 16, 16)
        at, fold, outs = 0, 0, []
        for width, keep in plan:
            waits = keep is None
            mode = SeqMode.LATE if waits else SeqMode.KEEP if keep else SeqMode.VERIFY
            batch = lay_out(table, [Seq(1, at, [0] * width, mode, 0, fold)], CPU)
            outs.append(run(m[at : at + width], w, layer, batch))
            at, fold = at + width, 0 if keep else width + fold * waits
        assert at == 78 and not layer.conv[[0, 2]].any()
        found.append((torch.cat(outs), layer.conv[1, :2].clone()))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


@pytest.mark.parametrize("fold", [1, 2, 17])
def test_folding_alone_gives_the_window_of_folding_before_rows(fold: int) -> None:
    run, w = short_conv_cuda.bind(ShortConvSpec(CPU, SHAPE)), taps_of()
    layers = [StateLayer(SHAPE, 3, 17, CPU) for _ in "ab"]
    for layer in layers:
        layer.conv.copy_(torch.rand(layer.conv.shape, generator=torch.Generator().manual_seed(5)))
        run(rows_of(17), w, layer, lay_out(SlotTable(3, 64, 16), [Seq(1, 0, [0] * 17)], CPU))
    others = layers[0].conv[[0, 2]].clone()
    alone = run.folder()
    alone(layers[0], 1, fold)
    alone(layers[0], 2, 0)
    outs = [
        run(
            rows_of(2, seed=3),
            w,
            layer,
            lay_out(SlotTable(3, 64, 16), [Seq(1, fold, [0] * 2, SeqMode.KEEP, 0, n)], CPU),
        )
        for layer, n in zip(layers, (0, fold), strict=True)
    ]
    assert torch.equal(*outs) and torch.equal(*(layer.conv[1, :2] for layer in layers))
    assert torch.equal(layers[0].conv[[0, 2]], others)
    with pytest.raises(OutOfBounds):
        alone(layers[0], 1, 18)
    assert not faults.record(CPU).any()


def test_a_padded_batch_touches_nothing_but_its_slots() -> None:
    """As graphs see it: 7 rows in a bucket of 8, four places for two sequences. Windows of others are NaN and stay."""
    seqs = [Seq(3, 0, [0] * 4), Seq(1, 0, [0] * 3, SeqMode.KEEP)]
    m, w, spec = rows_of(8), taps_of(), ShortConvSpec(CPU, SHAPE)
    layer, want = (StateLayer(SHAPE, 4, 6, CPU) for _ in "ab")
    layer.conv[[0, 2]] = torch.nan
    layer.conv[:, 2:] = torch.nan
    batch = lay_out(SlotTable(4, 64, 16), seqs, CPU, arena=Arena(4, 8, CPU))
    assert batch.bucket is not None
    got = short_conv_cuda.bind(spec)(m, w, layer, batch)
    plain = lay_out(SlotTable(4, 64, 16), seqs, CPU)
    expected = short_conv_ref.bind(spec)(m[:7], w, want, plain)
    assert torch.allclose(got[:7], expected, atol=1e-5) and not got[7:].any()
    assert torch.equal(layer.conv[1, :2], want.conv[1, :2])
    assert torch.equal(layer.conv[3, :6], want.conv[3, :6])
    assert layer.conv[[0, 2]].isnan().all()
    assert layer.conv[1, 2:].isnan().all() and layer.conv[3, 6:].isnan().all()


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
def test_a_wild_index_is_reported_and_its_sequence_writes_nothing(
    field: str, value: int, says: tuple[int, int, int]
) -> None:
    layer, run = StateLayer(SHAPE, 4, 6, CPU), short_conv_cuda.bind(ShortConvSpec(CPU, SHAPE))
    layer.conv.normal_(generator=torch.Generator().manual_seed(2))
    before = layer.conv.clone()
    seqs = [Seq(0, 0, [0] * 3), Seq(2, 0, [0] * 2, SeqMode.VERIFY, 0, 1)]
    batch = lay_out(SlotTable(4, 64, 16), seqs, CPU)
    getattr(batch, field)[0] = value
    out = run(rows_of(5), taps_of(), layer, batch)
    assert faults.record(CPU).tolist() == [1, 14, *says]
    assert torch.equal(layer.conv[[0, 1, 3]], before[[0, 1, 3]])
    assert out[3:].isfinite().all() and not torch.equal(before[2], layer.conv[2])


def test_more_rows_than_there_are_or_than_are_recorded_is_reported() -> None:
    run, layer = short_conv_cuda.bind(ShortConvSpec(CPU, SHAPE)), StateLayer(SHAPE, 2, 6, CPU)
    batch = lay_out(SlotTable(2, 64, 16), [Seq(0, 0, [0] * 3), Seq(1, 0, [0] * 2)], CPU)
    batch.seq_start[2] = 9
    run(rows_of(5), taps_of(), layer, batch)
    assert faults.record(CPU).tolist() == [1, 14, 1, 8, 5]
    assert not layer.conv[1].any() and layer.conv[0, 2:5].any()
    faults.record(CPU).zero_()
    narrow = StateLayer(SHAPE, 2, 2, CPU)
    run(
        rows_of(5),
        taps_of(),
        narrow,
        lay_out(SlotTable(2, 64, 16), [Seq(1, 0, [0] * 3), Seq(0, 0, [0] * 2)], CPU),
    )
    assert faults.record(CPU).tolist() == [1, 14, 1, 3, 3]
    assert not narrow.conv[1].any() and narrow.conv[0, 2:].any()


def test_a_batch_of_no_rows_launches_nothing() -> None:
    run, layer = short_conv_cuda.bind(ShortConvSpec(CPU, SHAPE)), StateLayer(SHAPE, 2, 6, CPU)
    out = run(rows_of(0), taps_of(), layer, lay_out(SlotTable(2, 64, 16), [], CPU))
    assert out.shape == (0, 140)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 4, 17])
def test_rounds_of_64_slots_are_the_references(width: int) -> None:
    spec, w, layers = (
        ShortConvSpec(CPU, SHAPE),
        taps_of(),
        [StateLayer(SHAPE, 64, 17, CPU) for _ in "ab"],
    )
    order = torch.randperm(64, generator=torch.Generator().manual_seed(width)).tolist()
    own, other = short_conv_cuda.bind(spec), short_conv_ref.bind(spec)
    for step in range(2):
        folds = step > 0 and width > 1
        mode = SeqMode.KEEP if width == 1 else SeqMode.VERIFY
        seqs = [
            Seq(slot, 0, [0] * width, mode, n_fold=slot % width + 1 if folds else 0) for slot in order
        ]
        batch = lay_out(SlotTable(64, 512, 64), seqs, CPU)
        m = rows_of(batch.n_row, seed=step)
        got, want = (run(m, w, layer, batch) for run, layer in zip((own, other), layers, strict=True))
        assert torch.allclose(got, want, atol=1e-4)
    assert torch.equal(layers[0].conv, layers[1].conv) and not faults.record(CPU).any()
