"""Pages, slots and the prefix tree under any sequence of calls, against a model of each row's content."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pyspec.errors import OutOfBounds, RequestError
from pyspec.slots.prefix import NO_HIT, Known, State, common_prefix
from pyspec.slots.table import Slot, SlotTable

N_SLOT, N_PAGE, SIZE = 3, 8, 16
Row = tuple[int, ...]  # all tokens up to a position, on which a row's K and V depend


class TableMachine(RuleBasedStateMachine):
    """Calls as the loop makes them, with texts over two tokens that often begin alike.

    `written` is the pool: the text that each row was computed from. `kept` has the text of each state.
    """

    needs_state = False

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(N_SLOT, N_PAGE, SIZE)
        self.table.needs_state = self.needs_state
        self.table.tree.lose = self.lose
        self.written: dict[int, Row] = {}
        self.frozen: dict[int, Row] = {}  # rows of filed pages, as they were when filed
        self.kept: dict[State, Row] = {}
        self.limit = [0] * N_SLOT
        self.prompts: dict[int, Row] = {}
        self.texts: list[Row] = [(0,) * 40]

    def lose(self, state: State) -> None:
        del self.kept[state]

    def idle(self) -> list[Slot]:
        return [s for s in self.table.slots if not s.busy]

    def busy(self) -> list[Slot]:
        return [s for s in self.table.slots if s.busy]

    @precondition(lambda self: self.idle())
    @rule(
        pick=st.integers(0, 9),
        same=st.integers(0, 90),
        other=st.lists(st.integers(0, 1), min_size=1, max_size=40),
        more=st.integers(1, 40),
        cache=st.integers(0, 4),
    )
    def admit(self, pick: int, same: int, other: list[int], more: int, cache: int) -> None:
        """A prompt that begins like an earlier text, or is one."""
        prompt = (*self.texts[pick % len(self.texts)][:same], *other)
        n_rows = min(len(prompt) + more, N_PAGE * SIZE)
        if len(prompt) >= n_rows:
            return
        hit = self.table.find(prompt) if cache else NO_HIT
        fits = self.table.can_admit(n_rows, prompt if cache else ())
        held = {p for s in self.busy() for p in s.pages[: len(s.nodes)]}
        owed = sum(s.reserved - len(s.nodes) for s in self.busy())
        shared = sum(node.page in held for node in hit.nodes)
        assert fits == (len(held) + owed + -(-n_rows // SIZE) - shared <= N_PAGE)
        if not fits:
            return
        slot = self.table.pick()
        assert slot is not None
        before, saved = slot.generation, hit.state and self.kept.get(hit.state)
        pair = self.table.acquire(slot, n_rows, prompt, hit)
        if pair is not None:
            for i in range(SIZE):
                self.written[pair[1] * SIZE + i] = self.written.get(pair[0] * SIZE + i, ())
        assert slot.generation > before and slot.tokens == list(prompt[: hit.n]) and hit.n < len(prompt)
        if hit.state is not None:
            assert saved == prompt[: hit.n], "the state of another text, or of another length"
        elif self.needs_state:
            assert hit.n == 0
        self.limit[slot.index], self.prompts[slot.index] = n_rows, prompt

    @precondition(lambda self: self.busy())
    @rule(i=st.integers(0, 9), n=st.integers(1, 40), kept=st.integers(0, 40), token=st.integers(0, 1))
    def forward(self, i: int, n: int, kept: int, token: int) -> None:
        """Write n rows, keep some: a request within its promise always gets its pages."""
        slot = self.busy()[i % len(self.busy())]
        n = min(n, self.limit[slot.index] - slot.n_past)
        if n <= 0:
            return
        self.table.grow(slot, slot.n_past + n)
        rows, text = self.table.rows(slot, slot.n_past, n), list(slot.tokens)
        assert rows == [self.table.row(slot, slot.n_past + j) for j in range(n)]
        prompt = self.prompts[slot.index]
        for row in rows:
            text.append(prompt[len(text)] if len(text) < len(prompt) else token)
            self.written[row] = tuple(text)
        slot.tokens = text[: slot.n_past + min(kept, n)]

    def keep(self, slot: Slot, whole: bool) -> None:
        node = self.table.file(slot, whole=whole)
        assert (node is not None) == (slot.n_past > 0 and (whole or slot.n_past % SIZE == 0))
        if node is not None and slot.n_past not in node.states:
            state = node.states[slot.n_past] = State(node, slot.n_past, None)
            self.kept[state] = tuple(slot.tokens)

    @precondition(lambda self: self.busy())
    @rule(i=st.integers(0, 9))
    def file(self, i: int) -> None:
        slot = self.busy()[i % len(self.busy())]
        before = list(slot.tokens)
        self.keep(slot, whole=False)
        assert slot.tokens == before and len(slot.nodes) == slot.n_past // SIZE

    @precondition(lambda self: self.busy())
    @rule(i=st.integers(0, 9), how=st.sampled_from(["keep", "keep", "leave nothing", "fail"]))
    def finish(self, i: int, how: str) -> None:
        slot = self.busy()[i % len(self.busy())]
        text, by = tuple(slot.tokens), (slot.index, slot.generation)
        if how == "keep":
            self.keep(slot, whole=True)
        self.table.release(slot, trusted=how != "fail")
        assert not (slot.busy or slot.tokens or slot.pages or slot.nodes)
        if how == "keep" and text:
            self.texts.append(text)
            assert self.table.find((*text, 0)).n == len(text), "what was left is there"
        if how == "fail":
            mine = [node for node in self.table.tree.nodes() if node.by == by]
            assert all(node.refs for node in mine), "only what another slot reads is left of it"

    @rule(n=st.integers(1, N_PAGE))
    def evict(self, n: int) -> None:
        for _ in range(n):
            n_idle = self.table.tree.n_idle
            assert self.table.tree.evict() == (n_idle > 0)

    @rule()
    def lose_a_state(self) -> None:
        if self.kept:
            state = next(iter(self.kept))
            del state.node.states[state.n_past]
            del self.kept[state]

    @invariant()
    def every_page_is_in_one_place_and_every_row_holds_its_text(self) -> None:
        self.table.check()
        for slot in self.table.slots:
            for pos in range(slot.n_past):
                assert self.written[self.table.row(slot, pos)] == tuple(slot.tokens[: pos + 1]), (
                    "somebody else's row"
                )
        for node in self.table.tree.nodes():
            text: list[int] = []
            at = node
            while at.parent is not None:
                text = [*at.tokens, *text]
                at = at.parent
            for j, pos in enumerate(range(node.start, node.end)):
                assert self.written[node.page * SIZE + j] == tuple(text[: pos + 1]), (
                    "a filed page holds another text"
                )
            for state in node.states.values():
                assert self.kept[state] == tuple(text[: state.n_past])
        assert set(self.kept) == {s for node in self.table.tree.nodes() for s in node.states.values()}

    @invariant()
    def busy_slots_hold_no_more_than_promised(self) -> None:
        assert self.table.n_page_used <= N_PAGE
        for slot in self.busy():
            assert len(slot.pages) <= slot.reserved


class StatefulMachine(TableMachine):
    needs_state = True


FEW = settings(max_examples=30, stateful_step_count=50, deadline=None, derandomize=True)


class TestTable(TableMachine.TestCase):
    settings = FEW


class TestStatefulTable(StatefulMachine.TestCase):
    settings = FEW


@pytest.mark.slow
class TestTableLonger(TableMachine.TestCase):
    settings = settings(FEW, max_examples=200)


@pytest.mark.slow
class TestStatefulTableLonger(StatefulMachine.TestCase):
    settings = settings(FEW, max_examples=200)


def filled(table: SlotTable, i: int, tokens: list[int]) -> None:
    """A request came with these tokens, and left."""
    slot = table.slots[i]
    table.acquire(slot, len(tokens))
    table.grow(slot, len(tokens))
    slot.tokens.extend(tokens)
    table.file(slot, whole=True)
    table.release(slot)


def test_filed_pages_go_oldest_first_from_their_end_and_held_ones_never() -> None:
    table = SlotTable(2, 8, 16)
    old, young = [1] * 32, [2] * 32
    filled(table, 0, old)
    filled(table, 0, young)
    slot = table.slots[0]
    held = [1] * 16
    table.acquire(slot, 32, held, table.find([*held, 7]))
    assert slot.pages == [table.find([*old, 7]).nodes[0].page]
    taker = table.slots[1]
    table.acquire(taker, 80)
    table.grow(taker, 64)
    assert table.find([*old, 7]).n == 32 and table.find([*young, 7]).n == 32, (
        "free pages are taken first"
    )
    table.grow(taker, 80)
    assert table.find([*old, 7]).n == 16, "its last page was of no use for longest"
    table.grow(slot, 32)
    assert (table.find([*old, 7]).n, table.find([*young, 7]).n) == (16, 16)
    table.check()


def test_what_was_used_again_stays_longer() -> None:
    table = SlotTable(1, 4, 16)
    for token in (1, 2, 3):
        filled(table, 0, [token] * 10)
    table.acquire(
        table.slots[0], 16, [1] * 9, table.find([1] * 10)
    )  # copied, not held: the last free page is used
    table.release(table.slots[0])
    table.acquire(table.slots[0], 48)
    table.grow(table.slots[0], 33)
    assert [table.find([token] * 9).n for token in (1, 2, 3)] == [8, 0, 0]


def test_the_last_page_there_is_is_taken_over_instead_of_copied() -> None:
    """Two pages; 20 tokens are filed, and a request of 32 rows continues from them: there is no third page to copy to."""
    table = SlotTable(1, 2, 16)
    filled(table, 0, [1] * 20)
    hit = table.find([1] * 25)
    assert hit.n == 20 and hit.tail is not None
    assert table.can_admit(32) and table.acquire(table.slots[0], 32, [1] * 25, hit) is None
    assert table.slots[0].n_past == 20 and table.tree.n_node == 1
    table.grow(table.slots[0], 32)
    table.check()


def test_the_middle_of_a_page_is_copied_and_stays_what_it_was() -> None:
    table = SlotTable(2, 8, 16)
    filled(table, 0, list(range(40)))
    for i, n in ((0, 39), (1, 21)):
        prompt = [*range(n), 99, 98]
        hit = table.find(prompt)
        pair = table.acquire(table.slots[i], 60, prompt, hit)
        assert hit.n == n and hit.tail is not None and pair == (hit.tail.page, table.slots[i].pages[-1])
    pages = [s.pages for s in table.slots]
    assert pages[0][0] == pages[1][0] and pages[0][1] != pages[1][1]
    assert table.find(list(range(41))).n == 40
    table.check()


def test_short_pages_are_taken_in_by_the_page_that_goes_on_from_them() -> None:
    table = SlotTable(1, 8, 16)
    lost: list[State] = []
    table.tree.lose = lost.append
    text = list(range(60))
    states = []
    for n in (20, 27, 24):
        filled(table, 0, text[:n])
        (node,) = table.find(text).nodes[1:] or [table.find(text).tail]
        if n != 24:
            states.append(State(node, n, n))
            node.states[n] = states[-1]
    assert table.tree.n_node == 2, "one short page: the longest"
    filled(table, 0, text)
    assert table.tree.n_node == 4 and not lost
    table.needs_state = True
    assert [table.find([*text[:n], 99]).n for n in (19, 20, 23, 27, 50)] == [0, 20, 20, 27, 27]
    assert table.find([*text[:26], 99, 98]).n_match == 26
    assert all(s.node is table.find([*text[:30]]).tail for s in states)
    table.check()


def test_the_deepest_state_is_found_whichever_page_matches_longest() -> None:
    table = SlotTable(1, 8, 16)
    filled(table, 0, [1, 2, 3, 4, 5, 6])
    node = table.find([1, 2, 3, 4, 5, 6, 7]).tail
    assert node is not None
    node.states[4] = State(node, 4, None)
    filled(table, 0, [1, 2, 3, 4, 9, 9, 9])
    table.needs_state = True
    hit = table.find([1, 2, 3, 4, 9, 9, 5])
    assert (hit.n, hit.n_match) == (4, 6) and hit.tail is node


def test_what_is_known_of_a_prompt_and_what_only_its_text_has() -> None:
    table = SlotTable(3, 20, 16)
    system = [9] * 35
    assert table.tree.known([*system, 1]) == Known()
    filled(table, 0, [*system, *([1] * 40)])
    assert table.tree.known([*system, *([1] * 50)]) == Known(75, 75), (
        "no other text goes on from any of its pages"
    )
    filled(table, 1, [*system, *([2] * 40)])
    for token in (1, 2):
        assert table.tree.known([*system, *([token] * 50)]) == Known(75, 75 - 32), (
            "the texts part on the third page"
        )
    assert table.tree.known([*system, 3, 3]) == Known(35, 3), "a page of two texts is the third's, too"
    assert table.tree.known([4]) == Known()


def test_requests_that_share_pages_fit_where_others_do_not() -> None:
    table = SlotTable(3, 8, 16)
    text = [1] * 64
    filled(table, 0, text)
    table.acquire(table.slots[0], 80, text, table.find([*text, 5]))
    assert table.can_admit(48) and not table.can_admit(80)
    assert not table.can_admit(80, [2] * 70) and table.can_admit(80, [*text, 6])
    table.acquire(table.slots[1], 80, text, table.find([*text, 6]))
    assert table.n_page_used == 4
    for slot in table.slots[:2]:
        table.grow(slot, 80)
    assert table.n_page_used == 6
    assert not table.can_admit(112, [*text, 7]) and table.can_admit(96, [*text, 7])
    table.check()


def test_more_pages_than_there_are_is_out_of_bounds() -> None:
    table = SlotTable(2, 4, 16)
    table.acquire(table.slots[0], 64)
    table.grow(table.slots[0], 49)
    table.acquire(table.slots[1], 1)
    with pytest.raises(OutOfBounds, match=r"slot 1 page 1 is outside 0\.\.3") as e:
        table.grow(table.slots[1], 1)
    assert e.value.slot == 1
    table.check()


@pytest.mark.parametrize(("first", "n"), [(-1, 1), (0, 33), (32, 1), (31, 2), (2**31, 1), (-5, 10)])
def test_rows_outside_the_slots_pages_are_refused(first: int, n: int) -> None:
    table = SlotTable(1, 4, 16)
    table.acquire(table.slots[0], 32)
    table.grow(table.slots[0], 32)
    with pytest.raises(OutOfBounds):
        table.rows(table.slots[0], first, n)


def test_the_idle_slot_not_used_for_longest_is_picked() -> None:
    table = SlotTable(2, 4, 16)
    table.acquire(table.slots[0], 1)
    assert table.pick(0) is None and table.pick() is table.slots[1]
    table.acquire(table.slots[1], 1)
    assert table.pick() is None and not table.can_admit(1)
    for slot in reversed(table.slots):
        table.release(slot)
    assert table.pick() is table.slots[0] and table.pick(1) is table.slots[1]
    with pytest.raises(RequestError, match=r"slot 2 does not exist; slots are 0\.\.1"):
        table.pick(2)


def test_a_long_text_is_found_and_given_back_without_recursion() -> None:
    table = SlotTable(1, 4000, 16)
    text = [i % 7 for i in range(60_000)]
    filled(table, 0, text)
    assert table.find(text).n == 59_999
    table.check()
    table.clear()
    assert table.find(text).n == table.n_page_cached == table.n_page_used == 0
    table.check()


@pytest.mark.parametrize("at", [0, 1, 5])
def test_common_prefix_is_the_number_of_equal_leading_tokens(at: int) -> None:
    a = [1, 2, 3, 4, 5, 6]
    assert common_prefix(a, [*a[:at], 99, *a[at + 1 :]]) == at
    assert common_prefix(a, a[:at]) == common_prefix(a[:at], a) == at


def test_a_last_page_is_filed_while_its_slot_goes_on() -> None:
    """What was read from elsewhere: other requests find it, and the slot writes behind it in a copy."""
    t = SlotTable(2, 5, SIZE)
    a, b = t.slots
    t.acquire(a, 3 * SIZE)
    t.grow(a, SIZE + 5)
    a.tokens.extend(range(SIZE + 5))
    assert t.file(a) is None
    before = list(a.pages)
    found = t.file_tail(a)
    assert found is not None
    node, copy = found
    assert (node.page, node.end) == (before[1], SIZE + 5) and copy == (before[1], a.pages[1])
    assert a.pages[0] == before[0] and a.pages[1] not in before
    t.check()
    hit = t.find([*range(SIZE + 5), 90])
    assert hit.n == SIZE + 5 and hit.tail is node
    a.tokens.extend(range(60, 65))
    again = t.file_tail(a)  # longer, so it takes the shorter one's place
    assert again is not None and again[0].end == SIZE + 10
    t.check()
    t.acquire(b, 2 * SIZE)
    t.grow(b, 2 * SIZE)
    t.grow(a, 3 * SIZE)
    assert t.file_tail(a) is None, "no page is left for a copy"
    t.check()
