"""Chats for programs: what the answer may call, and the answer taken apart into content, reasoning and tool calls. No torch."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from pyspec.engine.options import GenerateOptions, Message, check_messages, request_of
from pyspec.engine.result import Result, collect
from pyspec.errors import BadTemplate, NotSupported, RequestError
from pyspec.ranges import shown
from pyspec.request import Delta, Done, Grammar, Request, SamplingParams
from pyspec.text.markup.dialect import NAMES, AnswerMarkup, Dialect, dialect, recognised, think_marks
from pyspec.text.markup.held import control_tokens, ends_open, held_calls, shown_tokens
from pyspec.text.markup.parts import CallArguments, CallBegin, Content, Part, Reasoning
from pyspec.text.template import ChatTemplate
from pyspec.text.tokenizer import Tokenizer

Tool = Mapping[str, Any]
"""A tool as OpenAI's clients write it: {"type": "function", "function": {"name", "description", "parameters"}}, or its function alone."""

WORDS = ("auto", "none", "required")
OF_TOOLS = ("tools", "tool_choice", "tool_call_parser")
NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


class ToolOptions(GenerateOptions, total=False):
    """All that a chat takes beside its messages: the options of a generation, and tools.

    tools             functions that the model may call, as OpenAI's clients write them
    tool_choice       "auto": as the model likes; "none"; "required": at least one; or the name of the one to be called
    tool_call_parser  how the model writes calls, by name ("hermes", "qwen3_coder", ...); "auto": as its chat template does
    """

    tools: Sequence[Tool] | None
    tool_choice: str | Mapping[str, Any] | None
    tool_call_parser: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool.

    id         for the message that carries its result
    name       of the function
    arguments  JSON text of an object; cut short if the answer ended at its limit
    """

    id: str
    name: str
    arguments: str

    def values(self) -> dict[str, Any]:
        """The arguments as Python values. Raises RequestError if they are no JSON object: the answer was cut short."""
        try:
            found = json.loads(self.arguments or "{}")
        except ValueError as e:
            raise RequestError(
                f"the arguments of {self.name} are no JSON ({e}): {shown(self.arguments, 200)}"
            ) from None
        if not isinstance(found, dict):
            raise RequestError(f"the arguments of {self.name} are no object: {shown(self.arguments, 200)}")
        return found


@dataclass(frozen=True, slots=True)
class ChatResult(Result):
    """A finished answer of a chat. `text` is all that the model wrote; the rest is what it consists of.

    content     the answer itself
    reasoning   what the model thought before it; "" if it did not
    tool_calls  in order; the chat goes on with `message` and a message for each of them: {"role": "tool", "tool_call_id": id, "content": ...}
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, for the next turn."""
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in self.tool_calls
        ]
        return {"role": "assistant", "content": self.content, **({"tool_calls": calls} if calls else {})}


@dataclass(frozen=True, slots=True)
class ChatDelta(Delta):
    """A Delta of a chat: `content` and `reasoning` are more of either, `tool_calls` are calls that are complete with it."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(slots=True)
