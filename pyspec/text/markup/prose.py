"""The common part of dialects: content up to a call's mark, the calls, then content again. What is quoted or stands in code is no call."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass

from pyspec.text.markup.ahead import AHEAD, GAP, OVER, TAIL, WORD, Lookahead, Step
from pyspec.text.markup.call_grammar import CallRules, Lark, concat, either, literal, repeated
from pyspec.text.markup.parts import Content
from pyspec.text.markup.reader import AnswerReader, Emit, Steps, Tools, Trimmed, beginnings


@dataclass(frozen=True, slots=True, kw_only=True)
class Syntax(ABC):
    """How calls are written: a description that the reader of answers, the grammar and the end of reasoning share.

    open    marks that begin calls
    starts  other marks that may begin one, of an offered tool alone
    close   marks that end calls; grammars write the first of each kind
    inner   other texts of theirs that may be control tokens
    bare    texts that begin a call of an offered tool where an answer begins, and behind another call
    is_section  several calls may stand between `open` and `close`: the next three are lark for
    first, between, last  the text before the first call, between two, and behind the last one
    lead, gap  lark for the text before the body of a call, and before `close`, and `open` of another call
    is_closed  grammars write `close`
    """

    open: Step = ()
    starts: Step = ()
    close: Step = ()
    inner: Step = ()
    bare: Step = ()
    is_section: bool = False
    first: str = ""
    between: str = ""
    last: str = ""
    lead: str = "SPACE?"
    gap: str = "SPACE?"
    is_closed: bool = True

    @property
    def ends(self) -> Step:
        """Marks that may stand behind a call; without its bracket if models vary the rest of it."""
        return self.close

    @property
    def marks(self) -> Step:
        """All texts that may be control tokens, which answers otherwise hide."""
        return (*self.open, *self.close, *self.inner)

    def call(
        self, reader: AnswerReader, tools: Tools, *, opened: str, is_open: bool
    ) -> Steps[str | None]:
        """Read calls at this place. Returns "", or text that turned out to be content; None, with nothing taken, if none begins here.

        opened   the mark of `open` directly before
        is_open  one stands somewhere before, and its end does not: there may be calls of tools that are not offered, too
        """
        return None
        yield

    def heads(self, tools: Tools) -> tuple[Lookahead, ...]:
        """Beginnings of calls of these tools, which end reasoning; none if something else ends it first."""
        return ()

    @abstractmethod
    def bodies(self, lark: Lark, tools: Tools) -> list[str]:
        """Lark for a call of each tool, without the marks around it."""

    def rules(self, lark: Lark, tools: Tools, *, is_single: bool) -> CallRules:
        """The grammar of calls of these tools."""
        begin = (*self.open, *self.starts)[0]
        close = concat(self.gap, literal(self.close[0])) if self.close and self.is_closed else ""
        body = concat(self.lead, either(self.bodies(lark, tools)))
        if not self.is_section:
            between = concat(self.gap, literal(begin))
            return CallRules(
                begin, repeated(lark.rule(concat(body, close)), between, is_single=is_single)
            )
        calls = repeated(lark.rule(body), self.between, is_single=is_single)
        return CallRules(begin, concat(self.first, calls, self.last, close))

    def read(
        self, reader: AnswerReader, tools: Tools, also: tuple[Syntax, ...], *, trims_start: bool
    ) -> Steps[None]:
        """Read an answer without its reasoning. also: other syntax that models write behind these marks."""
        yield from read_answer(reader, tools, (self, *also), trims_start=trims_start)


FENCE = 3  # characters
FOLDED = 2048  # characters of text that are looked at together
MOST_OPEN = 64  # characters of marks that begin calls, one behind the other
BLANK = " \t\r"
QUOTES = {'"': '"', "'": "'", "“": "”", "„": "“", "‘": "’", "«": "»", "「": "」", "『": "』"}
BEFORE_QUOTES = frozenset(" \t\r\n([{=:,–—/>")  # behind others it ends a quote, or is an apostrophe
_SIGNS = re.compile(r"\n|`+|~{3,}")


class Prose:
    """Passes on text, and knows whether the next one is quoted or stands in code, inline or fenced.

    Inline code and quotes end with their line, unless a mark stands in them: then with their paragraph. A fence ends with a row of its
    signs at the end of a line, or with the quoted paragraph that it stands in.
    """

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.begin()

    def begin(self) -> None:
        """A text begins."""
        self._new, self._n_new, self._most = list[str](), 0, FOLDED  # text that is not looked at yet
        self._tail = "\n\n"  # the last characters of the other text
        self._open, self._is_fence, self._has_mark = "", False, False
        self._info: str | None = None  # of a fence: the rest of its first line, while that lasts
        self._starts_line = self._in_cited = self._may_close = self._has_words = False
        self.forgotten = (
            ""  # the signs that would end the fence, if it may have been left open before this mark
        )
        self._is_blank, self._is_cited = True, False  # the line so far

    def __call__(self, text: str) -> None:
        self._emit(text)
        self._new.append(text)
        self._n_new += len(text)
        if self._n_new > self._most:
            text = "".join(self._new)
            whole = text.rstrip("`~")
            self._fold(whole)
            self._new, self._n_new = [text[len(whole) :]], len(text) - len(whole)
            self._most = FOLDED + 2 * self._n_new

    def _fold(self, text: str) -> None:
        """Look at a text that does not end inside a row of signs."""
        at = 0
        for sign in _SIGNS.finditer(text):
            if at < sign.start():
                self._words(text[at : sign.start()])
            if sign.group() == "\n":
                self._line_ends()
            else:
                self._row(sign.group())
            at = sign.end()
        if at < len(text):
            self._words(text[at:])
        self._tail = (self._tail + text[-2:])[-2:]

    def _words(self, text: str) -> None:
        if bare := text.strip(BLANK):
            if self._is_blank:
                self._is_blank, self._is_cited = False, bare[0] == ">"
                self._leave_cited()
            self._may_close = False
            self._has_words = self._has_words or self._info is None
        if self._info is not None and len(self._info) < FOLDED:
            self._info += text
        if self._open in QUOTES.values() and self._open in text:
            self._open = ""

    def _leave_cited(self) -> None:
        if self._is_fence and self._in_cited and not self._is_cited:
            self._open, self._is_fence = "", False

    def _line_ends(self) -> None:
        is_word = self._info is None or len(self._info.split()) < 2
        if self._may_close or not (is_word or self._starts_line):
            self._open, self._is_fence = "", False
        if self._is_blank:
            self._leave_cited()
        if not self._is_fence and (self._is_blank or not self._has_mark):
            self._open, self._has_mark = "", False
        self._is_blank, self._is_cited, self._info, self._may_close = True, False, None, False

    def _row(self, row: str) -> None:
        """A row of backticks or tildes."""
        if not self._open and (row[0] == "`" or self._is_blank):
            self._open, self._is_fence = row, len(row) >= FENCE
            self._starts_line, self._in_cited = self._is_blank, self._is_cited
            self._info, self._has_words = "" if self._is_fence else None, False
        elif row == self._open and (self._info is not None or not self._is_fence):
            self._open, self._is_fence, self._info = "", False, None
        elif self._is_fence and row.startswith(self._open):
            self._may_close = True
        self._is_blank = False

    def _look(self) -> None:
        """Look at all text: a mark is next."""
        self._fold("".join(self._new))
        self._new, self._n_new, self._most = [], 0, FOLDED

    @property
    def is_line(self) -> bool:
        """True if nothing stands before the next text on its line."""
        self._look()
        return self._is_blank

    def quotes(self) -> bool:
        """True if the next text, a mark, is quoted."""
        self._look()
        if self._is_blank:
            self._leave_cited()
        if self._may_close:
            self._open, self._is_fence, self._may_close = "", False, False
        before, last = self._tail[0], self._tail[1]
        closing = QUOTES.get(last)
        if not self._open and closing and (last not in "'\"" or before in BEFORE_QUOTES):
            self._open = closing
        is_first = self._is_fence and self._has_words and not self._has_mark
        self.forgotten = self._open if is_first and self._is_blank and not self._in_cited else ""
        self._has_mark = bool(self._open)
        return self._has_mark or self._is_cited


def strays_of(reader: AnswerReader) -> Step:
    """Texts where a redundant mark or a header may stand."""
    return (*reader.strays, *(mark for form in reader.headers[:1] for mark in form[0]))


def pass_stray(reader: AnswerReader, mark: str, content: Trimmed) -> Steps[bool]:
    """Take a redundant mark, or a header, and reasoning behind it. False, with nothing taken, if the next text is neither."""
    header = (yield from reader.take(*reader.headers)) if reader.headers else None
    if header and header.name in reader.headers[0][1]:
        yield from reader.until(reader.strays, Trimmed(reader.reasoning))
    elif not header:
        if mark not in reader.strays:
            return False
        yield from reader.take_mark(mark)
    content.drop()
    return True


def read_answer(
    reader: AnswerReader,
    tools: Tools,
    forms: tuple[Syntax, ...],
    *,
    trims_start: bool,
    is_trial: bool = False,
) -> Steps[None]:
    """Read an answer without its reasoning. Spaces around calls are dropped.

    forms     the dialect's own, then others that models mix with it
    is_trial  of `_is_rest`, which makes no other one
    """
    content = Trimmed(reader.content, trims_start=trims_start)
    prose, own = Prose(content), forms[0]
    starts = (mark for form in forms for mark in form.starts)
    strays = strays_of(reader)
    marks = beginnings((*own.open, *starts, *strays))
    reader.ends = (*own.ends, *own.open)
    may_be_bare = bool(own.bare)
    while True:
        mark = ""
        if may_be_bare:
            prose((yield from reader.take_spaces()))
            mark, may_be_bare = (yield from reader.look(*own.bare)) or "", False
        if not mark and not (mark := (yield from reader.find(marks, prose))):
            break
        if mark in strays:
            if (yield from pass_stray(reader, mark, content)):
                continue
            prose((yield from reader.take_mark(mark)))
            continue
        text, n_calls = "", reader.n_calls
        is_call = reader.is_constrained or not prose.quotes()
        if not is_call and prose.forgotten and not is_trial:
            is_call = yield from _is_rest(reader, tools, forms, prose)
            if not is_call:
                continue
        if is_call:
            reader.is_line = prose.is_line
            text = yield from _calls(reader, tools, forms, mark)
            if reader.n_calls > n_calls:
                content.drop()
                prose.begin()
                may_be_bare = bool(own.bare)
        else:
            text = yield from reader.take_mark(mark)
        prose(text)
    content.flush()


def _is_rest(reader: AnswerReader, tools: Tools, forms: tuple[Syntax, ...], prose: Prose) -> Steps[bool]:
    """True if calls alone follow in a fence that nothing ends: models forget to. Else passes on the text up to the end of the fence."""
    text, end = yield from reader.take_until("\n" + prose.forgotten)
    trial = AnswerReader()
    trial.push("" if end or not reader.is_over else text)
    trial.is_over = True
    for _ in read_answer(trial, tools, forms, trims_start=True, is_trial=True):
        pass  # never waits
    if trial.n_calls and not any(isinstance(part, Content) for part in trial.parts):
        reader.put_back(text)
        return True
    prose(text + end)
    return False


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
    whole = (*own.close, *(mark + ">" for mark in cut), *(mark for mark in ends if mark not in cut))
    forms = ((GAP, AHEAD, whole), (GAP, AHEAD, cut, TAIL), (GAP, AHEAD, cut, WORD, OVER))
    again: Lookahead = (GAP, own.open, AHEAD, GAP)
    is_closed = False
    while (yield from reader.take(*forms)):
        is_closed = is_closed or bool(own.close and (yield from reader.look(*own.close)))
        yield from reader.take(*(form[2:] for form in forms))
    begun = tuple(mark[:n] for mark in whole for n in range(1, len(mark)))
    yield from reader.take((GAP, begun, OVER))  # the answer ends inside one
    while own.open and (yield from reader.take((*again, OVER), (*again, own.open))):
        pass
    return is_closed
