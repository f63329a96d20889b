"""`gdn`, `mamba2` and `short_conv` as one: rows, weights, layers and ragged batches, and what holds for all three on any machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import torch
from machines import CPU, NO_FAULT, Machine, off, same
from torch import Tensor

from pyspec.cuda.ops.gdn import cuda as gdn_cuda
from pyspec.cuda.ops.gdn import ref as gdn_ref
from pyspec.cuda.ops.gdn.ref import GdnSpec
from pyspec.cuda.ops.gdn.shape import GdnShape
from pyspec.cuda.ops.mamba2 import cuda as mamba2_cuda
from pyspec.cuda.ops.mamba2 import ref as mamba2_ref
from pyspec.cuda.ops.mamba2.ref import Mamba2Spec, Params, make_params
from pyspec.cuda.ops.mamba2.shape import Mamba2Shape
from pyspec.cuda.ops.short_conv import cuda as short_conv_cuda
from pyspec.cuda.ops.short_conv import ref as short_conv_ref
from pyspec.cuda.ops.short_conv.ref import ShortConvSpec
from pyspec.cuda.ops.short_conv.shape import ShortConvShape
from pyspec.slots.arena import Arena
from pyspec.slots.batch import Batch, Seq, SeqMode, lay_out
from pyspec.slots.recurrent import StateLayer
from pyspec.slots.table import SlotTable

EPS, N_SLOT, WIDTH = 1e-6, 4, 6
KEEP, VERIFY, LATE = SeqMode.KEEP, SeqMode.VERIFY, SeqMode.LATE
Plan = Sequence[tuple[int, int, SeqMode]]
"""How a slot's tokens come: of each forward (rows, rows of them that are taken, mode)."""


@dataclass(frozen=True)
class Op:
    """A recurrence on a device. A launch takes `rows` (of a number of tokens), `weights`, a layer and a batch."""

    shape: Any
    device: torch.device = CPU
    kernels: ModuleType | None = None  # CUDA's, or others
    how: dict[str, int] = field(default_factory=dict)  # builds of the kernels

    @property
    def name(self) -> str:
        return {GdnShape: "gdn", Mamba2Shape: "mamba2", ShortConvShape: "short_conv"}[type(self.shape)]

    @property
    def label(self) -> str:
        """In names of cases."""
        sizes = (str(x) for x in dataclasses.astuple(self.shape))
        return " ".join([self.name, "-".join(sizes), *(f"{k}={v}" for k, v in self.how.items())])

    @property
    def number(self) -> int:
        """Of the op in faults."""
        return {"gdn": 3, "mamba2": 7, "short_conv": 14}[self.name]

    @property
    def ref(self) -> ModuleType:
        return {"gdn": gdn_ref, "mamba2": mamba2_ref, "short_conv": short_conv_ref}[self.name]

    @property
    def cuda(self) -> ModuleType:
        return {"gdn": gdn_cuda, "mamba2": mamba2_cuda, "short_conv": short_conv_cuda}[self.name]

    @property
    def spec(self) -> Any:
        if self.name == "gdn":
            return GdnSpec(self.device, self.shape, EPS)
        return {"mamba2": Mamba2Spec, "short_conv": ShortConvSpec}[self.name](self.device, self.shape)

    def on(self, machine: Machine, **how: int) -> Op:
        return replace(self, device=machine.device, how={**self.how, **how})

    def bind(self, **how: int) -> Any:
        return (self.kernels or self.cuda).bind(self.spec, **{**self.how, **how})

    def folder(self) -> Callable[[StateLayer, int, int], None]:
        """The call that folds records without rows."""
        if self.kernels is self.ref:
            fold: Callable[[StateLayer, int, int], None] = self.ref.flush
            return fold
        made = getattr(self.kernels or self.cuda, "folder", None)
        return made(self.spec) if made else self.bind().folder()

    def reference(self) -> Any:
        return self.ref.bind(self.spec)

    def rows(self, n: int, gen: torch.Generator | int = 0) -> list[Tensor]:
        """Raw rows as a fused projection gives them: slices of wider ones that are NaN elsewhere."""
        gen = torch.Generator().manual_seed(gen) if isinstance(gen, int) else gen
        s = self.shape
        if self.name == "gdn":
            sizes, scales = [s.n_channel, s.n_v_head * s.n_decay, s.n_v_head], (1.0, 3.0, 3.0)
        else:
            sizes = [s.n_channel, s.n_head] if self.name == "mamba2" else [3 * s.n_channel]
            scales = (1.0, 1.0)
        wide = torch.full((n, 4 + sum(sizes) + 64 + -sum(sizes) % 4), torch.nan, device=self.device)
        parts = list(wide[:, 4:].split([*sizes, 64 + -sum(sizes) % 4], 1))[:-1]
        for x, scale in zip(parts, scales, strict=False):
            x.copy_(scale * torch.randn(x.shape, generator=gen))
        return parts

    def weights(self, gen: torch.Generator | int = 1) -> list[Any]:
        """Some heads of gdn keep all they saw, some forget at once."""
        gen = torch.Generator().manual_seed(gen) if isinstance(gen, int) else gen
        s = self.shape
        if self.name == "mamba2":
            return [make_params(s, gen, self.device)]
        if self.name == "short_conv":
            return [torch.randn(s.n_channel, s.n_conv, generator=gen).to(self.device)]
        scale = torch.tensor([0.0, 0.1, 1.0, 30.0])[torch.arange(s.n_v_head) % 4]
        a = -scale * torch.rand(s.n_v_head, generator=gen)
        bias = torch.randn(s.n_v_head * s.n_decay, generator=gen)
        return [x.to(self.device) for x in (a, bias, torch.randn(s.n_channel, 4, generator=gen))]

    def layer(self, n_slot: int = N_SLOT, width: int = WIDTH) -> StateLayer:
        return StateLayer(self.shape, n_slot, width, self.device)

    def unwritten(self) -> StateLayer:
        """A new layer whose records hold NaN."""
        layer = self.layer()
        for t in (*layer.records(), layer.conv[:, self.shape.n_conv - 1 :]):
            t.fill_(torch.nan)
        return layer

    def drawn(self, n_slot: int = N_SLOT, width: int = WIDTH) -> StateLayer:
        """A layer of random numbers, the same each time."""
        layer = self.layer(n_slot, width)
        for t in layer.tensors():
            t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(9)))
        return layer

    def window(self, layer: StateLayer, slot: Any = slice(None)) -> Tensor:
        return layer.conv[slot, : self.shape.n_conv - 1]

    def laid(self, seqs: Sequence[Seq], n_slot: int = N_SLOT) -> Batch:
        """What kernels read of a batch: positions and pages start anew in every forward."""
        return lay_out(SlotTable(n_slot, 512, 64), seqs, self.device)

    def laid_in_bucket(self, seqs: Sequence[Seq], arena: Arena) -> Batch:
        """As graphs see it, with places for more sequences and rows."""
        batch = lay_out(SlotTable(N_SLOT, 512, 64), seqs, self.device, arena=arena)
        assert batch.bucket is not None
        return batch