class AnswerReading:
    """Takes one answer apart as it comes. A call is told when its end is known."""

    markup: AnswerMarkup
    _open: ToolCall | None = None
    _parser: Any = field(init=False)

    def __post_init__(self) -> None:
        self._parser = self.markup.parser()

    def delta(self, event: Delta) -> ChatDelta:
        """The same delta with what its text is."""
        return self._apart(event, self._parser.push(event.text))

    def rest(self, request: str) -> ChatDelta | None:
        """What was held back until the answer's end, if anything was."""
        last = self._apart(Delta(request, (), ""), self._parser.finish(), is_over=True)
        return last if last.content or last.reasoning or last.tool_calls else None

    def _apart(self, event: Delta, parts: Iterable[Part], *, is_over: bool = False) -> ChatDelta:
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        for part in parts:
            if isinstance(part, Content):
                content.append(part.text)
            elif isinstance(part, Reasoning):
                reasoning.append(part.text)
            elif isinstance(part, CallBegin):
                calls += self._ended()
                self._open = ToolCall(part.id, part.name, "")
            elif isinstance(part, CallArguments) and self._open is not None:
                self._open = replace(self._open, arguments=self._open.arguments + part.text)
        if is_over:
            calls += self._ended()
        same = {f.name: getattr(event, f.name) for f in fields(event)}
        return ChatDelta(**same, content="".join(content), reasoning="".join(reasoning), tool_calls=tuple(calls))

    def _ended(self) -> list[ToolCall]:
        ended, self._open = self._open, None
        return [ended] if ended is not None else []


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A chat that is ready to run, and how its answer is read."""

    request: Request
    markup: AnswerMarkup

    def read(self, events: Iterable[Delta | Done]) -> Iterator[ChatDelta | Done]:
        """The events of the answer, each with what it is."""
        reading = AnswerReading(self.markup)
        for event in events:
            if isinstance(event, Delta):
                yield reading.delta(event)
            else:
                if (rest := reading.rest(event.request)) is not None:
                    yield rest
                yield event

    async def aread(self, events: AsyncIterable[Delta | Done]) -> AsyncIterator[ChatDelta | Done]:
        """`read` for asyncio."""
        reading = AnswerReading(self.markup)
        async for event in events:
            if isinstance(event, Delta):
                yield reading.delta(event)
            else:
                if (rest := reading.rest(event.request)) is not None:
                    yield rest
                yield event


def collected(events: Sequence[ChatDelta | Done]) -> ChatResult:
    """An answer put together."""
    deltas = [event for event in events if isinstance(event, ChatDelta)]
    whole = collect(events)
    return ChatResult(
        **{f.name: getattr(whole, f.name) for f in fields(Result)},
        content="".join(delta.content for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=tuple(call for delta in deltas for call in delta.tool_calls),
    )


@dataclass(frozen=True, slots=True)
class Chats:
    """Makes requests of chats.

    source       the chat template's text
    check        compiles a grammar, or raises RequestError
    recommended  sampling of a chat that gives no `params`
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    source: str
    check: Callable[[Grammar], Grammar]
    recommended: SamplingParams | None = None

    def call(self, messages: Sequence[Message], options: Mapping[str, Any]) -> ChatCall:
        """The chat as a request. Raises RequestError, ConfigError, BadTemplate, and NotSupported where calls could not be read."""
        check_messages(messages)
        if self.template is None:
            raise BadTemplate("the model file has no chat template; give text to `generate` instead of messages")
        rest = {name: value for name, value in options.items() if name not in OF_TOOLS}
        tools = tools_of(options.get("tools"))
        choice, name = choice_of(options.get("tool_choice"), tools)
        prompt = tuple(self.template.encode(self.tokenizer, messages, tools=list(tools.values()) or None))
        may_call = tools if choice != "none" else {}
        wanted = {name: tools[name]} if name else may_call
        markup = self._markup(prompt, wanted, options.get("tool_call_parser", "auto"), is_bound=choice == "required")
        request = replace(request_of(prompt, rest, self.recommended), shown=shown_tokens(self.tokenizer, markup))
        return ChatCall(self._held(request, markup, is_single=bool(name), tools=tools), markup)

    def _markup(self, prompt: Sequence[int], tools: Mapping[str, Tool], parser: str, *, is_bound: bool) -> AnswerMarkup:
        think = think_marks(self.source)
        return AnswerMarkup(
            calls=self._dialect(parser) if tools else None,
            think=think,
            is_open=think is not None and ends_open(self.tokenizer, prompt, think),
            tools={name: tool["function"].get("parameters") or NO_ARGUMENTS for name, tool in tools.items()},
            is_bound=is_bound,
        )

    def _dialect(self, name: str) -> Dialect:
        if name != "auto":
            if name not in NAMES:
                raise RequestError(f"tool_call_parser is {shown(name)}; want auto or one of {', '.join(NAMES)}")
            return dialect(name)
        found = recognised(self.source)
        if found is None:
            raise NotSupported(
                "tools: the chat template does not say how this model writes its calls; give tool_call_parser, one of "
                + ", ".join(NAMES)
            )
        return found

    def _held(self, request: Request, markup: AnswerMarkup, *, is_single: bool, tools: Mapping[str, Tool]) -> Request:
        """The request with its grammar compiled: that of its calls, or its own, in whose place calls may stand."""
        is_strict = any(tool["function"].get("strict") for tool in tools.values())
        if markup.calls is not None and (markup.is_bound or (is_strict and request.grammar is None)):
            return replace(
                request, grammar=self._checked(held_calls(self.tokenizer, markup, is_single=is_single), "tools")
            )
        if request.grammar is None:
            return request
        grammar = request.grammar
        if markup.calls is not None:
            control = control_tokens(self.tokenizer, markup.calls)
            source, _ = markup.calls.in_place(markup.tools, is_single=is_single, control=control)
            after = markup.think.end if markup.think is not None and markup.is_open else ""
            grammar = replace(grammar, calls=source, after=after)
        return replace(request, grammar=self._checked(grammar, "the text's constraint"))

    def _checked(self, grammar: Grammar, what: str) -> Grammar:
        try:
            return self.check(grammar)
        except RequestError as e:
            raise RequestError(f"{what}: {e}") from None


def tools_of(tools: object) -> dict[str, Tool]:
    """Tools by the names of their functions. Raises RequestError."""
    if tools is None:
        return {}
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise RequestError(f"tools is {shown(tools)}; want a list of tools")
    found: dict[str, Tool] = {}
    for i, tool in enumerate(tools):
        if isinstance(tool, Mapping) and "function" not in tool and "name" in tool:
            tool = {"type": "function", "function": tool}
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise RequestError(f'tools[{i}] is {shown(tool)}; want {{"type": "function", "function": {{"name": ...}}}}')
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        if parameters is not None and not isinstance(parameters, Mapping):
            raise RequestError(f"tools[{i}].function.parameters is {shown(parameters)}; want a JSON Schema, an object")
        if name in found:
            raise RequestError(f"tools: two of them are called {shown(name)}")
        found[name] = tool
    return found


def choice_of(choice: object, tools: Mapping[str, Tool]) -> tuple[str, str]:
    """What may be called, and the function that has to be, if one has. Raises RequestError."""
    if isinstance(choice, Mapping):
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(choice, str) or choice not in tools:
            raise RequestError(f"tool_choice: there is no tool {shown(choice)}")
        return "required", choice
    choice = "auto" if choice is None else choice
    if not isinstance(choice, str) or (choice not in WORDS and choice not in tools):
        raise RequestError(f"tool_choice is {shown(choice)}; want auto, none, required or the name of a tool")
    if choice in WORDS:
        if choice == "required" and not tools:
            raise RequestError("tool_choice: there are no tools to choose from")
        return choice, ""
    return "required", choice
