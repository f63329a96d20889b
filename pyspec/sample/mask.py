"""Masks of verified rows: the tokens that a grammar allows each row, filled for all requests at once, applied to all rows at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pyspec.constrain.constraint import Constraint, Masks, fill


class SpanMask:
    """The rows of one slot: the next one and those behind its drafts, which are usable.

    rows    None until needed: greedy choices are checked alone, and most need no mask
    choice  per row the best token under its mask and its logit, if the device has found them already
    """

    __slots__ = ("choice", "constraint", "drafts", "rows")

    def __init__(self, constraint: Constraint, drafts: Sequence[int]) -> None:
        self.constraint, self.drafts = constraint, drafts
        self.rows: Masks | None = None
        self.choice: tuple[list[int], list[float]] | None = None

    def allows(self, row: int, token: int) -> bool:
        """The mask of a row allows a token."""
        if self.rows is not None:
            return bool(self.rows[row, token >> 5] >> (token & 31) & 1)
        return self.constraint.allows(self.drafts[:row], token)


def fill_all(masks: Iterable[SpanMask]) -> None:
    """Fill masks that are not filled yet, in one call."""
    empty = [mask for mask in masks if mask.rows is None]
    if not empty:
        return
    rows, at = fill([(mask.constraint, mask.drafts) for mask in empty], empty[0].constraint.trie), 0
    for mask in empty:
        mask.rows = rows[at : at + len(mask.drafts) + 1]
        at += len(mask.drafts) + 1


def apply(logits: Tensor, spans: Sequence[tuple[int, SpanMask]]) -> None:
    """Set refused tokens to -inf. spans: the first row of each, and its mask.

    logits  [row, vocab]  f32  read and written
    """
    fill_all(mask for _, mask in spans)
    rows = [first + i for first, mask in spans for i in range(len(mask.drafts) + 1)]
    packed = torch.cat([torch.from_numpy(mask.rows) for _, mask in spans])
    if logits.is_cuda:
        packed = packed.pin_memory().to(logits.device, non_blocking=True)
    bits = packed[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)
    refused = (bits.view(len(rows), -1)[:, : logits.shape[1]] & 1) == 0
    if rows == list(range(rows[0], rows[0] + len(rows))):
        logits[rows[0] : rows[0] + len(rows)].masked_fill_(refused, -math.inf)
    else:
        at = torch.tensor(rows, device=logits.device)
        logits[at] = logits[at].masked_fill(refused, -math.inf)