class Exact:
    """The reference of an op in float64, on the CPU, with a layer of its own."""

    def __init__(self, op: Op) -> None:
        self.op = replace(op, device=CPU)
        self.layer, self.run = self.op.layer(), self.op.reference()
        for name in ("state", "conv", *self.op.shape.records):
            setattr(self.layer, name, getattr(self.layer, name).double())

    def __call__(self, rows: Sequence[Tensor], weights: Sequence[Any], seqs: Sequence[Seq]) -> Tensor:
        given = [x.cpu().double() for x in rows], [doubled(w) for w in weights]
        out: Tensor = self.run(*given[0], *given[1], self.layer, self.op.laid(seqs))
        return out


def doubled(x: Any) -> Any:
    """A tensor or parameters, in float64 on the CPU."""
    if isinstance(x, Tensor):
        return x.cpu().double()
    return Params(*(getattr(x, name).double().cpu() for name in Params.__slots__))


def gdn_shape(n_k: int, n_v: int, **more: Any) -> GdnShape:
    return GdnShape(n_k, n_v, 128, 4, 128 * (2 * n_k + n_v), **more)


def seq(slot: int, n: int, keep: bool = False, fold: int = 0, late: bool = False) -> Seq:
    return Seq(slot, 0, [0] * n, LATE if late else KEEP if keep else VERIFY, 0, fold)


def n_rows(seqs: Iterable[Seq]) -> int:
    return sum(s.width for s in seqs)


# -- how tokens came ------------------------------------------------------------------------------------------------


def kept(*widths: int) -> Plan:
    return [(n, n, KEEP) for n in widths]


def verified(widths: Sequence[int], accepts: Sequence[int] | None = None) -> Plan:
    return [(n, taken, VERIFY) for n, taken in zip(widths, accepts or widths, strict=True)]


def late(n: int) -> Plan:
    """Row by row, of which three wait and the fourth writes the state."""
    return [(1, 1, KEEP if t % 4 == 3 or t == n - 1 else LATE) for t in range(n)]


