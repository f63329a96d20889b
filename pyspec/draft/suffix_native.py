"""Suffix drafts in C++ (pyspec/cpu/native/suffix.cpp): one call a round for all slots, which holds no lock of Python.

The learned numbers stay in Python's memory. Where there is neither a library nor a compiler, plain lookups draft (`suffix_text`).
"""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Sequence
from functools import cache

from pyspec.cpu.build import CannotBuild, built_alone
from pyspec.draft.suffix_draft import NO_DRAFT, Promise, SuffixDraft
from pyspec.draft.suffix_text import GrowingText, Learned, PlainTexts, SlotText, SuffixAsk
from pyspec.slots.images import IMAGE
from pyspec.slots.table import Slot

log = logging.getLogger(__name__)

INT, LONG, POINTER, REAL = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
# result and arguments of each function
CALLS: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "automaton": (POINTER, ()),
    "free_automaton": (None, (POINTER,)),
    "begin": (None, (POINTER,)),
    "extend": (LONG, (POINTER, POINTER, LONG)),
    "n_token": (LONG, (POINTER,)),
    "n_state": (LONG, (POINTER,)),
    "n_byte": (LONG, (POINTER,)),
    "state": (None, (POINTER, INT, POINTER)),
    "match": (INT, (POINTER,)),
    "next": (INT, (POINTER, INT, INT)),
    "likeliest": (INT, (POINTER, INT, POINTER)),
    "step": (None, (POINTER, INT, POINTER)),
    "text": (POINTER, ()),
    "free_text": (None, (POINTER,)),
    "own": (POINTER, (POINTER,)),
    "text_byte": (LONG, (POINTER,)),
    "entered": (LONG, (POINTER, POINTER)),
    "continues": (INT, (POINTER, POINTER, LONG)),
    "start": (LONG, (POINTER, POINTER, LONG, POINTER)),
    "enter": (LONG, (POINTER, LONG)),
    "judge": (None, (POINTER, LONG, LONG)),
    "round": (LONG, (POINTER, LONG, POINTER, REAL, INT, *[POINTER] * 5)),
}


@cache
def compiled() -> ctypes.CDLL | str:
    """The library with these functions, compiled if it has to be (a second or two, once); or the reason why there is none."""
    try:
        lib = ctypes.CDLL(str(built_alone("suffix")))
        for name, (result, arguments) in CALLS.items():
            function = getattr(lib, f"pyspec_suffix_{name}")
            function.restype, function.argtypes = result, arguments
        return lib
    except (CannotBuild, OSError, AttributeError) as e:
        log.info("suffix drafts are made by plain lookups, because their library cannot be had: %s", e)
        return str(e)


def fastest() -> PlainTexts:
    """In C++, or by plain lookups where there is neither a library nor a compiler."""
    lib = compiled()
    return PlainTexts() if isinstance(lib, str) else NativeTexts(lib)


