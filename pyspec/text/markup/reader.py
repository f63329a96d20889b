"""The reader under every dialect: text that arrives in pieces, and machines that wait for more of it.

A machine is a generator. It takes text from the reader and emits parts; if its next step depends on text still to come, it yields.
Steps depend on characters alone, so any split of an answer gives the same parts. No text is scanned twice, except the end of a piece
that may begin a mark.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import Any, TypeVar

from pyspec.text.markup.ahead import Found, Lookahead, LookaheadTree
from pyspec.text.markup.parts import CallArguments, CallBegin, Content, Part, Reasoning

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A machine, or a step of one: it yields while it waits and returns its result."""
Emit = Callable[[str], None]
"""Takes text as it is read."""

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON Schema of each tool's arguments, by the tool's name."""

SIGNS = (".", ":", "/")  # between a namespace and a name
SPACES = " \t\r\n"
NO_LIMIT = 1 << 62
HELD_SPACES = 256  # at most this many spaces before a call belong to its markup
HELD_CHARS = 1 << 16  # at most this much text is held back in case it is not a call


class AnswerReader:
    """The answer's text so far and its parts so far.

    marks  in an answer of calls only: a mark cut off by the token limit is not content
    is_constrained  a grammar wrote the calls: marks are exact, and a value ends only where the grammar ended it
    is_line  the mark at hand begins a line
    n_calls  the number of calls so far
    ids     of the calls so far, as far as the model wrote them
    ends    marks behind which JSON does not go on, whatever brackets are open
    strays  redundant marks: the end of reasoning, behind a call that ended it already; those around a marked answer
    headers  of messages in an answer: the first form is of reasoning
    room  characters that may still be looked at one by one: a bound on the text that the caller holds back
    """

    def __init__(self, new_id: Callable[[], str] | None = None) -> None:
        self._text, self._at = "", 0
        self._held, self._from = list[str](), -1  # text that is held, and where it goes on; -1: nowhere
        self.is_over = False
        self.marks: tuple[str, ...] = ()
        self.is_constrained = self.is_line = False
        self.strays: tuple[str, ...] = ()
        self.headers: tuple[Lookahead, ...] = ()
        self.ends: tuple[str, ...] = ()
        self.room = NO_LIMIT
        self._known: dict[object, LookaheadTree] = {}
        self.parts: list[Part] = []
        self.n_calls = 0
        self.ids = set[str]()
        self._new_id = new_id or _new_id

    # -- text in -------------------------------------------------------------------------------------------------

    def push(self, text: str) -> None:
        if self._from >= 0:
            self._held.append(self._text[self._from : self._at])
            self._from = 0
        self._text, self._at = self._text[self._at :] + text, 0

    def hold(self) -> None:
        """Keep the text from here on, because it may turn out to be no call."""
        self._held, self._from = [], self._at

    def held(self) -> str:
        """That text, as the model wrote it, up to here. It is no longer kept."""
        text = self._text[self._from : self._at] if self._from >= 0 else ""
        self._from = -1
        return "".join([*self._held, text])

    def peek(self) -> Steps[str]:
        """The next character, not consumed; "" at the end of the answer, or without room for more."""
        while self._at >= len(self._text):
            if self.is_over:
                return ""
            yield
        return self._text[self._at] if self.room > 0 else ""

    def skip(self, n: int) -> None:
        """Skip characters that were looked at."""
        self._at += n
        self.room -= n

    def take_while(self, allowed: re.Pattern[str], most: int = NO_LIMIT) -> Steps[str]:
        """The available characters that match `allowed`; "" if the next one does not."""
        if not (yield from self.peek()):
            return ""
        match = allowed.match(self._text, self._at, self._at + min(most, self.room))
        if match is None:
            return ""
        self.skip(match.end() - self._at)
        return match.group()

    def take_spaces(self, most: int = HELD_SPACES) -> Steps[str]:
        """Take spaces and line ends, at most `most`."""
        taken = ""
        while len(taken) < most and (char := (yield from self.peek())) and char in SPACES:
            taken += char
            self.skip(1)
        return taken

    def drop_spaces(self) -> Steps[None]:
        """Skip all spaces and line ends."""
        while (yield from self.take_spaces()):
            pass

    def pass_line(self, ends: str) -> Steps[None]:
        """Skip to the next of these characters, which is not consumed."""
        while (char := (yield from self.peek())) and char not in ends:
            self.skip(1)

    def put_back(self, text: str) -> None:
        """Put back the text that was taken last."""
        self._text, self._at = text + self._text[self._at :], 0

    def rest(self, emit: Emit) -> Steps[None]:
        """Pass on all remaining text."""
        while (yield from self.peek()):
            emit(self._text[self._at :])
            self._at = len(self._text)

    def look(self, *marks: str) -> Steps[str | None]:
        """The next mark, not consumed. "" if the answer ends before or inside one; None if other text follows."""
        longest = max(map(len, marks))
        while True:
            ahead = self._text[self._at : self._at + longest]
            if found := next((mark for mark in marks if ahead.startswith(mark)), ""):
                return found
            if not any(mark.startswith(ahead) for mark in marks):
                return None
            if self.is_over:
                return ""
            yield

    def sees(
        self, *lookaheads: Lookahead | LookaheadTree, cut_fits: bool = False
    ) -> Steps[Found | None]:
        """The first of these that follows; nothing is consumed. cut_fits: the answer may end inside it."""
        only = lookaheads[0] if lookaheads else ()
        ahead = only if isinstance(only, LookaheadTree) else LookaheadTree(lookaheads)  # type: ignore[arg-type]
        while True:
            found = ahead.find(self._text, self._at, is_over=self.is_over, cut_fits=cut_fits)
            if found is not None:
                return found or None
            yield

    def take(
        self, *lookaheads: Lookahead | LookaheadTree, cut_fits: bool = False
    ) -> Steps[Found | None]:
        """Take the first of these that follows."""
        if found := (yield from self.sees(*lookaheads, cut_fits=cut_fits)):
            self._at = found.end
        return found

    def known(self, key: object, lookaheads: Callable[[], Iterable[Lookahead]]) -> LookaheadTree:
        """Look-aheads that an answer needs again and again. key: of those that are the same."""
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = LookaheadTree(lookaheads())
        return found

    def take_mark(self, *marks: str) -> Steps[str]:
        """Take the next mark; "" if another text follows."""
        found = (yield from self.look(*marks)) or ""
        self._at += len(found)
        return found

    def take_until(self, *marks: str, most: int = HELD_CHARS) -> Steps[tuple[str, str]]:
        """Take the text up to the first of the marks, and that mark; "" for the mark if there is none within `most` characters."""
        taken: list[str] = []
        found = yield from self.until(marks, taken.append, most)
        return "".join(taken), found

    def find(self, marks: tuple[str, ...], emit: Emit) -> Steps[str]:
        """Pass on text up to the first of the marks, which is not consumed. "" at the answer's end."""
        found = yield from self.until(marks, emit)
        self._at -= len(found)
        return found

    def until(self, marks: tuple[str, ...], emit: Emit, most: int = NO_LIMIT) -> Steps[str]:
        """Pass on text up to the first of the marks, which is consumed and returned.

        "" if the answer ends before a mark, or after `most` characters.
        """
        pattern, longest = _pattern(marks)
        while True:
            match = pattern.search(self._text, self._at)
            if match and match.start() - self._at < most:
                if match.start() > self._at:
                    emit(self._text[self._at : match.start()])
                self._at = match.end()
                return match.group()
            held = 0 if self.is_over else _overlap(self._text, self._at, marks, longest)
            n = min(len(self._text) - held - self._at, most)
            if n > 0:
                emit(self._text[self._at : self._at + n])
                self._at += n
                most -= n
            if most <= 0 or (self.is_over and self._at >= len(self._text)):
                return ""
            yield

    @property
    def is_read(self) -> bool:
        """True if all text so far is consumed."""
        return self._at >= len(self._text)

    # -- parts out -----------------------------------------------------------------------------------------------

    def content(self, text: str) -> None:
        if text and not (self.is_over and self._is_cut(text.strip())):
            self.parts.append(Content(text))

    def _is_cut(self, text: str) -> bool:
        return any(mark.startswith(text) or text.startswith(mark) for mark in self.marks)

    def reasoning(self, text: str) -> None:
        if text:
            self.parts.append(Reasoning(text))

    def begin_call(self, name: str, id_: str = "") -> None:
        """id_: the model's id, if it wrote one."""
        self.ids.add(id_)
        self.parts.append(CallBegin(self.n_calls, id_ or self._new_id(), name))
        self.n_calls += 1

    def arguments(self, text: str) -> None:
        """A piece of the arguments of the last call."""
        if text:
            self.parts.append(CallArguments(self.n_calls - 1, text))


