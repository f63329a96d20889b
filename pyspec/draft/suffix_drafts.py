"""Suffix drafts: the tokens behind the longest suffix of a text where it stood before, in the text itself or in finished answers.

Needs no model, and goes beside any drafter (`--spec-type dflash,suffix`). This file keeps one text for each slot and the finished answers.
Answers are kept by client, in bounded memory, and no client sees another's. Each client has two automata. The young one grows until it
has half of the memory, then it becomes the old one, and what was old goes. If all clients together have too much, those that asked
longest ago go.
A round asks for all slots in one call, which `suffix_native` answers in C++, and plain lookups (`suffix_text`) where there is no compiler.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from pyspec.draft.suffix_draft import NO_DRAFT, Promise, SuffixChances, SuffixDraft
from pyspec.draft.suffix_native import fastest
from pyspec.draft.suffix_text import LEAST_MATCH, MOST_TEXT, GrowingText, Learned, PlainTexts, SlotText
from pyspec.slots.images import IMAGE
from pyspec.slots.table import Slot

# Tokens of prompts and finished answers that are entered at once while a device runs: 0.01 ms
PIECE = 32
PER_ROUND = 256  # the same of a round without such a time, beside as many as it has rows
LEAST_ANSWER = 4  # tokens of an answer that is worth keeping
MOST_SHELVES = 64  # clients
MOST_QUEUED = 1 << 20  # tokens of answers that wait to be read


class Shelf:
    """One client's answers."""

    def __init__(self, kind: PlainTexts) -> None:
        self.young, self.old = kind.automaton(), kind.automaton()
        self.automata: tuple[GrowingText, ...] = ()  # those with text

    @property
    def n_bytes(self) -> int:
        return self.young.n_bytes + self.old.n_bytes

    def find_automata(self) -> None:
        """Call it when one of them was changed."""
        self.automata = tuple(each for each in (self.young, self.old) if each.n_token)


class Answers:
    """Answers of the latest clients.

    most_bytes  of all of them; 0: none is kept
    shared      clients see one another's
    kind        makes automata
    """

    def __init__(self, most_bytes: int, *, shared: bool = False, kind: PlainTexts) -> None:
        self.most_bytes, self.shared, self.kind = most_bytes, shared, kind
        self.shelves: OrderedDict[str, Shelf] = OrderedDict()
        # Client, answer, and tokens of it that were read
        self.queue: deque[tuple[str, Sequence[int], int]] = deque()
        self._n_queued = 0

    @property
    def n_bytes(self) -> int:
        """Host memory, estimated from counts."""
        return sum(shelf.n_bytes for shelf in list(self.shelves.values()))

    def automata(self, client: str) -> tuple[GrowingText, ...]:
        """Automata with answers that this client may see."""
        shelf = self.shelves.get("" if self.shared else client)
        return () if shelf is None else shelf.automata

    def add(self, client: str, answer: Sequence[int]) -> None:
        """Add a finished answer. `read` enters it later."""
        if (
            self.most_bytes
            and len(answer) >= LEAST_ANSWER
            and self._n_queued + len(answer) <= MOST_QUEUED
        ):
            self.queue.append(("" if self.shared else client, answer, 0))
            self._n_queued += len(answer)

    def read(self, n: int) -> int:
        """Enter up to n tokens of waiting answers. Returns how many are left of n."""
        while n > 0 and self.queue:
            client, answer, done = self.queue.popleft()
            shelf = self.shelves.get(client) or self.shelves.setdefault(client, Shelf(self.kind))
            self.shelves.move_to_end(client)
            if not done:
                shelf.young.begin()
            piece = answer[done : done + n]
            shelf.young.extend(piece)
            n -= len(piece)
            self._n_queued -= len(piece)
            if done + len(piece) < len(answer):
                self.queue.appendleft((client, answer, done + len(piece)))
            self._make_room(shelf)
        return n

    def _make_room(self, shelf: Shelf) -> None:
        if shelf.young.n_bytes > self.most_bytes // 2:
            shelf.young, shelf.old = self.kind.automaton(), shelf.young
        shelf.find_automata()
        while len(self.shelves) > 1 and (
            len(self.shelves) > MOST_SHELVES or self.n_bytes > self.most_bytes
        ):
            self.shelves.popitem(last=False)

    def clear(self) -> None:
        """Forget every answer."""
        self.shelves.clear()
        self.queue.clear()
        self._n_queued = 0


