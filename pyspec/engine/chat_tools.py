"""Chats for programs: tools in the request, and the answer split into content, reasoning and tool calls. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from pyspec.constrain.formats import format_grammar
from pyspec.engine.options import GenerateOptions, GrammarOptions, Message, check_messages, request_of
from pyspec.engine.result import Result, collect
from pyspec.engine.sight import Shown, Sight, Sighted, placed
from pyspec.errors import ConfigError, RequestError
from pyspec.ranges import Doc, shown
from pyspec.request import Delta, Done, FinishReason, Request, SamplingParams, finish_reason
from pyspec.slots.images import is_image
from pyspec.text.answer_plan import (
    CheckGrammar,
    Tool,
    ToolChoice,
    call_plan,
    plan_answer,
    text_grammar,
    tool_choice,
)
from pyspec.text.described_tools import ToolList, has_tools, with_described
from pyspec.text.left_out import own_tools
from pyspec.text.markup.answer_grammar import ends_open
from pyspec.text.markup.dialect import (
    GENERIC,
    NAMES,
    AnswerMarkup,
    Dialect,
    dialect_for,
    recognised,
    think_marks,
)
from pyspec.text.markup.parts import CallArguments, CallBegin, Content, Part, Reasoning
from pyspec.text.template import ChatTemplate, normalise, template_defaults
from pyspec.text.tokenizer import Tokenizer

WORDS = ("auto", "none", "required")
WANT_CHOICE = "want auto, none, required or the name of a tool"


class ToolOptions(GenerateOptions, total=False):
    """All options of a chat beside its messages: those of a generation, and tools.

    tools                functions that the model may call, in OpenAI's form, or each function alone
    tool_choice          "auto": the model decides; "none"; "required": at least one call; the name of the tool to call; or OpenAI's object
    parallel_tool_calls  an answer may have more than one call
    tool_call_parser     the syntax of calls, by name ("hermes", "qwen3_coder", ...); "auto": that of the chat template
    response_format      the format of the content, in OpenAI's form, in place of `json_schema`
    """

    tools: Sequence[Tool] | None
    tool_choice: str | Mapping[str, Any] | None
    parallel_tool_calls: bool | None
    tool_call_parser: str
    response_format: Mapping[str, Any] | None


OF_CHATS = ToolOptions.__annotations__.keys() - GenerateOptions.__annotations__.keys()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool."""

    id: Annotated[str, Doc("for the message that carries its result")]
    name: Annotated[str, Doc("of the function")]
    arguments: Annotated[str, Doc("JSON text of an object; cut short if the answer ended at its limit")]

    def values(self) -> dict[str, Any]:
        """The arguments as Python values. Raises RequestError if they are not a JSON object: the answer was cut short."""
        try:
            found = json.loads(self.arguments or "{}")
        except ValueError as e:
            raise RequestError(
                f"the arguments of {self.name} are not JSON ({e}): {shown(self.arguments, 200)}"
            ) from None
        if not isinstance(found, dict):
            raise RequestError(
                f"the arguments of {self.name} are not an object: {shown(self.arguments, 200)}"
            )
        return found


