"""Rows that a block drafter (DFlash) runs for a draft. The drafter runs them, and the controller weighs their cost.

A block has its trained length while that costs little: up to some hundred rows a forward takes the time of reading its
weights. Where more slots draft, and few tokens each, shorter blocks gain more than they lose: rows of layers
that see the whole block see fewer masks. In the demo pair (block of 8) blocks of four lose 0.9 % of the drafts that are right.
"""

from __future__ import annotations

from functools import lru_cache

FEW_ROWS = 128  # of a forward with the trained block, at most
LEAST = 4  # rows of a block


def block_rows(trained: int, n_slot: int, n_draft: int) -> int:
    """Rows of each block, where `n_slot` slots draft up to `n_draft` tokens: the anchor's and `n_draft` masks or more."""
    if n_slot * trained <= FEW_ROWS:
        return trained
    return min(trained, max(LEAST, 1 << n_draft.bit_length()))


@lru_cache(maxsize=1024)
def forward_rows(trained: int, n_slot: int, n_draft: int) -> tuple[int, ...]:
    """Rows of the forward for each number of slots that draft, from one to `n_slot`."""
    return tuple(n * block_rows(trained, n, n_draft) for n in range(1, n_slot + 1))


@lru_cache(maxsize=1024)
def depths(trained: int, n_slot: int, n_draft: int) -> tuple[int, ...]:
    """The longest draft of each block length that `n_slot` slots may have, shortest first."""
    rows = [block_rows(trained, n_slot, n) for n in range(1, n_draft + 2)]
    return tuple(n for n in range(1, n_draft + 1) if n == n_draft or rows[n - 1] != rows[n])
