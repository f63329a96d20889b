"""Tools for templates that know of none: the system prompt describes them, and calls and results of a history stand in plain messages.

What a template shows itself is left to it. It is found out by asking the template, once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from pyspec.errors import RequestError
from pyspec.server.api.schema import Chat, Message
from pyspec.server.api.spoken import spoken
from pyspec.server.engine import EngineLike, TemplateLike, TokenizerLike
from pyspec.server.settings import ServerSettings
from pyspec.text.markup.dialect import GENERIC
from pyspec.text.markup.hermes import CLOSE, OPEN

PROBE, ANSWER = "pyspec_probe", "pyspec_answer"
HOW = (
    f'To call a tool, write a block like this, and nothing behind it:\n{OPEN}\n{{"name": "NAME", "arguments": {{"KEY": "VALUE"}}}}\n{CLOSE}\n'
    "To call several, write one block for each. What they return comes in the next message. Where no tool is needed, answer in plain text."
)

_TEXTS = re.compile(r'"(?:[^"\\]|\\.)*"')
_SIGNS = re.compile(r'[^\w\s"\\]')


@dataclass(frozen=True, slots=True)
class Shown:
    """What a template writes down: tools, calls with their results, the system's message."""

    tools: bool
    calls: bool
    system: bool


_shown: WeakKeyDictionary[TemplateLike, Shown] = WeakKeyDictionary()


def with_generic_tools(engine: EngineLike, body: Chat, settings: ServerSettings) -> Chat:
    """The body as the template can show it; the same one where the template knows how calls are written."""
    template, has_calls = engine.template, any(_calls_of(m) or m.role == "tool" for m in body.messages)
    if template is None or spoken(engine.info.chat_template, settings) is not GENERIC or not (body.tools or has_calls):
        return body
    shown = _shown_by(template)
    messages = list(body.messages)
    if not shown.calls:
        messages = _merged([_plain(m, engine.tokenizer) for m in messages])
    update: dict[str, Any] = {"messages": messages}
    if body.tools and not shown.tools:
        update["tools"] = None
    if body.tools and body.tool_choice != "none" and body.parse_tool_calls is not False:
        update["messages"] = _told(messages, _instructions(engine.tokenizer, body, shown), shown)
    return body.model_copy(update=update)


def _shown_by(template: TemplateLike) -> Shown:
    found = _shown.get(template)
    if found is None:
        found = _shown[template] = _asked(template)
    return found


def _asked(template: TemplateLike) -> Shown:
    user = {"role": "user", "content": "hello"}
    function = {"name": PROBE, "description": "", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "aaaaaaaa1", "type": "function", "function": {"name": PROBE, "arguments": "{}"}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "aaaaaaaa1", "name": PROBE, "content": ANSWER}

    def writes(messages: list[Mapping[str, Any]], *texts: str, tools: list[Mapping[str, Any]] | None = None) -> bool:
        try:
            text = template.render(messages, tools=tools)
        except RequestError:
            return False
        return all(each in text for each in texts)

    return Shown(
        tools=writes([user], PROBE, tools=[{"type": "function", "function": function}]),
        calls=writes([user, turn, result], PROBE, ANSWER),
        system=writes([{"role": "system", "content": PROBE}, user], PROBE),
    )


def _calls_of(message: Message) -> list[Any]:
    calls = (message.model_extra or {}).get("tool_calls")
    return calls if isinstance(calls, list) else []


def _plain(message: Message, tokenizer: TokenizerLike) -> Message:
    """A message of the assistant with its calls in the text, and a result as what the user says."""
    if message.role == "tool":
        return _remade(message, "user", lambda text: f"<tool_response>\n{text}\n</tool_response>")
    calls = _calls_of(message)
    if message.role != "assistant" or not calls:
        return message
    blocks = "\n".join(f"{OPEN}\n{_json(_call(call), tokenizer)}\n{CLOSE}" for call in calls)
    return _remade(message, "assistant", lambda text: f"{text}\n{blocks}" if text else blocks)


def _remade(message: Message, role: str, write: Callable[[str], str]) -> Message:
    """The message with other text, without what is in the text now. What is no text stays to be refused."""
    content = message.content
    if isinstance(content, list):
        if not all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in content):
            return message
        content = "\n".join(part["text"] for part in content)
    own = {
        name: value for name, value in (message.model_extra or {}).items() if name not in ("tool_calls", "tool_call_id")
    }
    return Message.model_validate({**own, "role": role, "content": write(content or "")})


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RequestError("messages: a call of tool_calls has no function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # else it is shown as the model wrote it
            arguments = json.loads(arguments or "{}")
    return {"name": function.get("name"), "arguments": {} if arguments is None else arguments}


def _merged(messages: list[Message]) -> list[Message]:
    """Results that follow each other, and what the user says behind them, as one message: many templates want turns."""
    out: list[Message] = []
    for message in messages:
        last = out[-1] if out else None
        is_result = (
            isinstance(last and last.content, str)
            and last is not None
            and str(last.content).startswith("<tool_response>")
        )
        if is_result and last is not None and last.role == message.role == "user" and isinstance(message.content, str):
            out[-1] = last.model_copy(update={"content": f"{last.content}\n{message.content}"})
        else:
            out.append(message)
    return out


def _instructions(tokenizer: TokenizerLike, body: Chat, shown: Shown) -> str:
    if shown.tools:
        return HOW
    tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or ()]
    listed = "\n".join(_json(tool, tokenizer) for tool in tools)
    return f"You can call these tools:\n{listed}\n\n{HOW}"


def _told(messages: list[Message], text: str, shown: Shown) -> list[Message]:
    """The messages with the instructions in the system's, or in the first of the user where the template shows none."""
    role = "system" if shown.system else "user"
    i = next((i for i, m in enumerate(messages) if m.role == role or (shown.system and m.role == "developer")), -1)
    if i < 0 or (shown.system and i > 0):
        return [Message.model_validate({"role": role, "content": text}), *messages]
    first = messages[i]
    if isinstance(first.content, list):
        part = {"type": "text", "text": text + ("" if shown.system else "\n")}
        content: Any = [*first.content, part] if shown.system else [part, *first.content]
    else:
        said = first.content or ""
        content = "\n\n".join(each for each in ((said, text) if shown.system else (text, said)) if each)
    return [*messages[:i], first.model_copy(update={"content": content}), *messages[i + 1 :]]


def _json(value: Any, tokenizer: TokenizerLike) -> str:
    """As JSON, in which no text is that of a control token: what stands in a description must not become one."""

    def escaped(found: re.Match[str]) -> str:
        text = found.group()
        if tokenizer.encode(text, add_special=False) == tokenizer.encode(text, add_special=False, parse_special=False):
            return text
        return _SIGNS.sub(
            lambda sign: f"\\u{ord(sign.group()):04x}" if ord(sign.group()) < 0x10000 else sign.group(), text
        )

    return _TEXTS.sub(escaped, json.dumps(value, ensure_ascii=False))
