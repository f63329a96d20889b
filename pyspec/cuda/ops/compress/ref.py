"""Reference of `compress` in plain torch: one row for every `ratio` tokens, a weighted sum of the tokens' values.

    values, scores  [row, (1 + overlaps) * dim]  f32  of the batch's tokens; without scores (`weighed`) all tokens of a block count alike
    places          [ratio, (1 + overlaps) * dim] f32 the scores' bias, by a token's place in its block
    ring            the same of the tokens before, for every slot (slots.ring); scores with their bias
    pool            where the rows go, one for each block of `ratio` tokens (slots.kv, keys only)

A block's row is a sum of values, each channel weighed by a softmax over its tokens' scores, then normed (`normed`) and roped at the block's
first position. With `overlaps` a token gives two halves: the first counts in the row of the block behind its own, the second in that of its
own. A row is made when its block's last token runs. If that was a rejected draft, the token that replaces it makes the row again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.exact import by_row
from pyspec.cuda.guard import Guard
from pyspec.cuda.ops.rope_tail.ref import rope_tail
from pyspec.slots.batch import Batch
from pyspec.slots.kv import KVPool
from pyspec.slots.ring import RingRows

GUARD = Guard(13)

VALUES, SCORES = "values", "scores"  # names of the ring's rows


@dataclass(frozen=True, slots=True)
class CompressSpec:
    """`dim`: of a compressed row; the last `n_rot` of it are roped. weighed: tokens have scores; otherwise rings have none. normed: so are rows."""

    device: torch.device
    ratio: int
    dim: int
    overlaps: bool
    n_rot: int
    eps: float
    kv: torch.dtype
    weighed: bool = True
    normed: bool = True


Given = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor, RingRows, KVPool, Batch]
Compress = Callable[[*Given], None]
"""compress(values, scores, places, norm [dim], freq [n_rot / 2], ring, pool, batch): makes the rows, then keeps the tokens' in the ring."""


def bind(spec: CompressSpec) -> Compress:
    ratio, dim = spec.ratio, spec.dim

    def rows(values: Tensor, scores: Tensor) -> Tensor:
        """values, scores [block, token, dim] -> [block, dim]; a score of -inf does not count."""
        return (scores.softmax(1) * values).sum(1)

    def made_of(norm: Tensor | None, *own: Tensor) -> tuple[Tensor]:
        return (F.rms_norm(rows(*own), (dim,), norm, spec.eps) if spec.normed else rows(*own),)

    def compress(*given: *Given) -> None:
        values, scores, places, norm, freq, ring, pool, batch = given
        if not spec.weighed:
            scores = torch.zeros_like(values)
        else:
            assert scores is not None and places is not None
            scores = scores + places[batch.positions % ratio]
        for s, seq in enumerate(batch.seqs):
            here, n_past = slice(batch.starts[s], batch.starts[s + 1]), seq.n_past
            new = {VALUES: values[here]} | ({SCORES: scores[here]} if spec.weighed else {})
            first, end = n_past // ratio, (n_past + seq.width) // ratio  # blocks that are completed
            if end > first:
                blocks = _sources(first, end, seq.slot, n_past, new | {SCORES: scores[here]}, ring)
                (made,) = by_row(partial(made_of, norm), *blocks)
                made = rope_tail(made, ratio * torch.arange(first, end, device=made.device), freq)
                lasts = batch.kv_rows[here][
                    ratio * torch.arange(first + 1, end + 1, device=made.device) - 1 - n_past
                ]
                pool.write(pool.rows_of(lasts, batch.page_size), made[:, None], None)
            ring.write(seq.slot, n_past, new)

    def _sources(
        first: int, end: int, slot: int, n_past: int, new: dict[str, Tensor], ring: RingRows
    ) -> tuple[Tensor, Tensor]:
        """Values and scores of each block's sources [block, token, dim]: its own tokens, behind those of the block before."""
        start = max(0, (first - spec.overlaps) * ratio)
        old = ring.read(slot, start, n_past) if start < n_past else {}
        if old and not spec.weighed:
            old[SCORES] = torch.zeros_like(old[VALUES])
        found = []
        for name, nothing in ((VALUES, 0.0), (SCORES, -torch.inf)):
            whole = torch.cat((old[name], new[name])) if old else new[name][start - n_past :]
            whole = whole[: end * ratio - start].unflatten(0, (-1, ratio))
            own = whole[-(end - first) :]
            if spec.overlaps:
                before = whole[: end - first, :, :dim]
                if first == 0:  # nothing stands before the first block
                    empty = torch.full_like(whole[:1, :, :dim], nothing)
                    before = torch.cat((empty, whole[: end - first - 1, :, :dim]))
                own = torch.cat((before, own[..., dim:]), 1)
            found.append(own)
        return found[0], found[1]

    return compress
