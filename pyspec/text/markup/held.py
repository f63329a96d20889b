"""What an answer with tool calls needs beside its text: the grammar that holds it to the tools, and control tokens that have to show.

Both who serves chats over HTTP and who runs them from Python ask here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pyspec.request import Grammar
from pyspec.text.markup.call_grammar import Lark
from pyspec.text.markup.dialect import AnswerMarkup, Dialect
from pyspec.text.markup.reasoning import ThinkMarks

TAIL_TOKENS = 24  # of the prompt, that tell whether it ends within reasoning


class Tokens(Protocol):
    """What is asked of a tokenizer."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> Sequence[int]: ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str: ...


def held_calls(tokenizer: Tokens, markup: AnswerMarkup, *, is_single: bool) -> Grammar:
    """What holds the answer to the tools' schemas. Reasoning is free, and so is text before calls that may be left out.

    is_single  one call at most
    """
    assert markup.calls is not None
    lark, think = Lark(control_tokens(tokenizer, markup.calls)), markup.think
    rules = markup.calls.rules(lark, markup.tools, is_single=is_single)
    after = think.end if think is not None and markup.is_open else ""
    if not markup.is_bound:
        source = lark.text_or_calls(rules)
    elif think is not None and not after:
        source = lark.calls(rules, thought=(think.start, think.end))
    else:
        source = lark.calls(rules)
    return Grammar(kind="lark", source=source, after=after, lazy=bool(after) and not markup.is_bound)


def control_tokens(tokenizer: Tokens, speaks: Dialect) -> dict[str, int]:
    """The dialect's marks that are control tokens. Between marks in bare text they are spelled: free text ends at text."""
    if speaks.is_bare:
        return {}
    found = {mark: tokenizer.encode(mark, add_special=False, parse_special=True) for mark in speaks.marks}
    plain = {mark: tokenizer.encode(mark, add_special=False, parse_special=False) for mark in found}
    return {mark: ids[0] for mark, ids in found.items() if len(ids) == 1 and plain[mark] != ids}


def shown_tokens(tokenizer: Tokens, markup: AnswerMarkup) -> tuple[int, ...]:
    """Marks that are one token: should it be a control token, the parser has to see it all the same."""
    marks = [
        *(markup.calls.marks if markup.calls else ()),
        *([markup.think.start, markup.think.end] if markup.think else []),
    ]
    found = [tokenizer.encode(mark, add_special=False, parse_special=True) for mark in marks]
    return tuple(sorted({ids[0] for ids in found if len(ids) == 1}))


def ends_open(tokenizer: Tokens, prompt: Sequence[int], think: ThinkMarks) -> bool:
    """Whether the prompt's last words begin reasoning."""
    tail = tokenizer.decode(prompt[-TAIL_TOKENS:], special=True)
    return tail.rstrip().endswith(think.start)
