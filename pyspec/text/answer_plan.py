"""How a chat's answer is parsed, and the grammar that constrains it: the rules for tool calls, over HTTP and from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pyspec.errors import RequestError
from pyspec.request import Grammar
from pyspec.text.call_plan import CallPlan
from pyspec.text.markup.answer_grammar import (
    control_tokens,
    grammar_of_calls,
    lead_of,
    shown_tokens,
)
from pyspec.text.markup.dialect import AnswerMarkup
from pyspec.text.tokenizer import Tokenizer

CheckGrammar = Callable[[Grammar], Grammar]
"""Compiles a grammar. Raises RequestError if the grammar is not supported."""


@dataclass(frozen=True)
class Around:
    """What stands around a text that has a grammar, in one answer.

    free   text up to and including this is free: the end of reasoning
    calls  tool calls that may replace the text, in order of preference; the first that compiles is used
    begun  the part of the answer that exists already
    lead   as of `AnswerPlan`; an answer that has begun is inside its final message
    """

    free: str = ""
    calls: Sequence[str] = ()
    begun: str = ""
    lead: str = ""


ALONE = Around()


@dataclass(frozen=True)
class AnswerPlan:
    """The permitted form of an answer.

    shown    control tokens that the parser has to see
    grammar  the grammar of the calls; None: calls are free, or they may replace a text that has a grammar itself
    calls    with such a text: the calls that may replace it, as lark, in order of preference; the first that compiles is used
    lead     with such a text: lark of the whole answer around it, if an answer is a chain of messages
    """

    markup: AnswerMarkup
    shown: tuple[int, ...]
    grammar: Grammar | None = None
    calls: tuple[str, ...] = ()
    lead: str = ""

    @property
    def free(self) -> str:
        """The end of the part without a grammar: the end of the reasoning, if the answer begins within it."""
        think = self.markup.think
        return think.end if think is not None and self.markup.is_open and not self.lead else ""

    def around(self, begun: str = "") -> Around:
        return Around(self.free, self.calls, begun, self.lead)


def plan_answer(
    tokenizer: Tokenizer,
    calls: CallPlan,
    markup: AnswerMarkup,
    check: CheckGrammar,
    *,
    has_grammar: bool,
) -> AnswerPlan:
    """Plan an answer. Raises RequestError if schemas must be enforced and are not supported.

    markup       the answer's markup without its calls
    has_grammar  the text has a grammar of its own
    """
    is_chain = markup.think is not None and markup.think.is_chain
    may_replace = has_grammar and calls.dialect and not calls.is_calls_only and not is_chain
    in_place = _in_place(tokenizer, calls) if may_replace else []
    markup = replace(
        markup,
        calls=calls.dialect,
        tools=calls.schemas,
        is_calls_only=calls.is_calls_only,
        trigger=in_place[0][1] if in_place else "",
    )
    lead = ""
    if has_grammar and is_chain and not calls.is_calls_only:
        lead = lead_of(tokenizer, markup)
    grammar = None if in_place or lead else _call_grammar(tokenizer, calls, markup, check)
    return AnswerPlan(
        markup=replace(markup, is_constrained=grammar is not None or bool(in_place or lead)),
        shown=shown_tokens(tokenizer, markup),
        grammar=grammar,
        calls=tuple(source for source, _ in in_place),
        lead=lead,
    )


def _in_place(tokenizer: Tokenizer, calls: CallPlan) -> list[tuple[str, str]]:
    """Calls with their first characters, held to the tools' schemas. If strictness is optional, the second entry allows any arguments."""
    assert calls.dialect is not None
    control = control_tokens(tokenizer, calls.dialect)
    in_place = partial(calls.dialect.in_place, is_single=calls.is_single, control=control)
    any_arguments: dict[str, dict[str, Any]] = {name: {} for name in calls.schemas}
    return [in_place(calls.schemas), *([] if calls.is_constrained else [in_place(any_arguments)])]


def _call_grammar(
    tokenizer: Tokenizer, calls: CallPlan, markup: AnswerMarkup, check: CheckGrammar
) -> Grammar | None:
    """The grammar of the calls, or None if they are free. For a model that reads in its prompt how to call, all calls have a grammar:
    that of the schemas or, if those are not supported, that of the form alone."""
    if markup.calls is None or not (calls.is_constrained or markup.calls.is_prompted):
        return None
    try:
        return check(grammar_of_calls(tokenizer, markup, is_single=calls.is_single))
    except RequestError as e:
        if calls.is_constrained:
            raise RequestError(f"tools: their schemas can not be enforced: {e}") from None
    free = replace(markup, tools={name: {} for name in calls.schemas})
    return check(grammar_of_calls(tokenizer, free, is_single=calls.is_single))


def text_grammar(name: str, grammar: Grammar, check: CheckGrammar, around: Around = ALONE) -> Grammar:
    """Compile the grammar of a text. Raises RequestError that names the option with the grammar."""
    free, calls, lead = around.free, around.calls, "" if around.begun else around.lead
    grammar = replace(grammar, after=free, begun="" if free else around.begun, lead=lead)
    try:
        checked = check(grammar)
    except RequestError as e:
        raise RequestError(f"{name}: {e}") from None
    why = ""
    for each in calls:
        try:
            return check(replace(grammar, calls=each))
        except RequestError as e:
            why = why or str(e)
    if calls:
        raise RequestError(f"tools: their schemas can not be enforced beside {name}: {why}")
    return checked
