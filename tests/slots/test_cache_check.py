"""The check between rounds costs in proportion to the work done, not to all pages, and still finds every fault."""

from __future__ import annotations

import pytest

from pyspec.slots.cache import PrefixCache
from pyspec.slots.memory import Memory
from pyspec.slots.states import StateStore
from pyspec.slots.table import SlotTable

SIZE = 4


class Served:
    """Requests one after another over a cache without a model; counts full looks at all pages."""

    def __init__(self, n_page: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.table = SlotTable(2, n_page, SIZE)
        self.cache = PrefixCache(self.table, Memory([], 1), StateStore(0, 0))
        self.n_look = self.n_request = self.n_moved = 0
        look = self.table.check

        def counted() -> None:
            self.n_look += 1
            look()

        monkeypatch.setattr(self.table, "check", counted)

    def request(self, first: int, n: int) -> None:
        """`n` tokens that begin like those of every request with the same `first`."""
        prompt = [first, *range(n)]
        slot = self.table.pick()
        assert slot is not None and self.table.can_admit(n, prompt)
        self.cache.seat(slot, n, prompt, self.cache.find(prompt), ())
        self.table.grow(slot, n)
        slot.tokens.extend(prompt[slot.n_past : n])
        self.cache.file(slot, None, lambda slot: None, whole=True)
        self.n_moved += len(slot.pages)
        self.table.release(slot)
        self.n_request += 1
        self.cache.check()


@pytest.mark.parametrize("n_page", [256, 4096])
def test_looks_are_as_rare_as_pages_are_many(n_page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(n_page, monkeypatch)
    while served.table.n_page_cached < n_page * 3 // 4:
        served.request(served.n_request, 80)
    n_look, n_moved, n_request = served.n_look, served.n_moved, served.n_request
    for i in range(n_page):
        served.request(i % 7, 12)
    moved = served.n_moved - n_moved + 2 * (served.n_request - n_request)
    assert 0 < (served.n_look - n_look) * n_page <= moved + n_page, (
        "pages looked at are not more than pages moved"
    )


@pytest.mark.parametrize("what", ["lost", "held twice", "held by nobody", "another text's"])
def test_damage_is_found_before_as_much_was_done_again(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(64, monkeypatch)
    for i in range(5):
        served.request(i, 20)
    node = next(served.table.tree.nodes())
    if what == "lost":
        served.table._free.pop()
    elif what == "held twice":
        served.table._free[0] = node.page
    elif what == "held by nobody":
        served.table.tree.hold(node)
    else:
        node.children.setdefault(99, []).extend(node.children[min(node.children)])
    moved = served.n_moved
    with pytest.raises((AssertionError, IndexError)):
        for i in range(64):
            served.request(i % 5, 20)
    assert served.n_moved - moved <= 64
    with pytest.raises(AssertionError):
        served.cache.check(now=True)


def test_a_check_that_is_asked_for_now_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(64, monkeypatch)
    served.request(1, 20)
    served.request(1, 20)
    assert served.n_look == 0
    served.cache.check(now=True)
    assert served.n_look == 1