def played(
    op: Op, plan: Plan, n: int, width: int, *, neighbours: bool = False, folds: bool = False, **how: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Slot 1's n tokens as `plan` says, and what is left of them kept at once: its outputs, state and window.

    Rows that are not taken hold noise, other slots have rows of their own if there are neighbours and stay as they are if not. `folds`: a
    fold without rows ends it.
    """
    gen, w, layer = torch.Generator().manual_seed(2), op.weights(), op.layer(4, width)
    launch = op.bind(**how)
    text, outs, done, fold = op.rows(n, gen), [], 0, 0
    left = n - sum(taken for _, taken, _ in plan)
    for rows, taken, mode in [*plan, *([(left, left, KEEP)] if left or not folds else [])]:
        if not rows:
            continue
        noise = op.rows(rows, gen)
        given = [
            torch.cat([x[done : done + taken], y[taken:]]) for x, y in zip(text, noise, strict=True)
        ]
        seqs, at = [Seq(1, 0, [0] * rows, mode, 0, fold)], 0
        if neighbours:
            seqs, at = [seq(3, 2), *seqs, seq(0, 5, True)], 2
            given = [torch.cat([x[:2], y, x[2:]]) for x, y in zip(op.rows(7, gen), given, strict=True)]
        outs.append(launch(*given, *w, layer, op.laid(seqs))[at : at + taken])
        done, fold = done + taken, 0 if mode is KEEP else taken + (fold if mode is LATE else 0)
    if folds:
        op.folder()(layer, 1, fold)
    assert done == n and (neighbours or not any(t[[0, 2, 3]].any() for t in layer.tensors()))
    return torch.cat(outs), layer.state[1].clone(), op.window(layer, 1).clone()


def check_folding_alone(op: Op, fold: int, width: int) -> None:
    """Folding records without rows gives the bits of folding them before rows, and touches no other slot."""
    run, alone, w = op.bind(), op.folder(), op.weights()
    layers = [op.drawn(3, width) for _ in range(2)]
    for layer in layers:
        run(*op.rows(width), *w, layer, op.laid([seq(1, width)], 3))
    others = [t[[0, 2]].clone() for t in layers[0].tensors()]
    alone(layers[0], 1, fold)
    alone(layers[0], 2, 0)
    found = []
    for layer, n in zip(layers, (0, fold), strict=True):
        out = run(*op.rows(2, 3), *w, layer, op.laid([seq(1, 2, True, n)], 3))
        found.append((out, layer.state, op.window(layer, 1)))
    assert same(*found)
    assert same([t[[0, 2]] for t in layers[0].tensors()], others)


# -- padding, and indices that are none -----------------------------------------------------------------------------


def with_nobody(batch: Batch, n_seq: int = 2) -> Batch:
    """`n_seq` more sequences, without rows and with nonsense for metadata."""

    def more(x: Tensor, value: int) -> Tensor:
        return torch.cat([x, x.new_full((n_seq,), value)])

    return dataclasses.replace(
        batch,
        seq_slot=more(batch.seq_slot, 10**9),
        seq_start=more(batch.seq_start, int(batch.seq_start[-1])),
        seq_fold=more(batch.seq_fold, -7),
        seq_keep=more(batch.seq_keep, 1),
    )


def check_padding(op: Op, padded: Callable[[Sequence[Seq]], Batch], machine: Machine) -> None:
    """Rows without a sequence come out as zeros; slots without rows, and records that no row writes, stay NaN."""
    seqs, taps = [seq(3, 4), seq(1, 3, True)], op.shape.n_conv - 1
    layer, want, rows, w = op.unwritten(), op.layer(), op.rows(8), op.weights()
    for t in layer.tensors():
        t[[0, 2]] = torch.nan
    got = op.bind()(*rows, *w, layer, padded(seqs))
    expected = op.reference()(*(x[:7] for x in rows), *w, want, op.laid(seqs))
    assert off(got[:7], expected) < 1e-4 and not got[7:].any()
    assert torch.allclose(layer.state[[1, 3]], want.state[[1, 3]], atol=1e-4)
    assert torch.equal(op.window(layer, 1), op.window(want, 1))
    assert torch.equal(layer.conv[3, : taps + 4], want.conv[3, : taps + 4])
    assert all(t[[0, 2]].isnan().all() for t in layer.tensors())
    assert layer.conv[1, taps:].isnan().all() and layer.conv[3, taps + 4 :].isnan().all()
    for t in layer.records():
        assert t[1].isnan().all() and t[3, 4:].isnan().all() and t[3, :4].isfinite().all()
    assert machine.faults().tolist() == NO_FAULT


WILD = [
    ("seq_fold", -1, (-1, 7)),
    ("seq_fold", 7, (7, 7)),
    ("seq_fold", 2**31 - 1, (2**31 - 1, 7)),
    ("seq_slot", 4, (4, 4)),
    ("seq_slot", -1, (-1, 4)),
]
"""(field of a batch, its value, (index, limit) of the fault): more records than there are, slots that are none."""


def check_wild(
    op: Op,
    field: str,
    value: int,
    says: tuple[int, int],
    machine: Machine,
    widths: tuple[int, int, int] = (3, 3, 3),
) -> None:
    """The second sequence of three is reported and writes nothing; the others have the bits that they have without it."""
    first, n, last = widths
    rows, w = op.rows(sum(widths)), op.weights()
    seqs = [seq(0, first, True), seq(1, n, n > WIDTH), seq(2, last, last > WIDTH, 1)]
    launch, good, bad, batch = op.bind(), op.drawn(), op.drawn(), op.laid(seqs)
    want = launch(*rows, *w, good, op.laid(seqs))
    machine.waited()
    assert machine.faults().tolist() == NO_FAULT
    getattr(batch, field)[1] = value
    got = launch(*rows, *w, bad, batch)
    machine.waited()
    slot = value if field == "seq_slot" else 1
    assert machine.faults().tolist() == [1, op.number, slot, *says]
    machine.faults().zero_()
    assert all(torch.equal(got[part], want[part]) for part in (slice(0, first), slice(first + n, None)))
    for a, b, before in zip(bad.tensors(), good.tensors(), op.drawn().tensors(), strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]]) and torch.equal(a[[1, 3]], before[[1, 3]])
    assert not torch.equal(bad.conv[2], op.drawn().conv[2])


# -- prompts in chunks ----------------------------------------------------------------------------------------------


def follow(
    op: Op,
    machine: Machine,
    rounds: Iterable[Sequence[Seq]],
    within: Callable[[Sequence[Seq]], float],
    states: float,
    spoilt: Callable[[list[Tensor], list[Any]], tuple[list[Tensor], list[Any]]] | None = None,
    by_head: bool = False,
    states_by_head: bool = True,
    **settings: Any,
) -> None:
    """Rounds on the kernels and on the reference in float64: outputs are off by less than `within(round)`, a slot's state by `states`; by head, each head's.

    `spoilt` makes rows and weights hostile. `settings` are the machine's.
    """
    gen, mine, theirs = torch.Generator().manual_seed(1), op.unwritten(), Exact(op)
    weights, taps = op.weights(gen), op.shape.n_conv - 1
    with machine.started(**settings):
        launch = op.bind()
        for seqs in rounds:
            rows, w = op.rows(n_rows(seqs), gen), weights
            rows, w = spoilt(rows, w) if spoilt else (rows, w)
            machine.poison()
            got = launch(*rows, *w, mine, op.laid(seqs))
            want = theirs(rows, w, seqs)
            parts = zip(got.unbind(1), want.unbind(1), strict=True) if by_head else [(got, want)]
            assert got.isfinite().all() and all(off(*part) < within(seqs) for part in parts)
            for s in seqs:
                both = mine.state[s.slot], theirs.layer.state[s.slot]
                if states_by_head:
                    assert all(off(*of) < states for of in zip(*both, strict=True))
                assert off(*both) < states
                n = taps if s.keep else taps + s.width + s.n_fold * s.late
                assert off(mine.conv[s.slot, :n], theirs.layer.conv[s.slot, :n]) < 1e-6
                if not s.keep:
                    for a, b in zip(mine.records(), theirs.layer.records(), strict=True):
                        assert off(a[s.slot, : n - taps], b[s.slot, : n - taps]) < 1e-5
        assert machine.faults().tolist() == NO_FAULT


def beside(
    op: Op, machine: Machine, n: int, before: list[Seq], after: list[Seq], **settings: int
) -> tuple[Tensor, ...]:
    """A prompt of n rows of slot 1 (whose first forward folds records) between others: its outputs, state and window."""
    first, own, others = n_rows(before), op.rows(n, 8), op.rows(n_rows([*before, *after]), 18)
    rows = [torch.cat([x[:first], y, x[first:]]) for x, y in zip(others, own, strict=True)]
    layer = op.drawn()
    with machine.started(**settings):
        got = op.bind()(*rows, *op.weights(), layer, op.laid([*before, seq(1, n, True, 3), *after]))
    return got[first : first + n], layer.state[1], op.window(layer, 1)
