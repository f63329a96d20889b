"""Slots and KV pages: requests by slot, and texts by page. No torch here: it is arithmetic.

All index arithmetic on pages is in this file. A slot reads the first pages of its text in the prefix tree, shared with all slots whose
text begins with them, and holds pages of its own for the rest. A request's pages are filed in the tree at its end, and evicted when a
slot needs them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from pyspec.errors import OutOfBounds, RequestError
from pyspec.slots.images import Handles, ImageSpan, shift_before
from pyspec.slots.prefix import NO_HIT, NOBODY, Hit, Node, Owner, PrefixTree


@dataclass(slots=True)
class Slot:
    """One lane of the batch.

    tokens      committed: their K and V are in `pages`, at position = index
    nodes       the first pages, which are filed and immutable
    images      pictures of the request's prompt, in order
    left        the text that the last request filed: the content of an idle slot
    owner       whose text it is; left_owner: whose `left` is
    n_fold      recorded rows that are committed but not folded into the recurrent state yet
    generation  grows with every request; per-slot state elsewhere is tagged with it
    """

    index: int
    generation: int = 0
    busy: bool = False
    reserved: int = 0  # pages promised to the request, held or not
    n_fold: int = 0
    last_used: int = 0
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    images: tuple[ImageSpan, ...] = ()
    left: tuple[int, ...] = ()
    owner: Owner = NOBODY
    left_owner: Owner = NOBODY
    page_ids: NDArray[np.int64] | None = field(
        default=None, compare=False, repr=False
    )  # see SlotTable.reach

    @property
    def n_past(self) -> int:
        return len(self.tokens)

    @property
    def shift(self) -> int:
        """Rows less positions of a text row behind its tokens, where positions have three axes (M-RoPE)."""
        return shift_before(self.images, self.n_past)

    def images_in(self, first: int, end: int) -> tuple[ImageSpan, ...]:
        """Pictures with rows from `first` to `end` - 1."""
        return tuple(span for span in self.images if span.first < end and span.end > first)

    def left_of(self, salt: str) -> tuple[int, ...]:
        """The text that the last request filed, if it had this salt."""
        return self.left if self.left_owner.salt == salt else ()


def alloc_rows(n_page: int, page_size: int) -> int:
    """Rows a KV pool needs: every page's, and a null page."""
    return (n_page + 1) * page_size


