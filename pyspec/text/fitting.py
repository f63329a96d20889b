"""Changes chats and tools to a form that the template can write. Nothing of these is dropped silently, and nothing is refused that has
another form with the same meaning.

    null fields, empty lists of calls      left out
    developer                              system, unless the template knows the role
    system messages at the beginning       one message, joined by blank lines
    a template without system messages     their text begins the first user message
    later ones, where none may stand       at the end of the user message or tool result before; else at the start of the next user message
    a role twice, where turns must change  one message; a user message behind a tool's result becomes part of it
    ids of calls                           added, shortened to nine letters and digits, or made of the call's name, if the template needs that
    reasoning of earlier answers           as `thinking`, if the template reads that; content beside it and a call becomes part of it
    text beside a call                     before it in the rendered text, as the model wrote it, if the template hides one of the two
    several calls of an answer             one answer for each, its result behind it, if the template shows the first alone
    arguments of calls                     objects or texts, as the template writes them
    results of calls                       in the message with the calls, if the template has them there
    tools                                  get a description and parameters

A moved message stays near its place, so that the prefix cache still has the text before it at the next request.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from pyspec.ranges import no_number
from pyspec.text.abilities import HEAD, Abilities, Chat

_warn_once = cache(logging.getLogger(__name__).warning)

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
LISTENERS = ("user", "tool")
ASIDE = f"aB{secrets.token_hex(8)}T"  # no text of a client can contain it
_SAID = re.compile(ASIDE + "([0-9a-f]*)Z")
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def fitted(messages: Chat, able: Abilities) -> Chat:
    """The same chat in a form that the template accepts; content is text already."""
    chat = _apart([_thought(_without_empty(message), able) for message in messages], able)
    if any(message["role"] in HEAD for message in chat):
        chat = [_known(message, able) for message in chat]
        n_head = next((i for i, m in enumerate(chat) if m["role"] not in HEAD), len(chat))
        chat = _with_head(_head(chat[:n_head], able), _moved(chat[n_head:], able), able)
    chat = [_called(message, able) for message in _with_ids(_in_turns(chat, able), able)]
    return _with_responses(chat) if able.takes_responses else chat


def _with_responses(messages: Chat) -> Chat:
    """Results as a field of the message with their calls."""
    chat: Chat = []
    names: dict[str, str] = {}  # of the last calls by their ids
    for message in messages:
        if message["role"] != "tool":
            calls = message.get("tool_calls") or ()
            names = {_id_of(call): _SAID.sub("", _name_of(call)) for call in calls}
            chat.append(message)
            continue
        name = names.get(str(message.get("tool_call_id"))) or message.get("name")
        if name is None and len(names) == 1:
            name = next(iter(names.values()))
        result = {"name": name or "unknown", "response": _response(message["content"])}
        if not chat or chat[-1]["role"] != "assistant":
            chat.append({"role": "assistant", "content": ""})
        chat[-1] = chat[-1] | {"tool_responses": [*chat[-1].get("tool_responses", ()), result]}
    return chat


def _called(message: dict[str, Any], able: Abilities) -> dict[str, Any]:
    """An answer with its calls in the template's form. Text that the template hides beside them begins the first name, as a mark for
    `with_texts`."""
    if not isinstance(given := message.get("tool_calls"), list | tuple):
        return message
    calls, text = [_call(call, able) for call in given], message["content"].lstrip()
    name = _name_of(calls[0]) if calls and text else ""
    if not name or able.aside is None:
        return message | {"tool_calls": calls}
    mark = f"{ASIDE}{text.encode('utf-8', 'surrogatepass').hex()}Z"
    calls[0] = {**calls[0], "function": {**calls[0]["function"], "name": mark + name}}
    return message | {"content": "", "tool_calls": calls}


def with_texts(prompt: str, able: Abilities) -> str:
    """A prompt with the texts of answers in front of their calls."""
    if ASIDE not in prompt or able.aside is None:
        return prompt
    (before, behind, opening), pieces = able.aside, _SAID.split(prompt)
    for i in range(1, len(pieces), 2):
        said, pieces[i] = bytes.fromhex(pieces[i]).decode("utf-8", "surrogatepass"), ""
        at = pieces[i - 1].rfind(opening)
        if at < 0:
            _warn_once("texts beside calls are left out: the chat template hides them")
        else:
            pieces[i - 1] = pieces[i - 1][:at] + before + said + behind + pieces[i - 1][at:]
    return "".join(pieces)


def _name_of(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    return str(function.get("name") or "") if isinstance(function, Mapping) else ""


def _response(content: str) -> Any:
    """An object if the text is one."""
    with suppress(ValueError, RecursionError):
        value = json.loads(content, parse_constant=no_number)
        return value if isinstance(value, Mapping) else content
    return content


def _without_empty(message: Mapping[str, Any]) -> dict[str, Any]:
    """Without fields that clients add although the answer had none."""
    fields = {key: value for key, value in message.items() if value is not None}
    if not fields.get("tool_calls", True):
        del fields["tool_calls"]
    return fields


def _thought(message: dict[str, Any], able: Abilities) -> dict[str, Any]:
    """An answer with its reasoning under the name that the template reads. Beside a call such templates take one text alone."""
    thought = message.get("reasoning_content")
    if not thought or not able.reads_thinking or message["role"] != "assistant":
        return message
    own = {key: value for key, value in message.items() if key != "reasoning_content"}
    if own.get("tool_calls") and own.get("content"):
        return own | {"thinking": _blank_line(str(thought), str(own["content"])), "content": ""}
    return {"thinking": thought} | own


def _known(message: dict[str, Any], able: Abilities) -> dict[str, Any]:
    """A system or developer message with the role name that the template knows."""
    if message["role"] == "developer" and not able.knows_developer:
        return message | {"role": "system"}
    if message["role"] == "system" and not able.takes_system and able.knows_developer:
        return message | {"role": "developer"}
    return message


def _head(messages: Chat, able: Abilities) -> Chat:
    """The first messages, joined into one for each role that the template accepts."""
    joined: Chat = []
    for message in messages:
        if joined and (joined[-1]["role"] == message["role"] or not able.takes_both):
            joined[-1] = _behind(joined[-1], message["content"])
        else:
            joined.append(message)
    return joined


def _with_head(head: Chat, rest: Chat, able: Abilities) -> Chat:
    if not head or head[0]["role"] == "developer" or able.takes_system:
        is_alone = bool(head) and not any(message["role"] == "user" for message in rest)
        needs_user = is_alone and not able.takes_alone(head[0]["role"])
        return [*head, _user(""), *rest] if needs_user else head + rest
    text = _blank_line(*(message["content"] for message in head))
    if rest and rest[0]["role"] == "user":
        return [rest[0] | {"content": _blank_line(text, rest[0]["content"])}, *rest[1:]]
    return ([_user(text)] if text else []) + rest


def _moved(messages: Chat, able: Abilities) -> Chat:
    """Move later system messages that the template does not accept into neighbouring messages."""
    chat: Chat = []
    waiting = ""
    for message in messages:
        if message["role"] in HEAD and not able.takes_late(message["role"]):
            if chat and chat[-1]["role"] in LISTENERS and not waiting:
                chat[-1] = _behind(chat[-1], message["content"])
            else:
                waiting = _blank_line(waiting, message["content"])
            continue
        if waiting and message["role"] == "user":
            message = message | {"content": _blank_line(waiting, message["content"])}
        elif waiting:
            chat.append(_user(waiting))
        waiting = ""
        chat.append(message)
    return [*chat, _user(waiting)] if waiting else chat


def _apart(messages: Chat, able: Abilities) -> Chat:
    """Answers with several calls as one answer for each, the call's own result behind it."""
    chat, waiting = list[dict[str, Any]](), list(messages)
    while waiting:
        message = waiting.pop(0)
        calls = message.get("tool_calls")
        if not isinstance(calls, list | tuple) or len(calls) < 2 or not able.takes_one_call:
            chat.append(message)
            continue
        n = next((i for i, m in enumerate(waiting) if m["role"] != "tool"), len(waiting))
        results, waiting = waiting[:n], waiting[n:]
        for i, call in enumerate(calls):
            said = message if i == 0 else {"role": message["role"], "content": ""}
            chat.append(said | {"tool_calls": [call]})
            own = [r for r in results if r.get("tool_call_id") == _id_of(call)]
            for result in own or results[:1]:
                chat.append(result)
                results.remove(result)
        chat += results
    return chat


