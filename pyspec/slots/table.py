"""Slots and KV pages: who sits where, and which pages hold whose tokens. No torch here: it is arithmetic.

All index arithmetic on pages happens in this file. A slot keeps its pages and tokens after its request ended, so the
next request that begins with the same tokens continues from them; the pages of idle slots are taken back when another
slot needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pyspec.errors import OutOfBounds, RequestError


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens two sequences share."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(slots=True)
class Slot:
    """One lane of the batch.

    `tokens` are the committed ones: their K and V stand in `pages`, at position = index. `n_fold` counts the rows of the
    slot's last verify that are committed but not yet folded into its recurrent state; `generation` grows with every
    request, and whoever keeps state per slot tags it with that number.
    """

    index: int
    generation: int = 0
    busy: bool = False
    reserved: int = 0  # pages promised to the request, held or not
    n_fold: int = 0
    last_used: int = 0
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)

    @property
    def n_past(self) -> int:
        return len(self.tokens)


class SlotTable:
    """Owns every slot and every KV page: a page is free or held by exactly one slot."""

    def __init__(self, n_slot: int, n_page: int, page_size: int) -> None:
        self.page_size = page_size
        self.n_page = n_page
        self.slots = [Slot(i) for i in range(n_slot)]
        self._free = list(range(n_page - 1, -1, -1))
        self._clock = 0

    @property
    def n_row(self) -> int:
        return self.n_page * self.page_size

    @property
    def null_row(self) -> int:
        """A row behind all pages that no slot owns: where padding writes. Pools have it, see `n_alloc_row`."""
        return self.n_row

    @property
    def n_alloc_row(self) -> int:
        """Rows a KV pool needs: every page's, and a null page."""
        return self.n_row + self.page_size

    @property
    def n_page_used(self) -> int:
        return self.n_page - len(self._free)

    def pages_for(self, n_tokens: int) -> int:
        return -(-n_tokens // self.page_size)

    def can_admit(self, n_tokens: int) -> bool:
        """True if a request of at most `n_tokens` rows can run to its end beside the busy ones."""
        promised = sum(s.reserved for s in self.slots if s.busy)
        return any(not s.busy for s in self.slots) and promised + self.pages_for(n_tokens) <= self.n_page

    def pick(self, prompt: Sequence[int], wanted: int = -1) -> Slot | None:
        """The idle slot that shares the longest prefix with `prompt`; if none shares much, an empty or the oldest one.

        A prefix counts if it is half of the slot's tokens or of the prompt: the few tokens every chat begins with are no
        reason to throw another conversation away. `wanted` names a slot; None if that one (or every one) is busy.
        """
        if wanted >= len(self.slots):
            raise RequestError(f"slot {wanted} does not exist; slots are 0..{len(self.slots) - 1} (-np)")
        idle = [s for s in self.slots if not s.busy and wanted in (-1, s.index)]
        if not idle:
            return None

        def worth(slot: Slot) -> tuple[int, bool, int]:
            n = common_prefix(slot.tokens, prompt)
            return n if 2 * n >= min(slot.n_past, len(prompt)) else 0, not slot.tokens, -slot.last_used

        return max(idle, key=worth)

    def acquire(self, slot: Slot, n_tokens: int) -> None:
        """Seat a request of at most `n_tokens` rows in `slot`. The caller asked `can_admit` before."""
        assert not slot.busy
        self._clock += 1
        slot.busy, slot.last_used = True, self._clock
        slot.generation += 1
        slot.reserved = self.pages_for(n_tokens)

    def release(self, slot: Slot) -> None:
        """End the slot's request; its tokens and pages stay for reuse."""
        assert slot.busy
        slot.busy, slot.reserved = False, 0

    def trim(self, slot: Slot, n_tokens: int) -> None:
        """Forget all tokens from position `n_tokens` on and give back the pages that no token needs any more."""
        if not 0 <= n_tokens <= slot.n_past:
            raise OutOfBounds(f"slot {slot.index} length", n_tokens, slot.n_past + 1, slot.index)
        del slot.tokens[n_tokens:]
        keep = self.pages_for(n_tokens)
        self._free.extend(reversed(slot.pages[keep:]))
        del slot.pages[keep:]

    def grow(self, slot: Slot, n_tokens: int) -> None:
        """Hold pages for `n_tokens` positions. Takes pages from idle slots, oldest first, when none is free."""
        need = self.pages_for(n_tokens) - len(slot.pages)
        if need <= 0:
            return
        while need > len(self._free):
            idle = [s for s in self.slots if not s.busy and s.pages]
            if not idle:
                raise OutOfBounds(f"slot {slot.index} page", len(slot.pages) + need, self.n_page, slot.index)
            victim = min(idle, key=lambda s: s.last_used)
            self.trim(victim, 0)
            victim.n_fold = 0
            victim.generation += 1
        for _ in range(need):
            slot.pages.append(self._free.pop())

    def row(self, slot: Slot, pos: int) -> int:
        """KV row of the token at `pos`: page * page_size + offset."""
        limit = len(slot.pages) * self.page_size
        if not 0 <= pos < limit:
            raise OutOfBounds(f"slot {slot.index} position", pos, limit, slot.index)
        page, offset = divmod(pos, self.page_size)
        return slot.pages[page] * self.page_size + offset

    def rows(self, slot: Slot, first: int, n: int) -> list[int]:
        """KV rows of `n` tokens from position `first` on."""
        if n == 0:
            return []
        self.row(slot, first)
        self.row(slot, first + n - 1)
        size, pages = self.page_size, slot.pages
        return [pages[p // size] * size + p % size for p in range(first, first + n)]

    def check(self) -> None:
        """Every page is in exactly one place, and no slot holds more tokens than rows. Cheap; run when idle."""
        held = sorted(self._free + [p for s in self.slots for p in s.pages])
        assert held == list(range(self.n_page)), "a page is lost or held twice"
        for s in self.slots:
            assert s.n_past <= len(s.pages) * self.page_size, f"slot {s.index} has tokens without pages"
            assert s.n_fold <= s.n_past, f"slot {s.index} folds {s.n_fold} of {s.n_past} tokens"