class Trimmed:
    """Passes on text without spaces at its beginning. Spaces at its end wait for more text, and `drop` discards them."""

    def __init__(self, emit: Emit, *, trims_start: bool = True) -> None:
        self._emit, self._starts, self._held = emit, trims_start, ""

    def __call__(self, text: str) -> None:
        if self._starts:
            text = text.lstrip(SPACES)
            self._starts = not text
        text = self._held + text
        end = max(len(text.rstrip(SPACES)), len(text) - HELD_SPACES)
        self._held = text[end:]
        if end:
            self._emit(text[:end])

    def flush(self) -> None:
        held, self._held = self._held, ""
        if held:
            self._emit(held)

    def drop(self) -> None:
        """Discard the spaces around a call: they belong to its markup."""
        self._held, self._starts = "", True


class MarkupParser:
    """Parses an answer: pushes text to a reader and resumes its machine."""

    def __init__(
        self, machine: Callable[[AnswerReader], Steps[None]], new_id: Callable[[], str] | None = None
    ) -> None:
        self._reader = AnswerReader(new_id)
        self._steps: Steps[None] | None = machine(self._reader)

    def push(self, text: str) -> list[Part]:
        self._reader.push(text)
        return self._go()

    def finish(self) -> list[Part]:
        self._reader.is_over = True
        return self._go()

    def _go(self) -> list[Part]:
        if self._steps is not None and next(self._steps, _ENDED) is _ENDED:
            self._steps = None
        parts, self._reader.parts = self._reader.parts, []
        return _joined(parts)


