"""Rows that a block drafter (DFlash) runs for a draft. The drafter runs them, and the controller weighs their cost.

A block has its trained length while that costs little: on a GPU, up to some hundred rows a forward takes the time of reading its
weights. Where more slots draft, and few tokens each, shorter blocks gain more than they lose: rows of layers
that see the whole block see fewer masks. In the demo pair (block of 8) blocks of four lose 0.9 % of the drafts that are right.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

FEW_ROWS = 128  # of a forward with the trained block, at most
FEW_ROWS_CPU = 8  # a CPU's forward takes longer with each row
LEAST = 4  # rows of a block


@dataclass(frozen=True, slots=True)
class BlockLength:
    """How long blocks are.

    trained   rows of the block that the drafter was trained with
    few_rows  rows of a forward that are as good as free
    """

    trained: int
    few_rows: int = FEW_ROWS

    def rows(self, n_slot: int, n_draft: int) -> int:
        """Rows of each block, where `n_slot` slots draft up to `n_draft` tokens: the anchor's and `n_draft` masks or more."""
        if n_slot * self.trained <= self.few_rows:
            return self.trained
        return min(self.trained, max(LEAST, 1 << n_draft.bit_length()))

    def forward_rows(self, n_slot: int, n_draft: int) -> tuple[int, ...]:
        """Rows of the forward for each number of slots that draft, from one to `n_slot`."""
        return _forward_rows(self, n_slot, n_draft)

    def depths(self, n_slot: int, n_draft: int) -> tuple[int, ...]:
        """The longest draft of each block length that `n_slot` slots may have, shortest first."""
        return _depths(self, n_slot, n_draft)


@lru_cache(maxsize=1024)
def _forward_rows(block: BlockLength, n_slot: int, n_draft: int) -> tuple[int, ...]:
    return tuple(n * block.rows(n, n_draft) for n in range(1, n_slot + 1))


@lru_cache(maxsize=1024)
def _depths(block: BlockLength, n_slot: int, n_draft: int) -> tuple[int, ...]:
    rows = [block.rows(n_slot, n) for n in range(1, n_draft + 2)]
    return tuple(n for n in range(1, n_draft + 1) if n == n_draft or rows[n - 1] != rows[n])
