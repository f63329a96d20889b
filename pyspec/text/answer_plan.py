"""How a chat's answer is read, and what holds it: the rules for tool calls, over HTTP and from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from pyspec.errors import RequestError
from pyspec.request import Grammar
from pyspec.text.call_plan import CallPlan
from pyspec.text.markup.dialect import AnswerMarkup
from pyspec.text.markup.held import Tokens, control_tokens, held_calls, shown_tokens

Keep = Callable[[Grammar], Grammar]
"""Compiles a grammar. Raises RequestError if it can not be kept."""


@dataclass(frozen=True)
class AnswerPlan:
    """What an answer may be.

    shown    control tokens that its reader has to see
    grammar  what holds its calls, and where they are; None: nothing does, or they stand in the place of a text that is held itself
    calls    where a text is held: the calls that may stand in its place, as lark; the first of these that can be kept
    """

    markup: AnswerMarkup
    shown: tuple[int, ...]
    grammar: Grammar | None = None
    calls: tuple[str, ...] = ()

    @property
    def free(self) -> str:
        """Text up to and including this no grammar holds: the end of reasoning, if the answer begins within it."""
        return self.markup.think.end if self.markup.think is not None and self.markup.is_open else ""


def plan_answer(
    tokenizer: Tokens, calls: CallPlan, markup: AnswerMarkup, keep: Keep, *, has_grammar: bool
) -> AnswerPlan:
    """The plan of an answer. Raises RequestError where schemas have to be kept and can not be.

    markup       what is known of the answer beside its calls
    has_grammar  the text is held to a grammar of its own
    """
    in_place = _in_place(tokenizer, calls) if has_grammar and calls.dialect and not calls.is_bound else []
    markup = replace(
        markup,
        calls=calls.dialect,
        tools=calls.schemas,
        is_bound=calls.is_bound,
        trigger=in_place[0][1] if in_place else "",
    )
    grammar = None if in_place else _call_grammar(tokenizer, calls, markup, keep)
    return AnswerPlan(
        markup=replace(markup, is_held=grammar is not None or bool(in_place)),
        shown=shown_tokens(tokenizer, markup),
        grammar=grammar,
        calls=tuple(source for source, _ in in_place),
    )


def _in_place(tokenizer: Tokens, calls: CallPlan) -> list[tuple[str, str]]:
    """Calls that are held to their schemas; if these can not be kept and need not be, with any arguments. Each with its begin."""
    assert calls.dialect is not None
    control = control_tokens(tokenizer, calls.dialect)
    schemas = [calls.schemas] if calls.is_held else [calls.schemas, {name: {} for name in calls.schemas}]
    return [calls.dialect.in_place(each, is_single=calls.is_single, control=control) for each in schemas]


def _call_grammar(tokenizer: Tokens, calls: CallPlan, markup: AnswerMarkup, keep: Keep) -> Grammar | None:
    """What holds the answer to the tools' schemas; None where nothing does. Of a model that is told how to call all calls are held:
    if not to their schemas, because these can not be kept, to the form."""
    if markup.calls is None or not (calls.is_held or markup.calls.is_prompted):
        return None
    try:
        return keep(held_calls(tokenizer, markup, is_single=calls.is_single))
    except RequestError as e:
        if calls.is_held:
            raise RequestError(f"tools: their schemas can not be kept: {e}") from None
    free = replace(markup, tools={name: {} for name in calls.schemas})
    return keep(held_calls(tokenizer, free, is_single=calls.is_single))


def held_text(
    name: str, grammar: Grammar, keep: Keep, *, free: str = "", calls: Sequence[str] = (), begun: str = ""
) -> Grammar:
    """The grammar of a text, compiled. Raises RequestError that names the option which gave it.

    free   text up to and including this is free: the end of reasoning
    calls  tool calls that may stand in the text's place: the first of these that can be kept
    begun  what stands of the answer already
    """
    grammar = replace(grammar, after=free, begun="" if free else begun)
    try:
        kept = keep(grammar)
    except RequestError as e:
        raise RequestError(f"{name}: {e}") from None
    why = ""
    for each in calls:
        try:
            return keep(replace(grammar, calls=each))
        except RequestError as e:
            why = why or str(e)
    if calls:
        raise RequestError(f"tools: their schemas can not be kept beside {name}: {why}")
    return kept
