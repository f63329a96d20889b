"""The grammar that holds an answer to its tools, and the control tokens that its parser has to see.

Used for chats over HTTP and from Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from pyspec.request import Grammar
from pyspec.text.markup import harmony
from pyspec.text.markup.call_grammar import Lark
from pyspec.text.markup.dialect import AnswerMarkup, Dialect, dialect
from pyspec.text.markup.reasoning import ThinkMarks
from pyspec.text.tokenizer import Tokenizer

TAIL_TOKENS = 24  # last tokens of a prompt, enough to see an open reasoning


def grammar_of_calls(tokenizer: Tokenizer, markup: AnswerMarkup, *, is_single: bool) -> Grammar:
    """The grammar that holds an answer to the tools' schemas. Reasoning is free, and so is text before optional calls.

    is_single  one call at most
    """
    assert markup.calls is not None
    think, frames = markup.think, _frames(tokenizer, markup.think)
    lark = Lark(control_tokens(tokenizer, markup.calls) | frames)
    if think is not None and think.is_chain:
        source = harmony.answer(
            lark, markup.tools, is_calls_only=markup.is_calls_only, is_open=markup.is_open
        )
        return Grammar(kind="lark", source=source)
    after = think.end if think is not None and markup.is_open else ""
    rules = markup.calls.rules(lark, markup.tools, is_single=is_single)
    if not markup.is_calls_only:
        source = lark.text_or_calls(rules, list(frames.values()))
    elif think is not None and not after:
        source = lark.calls(rules, (think.start, think.end), think.lead)
    else:
        source = lark.calls(rules)
    is_lazy = bool(after) and not markup.is_calls_only
    return Grammar(kind="lark", source=source, after=after, lazy=is_lazy)


def lead_of(tokenizer: Tokenizer, markup: AnswerMarkup) -> str:
    """Lark of an answer that is a chain of messages: `body`, a rule elsewhere, is the text of its final message."""
    marks = control_tokens(tokenizer, dialect("harmony"))
    lark = Lark(marks)
    return harmony.answer(lark, markup.tools, body="body", is_open=markup.is_open)


def control_tokens(tokenizer: Tokenizer, spoken: Dialect) -> dict[str, int]:
    """The dialect's marks that are control tokens. Bare dialects have none: their free text ends at marks in text form."""
    if spoken.is_bare:
        return {}
    found = ((mark, *_ids(tokenizer, mark)) for mark in spoken.marks)
    return {mark: ids[0] for mark, ids, plain in found if len(ids) == 1 and plain != ids}


def _frames(tokenizer: Tokenizer, think: ThinkMarks | None) -> dict[str, int]:
    """The control tokens around reasoning and text, where an answer has marks around both."""
    if think is None or not think.opens:
        return {}
    found = (_ids(tokenizer, mark) for mark in (think.start, think.end, *think.strays))
    control = {id_ for ids, plain in found for id_ in ids if id_ not in plain}
    return {tokenizer.decode([id_], special=True): id_ for id_ in control}


def _ids(tokenizer: Tokenizer, mark: str) -> tuple[list[int], list[int]]:
    """The tokens of a mark, and those of the same characters as plain text."""
    encode = partial(tokenizer.encode, mark, add_special=False)
    return encode(parse_special=True), encode(parse_special=False)


def shown_tokens(tokenizer: Tokenizer, markup: AnswerMarkup) -> tuple[int, ...]:
    """Marks that are a token, or begin with a control token. A control token among them must be shown to the parser."""
    marks = [
        *(markup.calls.marks if markup.calls else ()),
        *(
            [markup.think.start, markup.think.end, *markup.think.marks, *markup.think.strays]
            if markup.think
            else []
        ),
    ]
    found = [_ids(tokenizer, mark) for mark in marks]
    return tuple(sorted({ids[0] for ids, plain in found if len(ids) == 1 or ids[:1] != plain[:1]}))


def ends_open(tokenizer: Tokenizer, prompt: Sequence[int], think: ThinkMarks) -> bool:
    """True if the prompt ends with the mark that begins reasoning."""
    tail = tokenizer.decode(prompt[-TAIL_TOKENS:], special=True)
    return tail.rstrip().endswith(think.start)