@dataclass(frozen=True, slots=True)
class ChatResult(Result):
    """A finished answer of a chat. `text` is all that the model wrote; the other fields are its parts."""

    # fmt: off
    content: Annotated[str, Doc("the answer itself")] = ""
    reasoning: Annotated[str, Doc("the model's reasoning before it; \"\" if there was none")] = ""
    tool_calls: Annotated[tuple[ToolCall, ...], Doc("in order; the chat goes on with `message` and a message for each of them: {\"role\": \"tool\", \"tool_call_id\": id, \"content\": ...}")] = ()
    # fmt: on

    @property
    def finish_reason(self) -> FinishReason:
        """The reason that it ended, in the words of OpenAI's clients: "stop", "length", "tool_calls"."""
        return finish_reason(self.finish, has_called=bool(self.tool_calls))

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, for the next turn."""
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in self.tool_calls
        ]
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        return message | ({"tool_calls": calls} if calls else {})


@dataclass(frozen=True, slots=True)
class ChatDelta(Delta):
    """A Delta of a chat."""

    content: Annotated[str, Doc("new text of the answer itself")] = ""
    reasoning: Annotated[str, Doc("new text of the reasoning before it")] = ""
    tool_calls: Annotated[tuple[ToolCall, ...], Doc("calls that are now complete")] = ()


@dataclass(slots=True)
class AnswerReading:
    """Splits one answer into parts as it arrives. A call is emitted when its end is known."""

    markup: AnswerMarkup
    _open: ToolCall | None = None
    _parser: Any = field(init=False)

    def __post_init__(self) -> None:
        self._parser = self.markup.parser()

    def events(self, event: Delta | Done) -> Iterator[ChatDelta | Done]:
        """The events for one event of the answer. At its end, the text held back comes first."""
        if isinstance(event, Delta):
            yield self.delta(event)
            return
        if (rest := self.rest(event.request)) is not None:
            yield rest
        yield event

    def delta(self, event: Delta) -> ChatDelta:
        """The same delta, with its text split into parts."""
        return self._apart(event, self._parser.push(event.text))

    def rest(self, request: str) -> ChatDelta | None:
        """A delta of the text held back until the answer's end; None if there is none."""
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
        return ChatDelta(
            **same,
            content="".join(content),
            reasoning="".join(reasoning),
            tool_calls=tuple(calls),
        )

    def _ended(self) -> list[ToolCall]:
        ended, self._open = self._open, None
        return [ended] if ended is not None else []


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A chat that is ready to run, and the markup of its answer."""

    request: Request
    markup: AnswerMarkup


def collected(events: Sequence[ChatDelta | Done]) -> ChatResult:
    """Join the events of an answer."""
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
    """Makes requests from chats, as the server does.

    source       the chat template's text
    check        compiles a grammar, or raises RequestError
    recommended  sampling of a chat without `params`
    sight   reads images; None: there are none
    """

    tokenizer: Tokenizer
    template: ChatTemplate
    source: str
    check: CheckGrammar
    recommended: SamplingParams | None = None
    sight: Sight | None = None

    def call(self, messages: Sequence[Message], options: Mapping[str, Any]) -> ChatCall:
        """Make a request of a chat. Raises RequestError, ConfigError, BadTemplate."""
        try:
            return self._call(messages, options)
        except RecursionError:
            raise RequestError(
                "messages or tools are nested more deeply than they can be written"
            ) from None

    def _call(self, messages: Sequence[Message], options: Mapping[str, Any]) -> ChatCall:
        check_messages(messages)
        seen = Shown()
        if self.sight is not None:
            messages = self.sight.with_marks(messages, options.get("images"), seen)
        tools = tools_of(options.get("tools"))
        choice = choice_of(options.get("tool_choice"), tools)
        dialect, parallel = dialect_of(self.source, options), parallel_of(options)
        calls = call_plan(tools, choice, dialect, parallel=parallel)
        prompt = self._prompt(messages, tools, dialect, seen, may_call=choice.wanted != "none")
        think = think_marks(self.source)
        text = [token for token in prompt.ids if not is_image(token)] if seen.pictures else prompt.ids
        is_open = think is not None and ends_open(self.tokenizer, text, think)
        markup = AnswerMarkup(think=think, is_open=is_open)
        request, name = self._request(prompt, options)
        grammar = request.grammar
        has_grammar = grammar is not None
        plan = plan_answer(self.tokenizer, calls, markup, self.check, has_grammar=has_grammar)
        if grammar is not None:
            grammar = text_grammar(name, grammar, self.check, plan.around())
        request = replace(request, shown=plan.shown, grammar=plan.grammar or grammar)
        return ChatCall(request, plan.markup)

    def _prompt(
        self,
        messages: Sequence[Message],
        tools: ToolList,
        dialect: Dialect,
        seen: Shown,
        *,
        may_call: bool,
    ) -> Sighted:
        chat: Sequence[Message] = messages
        is_generic = dialect is GENERIC
        if has_tools(messages, tools) and (is_generic or (tools and recognised(self.source))):
            chat, tools = with_described(
                self.template,
                lambda: self.tokenizer,
                normalise(messages),
                tools,
                may_call=may_call,
                knows_how=not is_generic,
            )
        values = template_defaults(self.source)
        rows = {} if self.sight is None else self.sight.rows(self.tokenizer, seen)
        ids = self.template.encode(self.tokenizer, chat, tools=tools or None, kwargs=values, rows=rows)
        return placed(ids, seen)

    def _request(self, prompt: Sighted, options: Mapping[str, Any]) -> tuple[Request, str]:
        """The request without tools, its grammar not yet compiled, and the name of the option with that grammar."""
        rest = {name: value for name, value in options.items() if name not in OF_CHATS}
        request = request_of(prompt.ids, rest, self.recommended, OF_CHATS, prompt.images)
        names = GrammarOptions.__annotations__
        given = next((name for name in names if rest.get(name) is not None), "")
        asked = format_grammar(options.get("response_format"))
        if asked is None:
            return request, given
        if request.grammar is not None:
            raise ConfigError(f"response_format and {given} are given; a text keeps to one of them")
        return replace(request, grammar=asked), "response_format"


def dialect_of(source: str, options: Mapping[str, Any]) -> Dialect:
    """The dialect of calls. Raises RequestError for an unknown name."""
    name = options.get("tool_call_parser", "auto")
    found = dialect_for(source, name) if name == "auto" or name in NAMES else None
    if found is None:
        known = ", ".join(NAMES)
        raise RequestError(f"tool_call_parser is {shown(name)}; want auto or one of {known}")
    return found


def parallel_of(options: Mapping[str, Any]) -> bool:
    """True if an answer may have several calls. Raises RequestError."""
    value = options.get("parallel_tool_calls")
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"parallel_tool_calls is {shown(value)}; want True or False")
    return value is not False


def tools_of(tools: object) -> ToolList:
    """The tools in OpenAI's form, without those that only other services run. Raises RequestError."""
    if tools is None:
        return []
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise RequestError(f"tools is {shown(tools)}; want a list of tools")
    return [_tool(tool, i) for i, tool in enumerate(own_tools(list(tools), "function"))]


