"""The changes of the prefix tree that routers hear of: a view rebuilt from them is what the cache holds, at any time."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from block_view import BlockView, hash_of, text_of, wanted
from hypothesis import settings
from hypothesis.stateful import invariant, rule
from test_slot_table import FEW, TableMachine

from pyspec.engine.block_events import event_of
from pyspec.slots.blocks import (
    BlockLog,
    BlockMirror,
    BlocksRemoved,
    BlocksStored,
    anew,
    chained,
    number_of,
)
from pyspec.slots.prefix import State
from pyspec.slots.table import Slot, SlotTable


def logged(table: SlotTable) -> tuple[BlockLog, BlockView]:
    log = BlockLog(table.tree, table.needs_state)
    table.tree.blocks = log
    return log, BlockView()


def update(log: BlockLog, view: BlockView, growing: Sequence[Slot] = ()) -> None:
    view.take(event_of(change, "map") for change in log.take(growing))


class BlockMachine(TableMachine):
    """Calls as the loop makes them; the view is compared after any number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.log, self.view = logged(self.table)
        self.is_due = False

    def keep(self, slot: Slot, whole: bool) -> None:
        super().keep(slot, whole)
        for node in slot.nodes[-1:]:
            self.log.touch(node)

    @rule()
    def lose_a_state(self) -> None:
        node = next(iter(self.kept)).node if self.kept else None
        super().lose_a_state()
        if node is not None:
            self.log.touch(node)

    @rule()
    def a_round_ends(self) -> None:
        self.is_due = True

    @invariant()
    def the_view_is_the_cache(self) -> None:
        if self.is_due:
            self.is_due = False
            growing = [slot for slot in self.busy() if slot.generation % 3]  # the others leave nothing
            update(self.log, self.view, growing)
            self.view.check(self.table, growing)
            assert len(self.log) == len(self.view.texts)


class StatefulBlockMachine(BlockMachine):
    needs_state = True


class TestBlocks(BlockMachine.TestCase):
    settings = settings(FEW, max_examples=8)


class TestStatefulBlocks(StatefulBlockMachine.TestCase):
    settings = settings(FEW, max_examples=8)


@pytest.mark.slow
class TestBlocksLonger(BlockMachine.TestCase):
    settings = settings(FEW, max_examples=150)


@pytest.mark.slow
class TestStatefulBlocksLonger(StatefulBlockMachine.TestCase):
    settings = settings(FEW, max_examples=150)


@pytest.mark.parametrize("needs_state", [False, True])
@pytest.mark.parametrize(("size", "n_page"), [(7, 23), (10, 9), (1, 40)])
def test_texts_that_grow_are_evicted_and_lose_states_on_pages_of_odd_sizes(
    size: int, n_page: int, needs_state: bool
) -> None:
    draw = random.Random(size)
    table = SlotTable(3, n_page, size)
    table.needs_state = needs_state
    log, view = logged(table)
    mirror = BlockMirror()
    texts: list[list[int]] = [[]]
    n_removed = 0
    for i in range(120):
        start = draw.choice(texts)
        prompt = [
            *start[: draw.randrange(len(start) + 1)],
            *draw.choices(range(3), k=draw.randrange(1, 30)),
        ]
        prompt = prompt[: size * n_page // 3]
        slot = table.slots[i % 3]
        table.acquire(slot, len(prompt), prompt, table.find(prompt))
        table.grow(slot, len(prompt))
        slot.tokens = list(prompt)
        node = table.file(slot, whole=True)
        if node is not None and draw.random() < 0.7:
            node.states.setdefault(len(prompt), State(node, len(prompt), None))
            log.touch(node)
        table.release(slot, trusted=draw.random() < 0.9)
        if draw.random() < 0.3:
            holders = [node for node in table.tree.nodes() if node.states]
            for node in holders[:1]:
                node.states.popitem()
                log.touch(node)
        texts = [*texts[-6:], prompt]
        if draw.random() < 0.7:
            before, changes = len(view.texts), log.take()
            mirror.take(changes)
            view.take(event_of(change, "map") for change in changes)
            view.check(table)
            late = BlockView()
            late.take(event_of(change, "array") for change in anew(mirror.blocks()))
            assert late.texts == view.texts and late.n_cleared == 1
            n_removed += len(view.texts) < before
            for text in texts:
                assert view.n_cached(text) <= table.find([*text, 9]).n_match
    assert n_removed > 3
    table.clear()
    update(log, view)
    assert not view.texts and not len(log)


def test_a_text_is_one_event_and_its_hashes_are_those_of_the_page() -> None:
    table = SlotTable(1, 8, 5)
    log, view = logged(table)
    text = [7, 70_000, 3, 2**31, 1, 1, 2, 3, 4, 5, 6, 6]
    slot = table.slots[0]
    table.acquire(slot, 12, text, table.find(text))
    table.grow(slot, 12)
    slot.tokens = list(text)
    table.file(slot, whole=True)
    (change,) = log.take()
    assert isinstance(change, BlocksStored)
    first = hash_of(b"", text[:5])
    assert first == chained(b"", text[:5]) and chained(first, text[5:10]) == hash_of(first, text[5:10])
    second = hash_of(first, text[5:10])
    assert change.hashes.tolist() == [number_of(first), number_of(second)]
    assert (change.parent, change.tokens.tolist(), change.block_size) == (None, text[:10], 5)
    view.take([event_of(change, "array")])
    assert view.n_cached(text) == 10 and view.n_cached([*text[:9], 0]) == 5
    table.release(slot)
    table.clear()
    (gone,) = log.take()
    assert isinstance(gone, BlocksRemoved)
    assert gone.hashes.tolist() == [number_of(second), number_of(first)], "the last one first"
    assert log.take() == []


def test_where_states_are_needed_a_block_is_stored_as_long_as_a_request_can_go_on_behind_it() -> None:
    table = SlotTable(1, 12, 4)
    table.needs_state = True
    log, view = logged(table)
    text = list(range(18))
    slot = table.slots[0]
    table.acquire(slot, 18, text, table.find(text))
    table.grow(slot, 18)
    slot.tokens = list(text)
    table.file(slot, whole=True)
    update(log, view)
    assert not view.texts, "four full pages without a state: a prompt is read again in full"
    nodes = [*slot.nodes]
    for n in (10, 18):
        node = nodes[(n - 1) // 4]
        node.states[n] = State(node, n, None)
        log.touch(node)
        update(log, view)
        assert view.n_cached(text) == n // 4 * 4
        assert table.find([*text[:n], 99]).n == n
    del nodes[-1].states[18]
    log.touch(nodes[-1])
    update(log, view)
    assert view.n_cached(text) == 8
    assert {text_of(node) for node in nodes[:2]} == wanted(table)
    table.release(slot)
