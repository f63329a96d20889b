"""Checkpoints within two budgets: the least recently used moves to the host, then goes; the counts match the states."""

from __future__ import annotations

import random

import pytest
import torch

from pyspec.slots import states
from pyspec.slots.memory import Checkpoint
from pyspec.slots.prefix import State
from pyspec.slots.states import Saved, StateStore
from pyspec.slots.table import SlotTable

SIZE = 400  # bytes of one state


def saved(mark: float = 0.0, n_bytes: int = SIZE) -> Saved:
    return Saved(
        Checkpoint(1, [torch.full((n_bytes // 8,), mark), torch.full((n_bytes // 8,), -mark)]), mark
    )


def store_of(n_device: int, n_host: int, n: int) -> tuple[SlotTable, StateStore, list[State]]:
    """`n` states on a text of 16 tokens."""
    table, store = SlotTable(1, 8, 16), StateStore(n_device * SIZE, n_host * SIZE)
    table.tree.lose = store.lose
    slot = table.slots[0]
    table.acquire(slot, 32)
    table.grow(slot, 16)
    slot.tokens.extend(range(16))
    node = table.file(slot)
    assert node is not None
    states = []
    for i in range(1, n + 1):
        store.add(node, i, saved(float(i)))
        states += [s for s in node.states.values() if s.n_past == i]
        check(table, store)
    return table, store, states


def check(table: SlotTable, store: StateStore) -> None:
    table.check()
    store.check({s for node in table.tree.nodes() for s in node.states.values()})


def test_the_longest_unused_moves_to_the_host_and_from_there_to_nowhere() -> None:
    table, store, _ = store_of(2, 3, 7)
    assert [s.n_past for s in store.tiers[0]] == [6, 7] and [s.n_past for s in store.tiers[1]] == [3, 4, 5]  # fmt: skip
    assert sorted(next(table.tree.nodes()).states) == [3, 4, 5, 6, 7]
    assert all(
        torch.equal(s.content.checkpoint.tensors[0], torch.full((50,), float(s.n_past)))
        for s in store.tiers[1]
    )
    assert all(s.content.draft == s.n_past for s in store.tiers[1])


def test_what_was_used_stays_longer() -> None:
    table, store, states = store_of(2, 2, 4)
    store.touch(states[0])  # on the host, where 2 is now the oldest
    store.touch(states[2])  # on the device, before 4
    node = states[0].node
    store.add(node, 9, saved())
    assert [s.n_past for s in store.tiers[0]] == [3, 9] and [s.n_past for s in store.tiers[1]] == [1, 4]
    assert sorted(node.states) == [1, 3, 4, 9]
    check(table, store)


def test_room_is_made_before_a_copy() -> None:
    table, store, _ = store_of(3, 8, 3)
    store.room(2 * SIZE)
    assert store.n_bytes == [SIZE, 2 * SIZE]
    check(table, store)


def test_room_is_made_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    table, store, kept = store_of(3, 8, 3)
    locked: list[int] = []

    def page_locked(n_bytes: int) -> torch.Tensor:
        locked.append(n_bytes)
        return torch.zeros(n_bytes, dtype=torch.uint8)

    monkeypatch.setattr(states, "_away", states._tensors)  # as if they lay on a device
    monkeypatch.setattr(states, "page_locked", page_locked)
    monkeypatch.setattr(states, "PIECE", SIZE // 2)
    assert store.prepare(0) and not locked
    before = [t.clone() for t in kept[0].content.checkpoint.tensors]
    assert [store.prepare(SIZE) for _ in range(3)] == [False, False, True]
    assert locked == [SIZE // 2, SIZE // 2] and store.n_bytes == [2 * SIZE, SIZE] and not store.ready
    moved = kept[0].content.checkpoint.tensors
    assert all(
        torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in zip(moved, before, strict=True)
    )
    assert store.prepare(SIZE) and len(locked) == 2
    assert not store.prepare(2 * SIZE) and len(locked) == 3
    store.room(2 * SIZE)  # needed now: the prepared memory is used
    assert len(locked) == 4 and store.n_bytes == [SIZE, 2 * SIZE]
    check(table, store)


def test_what_the_host_has_no_room_for_takes_no_piece_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    table, store, _ = store_of(2, 0, 2)
    monkeypatch.setattr(states, "_away", states._tensors)
    assert store.prepare(SIZE) and store.n_bytes == [SIZE, 0] and not store.ready
    check(table, store)


def test_budgets_too_small_for_one_state_keep_none() -> None:
    for n_device, n_host, want in ((0, 2, [0, 2]), (2, 0, [2, 0]), (0, 0, [0, 0])):
        table, store, _ = store_of(n_device, n_host, 3)
        assert [len(t) for t in store.tiers] == want
        assert len(next(table.tree.nodes()).states) == sum(want)


def test_states_go_with_their_page() -> None:
    table, store, _ = store_of(1, 2, 3)
    table.release(table.slots[0])
    assert len(store) == 3 and table.tree.evict()
    assert len(store) == 0 and store.n_bytes == [0, 0]
    check(table, store)


def test_states_without_tensors_count_nothing() -> None:
    """A model without recurrent layers keeps a drafter's share only."""
    table, store, states = store_of(0, 0, 0)
    node = next(table.tree.nodes())
    store.add(node, 5, Saved(Checkpoint(5, []), "share"))
    assert len(store) == 1 and store.n_bytes == [0, 0] and not states
    check(table, store)


def test_any_order_of_calls_keeps_the_counts() -> None:
    rng = random.Random(1)
    for _ in range(30):
        table, store, _ = store_of(rng.randint(0, 3), rng.randint(0, 3), 0)
        node = next(table.tree.nodes())
        for _ in range(40):
            states = list(node.states.values())
            at = rng.randint(1, 16)
            if at not in node.states:
                store.add(node, at, saved(n_bytes=SIZE * rng.randint(1, 2)))
            elif rng.random() < 0.5:
                store.touch(rng.choice(states))
            else:
                store.drop(rng.choice(states))
            check(table, store)


def test_states_go_to_few_pieces_of_host_memory() -> None:
    """Of one type each, in their order; a tensor that is larger than a piece has its own."""
    small, large = torch.zeros(1000), torch.zeros(states.PIECE // 4 + 1, device="meta")
    half = torch.zeros(8, dtype=torch.float16)
    tensors = [small, small.clone(), half, half.clone(), large, small.clone()]
    groups = states._groups(tensors)
    assert [len(g) for g in groups] == [2, 2, 1, 1]
    assert [id(t) for g in groups for t in g] == [id(t) for t in tensors]
    assert all(len({t.dtype for t in g}) == 1 for g in groups) and states._groups([]) == []


def test_a_structure_gets_its_tensors_replaced_where_there_are_others() -> None:
    a, b, c = torch.zeros(2), torch.ones(3), torch.full((1,), 7.0)
    made = states._with([a, (b, [a])], {id(a): c})
    assert made[0] is c and made[1][0] is b and made[1][1][0] is c and isinstance(made[1], tuple)
    assert states.to_host([a, (b,)])[0] is a, "what is on the host stays"