class SuffixDrafts:
    """One text for each slot, and finished answers. Called on the engine's thread.

    n_draft      most tokens of a draft
    n_match      fewest tokens that stood before in the same order
    least        a draft ends where the product of its chances would be less
    answer_bytes host memory of finished answers
    shared       clients' answers serve all clients
    kind         None: the fastest one that this machine has
    """

    def __init__(
        self,
        n_draft: int,
        *,
        n_match: int = LEAST_MATCH,
        least: float = 0.1,
        answer_bytes: int = 0,
        shared: bool = False,
        kind: PlainTexts | None = None,
    ) -> None:
        self.n_draft, self.n_match, self.least, self.kind = n_draft, n_match, least, kind or fastest()
        self.answers = Answers(answer_bytes, shared=shared, kind=self.kind)
        self.texts: dict[int, SlotText] = {}
        self.behind: set[int] = set()  # slots whose prompts are not entered yet
        self.forget_learned()

    def forget_learned(self) -> None:
        """Forget chances, texts and answers: they were of a warm-up."""
        self.learned = Learned(SuffixChances(), SuffixChances(), Promise())
        self.texts.clear()
        self.behind.clear()
        self.answers.clear()

    @property
    def n_bytes(self) -> int:
        """Host memory, estimated from counts. Safe to call from any thread."""
        return sum(text.n_bytes for text in list(self.texts.values())) + self.answers.n_bytes

    # -- requests ------------------------------------------------------------------------------------------------

    def begin(self, slot: Slot, prompt: Sequence[int], client: str = "", *, keeps: bool = False) -> None:
        """A request starts in `slot`. prompt: every token before its answer. keeps: its answer may serve the client's later ones."""
        text = self.texts.get(slot.index)
        if text is None or text.client != client or not text.continues(prompt):
            text = self.texts[slot.index] = self.kind.text(client)
        text.keeps = keeps
        text.start(slot, prompt, self.learned)
        self.behind.add(slot.index)

    def end(self, slot: Slot) -> None:
        """The request is over. Its text stays for a next one that continues it."""
        text = self.texts.get(slot.index)
        if text is None or text.slot is None:
            return
        self.behind.discard(slot.index)
        if text.keeps:
            self.answers.add(text.client, tuple(slot.tokens[text.n_begin :]))
        text.end()

    # -- rounds --------------------------------------------------------------------------------------------------

    @property
    def has_rest(self) -> bool:
        """Prompts or finished answers wait to be entered."""
        return bool(self.behind or self.answers.queue)

    def advance(self, n: int) -> bool:
        """Enter up to n tokens of prompts, the shortest rest first, and of finished answers. False if none is left."""
        self.behind = {slot for slot in self.behind if self._rest(self.texts[slot]) > 0}
        was_behind = bool(self.behind)
        for slot in sorted(self.behind, key=lambda slot: self._rest(self.texts[slot])):
            text = self.texts[slot]
            before = text.n_entered
            text.enter(n)
            n -= text.n_entered - before
            if n <= 0:
                return True
            self.behind.discard(slot)
        return was_behind or self.answers.read(n) < n

    @staticmethod
    def _rest(text: SlotText) -> int:
        """Tokens of the prompt that are not entered yet."""
        return min(text.n_begin, MOST_TEXT) - text.n_entered

    def draft(self, slot: Slot, anchor: int, most: int) -> SuffixDraft:
        """The likeliest tokens behind `anchor`, the slot's last chosen token; empty if nothing stands there before."""
        return self.draft_all([(slot, anchor, most)])[0]

    def draft_all(self, wishes: Sequence[tuple[Slot, int, int]]) -> list[SuffixDraft]:
        """A draft for each (slot, anchor, most tokens): as `draft`."""
        asks, at = [], []
        texts, automata_of = self.texts, self.answers.automata
        for i, (slot, anchor, most) in enumerate(wishes):
            text = texts.get(slot.index)
            if text is not None and text.slot is slot and most > 0 and len(slot.tokens) >= text.n_begin:
                asks.append((text, anchor, most, automata_of(text.client)))
                at.append(i)
        found = self.kind.draft_all(asks, self.least, self.n_draft, self.n_match) if asks else []
        found = [_spoken(draft) for draft in found]
        if len(at) == len(wishes):
            return found
        made = dict(zip(at, found, strict=True))
        return [made.get(i, NO_DRAFT) for i in range(len(wishes))]

    def judge(self, slot: int, n_draft: int, n_accepted: int) -> None:
        """Report the verdict on a slot's last draft. Of one that was not verified, the tokens that come are the verdict."""
        text = self.texts.get(slot)
        if text is not None:
            text.judge(n_draft, n_accepted)


def _spoken(draft: SuffixDraft) -> SuffixDraft:
    """The draft up to the first row of a picture."""
    n = next((i for i, token in enumerate(draft.tokens) if not 0 <= token < IMAGE), len(draft.tokens))
    return draft if n == len(draft.tokens) else draft.first(n) if n else NO_DRAFT
