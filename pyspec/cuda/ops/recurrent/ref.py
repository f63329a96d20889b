"""Shared by recurrent layers with deferred commit: bounds, the convolution with its window, ragged batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.kernel_context import current
from pyspec.errors import OutOfBounds
from pyspec.slots.batch import Batch, Seq
from pyspec.slots.recurrent import StateLayer


def check_seqs(batch: Batch, layer: StateLayer) -> None:
    """Check every index of the op on the host, before anything is written."""
    n_slot = layer.state.shape[0]
    for seq in batch.seqs:
        if not 0 <= seq.slot < n_slot:
            raise OutOfBounds("state slot", seq.slot, n_slot, seq.slot)
        if not 0 <= seq.n_fold <= layer.width:
            raise OutOfBounds(f"slot {seq.slot} fold count", seq.n_fold, layer.width + 1, seq.slot)
        if not seq.keep and first_record(seq) + seq.width > layer.width:
            raise OutOfBounds(
                f"slot {seq.slot} verify width", first_record(seq) + seq.width, layer.width + 1, seq.slot
            )


def first_record(seq: Seq) -> int:
    """Index of the first record of its rows."""
    return seq.n_fold if seq.late else 0


def has_records(layer: StateLayer, slot: int, n_fold: int) -> bool:
    """False if there is nothing to fold; OutOfBounds for more than a slot can have recorded."""
    if not 0 <= n_fold <= layer.width:
        raise OutOfBounds(f"slot {slot} fold count", n_fold, layer.width + 1, slot)
    return n_fold > 0


def softplus(x: Tensor) -> Tensor:
    """Spelt out, because on CPUs torch's own rounds the last rows of a tensor differently."""
    return torch.where(x > 20, x, x.clamp(max=20).exp().log1p())


def pad(rows: Sequence[Tensor], width: int, fill: float = 0.0) -> Tensor:
    """Ragged [n_i, ...] to [seq, width, ...]; `fill` is a value that leaves a state unchanged."""
    out = rows[0].new_full((len(rows), width, *rows[0].shape[1:]), fill)
    for i, r in enumerate(rows):
        out[i, : r.shape[0]] = r
    return out


def kept_records(layer: StateLayer, batch: Batch, slots: Tensor, fills: Sequence[float]) -> list[Tensor]:
    """For each of the layer's records [seq, deep, ...] the rows to be folded, padded with `fills`, which leave a state unchanged; [] if there
    are no rows. Records that are not folded may hold anything, NaN included: they are masked, not multiplied."""
    deep = max(seq.n_fold for seq in batch.seqs)
    if deep == 0:
        return []
    live = torch.tensor(
        [[t < seq.n_fold for t in range(deep)] for seq in batch.seqs], device=slots.device
    )
    rows = [record[slots, :deep] for record in layer.records()]
    return [
        torch.where(live.view(*live.shape, *[1] * (r.dim() - 2)), r, f)
        for r, f in zip(rows, fills, strict=True)
    ]


CHUNKED = 24  # rows from which a prompt chunk pays for the chunked form
CHUNK = 64
# step(states [n, ...], *rows [n, ...]) -> the rows' outputs: one token for many, in place
Step = Callable[..., Tensor | None]


def step_through(state: Tensor, rows: Sequence[Tensor], step: Step) -> list[Tensor | None]:
    """state [seq, head, ...] in place over rows [seq, row, head, ...], one row of all sequences and heads after the other."""
    flat = state.view(-1, *state.shape[2:])
    each = range(rows[0].shape[1]) if rows else range(0)
    return [step(flat, *(r[:, t].reshape(len(flat), *r.shape[3:]) for r in rows)) for t in each]


