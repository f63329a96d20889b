"""The common part of dialects: content up to a call's mark, the calls, then content again. What is quoted or stands in code is no call."""

from __future__ import annotations

from typing import Protocol

from pyspec.text.markup.ahead import AHEAD, GAP, OVER, TAIL, Lookahead, Step
from pyspec.text.markup.call_grammar import CallRules, Lark
from pyspec.text.markup.reader import AnswerReader, Emit, Steps, Tools, Trimmed, beginnings


class Syntax(Protocol):
    """How calls are written.

    open    marks that begin calls
    starts  other marks that may begin one, of an offered tool alone
    ends    marks that may stand behind a call; without its bracket if models vary the rest of it
    close   those of them that belong to `open`
    """

    @property
    def open(self) -> Step: ...
    @property
    def starts(self) -> Step: ...
    @property
    def ends(self) -> Step: ...
    @property
    def close(self) -> Step: ...

    def call(
        self, reader: AnswerReader, tools: Tools, *, opened: str, is_open: bool
    ) -> Steps[str | None]:
        """Read calls at this place. Returns "", or text that turned out to be content; None, with nothing taken, if none begins here.

        opened   the mark of `open` directly before
        is_open  one stands somewhere before, and its end does not: there may be calls of tools that are not offered, too
        """
        ...

    def heads(self, tools: Tools) -> tuple[Lookahead, ...]:
        """Beginnings of calls of these tools."""
        ...

    def rules(self, lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
        """The grammar of calls of these tools."""
        ...


FENCE = 3  # characters
MOST_OPEN = 64  # characters of marks that begin calls, one behind the other
BLANK = " \t\r"
QUOTES = {'"': '"', "'": "'", "“": "”", "„": "“", "‘": "’", "«": "»", "「": "」", "『": "』"}
BEFORE_QUOTES = frozenset(" \t\r\n([{=:,–—/>")  # behind others it ends a quote, or is an apostrophe


class Prose:
    """Passes on text, and knows whether the next one is quoted or stands in code, inline or fenced.

    Inline code and quotes end with their line, unless a mark stands in them: then with their paragraph.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.begin()

    def begin(self) -> None:
        """A text begins."""
        self._run, self._last, self._before = "", "\n", "\n"
        self._open, self._is_fence, self._has_mark = "", False, False
        self._is_blank, self._is_cited = True, False  # the line so far

    def __call__(self, text: str) -> None:
        self._emit(text)
        if not self._open and not self._run and not text.count("`") and "~~~" not in text:
            lines = text.rpartition("\n")
            if lines[1]:  # nothing of other lines matters
                self._char("\n")
                text = lines[2]
        for char in text:
            self._char(char)

    def _char(self, char: str) -> None:
        if self._run and char == self._run[0]:
            self._run += char
            return
        self._end_run()
        if char == "\n":
            if not self._is_fence and (self._is_blank or not self._has_mark):
                self._open, self._has_mark = "", False
            self._is_blank, self._is_cited = True, False
        elif char in "`~":
            self._run = char
        elif char not in BLANK:
            self._is_cited = self._is_cited or (self._is_blank and char == ">")
            self._is_blank = False
            if char == self._open:
                self._open = ""
        self._before, self._last = self._last, char

    def _end_run(self) -> None:
        """A row of backticks or tildes is over."""
        run, self._run = self._run, ""
        if not run or (run[0] == "~" and len(run) < FENCE):
            return
        if run == self._open or (self._is_fence and run.startswith(self._open)):
            self._open, self._is_fence = "", False
        elif not self._open:
            self._open, self._is_fence = run, len(run) >= FENCE
        self._is_blank = False

    @property
    def is_line(self) -> bool:
        """True if nothing stands before the next text on its line."""
        return self._is_blank

    def quotes(self) -> bool:
        """True if the next text, a mark, is quoted."""
        self._end_run()
        closing = QUOTES.get(self._last)
        if not self._open and closing and (self._last not in "'\"" or self._before in BEFORE_QUOTES):
            self._open = closing
        self._has_mark = bool(self._open)
        return self._has_mark or self._is_cited


def read_answer(
    reader: AnswerReader, tools: Tools, forms: tuple[Syntax, ...], *, trims_start: bool
) -> Steps[None]:
    """Read an answer without its reasoning. Spaces around calls are dropped. forms: the dialect's own, then others that models mix with it."""
    content = Trimmed(reader.content, trims_start=trims_start)
    prose, own = Prose(content), forms[0]
    starts = (mark for form in forms for mark in form.starts)
    marks = beginnings((*own.open, *starts, *([reader.stray] if reader.stray else ())))
    reader.ends = (*own.ends, *own.open)
    while mark := (yield from reader.find(marks, prose)):
        if mark == reader.stray:
            yield from reader.take_mark(mark)
            content.drop()
            continue
        text, n_calls = "", reader.n_calls
        if reader.is_constrained or not prose.quotes():
            reader.is_line = prose.is_line
            text = yield from _calls(reader, tools, forms, mark)
            if reader.n_calls > n_calls:
                content.drop()
                prose.begin()
        else:
            text = yield from reader.take_mark(mark)
        prose(text)
    content.flush()


def _calls(reader: AnswerReader, tools: Tools, forms: tuple[Syntax, ...], mark: str) -> Steps[str]:
    """Read calls from their mark on, which is not taken yet. Returns text that turned out to be content."""
    own, text, opened, is_open, is_read = forms[0], "", "", mark in forms[0].open, False
    while is_open and len(text) < MOST_OPEN and (more := (yield from reader.take_mark(*own.open))):
        text, opened = text + more + (yield from reader.take_spaces()), more
    while True:
        said = None
        for form in forms:
            said = yield from form.call(reader, tools, opened=opened, is_open=is_open)
            if said is not None:
                break
        if said is None and not text and not is_read:
            return (yield from reader.take_mark(mark))
        if said is None or said:
            return text + (said or "")
        is_read = True
        is_open = not (yield from _take_ends(reader, own, form.ends)) and is_open
        opened = ""
        text = yield from reader.take_spaces()


def _take_ends(reader: AnswerReader, own: Syntax, ends: Step) -> Steps[bool]:
    """Take the marks behind a call, in whatever form and number, and a mark that begins calls if none follows. Returns whether calls end.

    ends  those of the form that the call had
    """
    ends = tuple(dict.fromkeys((*own.ends, *ends)))
    cut = tuple(mark for mark in ends if mark[-1] not in ">]|")
    whole = (*(mark + ">" for mark in cut), *(mark for mark in ends if mark not in cut))
    forms = ((GAP, AHEAD, whole), (GAP, AHEAD, cut, TAIL), (GAP, AHEAD, cut, OVER))
    again: Lookahead = (GAP, own.open, AHEAD, GAP)
    is_closed = False
    while (yield from reader.take(*forms)):
        is_closed = is_closed or bool(own.close and (yield from reader.look(*own.close)))
        yield from reader.take(*(form[2:] for form in forms))
    while own.open and (yield from reader.take((*again, OVER), (*again, own.open))):
        pass
    return is_closed
