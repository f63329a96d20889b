"""Attention over paged keys and values, ragged, with a key range per row. Reference in plain torch.

    q           [row, head, dim]      float    after rope
    pool        keys and values [pool row, kv, dim] of any types; the rows of this batch are already written
    batch       page table, lo and hi per row (see slots.batch)
    sinks       [head]                f32      or None
    out         [row, head, dim]      q's dtype; [row, head, n_value] where keys are the values

Row r of sequence s attends to positions lo[r] <= p < hi[r] of s. Query head h reads KV head h // (head / kv). One
sequence never reads another's pages, and each is computed on its own, so a result does not depend on the neighbours.
A sink is one more key of its head for the softmax, with this logit and no value: weights of the others sum to less than one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.guard import Guard
from pyspec.cuda.kernel_context import current
from pyspec.cuda.ops.attend.spec import AttendSpec as AttendSpec
from pyspec.slots.kv import KVPool

if TYPE_CHECKING:
    from pyspec.slots.batch import Batch

GUARD = Guard(4)
P = TypeVar("P", int, Tensor)

Attend: TypeAlias = "Callable[Concatenate[Tensor, KVPool, Batch, ...], Tensor]"
"""attend(q, pool, batch, window=0, sinks=None) -> out; one that fetches ahead takes `after`, too (fuse.py)"""


def key_rows(batch: Batch, seq: int, first: int = 0) -> Tensor:
    """Pool rows of positions first..max_hi-1 of a sequence."""
    n, size, hidden = batch.max_hi[seq], batch.page_size, first // batch.page_size  # pages
    pages = batch.page_table[seq, hidden : -(-n // size)]
    rows = (pages[:, None] * size + torch.arange(size, device=pages.device)).view(-1)
    return rows[first - hidden * size : n - hidden * size]


def first_seen(position: P, window: int) -> P:
    """The first position that a row at `position` may see: of the last `window` up to its own, or of its chunk of -window positions."""
    return position - (window - 1) if window > 0 else position - position % -window


def check_given(q: Tensor, pool: KVPool, batch: Batch, sinks: Tensor | None, spec: AttendSpec) -> None:
    """Assert dtypes, shapes and layouts, which only our own code can get wrong."""
    assert q.dtype == torch.float32 and q.is_contiguous() and q.shape[1:] == (spec.n_head, spec.head_dim)
    assert (pool.n_head, pool.head_dim, pool.kv) == (spec.n_kv_head, spec.head_dim, spec.kv)
    assert all(plane.is_contiguous() for plane in pool.planes)
    assert (sinks is not None) == spec.has_sinks
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
    assert sinks is None or sinks.shape == (spec.n_head,)
    assert pool.n_row % batch.page_size == 0 and batch.row_seq.dtype == torch.int32
    for t in (batch.page_table, batch.positions, batch.lo, batch.hi):
        assert t.dtype == torch.int64 and t.is_contiguous()
    assert all(len(t) == q.shape[0] for t in (batch.positions, batch.lo, batch.hi, batch.row_seq))


def bind(spec: AttendSpec) -> Attend:
    group = spec.n_head // spec.n_kv_head

    def alone(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        """One row q [head, dim] with the keys and values [key, kv, dim] that it sees, independent of other rows."""
        kt, vt = k.permute(1, 2, 0), v.transpose(0, 1)
        scores = capped(q.view(spec.n_kv_head, group, -1) @ kt * spec.scale, spec.cap)
        if sinks is not None:
            scores = torch.cat([scores, sinks.to(q.dtype).view(spec.n_kv_head, group, 1)], -1)
        weights = scores.softmax(-1)[..., : k.shape[0]]
        return (weights @ vt).view(1, spec.n_head, spec.value_dim)

    def attend(
        q: Tensor, pool: KVPool, batch: Batch, window: int = 0, sinks: Tensor | None = None
    ) -> Tensor:
        """`window` narrows each row's range, see `first_seen`."""
        out = q.new_empty(len(q), spec.n_head, spec.value_dim)
        lo = batch.lo if window == 0 else torch.maximum(batch.lo, first_seen(batch.positions, window))
        for s, seq in enumerate(batch.seqs):
            rows = slice(batch.starts[s], batch.starts[s + 1])
            # Keys before it are not read
            first = max(0, first_seen(seq.n_past, window)) if window else 0
            k, v = pool.read(key_rows(batch, s, first), q.dtype)
            v = v[..., : spec.value_dim]
            if current().is_exact and q.device.type == "cpu":
                ranges = [
                    slice(lo[r] - first, batch.hi[r] - first) for r in range(rows.start, rows.stop)
                ]
                out[rows] = torch.cat(
                    [
                        alone(x, k[at], v[at], sinks)
                        for x, at in zip(q[rows].unbind(), ranges, strict=True)
                    ]
                )
                continue
            qs = q[rows].view(seq.width, spec.n_kv_head, group, spec.head_dim).permute(1, 2, 0, 3)
            pos = torch.arange(first, batch.max_hi[s], device=q.device)
            seen = (pos >= lo[rows, None]) & (pos < batch.hi[rows, None])
            kt, vt = (t.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for t in (k, v))
            if sinks is None and not spec.cap:
                y = F.scaled_dot_product_attention(qs, kt, vt, attn_mask=seen, scale=spec.scale)
            else:
                own = None if sinks is None else sinks.to(q.dtype).view(spec.n_kv_head, group, 1, 1)
                y = _by_hand(qs, kt, vt, seen, own, spec)
            out[rows] = y.permute(2, 0, 1, 3).reshape(seq.width, spec.n_head, spec.value_dim)
        return out

    return attend


def capped(scores: Tensor, cap: float) -> Tensor:
    """As `AttendSpec.cap` says."""
    return cap * (scores / cap).tanh() if cap else scores


def _by_hand(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None, spec: AttendSpec
) -> Tensor:
    """q [kv, group, row, dim], k, v [kv, group, key, dim], seen [row, key], sinks [kv, group, 1, 1] -> as q."""
    scores = capped(q @ k.transpose(-1, -2) * spec.scale, spec.cap).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[-2]] @ v
