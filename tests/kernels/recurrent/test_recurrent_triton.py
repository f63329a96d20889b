"""`gdn`, `mamba2` and `short_conv` in Triton against their references, in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton_interpreter  # noqa: F401
from machines import CPU, INTERPRETED, same
from recurrent_cases import Op, check_wild, kept, late, n_rows, played, seq, verified

from pyspec.cuda.op import guarded_ops
from pyspec.cuda.ops.gdn import triton as gdn_triton
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.mamba2 import triton as mamba2_triton
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.cuda.ops.recurrent.check import LATE_ROUNDS
from pyspec.cuda.ops.short_conv import triton as short_conv_triton
from pyspec.cuda.ops.short_conv.shape import ShortConvShape
from pyspec.slots.batch import Seq, SeqMode, lay_out
from pyspec.slots.table import SlotTable

OPS = {
    "gdn": Op(GdnShape(1, 2, 32, 4, 4 * 32), kernels=gdn_triton),
    "gdn by key": Op(GdnShape(1, 2, 32, 4, 4 * 32, by_key=True, floor=-5.0), kernels=gdn_triton),
    "mamba2": Op(Mamba2Shape(2, 32, 1, 16, 4), kernels=mamba2_triton),
    "short_conv": Op(ShortConvShape(72, 3), kernels=short_conv_triton),
}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("name", OPS)
def test_rounds_that_fold_join_and_leave_are_the_references(name: str) -> None:
    op = OPS[name]
    runs, layers = (op.bind(), op.reference()), [op.layer(3, 4) for _ in "ab"]
    tables, all_rows, w = [SlotTable(3, 32, 16) for _ in "ab"], op.rows(9), op.weights()
    for seqs in (
        [Seq(0, 0, [0] * 3, SeqMode.KEEP), Seq(2, 0, [0], SeqMode.KEEP)],
        [Seq(0, 3, [0] * 4), Seq(2, 1, [0] * 2)],
        [
            Seq(2, 2, [0], SeqMode.VERIFY, 0, 1),
            Seq(0, 6, [0] * 2, SeqMode.VERIFY, 0, 3),
            Seq(1, 0, [0] * 5, SeqMode.KEEP),
        ],
        [Seq(0, 8, [0], SeqMode.KEEP, 0, 0), Seq(2, 3, [0], SeqMode.KEEP)],
        *LATE_ROUNDS,
        [Seq(1, 5, [0] * 2)],
    ):
        rows = [x[: n_rows(seqs)] for x in all_rows]
        got, want = (
            run(*rows, *w, layer, lay_out(table, seqs, CPU))
            for run, layer, table in zip(runs, layers, tables, strict=True)
        )
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)
    for got, want in zip(layers[0].tensors(), layers[1].tensors(), strict=True):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_state_and_outputs_have_the_same_bits_however_tokens_came(name: str) -> None:
    plans = (
        kept(*[1] * 7),
        kept(7),
        verified([4, 3]),
        [*kept(2), *verified([4]), *kept(1)],
        late(7),
    )
    assert same(*(played(OPS[name], plan, 7, 4, folds=True) for plan in plans))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(("field", "value"), [("seq_slot", 9), ("seq_fold", 7)])
def test_a_bad_index_is_reported_and_its_sequence_is_skipped(name: str, field: str, value: int) -> None:
    op = OPS[name]
    assert guarded_ops()[op.number].name == op.name
    check_wild(op, field, value, (value, 4 if field == "seq_slot" else 7), INTERPRETED, (1, 1, 1))


@pytest.mark.parametrize("name", OPS)
def test_more_rows_than_there_are_is_reported_and_its_sequence_is_skipped(name: str) -> None:
    op = OPS[name]
    layer, batch = op.layer(3, 4), op.laid([seq(0, 1, True), seq(1, 1, True)], 3)
    batch.seq_start[2] = 70
    op.bind()(*op.rows(2), *op.weights(), layer, batch)
    assert INTERPRETED.faults().tolist()[:2] == [1, op.number]
    INTERPRETED.faults().zero_()
    assert not any(t[1].any() for t in layer.tensors()) and layer.conv[0].any()
    assert name == "short_conv" or layer.state[0].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_the_check_of_a_load_passes(name: str) -> None:
    op = OPS[name]
    assert op.ref.check(op.bind(), replace(op, kernels=None).reference(), op.spec) is None