_ENDED = object()


def _joined(parts: list[Part]) -> list[Part]:
    """Merge neighbouring parts of one kind. Neighbouring arguments belong to one call, because each call begins with a part of its own."""
    out: list[Part] = []
    for _, group in groupby(parts, type):
        same = list(group)
        text = "".join(part.text for part in same if not isinstance(part, CallBegin))
        first = same[0]
        out += same if isinstance(first, CallBegin) else [replace(first, text=text)]
    return out


def offered(name: str, tools: Tools) -> str:
    """The tool that a model's name means: the one of this name, or one behind a namespace that no tool has."""
    if name in tools:
        return name
    behind = (each for each in tools if name.endswith(tuple(sign + each for sign in SIGNS)))
    return max(behind, key=len, default=name)


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def beginnings(marks: Iterable[str]) -> tuple[str, ...]:
    """Those of these marks of which no other one is a beginning."""
    every = tuple(dict.fromkeys(marks))
    return tuple(a for a in every if not any(a != b and a.startswith(b) for b in every))


@lru_cache(maxsize=256)
def _pattern(marks: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    assert not any(a != b and b.startswith(a) for a in marks for b in marks), (
        "which mark it is must not hang on what follows"
    )
    return re.compile("|".join(map(re.escape, marks))), max(map(len, marks))


def _overlap(text: str, start: int, marks: tuple[str, ...], longest: int) -> int:
    """Length of the longest suffix of `text[start:]` that may begin a mark."""
    for n in range(min(longest - 1, len(text) - start), 0, -1):
        end = text[-n:]
        if any(mark.startswith(end) for mark in marks):
            return n
    return 0
