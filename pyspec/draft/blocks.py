"""How many rows a block drafter (DFlash) runs for a draft: known to the drafter, which runs them, and to the controller, which weighs them.

A block is as long as it was trained, as long as that costs little: up to some hundred rows a forward takes the time of reading its
weights. Where more slots draft, and few tokens each, shorter blocks (fewer masks) are worth more than what they lose: rows of layers
that see the whole block see fewer masks. In the demo pair (block of 8) blocks of four lose 0.9 % of the drafts that are right.
"""

from __future__ import annotations

from functools import lru_cache

FEW_ROWS = 128  # of a forward: up to so many the trained block runs
LEAST = 4  # rows of a block


def block_rows(trained: int, n_slot: int, n_draft: int) -> int:
    """Rows of each block, where so many slots draft up to `n_draft` tokens: the anchor's and as many masks or more."""
    if n_slot * trained <= FEW_ROWS:
        return trained
    return min(trained, max(LEAST, 1 << n_draft.bit_length()))


@lru_cache(maxsize=1024)
def forward_rows(trained: int, n_slot: int, n_draft: int) -> tuple[int, ...]:
    """Rows of the forward for each number of slots that draft, from one to `n_slot`."""
    return tuple(n * block_rows(trained, n, n_draft) for n in range(1, n_slot + 1))


@lru_cache(maxsize=1024)
def depths(trained: int, n_slot: int, n_draft: int) -> tuple[int, ...]:
    """The longest draft of each block length that there is for so many slots, shortest first."""
    rows = [block_rows(trained, n_slot, n) for n in range(1, n_draft + 2)]
    return tuple(n for n in range(1, n_draft + 1) if n == n_draft or rows[n - 1] != rows[n])
