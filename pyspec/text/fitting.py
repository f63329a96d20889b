"""Chats and tools as clients send them, changed to what a template can write: nothing is lost without a word, and nothing is refused that
could be said otherwise.

    fields that are null, calls that are an empty list   left out
    developer                          system, unless the template knows the role
    system messages at the beginning   one, joined by blank lines
    no system message is taken         in front of the user's first message
    later ones, where none is taken    at the end of the user's message or the tool's result before; else in front of the user's message behind
    a role twice, where turns are needed   one message; the user's behind a tool's result is a part of it
    ids of calls                       there, and of nine letters and digits, where the template wants that
    arguments of calls                 objects or texts, as the template writes them
    tools                              have a description and parameters

A message that is moved stays near its place, so what stands before it is found in the prefix cache at the next request.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from pyspec.text.abilities import HEAD, Abilities, Chat

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
LISTENERS = ("user", "tool")
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def fitted(messages: Chat, able: Abilities) -> Chat:
    """The same chat as the template takes it; content is text already."""
    chat = [_said(message) for message in messages]
    if any(message["role"] in HEAD for message in chat):
        chat = [_known(message, able) for message in chat]
        n_head = next((i for i, message in enumerate(chat) if message["role"] not in HEAD), len(chat))
        chat = _with_head(_head(chat[:n_head], able), _moved(chat[n_head:], able), able)
    chat = _with_ids(_in_turns(chat, able), able)
    return [
        message | {"tool_calls": [_call(call, able) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list | tuple)
        else message
        for message in chat
    ]


def _said(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without what clients send back of an answer that did not have it."""
    return {
        key: value for key, value in message.items() if value is not None and not (key == "tool_calls" and not value)
    }


def _known(message: dict[str, Any], able: Abilities) -> dict[str, Any]:
    """A message of the developer or the system by the name that the template has for it."""
    if message["role"] == "developer" and not able.knows_developer:
        return message | {"role": "system"}
    if message["role"] == "system" and not able.takes_system and able.knows_developer:
        return message | {"role": "developer"}
    return message


def _head(messages: Chat, able: Abilities) -> Chat:
    """One message of each role that the template takes."""
    joined: Chat = []
    for message in messages:
        if joined and (joined[-1]["role"] == message["role"] or not able.takes_both):
            joined[-1] = joined[-1] | {"content": _blank_line(joined[-1]["content"], message["content"])}
        else:
            joined.append(message)
    return joined


def _with_head(head: Chat, rest: Chat, able: Abilities) -> Chat:
    if not head or head[0]["role"] == "developer" or able.takes_system:
        is_alone = bool(head) and not any(message["role"] == "user" for message in rest)
        return [*head, _user(""), *rest] if is_alone and not able.takes_alone(head[0]["role"]) else head + rest
    text = _blank_line(*(message["content"] for message in head))
    if rest and rest[0]["role"] == "user":
        return [_before(text, rest[0]), *rest[1:]]
    return ([_user(text)] if text else []) + rest


def _moved(messages: Chat, able: Abilities) -> Chat:
    """What the system says behind the beginning, where the template does not take it there, as what others say."""
    chat: Chat = []
    waiting = ""
    for message in messages:
        if message["role"] in HEAD and not able.takes_late(message["role"]):
            if chat and chat[-1]["role"] in LISTENERS and not waiting:
                chat[-1] = chat[-1] | {"content": _blank_line(chat[-1]["content"], message["content"])}
            else:
                waiting = _blank_line(waiting, message["content"])
            continue
        if waiting and message["role"] == "user":
            message = _before(waiting, message)
        elif waiting:
            chat.append(_user(waiting))
        waiting = ""
        chat.append(message)
    return [*chat, _user(waiting)] if waiting else chat