def _tool(tool: object, i: int) -> Tool:
    if isinstance(tool, Mapping) and "function" not in tool and "name" in tool:
        tool = {"type": "function", "function": tool}
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or not isinstance(function, Mapping):
        form = '{"type": "function", "function": {"name": ...}}'
        raise RequestError(f"tools[{i}] is {shown(tool)}; want {form}")
    name, strict = function.get("name"), function.get("strict")
    if not isinstance(name, str) or not 1 <= len(name) <= 256:
        flaw = f"is {shown(name)}; want text of 1 to 256 characters"
        raise RequestError(f"tools[{i}].function.name {flaw}")
    optional = (("parameters", Mapping, "a JSON Schema, an object"), ("description", str, "text"))
    for key, kind, wanted in optional:
        if (value := function.get(key)) is not None and not isinstance(value, kind):
            raise RequestError(f"tools[{i}].function.{key} is {shown(value)}; want {wanted}")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"tools[{i}].function.strict is {shown(strict)}; want True or False")
    return {"type": "function", **tool}


def choice_of(choice: object, tools: Sequence[Tool]) -> ToolChoice:
    """The permitted calls. A tool's name requires a call of that tool. Raises RequestError."""
    if isinstance(choice, str) and choice not in WORDS:
        if all(choice != tool["function"]["name"] for tool in tools):
            raise RequestError(f"tool_choice is {shown(choice)}; {WANT_CHOICE}")
        return ToolChoice("required", (choice,), is_named=True)
    if choice is not None and not isinstance(choice, str | Mapping):
        raise RequestError(f"tool_choice is {shown(choice)}; {WANT_CHOICE}")
    return tool_choice(choice)
