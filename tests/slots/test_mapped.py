"""Memory kept between requests returns to the system when it is freed: no cycle holds it, and the C library keeps none of it."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pyspec.slots import mapped
from pyspec.slots.memory import Checkpoint
from pyspec.slots.prefix import Node
from pyspec.slots.states import Saved, StateStore
from pyspec.slots.table import SlotTable

PIECE = (5 << 18) + 12  # bytes; an odd number of pages

Way = Callable[[SlotTable, StateStore, Node], object]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _longer(table: SlotTable, store: StateStore, node: Node) -> None:
    """A text that continues behind the short page takes it in, and is evicted."""
    table.tree.add(table.tree.root, (*node.tokens, 99), table._free.pop(), (0, 2))
    assert table.tree.evict()


WAYS: dict[str, Way] = {
    "evicted": lambda table, store, node: table.tree.evict(),
    "pruned": lambda table, store, node: table.tree.prune(node),
    "cleared": lambda table, store, node: table.clear(),
    "erased": lambda table, store, node: table.erase(table.slots[0]),
    "dropped": lambda table, store, node: [store.drop(state) for state in list(node.states.values())],
    "put out by others": lambda table, store, node: [
        store.add(node, n, Saved(Checkpoint(n, [torch.ones(7)]), None)) for n in range(4, 8)
    ],
    "taken in": _longer,
}


@pytest.mark.parametrize("way", WAYS)
def test_tensors_of_a_state_go_with_it_and_wait_for_no_collector(no_collector: None, way: str) -> None:
    table, store = SlotTable(1, 4, 16), StateStore(56, 56)
    table.tree.lose = store.lose
    slot = table.slots[0]
    table.acquire(slot, 16)
    table.grow(slot, 7)
    slot.tokens.extend(range(7))
    node = table.file(slot, whole=True)
    slot.left = tuple(slot.tokens)
    table.release(slot)
    assert node is not None
    held = []
    for n in (1, 3):
        kept = torch.full((7,), float(n))
        held.append(weakref.ref(kept))
        store.add(node, n, Saved(Checkpoint(n, [kept]), None))
        del kept
    assert all(ref() is not None for ref in held)
    WAYS[way](table, store, node)
    del node
    assert [ref() for ref in held] == [None, None], f"{way}, and still there"


COUNTS_PAGES = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="counts pages as Linux does"
)
RESIDENT = """
import torch
from pathlib import Path
from pyspec.slots import mapped

def resident():  # without what is read from files, such as a library's code
    _, all_, of_files, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (all_ - of_files) * 4096

before = resident()
"""
FREED_BESIDE_WHAT_STAYS = f"""
stays, pieces = [], []
for _ in range(64):
    pieces.append(mapped.mapped({PIECE}).fill_(1))
    stays.append(torch.ones(700))
held = resident() - before
del pieces[1:]
print(held, resident() - before, len(pieces[0]), int(pieces[0].sum()))
"""
WRITTEN_LATER = """
made = mapped.zeros((1 << 13, 8, 256), torch.float16, torch.device("cpu"))
fresh, zero = resident() - before, not made[:: 1 << 12].any()
made[:100] = 1
assert made.shape == (1 << 13, 8, 256) and zero and made[99].all() and not made[100].any()
print(fresh, resident() - before)
"""


def numbers_of_a_process(program: str) -> list[int]:
    """Here, what other tests free or write meanwhile would count."""
    run = [sys.executable, "-c", RESIDENT + program]
    return [
        int(n) for n in subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()
    ]


@COUNTS_PAGES
def test_memory_is_the_systems_again_though_what_was_made_after_it_stays() -> None:
    held, left, n, total = numbers_of_a_process(FREED_BESIDE_WHAT_STAYS)
    assert held > 60 * PIECE and left < 8 * PIECE
    assert n == total == PIECE


@COUNTS_PAGES
def test_memory_of_slots_is_taken_as_it_is_written() -> None:
    """A context of 186,000 tokens had taken 10 GiB, and 12 s of a load, before the first request."""
    fresh, written = numbers_of_a_process(WRITTEN_LATER)
    assert fresh < 4 << 20 and written < 4 << 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
@pytest.mark.parametrize("n", [3, 300_001])
def test_room_has_the_type_that_was_asked_for_and_keeps_what_is_written(
    dtype: torch.dtype, n: int
) -> None:
    like = torch.zeros(2, dtype=dtype)
    room = mapped.empty_like(like, n)
    assert room.dtype is dtype and room.shape == (n,) and room.device == like.device
    room.copy_(torch.arange(n).to(dtype))
    part = room[n // 2 :]
    del room
    assert torch.equal(part, torch.arange(n).to(dtype)[n // 2 :])


def test_where_there_are_no_more_mappings_the_c_library_s_memory_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mapped, "MOST", len(mapped._PIECES) + 1)
    pieces = [mapped.mapped(PIECE) for _ in range(3)]
    assert [len(piece) for piece in pieces] == [PIECE] * 3
    n = len(mapped._PIECES)
    del pieces
    assert len(mapped._PIECES) == n - 1, "a piece that is gone is still counted"