def advance(
    layer: StateLayer,
    batch: Batch,
    state: Tensor,
    out: Tensor,
    short: Callable[[Tensor, Sequence[slice], int], Tensor],
    long: Callable[[Tensor, slice], Tensor] | None,
    chunked: int,
) -> None:
    """Run the batch's rows over `state` [seq, ...], which has its records folded; write `out` [row, head, dim] and the states.

    short(states, spans, width)  over several sequences at once, [seq, width, head, dim]: fewer rows than `chunked`, or a verify
    long(state, span)            over one, [row, head, dim]; None: there is no such form
    """
    spans = [slice(batch.starts[s], batch.starts[s + 1]) for s in range(len(batch.seqs))]
    few = [
        s
        for s, seq in enumerate(batch.seqs)
        if long is None or current().is_exact or not (seq.keep and seq.width >= chunked)
    ]
    for s, seq in enumerate(batch.seqs):
        if not seq.keep and not seq.late:  # the state of a verify is stored as it stands before its rows
            layer.state[seq.slot] = state[s]
    if few:
        part = state if len(few) == len(spans) else state[few]
        y = short(part, [spans[s] for s in few], max(batch.seqs[s].width for s in few))
        for i, s in enumerate(few):
            out[spans[s]] = y[i, : batch.seqs[s].width]
            if batch.seqs[s].keep:
                layer.state[batch.seqs[s].slot] = part[i]
    for s in set(range(len(spans))) - set(few):
        assert long is not None
        out[spans[s]] = long(state[s], spans[s])
        layer.state[batch.seqs[s].slot] = state[s]


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The parts in which two recurrences differ.

    step    see Step; `state, *rows of a record, query`
    widen   rows of key heads or groups [..., shared head, dim] to all heads
    shared  the record that is widened; so is the query
    fills   of each record, a value that leaves a state unchanged
    """

    step: Step
    widen: Callable[[Tensor], Tensor]
    shared: int
    fills: Sequence[float]

    def widened(self, rows: Sequence[Tensor]) -> list[Tensor]:
        return [self.widen(r) if i == self.shared else r for i, r in enumerate(rows)]


def run_rows(
    r: Recurrence,
    layer: StateLayer,
    batch: Batch,
    rows: Sequence[Tensor],
    query: Tensor,
    long: Callable[[Tensor, slice], Tensor] | None,
) -> Tensor:
    """Fold, then run a batch's rows, in the order of the records [row, head, ...], with `query` -> out [row, head, dim].

    long(state, span)  runs a long kept sequence, see `advance`
    """
    slots = torch.tensor([seq.slot for seq in batch.seqs], device=query.device)
    state = layer.state[slots]
    n_head, dim = state.shape[1:3]
    out = query.new_empty(query.shape[0], n_head, dim)
    if records := kept_records(layer, batch, slots, r.fills):
        step_through(state, r.widened(records), r.step)
    record(layer, batch, rows)

    def short(part: Tensor, spans: Sequence[slice], width: int) -> Tensor:
        padded = [
            pad([x[span] for span in spans], width, fill) for x, fill in zip(rows, r.fills, strict=True)
        ]
        asked = r.widen(pad([query[span] for span in spans], width))
        y = step_through(part, (*r.widened(padded), asked), r.step)
        return torch.stack(y, 1).view(len(spans), n_head, width, dim).transpose(1, 2)  # type: ignore[arg-type]  # with a query every step gives outputs

    advance(layer, batch, state, out, short, long, CHUNKED)
    return out


def flush(r: Recurrence, layer: StateLayer, slot: int, n_fold: int) -> None:
    """Fold a slot's recorded rows now, so that its state stands at its committed length (checkpoints)."""
    if not has_records(layer, slot, n_fold):
        return
    rows = r.widened([record[slot, :n_fold] for record in layer.records()])
    for t in range(n_fold):
        r.step(layer.state[slot], *(x[t] for x in rows))
    shift_window(layer, slot, n_fold)


def convolve(
    m: Tensor, w: Tensor, layer: StateLayer, batch: Batch, taps: int, bias: Tensor | None = None
) -> Tensor:
    """Shift windows by the fold, convolve, silu; store windows (keep) or raw rows (verify).

    A row's bits do not depend on other rows if the channels are a multiple of 32, as in models: on CPUs
    torch's silu rounds the remainder otherwise.
    """
    return F.silu(through_window(m, w, layer, batch, taps, bias))


def through_window(
    m: Tensor, w: Tensor, layer: StateLayer, batch: Batch, taps: int, bias: Tensor | None = None
) -> Tensor:
    """`convolve` without an activation."""
    out = torch.empty_like(m)
    for s, seq in enumerate(batch.seqs):
        rows = m[batch.starts[s] : batch.starts[s + 1]]
        window = layer.conv[seq.slot, seq.n_fold : seq.n_fold + taps - 1].clone()
        x = torch.cat([window, rows])
        n = seq.width
        y = x[0:n] * w[:, 0] if bias is None else torch.addcmul(bias, x[0:n], w[:, 0])
        for t in range(1, taps):
            y = torch.addcmul(y, x[t : t + n], w[:, t])
        out[batch.starts[s] : batch.starts[s + 1]] = y
        if seq.keep:
            layer.conv[seq.slot, : taps - 1] = x[n:]
        else:
            first = first_record(seq)
            layer.conv[seq.slot, taps - 1 + first : taps - 1 + first + n] = rows
            if not seq.late:
                layer.conv[seq.slot, : taps - 1] = window
    return out


def record(layer: StateLayer, batch: Batch, rows: Sequence[Tensor]) -> None:
    """Keep the rows of every verify for the fold that may come; `rows` [row, ...] in the order of the shape's records."""
    for s, seq in enumerate(batch.seqs):
        if not seq.keep:
            first = first_record(seq)
            for record, new in zip(layer.records(), rows, strict=True):
                record[seq.slot, first : first + seq.width] = new[batch.starts[s] : batch.starts[s + 1]]


def shift_window(layer: StateLayer, slot: int, n_fold: int) -> None:
    """Move a slot's conv window to after its first `n_fold` recorded rows, without new rows."""
    taps = layer.shape.n_conv
    layer.conv[slot, : taps - 1] = layer.conv[slot, n_fold : n_fold + taps - 1].clone()