def _ints(tokens: Sequence[int]) -> array[int]:
    """Rows of pictures become negative numbers, of which few are the same."""
    if isinstance(tokens, array):
        return tokens
    try:
        return array("i", tokens)
    except OverflowError:
        return array("i", (x if x < IMAGE else ~(1 + x % (IMAGE // 4)) for x in tokens))


def _address(numbers: array[int] | array[float]) -> int:
    return numbers.buffer_info()[0]


class NativeAutomaton:
    """Implements `GrowingText`. It lies in the library's memory."""

    def __init__(self, lib: ctypes.CDLL) -> None:
        self._lib, self.handle = lib, 0
        self.handle = _had(lib.pyspec_suffix_automaton())

    def __del__(self) -> None:
        if self.handle:
            self._lib.pyspec_suffix_free_automaton(self.handle)

    @property
    def n_token(self) -> int:
        return int(self._lib.pyspec_suffix_n_token(self.handle))

    @property
    def n_bytes(self) -> int:
        return int(self._lib.pyspec_suffix_n_byte(self.handle))

    def begin(self) -> None:
        self._lib.pyspec_suffix_begin(self.handle)

    def extend(self, tokens: Sequence[int]) -> None:
        numbers = _ints(tokens)
        _had(self._lib.pyspec_suffix_extend(self.handle, _address(numbers), len(numbers)), -1)


class NativeText(SlotText):
    """Its automaton and its tokens lie in the library's memory, and it reads and writes the learned numbers."""

    def __init__(self, lib: ctypes.CDLL, client: str) -> None:
        super().__init__(client)
        self._lib, self.handle = lib, 0
        self.n_sent = 0  # tokens that the library has
        self.promise = Promise()
        self._learned: Learned | None = None
        self.handle = _had(lib.pyspec_suffix_text())

    def __del__(self) -> None:
        if self.handle:
            self._lib.pyspec_suffix_free_text(self.handle)

    @property
    def n_entered(self) -> int:
        return int(self._lib.pyspec_suffix_entered(self.handle, None))

    @property
    def n_bytes(self) -> int:
        return int(self._lib.pyspec_suffix_text_byte(self.handle))

    def continues(self, prompt: Sequence[int]) -> bool:
        numbers = _ints(prompt)
        return bool(self._lib.pyspec_suffix_continues(self.handle, _address(numbers), len(numbers)))

    def start(self, slot: Slot, prompt: Sequence[int], learned: Learned) -> None:
        self.slot, self.n_begin, self.n_sent = slot, len(prompt), len(prompt)
        self._learned, self.promise = learned, Promise(learned.promise)
        tables = [
            _address(table)
            for chances in (learned.of_text, learned.of_answers)
            for table in (chances.came, chances.seen, chances.guess)
        ]
        tables += [
            _address(table)
            for promise in (self.promise, learned.promise)
            for table in (promise.kept, promise.promised)
        ]
        numbers, addresses = _ints(prompt), array("q", tables)
        _had(
            self._lib.pyspec_suffix_start(
                self.handle, _address(numbers), len(numbers), _address(addresses)
            ),
            -1,
        )

    def enter(self, n: int) -> None:
        _had(self._lib.pyspec_suffix_enter(self.handle, n), -1)

    def judge(self, n_draft: int, n_accepted: int) -> None:
        self._lib.pyspec_suffix_judge(self.handle, n_draft, n_accepted)


class NativeTexts(PlainTexts):
    """The same with the library."""

    name = "C++"

    def __init__(self, lib: ctypes.CDLL) -> None:
        self._lib = lib
        self._width = self._room = 0

    def automaton(self) -> GrowingText:
        return NativeAutomaton(self._lib)

    def text(self, client: str) -> SlotText:
        return NativeText(self._lib, client)

    def _make_room(self, n: int, width: int) -> None:
        self._width, self._room = width, n
        size = n * width
        self._n_token, self._tokens = array("i", bytes(4 * n)), array("i", bytes(4 * size))
        self._expected = array("d", bytes(8 * n))
        self._chances, self._survival = array("d", bytes(8 * size)), array("d", bytes(8 * size))
        results = (self._n_token, self._expected, self._tokens, self._chances, self._survival)
        self._results = [_address(each) for each in results]

    def draft_all(
        self, asks: Sequence[SuffixAsk], least: float, n_draft: int, n_match: int
    ) -> list[SuffixDraft]:
        if len(asks) > self._room or n_draft != self._width:
            self._make_room(max(len(asks), self._room), n_draft)
        new: list[int] = []
        block: list[int] = []
        promises = []
        for text, anchor, most, automata in asks:
            assert isinstance(text, NativeText) and text.slot is not None
            tokens = text.slot.tokens
            n_known, n = text.n_sent, len(tokens)
            if n_known > n:  # asked again, or rolled back
                n_known = n
            new += tokens[n_known:]
            new.append(anchor)
            text.n_sent = n + 1
            handles = [a.handle for a in automata if isinstance(a, NativeAutomaton)] if automata else []
            block += (text.handle, n_known, n + 1 - n_known, min(most, n_draft))
            block += (*handles, 0, 0)[:2]
            promises.append(text.promise)
        numbers, added = array("q", block), _ints(new)
        _had(
            self._lib.pyspec_suffix_round(
                _address(numbers), len(asks), _address(added), least, n_match, *self._results
            ),
            -1,
        )
        return self._found(promises)

    def _found(self, promises: Sequence[Promise]) -> list[SuffixDraft]:
        """The results of the last round: one text's tokens lie behind the other's."""
        sizes = self._n_token[: len(promises)].tolist()
        total = sum(sizes)
        if not total:
            return [NO_DRAFT] * len(promises)
        tokens = self._tokens[:total].tolist()
        chances, survival = self._chances[:total].tolist(), self._survival[:total].tolist()
        found, at = [], 0
        for n, expected, promise in zip(sizes, self._expected, promises, strict=False):
            if n:
                end = at + n
                found.append(
                    SuffixDraft(tokens[at:end], chances[at:end], promise, (survival[at:end], expected))
                )
                at = end
            else:
                found.append(NO_DRAFT)
        return found


def _had(found: int | None, failed: int | None = None) -> int:
    """The library's answer. MemoryError if it had no memory."""
    if found is None or found == failed:
        raise MemoryError("no memory for suffix drafts")
    return found