class SlotTable:
    """Owns every slot and every KV page: a page is free, filed in the tree, or one slot's own."""

    def __init__(self, n_slot: int, n_page: int, page_size: int) -> None:
        self.page_size = page_size
        self.n_page = n_page
        self.slots = [Slot(i) for i in range(n_slot)]
        self._free = list(range(n_page - 1, -1, -1))
        self.tree = PrefixTree(page_size, self._free.append)
        self.handles = Handles()  # of pictures
        self.has_unread = False  # a page was filed of which the drafter has no rows
        self.n_change = 0  # pages that slots have released, and requests
        self.needs_state = False  # a prefix can be continued only at a kept state (recurrent layers)
        self.n_chunk = (
            0  # most rows of a slot in a forward of the target (`Memory.n_chunk`); 0: any number
        )
        self._clock = 0

    @property
    def n_row(self) -> int:
        return self.n_page * self.page_size

    @property
    def null_row(self) -> int:
        """A row behind all pages that no slot owns, for the writes of padding. Pools have it, see `n_alloc_row`."""
        return self.n_row

    @property
    def n_alloc_row(self) -> int:
        """Rows of a KV pool."""
        return alloc_rows(self.n_page, self.page_size)

    @property
    def n_page_used(self) -> int:
        """Pages that slots hold. Pages that are only filed count as free."""
        return self.n_page - len(self._free) - self.tree.n_idle

    @property
    def n_page_cached(self) -> int:
        """Filed pages, held or not."""
        return self.tree.n_node

    def pages_for(self, n_tokens: int) -> int:
        """Pages that hold `n_tokens` tokens."""
        return -(-n_tokens // self.page_size)

    @property
    def _promised(self) -> int:
        """Pages that running requests hold or may still ask for; a page they share counts once."""
        return self.tree.n_held + sum(s.reserved - len(s.nodes) for s in self.slots if s.busy)

    def can_admit(self, n_tokens: int, prompt: Sequence[int] = (), owner: Owner = NOBODY) -> bool:
        """True if a request of at most `n_tokens` rows can run to its end beside the busy ones.

        prompt: given if it may share pages with them.
        """
        if all(s.busy for s in self.slots):
            return False
        over = self._promised + self.pages_for(n_tokens) - self.n_page
        return over <= 0 or (
            len(prompt) > 0 and over <= sum(node.refs > 0 for node in self.find(prompt, owner).nodes)
        )

    def find(self, prompt: Sequence[int], owner: Owner = NOBODY) -> Hit:
        """The part of a prompt in the tree."""
        return self.tree.find(prompt, self.needs_state, owner)

    def pick(self, wanted: int = -1) -> Slot | None:
        """The least recently used idle slot. wanted: a slot's index; None if that one (or every one) is busy."""
        if wanted >= len(self.slots):
            raise RequestError(f"slot {wanted} does not exist; slots are 0..{len(self.slots) - 1} (-np)")
        idle = [s for s in self.slots if not s.busy and wanted in (-1, s.index)]
        return min(idle, key=lambda s: s.last_used, default=None)

    def acquire(
        self,
        slot: Slot,
        n_tokens: int,
        prompt: Sequence[int] = (),
        hit: Hit = NO_HIT,
        owner: Owner = NOBODY,
    ) -> tuple[int, int] | None:
        """Seat a request of at most `n_tokens` rows in `slot`, with the part of its prompt in `hit`.

        Call `can_admit` first. Returns (from, to) if a page has to be copied before any forward.
        """
        assert not slot.busy
        self.drop(slot)
        self._clock += 1
        slot.busy, slot.last_used = True, self._clock
        slot.generation += 1
        slot.reserved, slot.owner = self.pages_for(n_tokens), owner
        for node in hit.nodes:
            self.tree.hold(node)
            node.mark(owner.client, self.page_size)
        slot.nodes.extend(hit.nodes)
        slot.pages.extend(node.page for node in hit.nodes)
        slot.tokens.extend(prompt[: hit.n])
        if hit.tail is None:
            return None
        self.tree.touch(hit.tail)
        slot.pages.append(self._take())
        # If no other page was free, the tail itself was evicted: it has the content already.
        return None if slot.pages[-1] == hit.tail.page else (hit.tail.page, slot.pages[-1])

    def file(self, slot: Slot, *, whole: bool = False, n_unread: int = 0) -> Node | None:
        """File the full pages of the slot's committed tokens. A page that is filed already is shared from now on.

        whole: also the page that is not full; release the slot next. n_unread: the drafter has no rows of so many tokens at the begin.
        Returns the node of the slot's last token, if that is filed.
        """
        self.has_unread = self.has_unread or n_unread > 0
        end = self.pages_for(slot.n_past) if whole else slot.n_past // self.page_size
        for i in range(len(slot.nodes), end):
            node = self._filed(slot, i)
            if node.page != slot.pages[i]:
                self._free.append(slot.pages[i])
                slot.pages[i], slot.page_ids = node.page, None
            elif node.start < n_unread:
                node.n_unread = min(node.end, n_unread)
            self.tree.hold(node)
            slot.nodes.append(node)
        return slot.nodes[-1] if slot.nodes and slot.n_past <= slot.nodes[-1].end else None

    def file_tail(self, slot: Slot, *, n_unread: int = 0) -> tuple[Node, tuple[int, int] | None] | None:
        """File the slot's last page, though it is not full; the slot goes on in a copy of it, if there is a page for that. File its full pages
        first. n_unread: as for `file`.

        Returns the page's node, and (from, to) if a page has to be copied before any forward.
        """
        i = len(slot.nodes)
        if slot.n_past <= i * self.page_size or not (self._free or self.tree.n_idle):
            return None
        node = self._filed(slot, i)
        if node.page != slot.pages[i]:  # another request has left it
            return node, None
        self.has_unread, node.n_unread = self.has_unread or n_unread > 0, min(node.end, n_unread)
        self.tree.hold(node)
        slot.pages[i], slot.page_ids = self._take(), None
        self.tree.let_go([node])
        return node, (node.page, slot.pages[i])

    def _filed(self, slot: Slot, i: int) -> Node:
        """The node of the slot's page `i`, which is the first one that is not its node yet."""
        parent = slot.nodes[-1] if slot.nodes else self.tree.root_of(slot.owner.salt)
        tokens = tuple(slot.tokens[i * self.page_size : (i + 1) * self.page_size])
        node = self.tree.add(parent, tokens, slot.pages[i], (slot.index, slot.generation))
        node.mark(slot.owner.client, len(tokens))
        return node

    def release(self, slot: Slot, *, trusted: bool = True) -> None:
        """End the slot's request. Its filed pages stay; if it is not `trusted`, they are removed."""
        assert slot.busy
        by = (slot.index, slot.generation)
        first = next((node for node in slot.nodes if node.by == by), None)
        slot.busy, slot.reserved = False, 0
        self.drop(slot)
        if first is not None and not trusted:
            self.tree.prune(first)

    def drop(self, slot: Slot) -> None:
        """Release all pages of a slot."""
        self.n_change += 1 + len(slot.pages)
        self._free.extend(reversed(slot.pages[len(slot.nodes) :]))
        self.tree.let_go(slot.nodes)
        slot.nodes.clear()
        slot.pages.clear()
        slot.tokens.clear()
        slot.n_fold, slot.page_ids, slot.images = 0, None, ()

    def erase(self, slot: Slot, salt: str = "") -> int:
        """Forget filed pages of requests of this salt in this slot, except those that other slots hold or have left. Returns the number of
        tokens it held."""
        nodes, n = self.tree.path(slot.left_of(salt), salt)
        own = self.tree.nodes(self.tree.root_of(salt))
        mine = {*nodes, *(node for node in own if node.by[0] == slot.index)}
        for other in self.slots:
            if other is not slot:
                mine.difference_update(self.tree.path(other.left_of(salt), salt)[0])
        for node in sorted(mine, key=lambda node: -node.end):  # children before their parents
            if not node.refs and not node.children:
                self.tree.remove(node)
        if slot.left_owner.salt == salt:
            slot.left = ()
        return n

    def clear(self) -> None:
        """Forget every filed page that no slot holds."""
        self.tree.prune()

    def grow(self, slot: Slot, n_tokens: int) -> None:
        """Hold pages for `n_tokens` positions, evicting idle filed pages if none is free."""
        need = self.pages_for(n_tokens) - len(slot.pages)
        if need <= 0:
            return
        if need > len(self._free) + self.tree.n_idle:
            raise OutOfBounds(f"slot {slot.index} page", len(slot.pages) + need, self.n_page, slot.index)
        slot.pages.extend(self._take() for _ in range(need))
        slot.page_ids = None

    def reach(self, slot: Slot, first: int, end: int) -> NDArray[np.int64]:
        """Hold pages for positions `first` to `end` - 1. Returns all pages of the slot.

        The same array is returned while the pages are the same; it is never written to.
        """
        if first < 0:
            raise OutOfBounds(
                f"slot {slot.index} position", first, len(slot.pages) * self.page_size, slot.index
            )
        self.grow(slot, end)
        if slot.page_ids is None:
            slot.page_ids = np.array(slot.pages, dtype=np.int64)
        return slot.page_ids

    def rows_of(
        self, pages: Sequence[NDArray[np.int64]], widths: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """KV rows of tokens of several slots, one after another: widths[i] of the slot that has pages[i]."""
        if not len(positions):
            return positions
        first = np.array([0, *accumulate(map(len, pages[:-1]))]).repeat(widths)
        page, offset = positions // self.page_size, positions % self.page_size
        return np.concatenate(pages)[first + page] * self.page_size + offset

    def _take(self) -> int:
        """A free page, or the least recently used filed one."""
        if not self._free:
            self.tree.evict()
        return self._free.pop()

    def row(self, slot: Slot, pos: int) -> int:
        """KV row of the token at `pos`: page * page_size + offset."""
        limit = len(slot.pages) * self.page_size
        if not 0 <= pos < limit:
            raise OutOfBounds(f"slot {slot.index} position", pos, limit, slot.index)
        page, offset = divmod(pos, self.page_size)
        return slot.pages[page] * self.page_size + offset

    def rows(self, slot: Slot, first: int, n: int) -> list[int]:
        """KV rows of `n` tokens from position `first` on."""
        return [self.row(slot, pos) for pos in range(first, first + n)]

    def check(self) -> None:
        """Check that every page is in one place, and every count is right. It takes time in proportion to all pages: see `PrefixCache.check`."""
        filed = [node.page for node in self.tree.nodes()]
        own = [p for s in self.slots for p in s.pages[len(s.nodes) :]]
        assert sorted(self._free + filed + own) == list(range(self.n_page)), (
            "a page is lost or held twice"
        )
        self.tree.check()
        holds: Counter[Node] = Counter()
        for s in self.slots:
            holds.update(s.nodes)
            assert s.n_past <= len(s.pages) * self.page_size, f"slot {s.index} has tokens without pages"
            assert not s.busy or len(s.pages) <= s.reserved, (
                f"slot {s.index} holds {len(s.pages)} pages of {s.reserved}"
            )
            assert s.page_ids is None or s.page_ids.tolist() == s.pages, (
                f"slot {s.index} is laid out on other pages"
            )
            assert s.n_fold <= s.n_past, f"slot {s.index} folds {s.n_fold} of {s.n_past} tokens"
            assert s.pages[: len(s.nodes)] == [node.page for node in s.nodes], (
                f"slot {s.index} reads other pages"
            )
            text = [t for node in s.nodes for t in node.tokens]
            assert s.tokens[: len(text)] == text, f"slot {s.index} holds another text's pages"
        assert all(node.refs == holds[node] for node in self.tree.nodes()), (
            "the holders of a page are miscounted"
        )