def _in_turns(messages: Chat, able: Abilities) -> Chat:
    """Alternating turns of user and assistant, the user first, if the template accepts nothing else."""
    chat: Chat = []
    for message in messages:
        last, role = chat[-1] if chat else {"role": "system"}, message["role"]
        is_again = role == last["role"] and role in ("user", "assistant")
        if is_again and not last.get("tool_calls") and able.needs_turns:
            text = _blank_line(last["content"], message["content"])
            chat[-1] = {**last, **message, "content": text}
        elif role == "user" and last["role"] == "tool" and not able.takes_user_behind_result:
            chat[-1] = _behind(last, message["content"])
        elif role == "assistant" and last["role"] in HEAD and able.needs_turns:
            chat += [_user(""), message]
        else:
            chat.append(message)
    return chat


def _with_ids(messages: Chat, able: Abilities) -> Chat:
    """Give calls and their results ids of the form that the template wants."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    ids = [call.get("id") for call in calls if isinstance(call, Mapping)]
    ids += [message.get("tool_call_id") for message in messages if message["role"] == "tool"]
    if calls and able.names_calls_by_id:
        return _with_named_ids(messages)
    is_missing = not all(ids)
    is_other = any(id_ and not SHORT_ID.fullmatch(str(id_)) for id_ in ids)
    if not (is_missing and not able.takes_no_ids) and not (is_other and not able.takes_long_ids):
        return messages
    chat: Chat = []
    open_ids: list[str] = []  # calls still without a result
    for i, message in enumerate(messages):
        if made := message.get("tool_calls"):
            open_ids = [_short(_id_of(call) or f"{i}.{j}") for j, call in enumerate(made)]
            named = [
                {**call, "id": id_} if isinstance(call, Mapping) else call
                for call, id_ in zip(made, open_ids, strict=True)
            ]
            message = message | {"tool_calls": named}
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            id_ = _short(str(given)) if given else next(iter(open_ids), _short(str(i)))
            open_ids = [each for each in open_ids if each != id_]
            message = message | {"tool_call_id": id_}
        chat.append(message)
    return chat


def _with_named_ids(messages: Chat) -> Chat:
    """Give calls and their results ids that contain the call's name, for templates that show it nowhere else."""
    chat: Chat = []
    ids: dict[str, str] = {}
    n = 0
    for message in messages:
        if made := message.get("tool_calls"):
            named = []
            for call in made:
                given, name = _id_of(call), _name_of(call)
                is_own = re.fullmatch(rf"functions\.{re.escape(name)}:\d+", given)
                ids[given] = given if is_own else f"functions.{name}:{n}"
                named.append({**call, "id": ids[given]} if isinstance(call, Mapping) else call)
                n += 1
            message = message | {"tool_calls": named}
        elif (given := str(message.get("tool_call_id"))) in ids:
            message = message | {"tool_call_id": ids[given]}
        chat.append(message)
    return chat


