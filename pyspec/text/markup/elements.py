"""Calls with one element for each argument, whose strings are bare text between marks.

Qwen3-Coder, Qwen3.5 and Nemotron 3 write <function=name> with <parameter=name>, Seed-OSS the same in marks of its own, MiniMax M2 <invoke name="..">, Muse, DeepSeek V3.2 and
V4 the same with a word before, GLM 4.5 and later the name and pairs of <arg_key> and <arg_value>.

Models quote names, leave out a bracket or a mark, write one twice or another one, mostly in long contexts. As the names of tools and
arguments are known, marks around these are read in any such form. Marks around other names have to be exact.

A value has no escapes. Its end mark counts only if the next text may follow a value, so that an argument may contain this markup. A
value also ends before the mark that ends the call, if the next text may follow a call, and before the next argument, if it is one of
the tool's that is still missing. A whole call inside a value is part of it. If a grammar wrote the value, it ends only where the
grammar ended it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial

from pyspec.text.markup.ahead import (
    AHEAD,
    ATTRIBUTES,
    GAP,
    INSIDE,
    NAME,
    OVER,
    SIGN,
    TAIL,
    Found,
    Lookahead,
    LookaheadTree,
    Names,
    Step,
)
from pyspec.text.markup.call_grammar import (
    Lark,
    Schema,
    concat,
    either,
    literal,
    properties_of,
    takes_any,
    words_of,
)
from pyspec.text.markup.json_text import read_arguments
from pyspec.text.markup.prose import Syntax
from pyspec.text.markup.reader import AnswerReader, Emit, Steps, Tools, beginnings, offered
from pyspec.text.markup.typed import ArgumentWriter, names_of, types_of

CLOSING = frozenset(".)]}>")  # last characters of a value before another argument on the same line
NAME_CHARS = 256
QUOTE: Step = ("", '"', "'", "`")
_STRING = re.compile(r"""\bstring\s*=\s*["'](true|false)""")

Forms = Callable[[Step], tuple[Lookahead, ...]]
"""The forms of a mark around one of these names: the exact one first, the last one without a part of it."""


def tag(exact: str, *words: str) -> Forms:
    """A tag: <word=name>, <word name="name">, and the like. exact: its text before the name."""
    begins = tuple(f"<{word}" for word in words)
    quote = ('"',) if exact.endswith('"') else ("",)

    def forms(names: Step) -> tuple[Lookahead, ...]:
        cut = words if isinstance(names, Names) else ()
        any_begin = ((*begins, *cut), SIGN, QUOTE, names, QUOTE)
        return ((exact,), names, quote, ATTRIBUTES), (*any_begin, ATTRIBUTES), any_begin

    return forms


