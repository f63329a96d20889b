"""Tools for templates without tool support: the system prompt describes them, and earlier calls and results become plain messages.

The parts that a template can show itself are left to it (`text/abilities.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pyspec.errors import RequestError
from pyspec.text.abilities import HEAD, Chat
from pyspec.text.template import ChatTemplate
from pyspec.text.tokenizer import Tokenizer

ToolList = list[Mapping[str, Any]]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
INSTRUCTIONS = (
    "To call a tool, write a block like this, and nothing behind it:\n"
    f'{OPEN}\n{{"name": "NAME", "arguments": {{"KEY": "VALUE"}}}}\n{CLOSE}\n'
    "To call several, write one block for each. What they return comes in the next message. "
    "Where no tool is needed, answer in plain text."
)

_TEXTS = re.compile(r'"(?:[^"\\]|\\.)*"')
_SIGNS = re.compile(r'[^\w\s"\\]')


def has_tools(messages: Sequence[Mapping[str, Any]], tools: ToolList) -> bool:
    """True if a chat has tools, calls or results."""
    return bool(tools) or any(_calls_of(m) or m["role"] == "tool" for m in messages)


def with_described(
    template: ChatTemplate,
    get_tokenizer: Callable[[], Tokenizer],
    messages: Sequence[Mapping[str, Any]],
    tools: ToolList,
    *,
    may_call: bool,
    knows_how: bool,
) -> tuple[Chat, ToolList]:
    """The messages, with content as text, and the tools that the template can show.

    may_call   the answer may call a tool, so the prompt explains how
    knows_how  model and template have a call syntax of their own: only tools that the template hides are described
    """
    chat = [dict(message) for message in messages]
    if knows_how:
        if not (tools and may_call and template.able(tools=True).hides_tools):
            return chat, tools
        return _instructed(chat, _listed(tools, get_tokenizer)), []
    shows_tools = bool(tools) and template.able(tools=True).shows_tools
    if not template.able(tools=shows_tools).shows_calls:
        chat = _in_turns(chat, get_tokenizer)
    if tools and may_call:
        described = "" if shows_tools else f"{_listed(tools, get_tokenizer)}\n\n"
        chat = _instructed(chat, described + INSTRUCTIONS)
    return chat, tools if shows_tools else []


def _calls_of(message: Mapping[str, Any]) -> Sequence[Any]:
    calls = message.get("tool_calls")
    return calls if isinstance(calls, list | tuple) else ()


def _in_turns(messages: Chat, get_tokenizer: Callable[[], Tokenizer]) -> Chat:
    """Write calls into the assistant's text, and results as user messages. Consecutive results, and a user message behind them, become
    one message, because many templates need turns."""
    chat: Chat = []
    is_answered = False  # the last message begins with results
    for message in messages:
        is_result = message["role"] == "tool"
        message = _result(message) if is_result else _called(message, get_tokenizer)
        if is_answered and message["role"] == "user":
            last = chat[-1]
            chat[-1] = last | {"content": f"{last['content']}\n{message.get('content') or ''}"}
        else:
            chat.append(message)
            is_answered = is_result
    return chat


def _result(message: Mapping[str, Any]) -> dict[str, Any]:
    own = {k: v for k, v in message.items() if k not in ("tool_calls", "tool_call_id", "name")}
    return own | {
        "role": "user",
        "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>",
    }


def _called(message: dict[str, Any], get_tokenizer: Callable[[], Tokenizer]) -> dict[str, Any]:
    calls = _calls_of(message)
    if message["role"] != "assistant" or not calls:
        return message
    blocks = "\n".join(f"{OPEN}\n{_json(_call(call), get_tokenizer)}\n{CLOSE}" for call in calls)
    content = message.get("content")
    own = {key: value for key, value in message.items() if key != "tool_calls"}
    return own | {"content": f"{content}\n{blocks}" if content else blocks}


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError("messages: a call of tool_calls has no function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # other text is shown as the model wrote it
            arguments = json.loads(arguments or "{}")
    return {"name": function.get("name"), "arguments": {} if arguments is None else arguments}


def _listed(tools: ToolList, get_tokenizer: Callable[[], Tokenizer]) -> str:
    return "You can call these tools:\n" + "\n".join(_json(tool, get_tokenizer) for tool in tools)


def _instructed(messages: Chat, text: str) -> Chat:
    """Append the instructions to the first system message; without one, add a system message. `fitting` later moves it if needed."""
    if not messages or messages[0]["role"] not in HEAD:
        return [{"role": "system", "content": text}, *messages]
    content = messages[0].get("content")
    return [messages[0] | {"content": f"{content}\n\n{text}" if content else text}, *messages[1:]]


def _escaped(sign: re.Match[str]) -> str:
    code = ord(sign.group())
    return f"\\u{code:04x}" if code < 0x10000 else sign.group()


def _json(value: Any, get_tokenizer: Callable[[], Tokenizer]) -> str:
    """JSON in which no text is a control token's: text in a description must not become a control token."""

    tokenizer = get_tokenizer()

    def escaped(found: re.Match[str]) -> str:
        text = found.group()
        plain = tokenizer.encode(text, add_special=False, parse_special=False)
        is_plain = tokenizer.encode(text, add_special=False) == plain
        return text if is_plain else _SIGNS.sub(_escaped, text)

    try:
        return _TEXTS.sub(escaped, json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as e:
        raise RequestError(f"a tool or a call has no JSON form: {e}") from None