def _id_of(call: Any) -> str:
    return str(call.get("id") or "") if isinstance(call, Mapping) else ""


def _short(id_: str) -> str:
    """A short id, always the same for the same id, so that the prefix cache still matches."""
    if SHORT_ID.fullmatch(id_):
        return id_
    return hashlib.sha256(id_.encode("utf-8", "replace")).hexdigest()[:9]


def _behind(message: dict[str, Any], text: str) -> dict[str, Any]:
    return message | {"content": _blank_line(message["content"], text)}


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _blank_line(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)


def _call(call: Any, able: Abilities) -> Any:
    """A call with arguments in the template's form: clients send JSON text, an object, or nothing."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    given = function.get("arguments")
    if able.takes_objects:
        arguments = _object(given, able)
    elif isinstance(given, str):
        arguments = given
    else:
        arguments = json.dumps({} if given is None else given, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _object(given: Any, able: Abilities) -> Any:
    """Arguments as an object. Text that is not an object stays text if the template accepts that."""
    value = given
    if isinstance(given, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(given, parse_constant=no_number) if given.strip() else None
    if isinstance(value, Mapping) or value is None:
        return value or {}
    return given if isinstance(given, str) and able.takes_texts else {"arguments": value}


def fitted_tools(tools: Sequence[Mapping[str, Any]], able: Abilities) -> list[dict[str, Any]]:
    """The tools with all fields that templates read, in the order of the request."""
    return [_tool(tool, able) for tool in tools]


def _tool(tool: Mapping[str, Any], able: Abilities) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return dict(tool)
    whole: dict[str, Any] = {}
    for key, value in function.items():
        if value is not None:
            whole[key] = value
        # after the name, as in the models' training data
        if key == "name" and function.get("description") is None:
            whole["description"] = ""
    parameters = whole.get("parameters") or NO_PARAMETERS
    if isinstance(parameters, Mapping) and "properties" not in parameters and able.needs_properties:
        parameters = {**parameters, "properties": {}}
    return {**tool, "function": whole | {"parameters": parameters}}