def _in_turns(messages: Chat, able: Abilities) -> Chat:
    """Where the template takes no other, turns of the user and the assistant, the user's first."""
    chat: Chat = []
    for message in messages:
        last, role = chat[-1] if chat else {"role": "system"}, message["role"]
        is_again = role == last["role"] and role in ("user", "assistant") and not last.get("tool_calls")
        if is_again and able.needs_turns:
            chat[-1] = {**last, **message, "content": _blank_line(last["content"], message["content"])}
        elif role == "user" and last["role"] == "tool" and not able.takes_user_behind_result:
            chat[-1] = last | {"content": _blank_line(last["content"], message["content"])}
        elif role == "assistant" and last["role"] in HEAD and able.needs_turns:
            chat += [_user(""), message]
        else:
            chat.append(message)
    return chat


def _with_ids(messages: Chat, able: Abilities) -> Chat:
    """Calls and their results by ids of the form that the template wants."""
    calls = [call for message in messages for call in message.get("tool_calls") or () if isinstance(call, Mapping)]
    ids = [call.get("id") for call in calls] + [m.get("tool_call_id") for m in messages if m["role"] == "tool"]
    is_missing = not all(ids) and not able.takes_no_ids
    is_other = any(id_ and not SHORT_ID.fullmatch(str(id_)) for id_ in ids) and not able.takes_long_ids
    if not is_missing and not is_other:
        return messages
    chat: Chat = []
    open_ids: list[str] = []  # of calls whose result has not come
    for i, message in enumerate(messages):
        if made := message.get("tool_calls"):
            open_ids = [_short(_id_of(call) or f"{i}.{j}") for j, call in enumerate(made)]
            named = [
                {**call, "id": id_} if isinstance(call, Mapping) else call
                for call, id_ in zip(made, open_ids, strict=True)
            ]
            message = message | {"tool_calls": named}
        elif message["role"] == "tool":
            said = message.get("tool_call_id")
            id_ = _short(str(said)) if said else next(iter(open_ids), _short(str(i)))
            open_ids = [each for each in open_ids if each != id_]
            message = message | {"tool_call_id": id_}
        chat.append(message)
    return chat


def _id_of(call: Any) -> str:
    return str(call.get("id") or "") if isinstance(call, Mapping) else ""


def _short(id_: str) -> str:
    """The same for the same id, in every request: what was read stays in the prefix cache."""
    return id_ if SHORT_ID.fullmatch(id_) else hashlib.sha256(id_.encode("utf-8", "replace")).hexdigest()[:9]


def _before(text: str, message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": _blank_line(text, message["content"])}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _blank_line(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def _call(call: Any, able: Abilities) -> Any:
    """A call with its arguments as the template writes them: clients send JSON text, an object, or nothing."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    given = function.get("arguments")
    if able.takes_objects:
        arguments = _object(given, able)
    else:
        arguments = given if isinstance(given, str) else json.dumps({} if given is None else given, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _object(given: Any, able: Abilities) -> Any:
    """Arguments as an object; a text that is none stays one where the template takes it."""
    value = given
    if isinstance(given, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(given, parse_constant=_no_number) if given.strip() else None
    if isinstance(value, Mapping) or value is None:
        return value or {}
    return given if isinstance(given, str) and able.takes_texts else {"arguments": value}


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def fitted_tools(tools: Sequence[Mapping[str, Any]], able: Abilities) -> list[dict[str, Any]]:
    """The tools with all that templates look for, their fields in the order in which they came."""
    return [_tool(tool, able) for tool in tools]


def _tool(tool: Mapping[str, Any], able: Abilities) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    whole: dict[str, Any] = {}
    for key, value in function.items():
        if value is not None:
            whole[key] = value
        if key == "name" and function.get("description") is None:  # behind the name, as models were trained with it
            whole["description"] = ""
    parameters = whole.get("parameters") or NO_PARAMETERS
    if isinstance(parameters, Mapping) and "properties" not in parameters and able.needs_properties:
        parameters = {**parameters, "properties": {}}
    return {**tool, "function": whole | {"parameters": parameters}}