def bare(names: Step) -> tuple[Lookahead, ...]:
    """A name without a mark."""
    return ((names,),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements(Syntax):
    """The marks of a dialect: `tags` and `pairs` make them.

    call_marks, key_marks  texts around the name of a tool, and of an argument, as grammars write them
    value_end   the same behind a value
    end         the same behind the arguments; "": `close` is there
    text, json  behind the name of an argument that is a string, or JSON, if that is marked
    calls, keys  any forms of `call_marks` and `key_marks`
    key_starts  beginnings of `keys`, as `starts` are those of `calls`
    value_ends, call_ends, close_ends  beginnings of `value_end`, `end` and `close` in any form
    """

    call_marks: tuple[str, str]
    key_marks: tuple[str, str]
    value_end: str
    calls: Forms
    keys: Forms
    key_starts: Step
    value_ends: Step
    close_ends: Step
    call_ends: Step = ()
    end: str = ""
    text: str = ""
    json: str = ""

    @property
    def ends(self) -> Step:
        return (*self.call_ends, *self.close_ends, *self.value_ends)

    @property
    def _behind(self) -> Step:
        """What may follow an argument."""
        return (*self.key_starts, *self.call_ends, *self.close_ends)

    @property
    def _has_tags(self) -> bool:
        return self.calls is not bare

    # -- calls ---------------------------------------------------------------------------------------------------

    def call(
        self, reader: AnswerReader, tools: Tools, *, opened: str, is_open: bool
    ) -> Steps[str | None]:
        if not opened and not self._has_tags:
            return None
        key = (self.call_marks, is_open, reader.is_line)
        found = yield from reader.take(
            reader.known(key, lambda: self._begins(reader, tools, is_open=is_open))
        )
        if not found:
            return None
        reader.begin_call(name := offered(found.name, tools))
        yield from reader.drop_spaces()
        if (yield from reader.peek()) == "{":
            yield from read_arguments(reader)
        else:
            arguments = ArgumentWriter(reader, tools.get(name, {}))
            # models end a call by its tool's name, too
            own = replace(self, call_ends=(*self.call_ends, *(f"</{name}>" for _ in self.call_ends[:1])))
            yield from own._arguments(reader, tools, arguments)
            yield from reader.take_mark(f"</{name}>")
        return ""

    def _begins(self, reader: AnswerReader, tools: Tools, *, is_open: bool) -> list[Lookahead]:
        begin, end = self.call_marks
        if reader.is_constrained:
            return [((begin,), Names(tools), (end,))]
        known, unknown = self.calls(Names(tools)), self.calls(NAME)
        forms = self._known(tools)
        if self._has_tags:
            known, unknown = known[:-1], unknown[:-1]
        if is_open and (self._has_tags or reader.is_line):
            forms += [(*form, AHEAD, GAP, OVER) for form in known]
        if is_open:
            forms += [(*form, AHEAD, GAP, self._behind) for form in unknown]
        return forms

    def _known(self, tools: Tools) -> list[Lookahead]:
        """Beginnings of calls of these tools, up to the name's end, and what may follow."""
        behind = (*self._behind, "{")
        forms: list[Lookahead] = [(*form, AHEAD, GAP, behind) for form in self._once_or_twice(tools)]
        for name in sorted(tools, key=len, reverse=True):
            keys = self.keys(Names(names_of(tools[name])))
            keys = keys[1:2] if self._has_tags else keys
            forms += [(*form, AHEAD, GAP, *key) for form in self._once_or_twice([name]) for key in keys]
        return forms

    def _once_or_twice(self, names: Iterable[str]) -> list[Lookahead]:
        once = self.calls(Names(names))
        return [*once, *((*form, GAP, *form) for form in once)] if self._has_tags else [*once]

    def heads(self, tools: Tools) -> tuple[Lookahead, ...]:
        known = self._known(tools)
        inside = [(self.open, GAP, *form) for form in known]
        return (*inside, *known) if self.starts else tuple(inside)

    # -- arguments -----------------------------------------------------------------------------------------------

    def _arguments(self, reader: AnswerReader, tools: Tools, arguments: ArgumentWriter) -> Steps[None]:
        """Read arguments up to the mark that ends them, which is not taken. Other text between them is dropped."""
        marks = beginnings((*self._behind, *self.open, *self.starts))
        while True:
            yield from reader.drop_spaces()
            if found := (yield from self._key(reader, arguments)):
                kind = _STRING.search(found.attributes)
                value = arguments.value(found.name, is_text=kind and kind[1] == "true")
                if not (yield from self._value(reader, tools, value, found.name, arguments.expected)):
                    return  # cut off
                value.end()
                continue
            dropped: list[str] = []
            mark = yield from reader.find(marks, dropped.append)
            is_call = mark in self.starts and (yield from reader.sees(*self.calls(Names(tools))[:-1]))
            if mark not in self.key_starts and (is_call or mark not in self.starts):
                text = "".join(dropped).strip()
                if mark or not text or any(each.startswith(text) for each in self.ends):
                    arguments.end()
                return
            if not dropped:
                yield from reader.take_mark(mark)

    def _key(self, reader: AnswerReader, arguments: ArgumentWriter) -> Steps[Found | None]:
        """Take the marks around an argument's name. None if there are none, or not whole ones."""
        begin, text = self.key_marks
        end, line, value = text.partition("\n")
        known = self.keys(Names(arguments.names))
        if reader.is_constrained:
            forms = known[:1]
        elif self._has_tags:
            begins, sign, _, names, _ = known[-1]
            quoted: Lookahead = (begins, sign, ('"', "'"), names, ('"', "'"), AHEAD, NAME)
            cut: Lookahead = (*known[-1], AHEAD, INSIDE, ("</",)) if text == ">" else quoted
            forms = (*known[:-1], (*known[-1], ("\n",)), *self.keys(NAME)[:-1], quoted, cut)
        else:
            forms = known
        found = yield from reader.take(*forms)
        if not found and (yield from reader.take_mark(begin)):  # an unknown name
            ends = [mark for mark in (self.text, self.json, end) if mark]
            name, mark = yield from reader.take_until("\n", *ends, most=NAME_CHARS)
            if mark in ("", "\n"):
                return None
            found = Found(0, name, mark)
            if value:
                found = Found(0, name.strip())
                yield from reader.take_spaces()
                if not (yield from reader.take_mark(value)):
                    return None
        if found and line and not value:
            yield from reader.take_mark("\n")
        if found and not reader.is_constrained:  # the mark may be there twice
            keys = self.keys(Names([found.name]))[:-1] if self._has_tags else (((value,),),)
            if (yield from reader.take(*((GAP, *key) for key in keys))) and line and not value:
                yield from reader.take_mark("\n")
        return found

    def _value(
        self, reader: AnswerReader, tools: Tools, emit: Emit, name: str, expected: Collection[str] | None
    ) -> Steps[bool]:
        """Pass on a value up to its end, which is taken. Returns False if the answer ends first.

        name      its argument's, by which models end it, too
        expected  arguments that may come next; None: any
        """
        if reader.is_constrained:
            return bool((yield from reader.until((self.value_end,), emit)))
        value, depth, n_own = _Value(emit), 0, 0
        own = (f"<{name}", f"</{name}>")
        marks = self._marks(own)
        forms: dict[tuple[bool, ...], LookaheadTree] = {}
        while mark := (yield from reader.find(marks, value)):
            text = mark.lstrip("\n")
            lead: Lookahead = () if text == mark else (("\n",),)
            is_line = bool(lead) or value.last == "\n"
            is_word = value.last.isalnum() or value.last in CLOSING
            key = (bool(lead), bool(depth), is_line, is_word, not n_own)
            if key not in forms:
                # behind the text of a whole call only the answer's end confirms it
                ends = (
                    [(self.value_ends, TAIL, AHEAD, GAP, *self._closing, GAP, OVER)]
                    if depth
                    else self._value_forms(
                        tools, expected, () if n_own else own[1:], is_line=is_line, is_word=is_word
                    )
                )
                forms[key] = LookaheadTree((*lead, *end) for end in ends)
            if (yield from reader.take(forms[key], cut_fits=True)):
                return True
            if depth and text in self.close_ends:
                depth -= 1
            elif text in self.open and (yield from reader.sees((*lead, *self._any_call))):
                depth += 1
            elif text in own:
                n_own = max(n_own + (1 if text == own[0] else -1), 0)
            value((yield from reader.take_mark(mark)))
        return False

    @property
    def _closing(self) -> Lookahead:
        return ((self.end,), GAP, self.close) if self.end else (self.close,)

    @property
    def _any_call(self) -> Lookahead:
        if self._has_tags:
            return (self.open, GAP, (self.call_marks[0],))
        return (self.open, NAME, GAP, (*self.key_starts, *self.close))

    def _marks(self, own: Step) -> Step:
        """Marks where a value may end, or of which one follows. own: of its argument's name."""
        every = (*self.value_ends, *self.key_starts, *self.call_ends, *self.close_ends, *self.open)
        if not any(a.startswith(b) or b.startswith(a) for a in own for b in every):
            every = (*every, *own)
        # a line's end before these is the value's
        inside = () if self.value_end.startswith("\n") else self.value_ends
        every += tuple("\n" + mark for mark in every if mark not in inside)
        return beginnings(every)

    def _value_forms(
        self,
        tools: Tools,
        expected: Collection[str] | None,
        by_name: Step,
        *,
        is_line: bool,
        is_word: bool,
    ) -> list[Lookahead]:
        """What confirms that a value ends, up to the part that is taken.

        by_name  the end mark with the argument's name
        is_line, is_word  whether a line or a word ends before it
        """
        calls = self.calls(Names(tools))
        keys = self.keys(NAME if expected is None else Names(expected))
        end: Lookahead = (self.value_ends, TAIL)
        # a line's end stands for a bracket
        whole: Lookahead = (tuple(mark.rstrip(">") + end for mark in self.value_ends for end in ">\n"),)
        follow: list[Lookahead] = [(self._behind,), (self.open, GAP, *calls[-1])]
        follow += [calls[-1], keys[1]] if self._has_tags else []
        twice: Lookahead = (*end, GAP, (*self.value_ends, *by_name), TAIL)
        forms = [(*each, AHEAD, GAP, *behind) for each in (end, twice) for behind in follow]
        forms += [(by_name, AHEAD, GAP, self._behind)] if by_name else []
        if not self._has_tags and expected:
            forms += [
                (*each, AHEAD, GAP, *key) for each in (whole, (*whole, GAP, *whole)) for key in keys
            ]
        if is_line or (expected is not None and is_word):
            known = keys[:1] if expected is None else (*keys[:-1], (*keys[-1], ("\n",)))
            forms += [(AHEAD, *key) for key in (known if self._has_tags else known[:-1] or known)]
        call: Lookahead = (self.call_ends, TAIL, GAP)
        close: Lookahead = (self.close_ends, TAIL, GAP)
        behind = (*self.close_ends, *self.open, self.call_marks[0] or self.open[0])
        ends: list[Lookahead] = (
            [(*call, behind), (*call, *call, behind)] if is_line else [(*call, *close, self.open)]
        )
        ends += [(*close, self.open), (*close, *close, self.open)]
        return forms + [(AHEAD, *end) for end in ends]

    # -- grammar -------------------------------------------------------------------------------------------------

    def bodies(self, lark: Lark, tools: Tools) -> list[str]:
        (begin, behind), end = self.call_marks, literal(self.end) if self.end else ""
        return [
            concat(literal(f"{begin}{name}{behind}"), self._lark(lark, schema), end)
            for name, schema in tools.items()
        ]

    def _lark(self, lark: Lark, schema: Schema) -> str:
        """The arguments in the schema's order, and no others; any arguments if the schema neither names nor forbids some."""
        begin, behind = self.key_marks
        if takes_any(schema):
            key_end = literal(self.text or behind)
            any_name = r'/[^<>"\s]{1,64}/' if begin.endswith('"') else r"/[^<>\s]{1,64}/"
            return f"({concat(literal(begin), any_name, key_end, lark.text_before(self.value_end))})*"
        out = []
        for name, own, is_needed in properties_of(schema):
            end = literal(self.value_end)
            if words := words_of(own, self._can_be_bare):
                kind, value = self.text, concat(either([literal(word) for word in words]), end)
            elif "string" in types_of(schema, name):
                kind, value = self.text, lark.text_before(self.value_end)
            else:
                kind, value = self.json, concat(lark.json(own), end)
            rule = lark.rule(concat(literal(f"{begin}{name}"), literal(kind or behind), value))
            out.append(rule if is_needed else f"{rule}?")
        return concat(*out)

    def _can_be_bare(self, text: str) -> bool:
        return (text + self.value_end).find(self.value_end) == len(text)


class _Value:
    """Passes on a value. last: its last character."""

    def __init__(self, emit: Emit) -> None:
        self._emit, self.last = emit, "\n"

    def __call__(self, text: str) -> None:
        self._emit(text)
        self.last = text[-1:] or self.last


# -- the dialects ------------------------------------------------------------------------------------------------


def tags(
    open_: Step,
    close: Step,
    call: Step,
    key: Step = ("parameter", "param"),
    *,
    prefixes: Step = ("",),
    is_named: bool = True,
    line: str = "",
    is_section: bool = True,
    has_kinds: bool = False,
) -> Elements:
    """A dialect with a tag around each name, and end marks of the same words.

    call, key   words of tags around names of tools and of arguments, the exact one first
    prefixes    of these words: the exact one first, then those that models write
    is_named    tags are <word name="name">; else <word=name>
    line        stands around a value
    has_kinds   the tag around an argument's name says whether its value is a string
    """
    begin, end = (' name="', '">') if is_named else ("=", ">")
    calls, keys = ([p + word for p in prefixes for word in words] for words in (call, key))
    open_, close = (
        tuple(dict.fromkeys(mark.replace(prefixes[0], prefix) for prefix in prefixes for mark in marks))
        for marks in (open_, close)
    )
    closed = [_NAMESPACE.sub(r"\1", mark) for mark in close] + list(close)
    return Elements(
        open=open_,
        close=close,
        inner=prefixes[:1] if prefixes[0] else (),
        is_section=is_section,
        call_marks=(f"<{calls[0]}{begin}", f"{end}\n"),
        key_marks=(f"<{keys[0]}{begin}", f"{end}{line}"),
        value_end=f"{line}</{keys[0]}>\n",
        end=f"</{calls[0]}>",
        text='" string="true">' if has_kinds else "",
        json='" string="false">' if has_kinds else "",
        calls=tag(f"<{calls[0]}{begin}", *calls),
        keys=tag(f"<{keys[0]}{begin}", *keys),
        starts=tuple(f"<{each}" for each in calls),
        key_starts=beginnings(f"<{each}" for each in keys),
        value_ends=(
            *(f"</{prefix}param" for prefix in prefixes),
            *(f"<{prefix}{key[0]}{sign}" for prefix in prefixes for sign in (">", "/>")),
        ),
        call_ends=(*(f"</{each}" for each in calls), *(["</func>"] if "function" in call else [])),
        close_ends=tuple(dict.fromkeys(mark.rstrip("s>") for mark in closed)),
    )


_NAMESPACE = re.compile(r"(</)\w+:")

_function = partial(tags, call=("function", "invoke"), is_named=False, is_section=False)
QWEN = _function(("<tool_call>",), ("</tool_call>",), line="\n")
SEED = _function(("<seed:tool_call>",), ("</seed:tool_call>",))
MINIMAX = tags(("<minimax:tool_call>",), ("</minimax:tool_call>",), ("invoke", "function"))
MUSE = tags(
    ("<atem:function_calls>",),
    ("</atem:function_calls>",),
    ("invoke",),
    prefixes=("atem:", ""),
)
DSML = tags(
    ("<｜DSML｜tool_calls>", "<｜DSML｜function_calls>"),
    ("</｜DSML｜tool_calls>", "</｜DSML｜function_calls>"),
    ("invoke",),
    ("parameter",),
    prefixes=("｜DSML｜", "|DSML|", ""),  # as it is, with other bars, left out
    has_kinds=True,
)

KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
KEYS: Step = (KEY, KEY[:-1], KEY[1:])  # a bracket may be missing
KEY_ENDS: Step = (END_KEY, END_KEY[:-1], END_KEY[1:])
VALUES: Step = (VALUE, f"{VALUE[:-1]}\n", VALUE[:-1], VALUE[1:])  # a line's end stands for a bracket


def pairs(names: Step) -> tuple[Lookahead, ...]:
    """A name and the mark of its value: as they should be, with other marks, with a sign of JSON or Python between them, and without
    the first one."""
    exact: Lookahead = ((KEY,), names, (END_KEY,), GAP, (VALUE,))
    begin: Lookahead = ((*KEYS, "<tool_call>", VALUE), GAP, (KEY, ""), GAP)
    name: Lookahead = (QUOTE, names, QUOTE, GAP)
    sign: Lookahead = (("", ":", "="), GAP)
    marks: Lookahead = (
        (*KEY_ENDS, END_VALUE, *VALUES, KEY, ">"),
        GAP,
        (*KEY_ENDS, ""),
        GAP,
        (*VALUES, KEY, ""),
    )
    return (
        exact,
        (*begin, *name, (*KEY_ENDS, ""), GAP, *sign, VALUES),
        (*begin, *name, *sign, *marks),
        ((KEY,), GAP, *name, (":", "="), GAP),
        (names, GAP, *sign, (*KEY_ENDS, VALUE), GAP, (*KEY_ENDS, ""), GAP, *sign, (VALUE, "")),
    )


GLM = Elements(
    open=("<tool_call>",),
    close=("</tool_call>",),
    inner=(KEY, END_KEY, VALUE, END_VALUE),
    call_marks=("", "\n"),
    key_marks=(KEY, f"{END_KEY}\n{VALUE}"),
    value_end=f"{END_VALUE}\n",
    calls=bare,
    keys=pairs,
    key_starts=(KEY,),
    value_ends=("</arg_value", "</arg_key", "<arg_value>"),
    close_ends=("</tool_call",),
)
