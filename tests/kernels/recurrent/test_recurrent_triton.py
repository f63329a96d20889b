"""`gdn`, `mamba2` and `short_conv` in Triton against their references, in the interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton_interpreter  # noqa: F401
from torch import Tensor

from pyspec.cuda import faults
from pyspec.cuda.op import guarded_ops
from pyspec.cuda.ops.gdn import ref as gdn_ref
from pyspec.cuda.ops.gdn import triton as gdn_triton
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.mamba2 import ref as mamba2_ref
from pyspec.cuda.ops.mamba2 import triton as mamba2_triton
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.cuda.ops.recurrent.check import LATE_ROUNDS
from pyspec.cuda.ops.short_conv import ref as short_conv_ref
from pyspec.cuda.ops.short_conv import triton as short_conv_triton
from pyspec.cuda.ops.short_conv.shape import ShortConvShape
from pyspec.slots.batch import Batch, Seq, SeqMode, lay_out
from pyspec.slots.recurrent import StateLayer
from pyspec.slots.table import SlotTable

CPU = torch.device("cpu")
GDN = gdn_ref.GdnSpec(CPU, GdnShape(1, 2, 32, 4, 4 * 32), 1e-6)
MAMBA2 = mamba2_ref.Mamba2Spec(CPU, Mamba2Shape(n_head=2, head_dim=32, n_group=1, n_state=16, n_conv=4))
SHORT_CONV = short_conv_ref.ShortConvSpec(CPU, ShortConvShape(72, 3))
SPECS = {"gdn": GDN, "mamba2": MAMBA2, "short_conv": SHORT_CONV}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
Run = Callable[[StateLayer, Batch, slice], Tensor]


def runs(name: str, n: int) -> tuple[Run, Run, Callable[[StateLayer, int, int], None]]:
    """(the kernels, the reference) over rows of one text of n tokens; the kernels' fold."""
    gen = torch.Generator().manual_seed(7)
    shape = SPECS[name].shape
    if name == "short_conv":
        raw, w = torch.randn(n, 3 * 72, generator=gen), torch.randn(72, 3, generator=gen)
        conv = short_conv_triton.bind(SHORT_CONV)
        run, ref_run = (
            lambda layer, batch, r, f=f: f(raw[r], w, layer, batch)
            for f in (conv, short_conv_ref.bind(SHORT_CONV))
        )
        return run, ref_run, conv.folder()
    m = torch.randn(n, shape.n_channel, generator=gen)
    if name == "gdn":
        gates = torch.randn(2, n, 2, generator=gen)
        weights = (
            -torch.rand(2, generator=gen),
            torch.randn(2, generator=gen),
            torch.randn(shape.n_channel, 4, generator=gen),
        )
        own, other = gdn_triton.bind(GDN), gdn_ref.bind(GDN)
        own_run, other_run = (
            lambda layer, batch, r, f=f: f(m[r], gates[0, r], gates[1, r], *weights, layer, batch)
            for f in (own, other)
        )
        return own_run, other_run, own.folder()
    dt, p = torch.randn(n, 2, generator=gen), mamba2_ref.make_params(shape, gen, CPU)
    own, other = mamba2_triton.bind(MAMBA2), mamba2_ref.bind(MAMBA2)
    own_run, other_run = (
        lambda layer, batch, r, f=f: f(m[r], dt[r], p, layer, batch) for f in (own, other)
    )
    return own_run, other_run, own.folder()


@pytest.mark.parametrize("name", SPECS)
def test_rounds_that_fold_join_and_leave_are_the_references(name: str) -> None:
    own, other, _ = runs(name, 9)
    shape = SPECS[name].shape
    layers, tables = [StateLayer(shape, 3, 4, CPU) for _ in "ab"], [SlotTable(3, 32, 16) for _ in "ab"]
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
        n = sum(s.width for s in seqs)
        got, want = (
            run(layer, lay_out(table, seqs, CPU), slice(0, n))
            for run, layer, table in zip((own, other), layers, tables, strict=True)
        )
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)
    for got, want in zip(layers[0].tensors(), layers[1].tensors(), strict=True):
        assert torch.allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_state_and_outputs_have_the_same_bits_however_tokens_came(name: str) -> None:
    n, found = 7, []
    own, _, fold = runs(name, n)
    late = [(1, None)] * 3 + [(1, True)]  # rows that wait, and one that writes the state
    plans = [
        [(1, True)] * n,
        [(n, True)],
        [(4, False), (3, False)],
        [(2, True), (4, False), (1, True)],
        [*late, *late[:3]],
    ]
    for plan in plans:
        layer, table = StateLayer(SPECS[name].shape, 2, 4, CPU), SlotTable(2, 32, 16)
        at, n_fold, out = 0, 0, []
        for width, keep in plan:
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
                        n_fold,
                    )
                ],
                CPU,
            )
            out.append(own(layer, batch, slice(at, at + width)))
            at, n_fold = at + width, 0 if keep else width + n_fold * waits
        fold(layer, 1, n_fold)
        found.append(
            (torch.cat(out), layer.state.clone(), layer.conv[:, : SPECS[name].shape.n_conv - 1].clone())
        )
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, found[0], strict=True))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("field, value", [("seq_slot", 9), ("seq_fold", 5), ("seq_start", 70)])
def test_a_bad_index_is_reported_and_its_sequence_is_skipped(name: str, field: str, value: int) -> None:
    own, _, _ = runs(name, 2)
    layer, table = StateLayer(SPECS[name].shape, 3, 4, CPU), SlotTable(3, 32, 16)
    batch = lay_out(table, [Seq(0, 0, [0], SeqMode.KEEP), Seq(1, 0, [0], SeqMode.KEEP)], CPU)
    getattr(batch, field)[0 if field != "seq_start" else 2] = value
    own(layer, batch, slice(0, 2))
    fault = faults.record(CPU)
    tripped = fault.tolist()
    fault.zero_()
    assert tripped[:2] == [1, {op.name: number for number, op in guarded_ops().items()}[name]]
    bad, good = (1, 0) if field == "seq_start" else (0, 1)
    assert not any(t[bad].any() for t in layer.tensors()) and layer.conv[good].any()
    assert name == "short_conv" or layer.state[good].any()


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_the_check_of_a_load_passes(name: str) -> None:
    ref, tri = {
        "gdn": (gdn_ref, gdn_triton),
        "mamba2": (mamba2_ref, mamba2_triton),
        "short_conv": (short_conv_ref, short_conv_triton),
    }[name]
    assert ref.check(tri.bind(SPECS[name]), ref.bind(SPECS[name]), SPECS[name]) is None
