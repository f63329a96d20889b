"""The prefix cache: what requests leave in pages and states, and what a new one takes from it.

`find` says how much of a prompt is there, `seat` gives it to a slot, `keep` files what a slot has. Everything a prefix needs
comes and goes together: pages of the target and of the drafter stand at the same numbers, and what the target has beside its pages
(recurrent state, rings) and the drafter's share are one State at one exact number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from pyspec.slots.memory import Memory
from pyspec.slots.parts import PartMemory
from pyspec.slots.prefix import NO_HIT, Hit
from pyspec.slots.states import Saved, StateStore
from pyspec.slots.table import Slot, SlotTable


class PrefixCache:
    """`every`: tokens between the checkpoints of a long prompt, 0 for none between."""

    def __init__(
        self, table: SlotTable, memory: Memory, states: StateStore, *, on: bool = True, every: int = 0
    ) -> None:
        self.table, self.memory, self.states, self.on, self.every = table, memory, states, on, every
        table.needs_state = memory.needs_state
        table.tree.lose = states.lose
        self._state_bytes = 0  # of one checkpoint, once it is known
        self._checked = 0  # table.n_change at the last check

    def find(self, prompt: Sequence[int]) -> Hit:
        """The longest filed text that begins as `prompt` does; NO_HIT while the cache is off."""
        return self.table.find(prompt) if self.on else NO_HIT

    def seat(
        self, slot: Slot, n_rows: int, prompt: Sequence[int], hit: Hit, paged: Iterable[PartMemory]
    ) -> Saved | None:
        """Seat a request with what `hit` has of its prompt; `paged` are all that have pages. Returns what was kept there."""
        saved = hit.state.content if hit.state is not None else None
        if hit.state is not None:
            self.states.touch(hit.state)
        copy = self.table.acquire(slot, n_rows, prompt, hit)
        if copy is not None:
            old, new = copy
            self.memory.copy_page(list(paged), self.table.page_size, new, old)
        if isinstance(saved, Saved):
            self.memory.restore(slot.index, saved.checkpoint)
            return saved
        if self.memory.needs_state:
            self.memory.reset(slot.index)
        return None

    def file(self, slot: Slot, draft: object | None, fold: Callable[[Slot], None], *, whole: bool = False) -> None:
        """File what the slot has committed, and its state there.

        draft  the drafter's share at this length; its rows of all committed tokens stand in the pages
        fold   brings the slot's recurrent state to its committed length
        whole  the last page, too, though it is not full: the request is over
        """
        node = self.table.file(slot, whole=whole)
        if node is None or not (self.memory.needs_state or draft is not None):
            return
        if (old := node.states.get(slot.n_past)) is not None:  # another request came by here
            self.states.touch(old)
            return
        fold(slot)
        self.states.room(self._state_bytes)  # before the copy is made, so that the device never holds more
        saved = Saved(self.memory.checkpoint(slot.index, slot.n_past), draft)
        self._state_bytes = saved.n_bytes
        self.states.add(node, slot.n_past, saved)

    def make_ready(self) -> bool:
        """A step towards room for the next state before it is wanted: moving one to the host takes as long as a prompt. True: it is there."""
        return self.states.prepare(self._state_bytes)

    def keep_start(self, slot: Slot, draft: object | None, logits: Tensor) -> Saved | None:
        """What a slot has where its prompt ends, for its request to hold until `file_start`; None if there is no room.

        logits  [1, vocab]  of the prompt's last token; copied
        """
        n_bytes = sum(t.numel() * t.element_size() for t in (*self.memory.saved_like(slot.n_past), logits))
        if not self.states.reserve(n_bytes):
            return None
        return Saved(self.memory.checkpoint(slot.index, slot.n_past), draft, logits.clone())

    def drop_start(self, saved: Saved) -> None:
        """It will not be filed."""
        self.states.give_back(saved.n_bytes)

    def file_start(self, slot: Slot, saved: Saved) -> None:
        """File a start at its place in the pages that its slot has filed."""
        at = saved.checkpoint.n_past
        node = next((node for node in slot.nodes if node.start < at <= node.end), None)
        if node is not None and at not in node.states:
            self.states.add_start(node, at, saved)
        else:  # another request came by here
            self.drop_start(saved)

    def check(self, *, now: bool = False) -> None:
        """Everything that is always true between rounds.

        It looks at every page, so it waits until as many have changed hands since the last time: what it costs is in proportion
        to what was done, however many pages there are. `now` does not wait.
        """
        if not now and self.table.n_change - self._checked < self.table.n_page:
            return
        self._checked = self.table.n_change
        self.table.check()
        self.states.check({s for node in self.table.tree.nodes() for s in node.states.values()})
