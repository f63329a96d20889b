"""How a chat's answer is parsed, and the grammar that constrains it: the rules for tool calls, over HTTP and from Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from pyspec.errors import NotSupported, RequestError
from pyspec.request import Grammar
from pyspec.text.left_out import own_tools
from pyspec.text.markup.answer_grammar import (
    control_tokens,
    grammar_of_calls,
    lead_of,
    shown_tokens,
)
from pyspec.text.markup.dialect import NAMES, AnswerMarkup, Dialect
from pyspec.text.tokenizer import Tokenizer

# -- the tools that may be called ------------------------------------------------------------------------------------
# The tools that an answer may or must call, as a chat requests it over HTTP and from Python.

Wanted = Literal["auto", "none", "required"]
Tool = Mapping[str, Any]
"""A tool as OpenAI's clients write it: {"type": "function", "function": {"name", "description", "parameters", "strict"}}."""

NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}
STRING_LIMITS = frozenset({"pattern", "format", "minLength", "maxLength"})


@dataclass(frozen=True)
class CallPlan:
    """The calls that a chat permits.

    dialect   how calls are written; None: calls are not parsed
    schemas   the arguments' schema of each tool that may be called
    is_calls_only   the answer consists of calls
    is_constrained  a grammar holds names and arguments to the tools' schemas
    is_single one call at most
    """

    dialect: Dialect | None = None
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_calls_only: bool = False
    is_constrained: bool = False
    is_single: bool = False


@dataclass(frozen=True)
class ToolChoice:
    """A parsed `tool_choice`.

    allowed   the only functions that may be called; None: all
    is_named  it names the one function that must be called
    """

    wanted: Wanted = "auto"
    allowed: tuple[str, ...] | None = None
    is_named: bool = False


def call_plan(
    tools: Sequence[Tool], choice: ToolChoice, dialect: Dialect | None, *, parallel: bool
) -> CallPlan:
    """The permitted calls. Raises RequestError, and NotSupported if calls could not be parsed.

    dialect   how the model writes calls; None: calls are not parsed
    parallel  an answer may have more than one call
    """
    named = {str(tool["function"]["name"]): tool["function"] for tool in tools}
    if len(named) < len(tools):
        raise RequestError("tools: two of them have the same name")
    allowed = choice.allowed
    wanted = named if allowed is None else {name: named[name] for name in allowed if name in named}
    if lost := [name for name in allowed or () if name not in named]:
        raise RequestError(f"tool_choice: there is no tool {lost[0][:80]!r}")
    is_calls_only = choice.wanted == "required"
    if is_calls_only and not wanted:
        raise RequestError("tool_choice: there are no tools to choose from")
    if not wanted or choice.wanted == "none":
        return CallPlan()
    if dialect is None:
        raise NotSupported(
            'tools: this server reads no calls (--tool-call-parser none); send tool_choice "none", or start it with'
            f" --tool-call-parser auto, or one of {', '.join(NAMES)}"
        )
    if dialect.is_bare:
        for function in wanted.values():
            _check_bare(function)
    is_strict = any(function.get("strict") for function in wanted.values())
    return CallPlan(
        dialect=dialect,
        schemas={name: f.get("parameters") or NO_ARGUMENTS for name, f in wanted.items()},
        is_calls_only=is_calls_only,
        is_constrained=is_calls_only or len(wanted) < len(named) or is_strict or not parallel,
        is_single=choice.is_named or not parallel,
    )


def tool_choice(choice: Any) -> ToolChoice:
    """Parse `tool_choice` as OpenAI's clients send it. Raises RequestError."""
    if choice is None:
        return ToolChoice()
    if choice == "auto" or choice == "none" or choice == "required":
        return ToolChoice(choice)
    if isinstance(choice, str):
        raise RequestError(f'tool_choice: {choice[:40]!r} is none of "auto", "none" and "required"')
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools"))
    return ToolChoice("required", (_named(choice, "tool_choice"),), is_named=True)


def _allowed(choice: Any) -> ToolChoice:
    """The functions of OpenAI's `allowed_tools`. Tools of other types are left out, as in the prompt."""
    tools = choice.get("tools") if isinstance(choice, Mapping) else None
    mode = choice.get("mode") if isinstance(choice, Mapping) else None
    if mode not in ("auto", "required", None):
        raise RequestError('tool_choice: the mode of allowed_tools is "auto" or "required"')
    if not isinstance(tools, list):
        want = "an object with a mode and a list of tools"
        raise RequestError(f"tool_choice: allowed_tools is {want}")
    names = [_named(tool, "tool_choice.allowed_tools") for tool in own_tools(tools, "function")]
    return ToolChoice(mode or "auto", tuple(dict.fromkeys(names)))


def _named(choice: Any, where: str) -> str:
    is_function = isinstance(choice, Mapping) and choice.get("type") == "function"
    function = choice.get("function") if is_function else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        form = '{type: "function", function: {name: "..."}}'
        raise RequestError(f"{where}: a word, or an object such as {form}")
    return name


def _check_bare(function: Mapping[str, Any]) -> None:
    """Raise RequestError if a strict tool restricts a string in a way that bare text can not be held to."""
    properties = (function.get("parameters") or {}).get("properties")
    if not function.get("strict") or not isinstance(properties, Mapping):
        return
    for name, schema in properties.items():
        if not isinstance(schema, Mapping) or "enum" in schema:
            continue
        limits = STRING_LIMITS & schema.keys()
        if limits and schema.get("type", "string") == "string":
            limit = f"{min(limits)} of argument {name[:80]!r}"
            raise RequestError(
                f"tools: {function['name']} is strict, but {limit} can not be enforced:"
                " this model writes strings as bare text"
            )


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
