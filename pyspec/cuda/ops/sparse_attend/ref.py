"""Attention over a window of raw rows and over compressed ones, with keys that are values, too. Reference in plain torch.

    q       [row, head, dim]  f32    as a product gives it: heads are normed without a weight, and their last dims are turned
    kv      [row, dim]        f32    the batch's own keys, normed with a weight and turned alike
    ring    ROWS [slot, n, dim]      keys of the tokens before (slots.ring)
    pool    compressed rows, keys only; None where a layer has none
    chosen  [row, top_k]      int32  which of them, -1 for none; None: all whose blocks are complete
    sinks   [head]            f32    one more logit of every head, without a value
    out     [row, head, dim]  f32    turned back, since values carry the turn of keys

A token sees the last `window` tokens, itself among them, and its compressed rows under one softmax. The batch's own keys are rounded as the ring
rounds them, so a row does not depend on where a prompt was cut. Keys go into the ring at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.guard import Guard
from pyspec.cuda.kernel_context import current
from pyspec.cuda.ops.index_rows.ref import block_rows
from pyspec.cuda.ops.rope_tail.ref import rope_tail
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool
from pyspec.slots.ring import RingRows

GUARD = Guard(12)

ROWS = "rows"  # name of the ring's rows


@dataclass(frozen=True, slots=True)
class SparseSpec:
    """`ratio`: tokens of a compressed row, 0 where a layer has none; `n_rot`: dims that are turned; `eps`: of the norms."""

    device: torch.device
    n_head: int
    dim: int
    window: int
    ratio: int
    kv: torch.dtype
    n_rot: int
    eps: float


@dataclass(frozen=True, slots=True)
class KeyTail:
    """Weights that turn a product's rows into keys: `norm` [dim] f32, and `freq` [n_rot / 2] f64, angles of one position."""

    norm: Tensor
    freq: Tensor


Given = tuple[Tensor, Tensor, KeyTail, RingRows, KVPool | None, Tensor | None, Tensor]
SparseAttend = Callable[[*Given, Batch], Tensor]
"""attend(q, kv, tail, ring, pool, chosen, sinks, batch)"""


def _weighed(q: Tensor, keys: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """q [head, dim], keys [key, dim] -> [head, dim]"""
    scores = torch.cat((q @ keys.T * scale, sinks.view(-1, 1)), -1)
    return scores.softmax(-1)[..., :-1] @ keys


def bind(spec: SparseSpec) -> SparseAttend:
    scale = spec.dim**-0.5

    def attend(*given: *tuple[*Given, Batch]) -> Tensor:
        q, kv, tail, ring, pool, chosen, sinks, batch = given
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        q = rope_tail(F.rms_norm(q, (spec.dim,), None, spec.eps), batch.positions, tail.freq)
        kv = rope_tail(F.rms_norm(kv, (spec.dim,), tail.norm, spec.eps), batch.positions, tail.freq)
        kv = kv.to(ring.rows[ROWS].dtype)
        for s, seq in enumerate(batch.seqs):
            here, n_past = slice(batch.starts[s], batch.starts[s + 1]), seq.n_past
            at, first = batch.positions[here, None], max(0, n_past - spec.window + 1)
            old = ring.read(seq.slot, first, n_past)[ROWS]
            keys = torch.cat((old, kv[here])).float()
            place = torch.arange(first, n_past + seq.width, device=q.device)
            seen = (place <= at) & (place > at - spec.window)
            if pool is not None and (n_block := (n_past + seq.width) // spec.ratio):
                rows = pool.read(block_rows(pool, batch, s, n_block), torch.float32)[0][:, 0]
                block = torch.arange(n_block, device=q.device)
                taken = block < (at + 1) // spec.ratio
                if chosen is not None:
                    mark = torch.zeros(seq.width, n_block + 1, dtype=torch.bool, device=q.device)
                    # -1 marks the last column, which is left out
                    taken = mark.scatter_(1, chosen[here].long() % (n_block + 1), True)[:, :n_block]
                keys, seen = torch.cat((keys, rows)), torch.cat((seen, taken), 1)
            ring.write(seq.slot, n_past, {ROWS: kv[here]})
            if current().is_exact and q.device.type == "cpu":  # each row alone, with the keys it sees
                each = zip(q[here], seen, strict=True)
                out[here] = torch.stack([_weighed(one, keys[sees], sinks, scale) for one, sees in each])
                continue
            scores = torch.einsum("rhd,kd->rhk", q[here], keys) * scale
            scores = scores.masked_fill(~seen[:, None], -torch.inf)
            sink = sinks.view(1, -1, 1).expand(len(scores), -1, 1)
            out[here] = torch.cat((scores, sink), -1).softmax(-1)[..., :-1] @ keys
        return rope_tail(out, batch.positions, tail.freq, -1.0)

    return attend
