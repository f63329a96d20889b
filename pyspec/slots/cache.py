"""The prefix cache: pages and states that requests leave, and that later ones reuse.

`find` looks up a prompt, `seat` gives the found part to a slot, `file` files a slot's content. All parts of a prefix stay together: pages
of target and drafter have the same numbers, and the target's memory outside pages (recurrent state, rings) and the drafter's share are one
State at one exact number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from pyspec.slots.blocks import BlockLog
from pyspec.slots.memory import Memory
from pyspec.slots.parts import PartMemory
from pyspec.slots.prefix import NO_HIT, NOBODY, NOT_KNOWN, Hit, Known, Node, Owner
from pyspec.slots.states import Saved, StateStore, bytes_of
from pyspec.slots.table import Slot, SlotTable


class PrefixCache:
    """every    tokens between the checkpoints of a long prompt, 0 for none between
    growing  gives the slots whose texts grow, and will be filed when their requests end
    """

    def __init__(
        self, table: SlotTable, memory: Memory, states: StateStore, *, on: bool = True, every: int = 0
    ) -> None:
        self.table = table
        self.memory = memory
        self.states = states
        self.on = on
        self.every = every
        table.needs_state, table.n_chunk = memory.needs_state, memory.n_chunk
        table.tree.lose = states.lose
        self.growing: Callable[[], Sequence[Slot]] = tuple
        self._state_bytes = 0  # of the largest checkpoint so far
        self._checked = 0  # table.n_change at the last check

    def log_blocks(self) -> BlockLog:
        """Collect the changes of full pages for routers from now on; the first ones are the pages that are filed already."""
        log = BlockLog(self.table.tree, self.memory.needs_state)
        self.table.tree.blocks, self.states.on_change = log, log.touch
        return log

    def log_no_blocks(self) -> None:
        """Collect no more changes."""
        self.table.tree.blocks, self.states.on_change = None, lambda node: None

    def find(self, prompt: Sequence[int], owner: Owner = NOBODY) -> Hit:
        """The longest filed prefix of `prompt`; NO_HIT while the cache is off."""
        return self.table.find(prompt, owner) if self.on else NO_HIT

    def known(self, prompt: Sequence[int], salt: str = "") -> Known:
        """How much of `prompt` is filed; NOT_KNOWN while the cache is off."""
        return self.table.tree.known(prompt, salt) if self.on else NOT_KNOWN

    def seat(
        self,
        slot: Slot,
        n_rows: int,
        prompt: Sequence[int],
        hit: Hit,
        paged: Iterable[PartMemory],
        owner: Owner = NOBODY,
    ) -> Saved | None:
        """Seat a request with the part of its prompt in `hit`. paged: all paged memory. Returns the state that was kept there."""
        saved = hit.state.content if hit.state is not None else None
        if hit.state is not None:
            self.states.touch(hit.state)
        copy = self.table.acquire(slot, n_rows, prompt, hit, owner)
        if copy is not None:
            old, new = copy
            self.memory.copy_page(list(paged), self.table.page_size, new, old)
        if isinstance(saved, Saved):
            self.memory.restore(slot.index, saved.checkpoint)
            return saved
        if self.memory.needs_state:
            self.memory.reset(slot.index)
        return None

    def file(
        self,
        slot: Slot,
        draft: object | None,
        fold: Callable[[Slot], None],
        *,
        whole: bool = False,
        n_unread: int = 0,
    ) -> None:
        """File the slot's committed tokens, and its state there.

        draft  the drafter's share at this length; its rows of all committed tokens are in the pages
        fold   brings the slot's recurrent state to its committed length
        whole  also file the last page, though it is not full: the request has ended
        n_unread  tokens up to which the drafter has not read the text, so that its rows are not in the pages
        """
        node = self.table.file(slot, whole=whole, n_unread=n_unread)
        if node is not None:
            self._file_state(node, slot, draft, fold)

    def file_copy(
        self,
        slot: Slot,
        draft: object | None,
        fold: Callable[[Slot], None],
        paged: Iterable[PartMemory],
        n_unread: int = 0,
    ) -> None:
        """As `file`, and the last page and the state there, too, of a slot that goes on: where no forward has filled it, and behind pictures.
        paged: all paged memory."""
        node = self.table.file(slot, n_unread=n_unread)
        if node is None and (self.memory.needs_state or draft is not None):
            found = self.table.file_tail(slot, n_unread=n_unread)
            if found is None:
                return
            node, copy = found
            if copy is not None:
                old, new = copy
                self.memory.copy_page(list(paged), self.table.page_size, new, old)
        if node is not None:
            self._file_state(node, slot, draft, fold)

    def _file_state(
        self, node: Node, slot: Slot, draft: object | None, fold: Callable[[Slot], None]
    ) -> None:
        if not (self.memory.needs_state or draft is not None):
            return
        if (old := node.states.get(slot.n_past)) is not None:  # another request left one here
            self.states.touch(old)
            return
        fold(slot)
        # before the copy is made, so that the device never holds more
        self.states.room(bytes_of((self.memory.saved_like(slot.n_past), draft)))
        saved = Saved(self.memory.checkpoint(slot.index, slot.n_past), draft)
        self._state_bytes = max(self._state_bytes, saved.n_bytes)
        self.states.add(node, slot.n_past, saved)

    def make_ready(self) -> bool:
        """Move a part of an old state to the host. Returns True if there is room for the next state.

        Call it in advance, because making room takes as long as a prompt.
        """
        return self.states.prepare(self._state_bytes)

    def keep_start(self, slot: Slot, draft: object | None, logits: Tensor) -> Saved | None:
        """Copy the slot's state at its prompt's end, held by its request until `file_start`; None if there is no room.

        logits  [1, vocab]  of the prompt's last token; copied
        """
        n_bytes = bytes_of((self.memory.saved_like(slot.n_past), draft, logits))
        if not self.states.reserve(n_bytes):
            return None
        return Saved(self.memory.checkpoint(slot.index, slot.n_past), draft, logits.clone())

    def drop_start(self, saved: Saved) -> None:
        """Free a start that will not be filed."""
        self.states.give_back(saved.n_bytes)

    def file_start(self, slot: Slot, saved: Saved) -> None:
        """File a start at its place in the slot's filed pages."""
        at = saved.checkpoint.n_past
        node = next((node for node in slot.nodes if node.start < at <= node.end), None)
        if node is not None and at not in node.states:
            self.states.add_start(node, at, saved)
        else:  # another request left one here
            self.drop_start(saved)

    def leave_device(self, page_bytes: int) -> list[int]:
        """Move all states to the host, and forget what its limit has no room for beside filed pages of `page_bytes` each: what was used longest
        ago. Returns the pages that are still filed. No request runs."""
        tree, limit = self.table.tree, self.states.limits[1]
        # pages of a recurrent model are of no use without states, nor are states without pages
        self.states.leave_device(max(limit // 2, limit - tree.n_node * page_bytes))
        while tree.n_node * page_bytes + self.states.n_bytes[1] > limit and tree.evict():
            pass
        return sorted(node.page for node in tree.nodes())

    def check(self, *, now: bool = False) -> None:
        """Check the invariants that hold between rounds.

        It reads every page, so it waits until as many pages have changed hands since the last time: its cost is in proportion to the work
        done. `now` does not wait.
        """
        if not now and self.table.n_change - self._checked < self.table.n_page:
            return
        self._checked = self.table.n_change
        self.table.check()
        self.states.check({s for node in self.table.tree.nodes() for s in node.states.values()})
