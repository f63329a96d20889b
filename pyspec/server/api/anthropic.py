"""Anthropic's messages, converted to a body of chat completions. Fields that are not part of a chat pass unchanged.

Images become parts of chat completions, those in documents, too; PDFs are refused by name. Tools that Anthropic's servers run, and their
results, are left out. Hints for caching and billing are ignored: every prompt is cached, and nothing is billed.
"""

from __future__ import annotations

import json
import re
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, Literal

from pydantic import Field

from pyspec.errors import NotSupported, RequestError
from pyspec.server.api.out_of_scope import is_foreign_block, words
from pyspec.server.api.schema import (
    WHOLE,
    AsSent,
    Body,
    Count,
    image_part,
    string_of,
    tools_field,
    validate,
)
from pyspec.server.api.steady import without_transport
from pyspec.server.settings import Limits
from pyspec.text.left_out import NO_IMAGE, own_tools

MEDIA_TYPE = re.compile(r"image/[a-zA-Z0-9.+-]{1,40}")
MAX_TOKENS = 4096  # default, as in llama-server; Anthropic's own API requires it
HANDLED = words(
    "system messages tools tool_choice stop_sequences max_tokens thinking output_config output_format"
)
IGNORED = words(
    "anthropic_beta betas cache_control context_management diagnostics inference_geo metadata service_tier speed"
)
FUNCTION = {"name": "name", "description": "description", "input_schema": "parameters"}
FUNCTION |= {"strict": "strict"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}

Name = Annotated[str, Field(min_length=1, max_length=256)]


class ConversationTurn(Body):
    """One message. Its content is text or a list of blocks, which are checked when they are read."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class MessagesTool(AsSent):
    """A tool for the model."""

    name: Name
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None


class ToolSelection(Body):
    """Tools that the model may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Thinking before the answer: on or off, and its most tokens."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None


class OutputFormat(Body):
    """A JSON Schema that the answer follows."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    """Effort, and the format of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class MessagesBody(Body):
    """`/v1/messages`. Sampling parameters of chat completions are accepted, too."""

    model: str | None = None
    messages: Annotated[list[ConversationTurn], Field(min_length=1, fail_fast=True)]
    system: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    max_tokens: Count | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, WHOLE] | None = None
    tools: Annotated[list[MessagesTool], Field(fail_fast=True)] | None = tools_field("custom")
    tool_choice: ToolSelection | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    # the beta's name of output_config.format, which older SDKs send
    output_format: OutputFormat | None = None


def to_chat(sent: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """The same request as a body of `/v1/chat/completions`. Raises RequestError, NotSupported."""
    body = validate(MessagesBody, sent | {"tools": own_tools(sent.get("tools"), "custom")})
    chat = {name: value for name, value in sent.items() if name not in HANDLED | IGNORED}
    if chat.pop("container", None):
        raise NotSupported("container is not supported; leave it out")
    chat["messages"] = [*_system(body.system), *_turns(body.messages, limits)]
    chat["max_tokens"] = MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.stop_sequences:
        chat["stop"] = body.stop_sequences
    if body.tools:
        chat["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        chat |= _tool_choice(body.tool_choice)
    return chat | _thinking(body.thinking, sent) | _output(body.output_config, body.output_format)


def _system(system: str | list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The system prompt. Its blocks are joined without a separator, as in llama-server."""
    if system is None:
        return []
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
    parts = [part for i, block in enumerate(blocks) for part in _parts(block, f"system.{i}")]
    if any(part["type"] != "text" for part in parts):
        raise NotSupported("system: images are not supported here")
    return [{"role": "system", "content": "".join(without_transport(part["text"]) for part in parts)}]


def _turns(turns: list[ConversationTurn], limits: Limits) -> list[dict[str, Any]]:
    if len(turns) > limits.messages:
        raise RequestError(f"messages: {len(turns)} of them; at most {limits.messages} are taken")
    messages: list[dict[str, Any]] = []
    for i, turn in enumerate(turns):
        where = f"messages.{i}.content"
        if isinstance(turn.content, str):
            messages.append({"role": turn.role, "content": turn.content})
        elif turn.role == "assistant":
            messages += _assistant(turn.content, where)
        else:
            messages += _user_messages(turn.role, turn.content, where)
    return messages


def _user_messages(role: str, blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """A user's message: text, with tool results as messages of their own, in order."""
    messages: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        at = f"{where}.{i}"
        kind = _kind(block, at)
        if kind == "tool_result":
            messages.append(_result(block, at))
        if kind == "tool_result" or is_foreign_block(kind):
            continue
        if not messages or messages[-1]["role"] != role:
            messages.append({"role": role, "content": []})
        messages[-1]["content"] += _parts(block, at)
    return messages


def _result(block: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool's result. Templates have no flag for a failed tool, so its text carries the error."""
    call = block.get("tool_use_id")
    if not isinstance(call, str):
        raise RequestError(f"{where}.tool_use_id: a string that names the call")
    content = block.get("content")
    if isinstance(content, list):
        blocks = [(part, f"{where}.content.{i}") for i, part in enumerate(content)]
        own = ((part, at) for part, at in blocks if not is_foreign_block(_kind(part, at)))
        parts = _joined([each for part, at in own for each in _parts(part, at, of_tool=True)])
        content = parts[0]["text"] if [part["type"] for part in parts] == ["text"] else parts
    elif not (content is None or isinstance(content, str)):
        raise RequestError(f"{where}.content: a string or a list of text blocks")
    return {"role": "tool", "tool_call_id": call, "content": content or ""}


def _assistant(blocks: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """The model's message: thoughts, text and calls. Calls that a server ran, and encrypted thoughts, are left out."""
    thoughts: list[str] = []
    texts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        at = f"{where}.{i}"
        kind = _kind(block, at)
        if kind == "thinking":
            thoughts.append(string_of(block, "thinking", at))
        elif kind == "tool_use":
            calls.append(_call(block, at))
        elif not is_foreign_block(kind):
            texts += _parts(block, at)
    if not (thoughts or texts or calls):
        return []
    message: dict[str, Any] = {"role": "assistant", "content": texts or ""}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return [message]


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    given = block.get("input")
    if not (given is None or isinstance(given, dict)):
        raise RequestError(f"{where}.input: an object")
    arguments = json.dumps(given or {}, ensure_ascii=False)
    function = {"name": string_of(block, "name", where), "arguments": arguments}
    return {"id": string_of(block, "id", where), "type": "function", "function": function}


def _kind(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise RequestError(
            f'{where}.type: missing; a block is an object such as {{type: "text", text: "..."}}'
        )
    return kind


def _parts(block: Any, where: str, *, of_tool: bool = False) -> list[dict[str, Any]]:
    """A block as parts of a message of chat completions. A tool's image of another source costs the model a line, not the client every
    later turn."""
    kind = _kind(block, where)
    if kind in ("document", "search_result") and (parts := _document(block, where, of_tool)):
        return parts
    if kind == "text":
        return [{"type": "text", "text": string_of(block, "text", where)}]
    if kind != "image":
        raise NotSupported(f"{where}: blocks of type {kind[:40]!r} are not supported here")
    try:
        return [_image(block, where)]
    except NotSupported:
        if not of_tool:
            raise
        return [{"type": "text", "text": NO_IMAGE}]


def _image(block: Any, where: str) -> dict[str, Any]:
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "url":
        return image_part(string_of(source, "url", f"{where}.source"), where)
    if kind == "base64":
        media = string_of(source, "media_type", f"{where}.source")
        if not MEDIA_TYPE.fullmatch(media):
            raise RequestError(f"{where}.source.media_type: want image/png, or the like")
        data = string_of(source, "data", f"{where}.source")
        return image_part(f"data:{media};base64,{data}", where)
    raise NotSupported(f"{where}.source: an image's source is base64 or url, not {str(kind)[:40]!r}")


def _joined(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring texts are one, as in llama-server."""
    joined: list[dict[str, Any]] = []
    for kind, group in groupby(parts, itemgetter("type")):
        same = list(group)
        joined += [{"type": kind, "text": "".join(p["text"] for p in same)}] if kind == "text" else same
    return joined


def _document(block: dict[str, Any], where: str, of_tool: bool) -> list[dict[str, Any]]:
    """The text and images of a document or a search result, with its title before; nothing if its source is neither."""
    source = block.get("source")
    content = block.get("content")
    if isinstance(source, dict):
        is_text = source.get("type") == "text" or source.get("type") == "content"
        content = source.get("data", source.get("content")) if is_text else None
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        return []
    heads = (block.get("title"), block.get("context"), source)
    parts = [{"type": "text", "text": f"{head}\n"} for head in heads if isinstance(head, str) and head]
    for i, part in enumerate(content):
        parts += _parts(part, f"{where}.source.content.{i}", of_tool=of_tool)
    return _joined([*parts, {"type": "text", "text": "\n"}])


def _tool(tool: MessagesTool) -> dict[str, Any]:
    """A tool in the form of chat completions, its fields in order."""
    function = {FUNCTION[key]: tool.sent[key] for key in tool.sent if key in FUNCTION}
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolSelection) -> dict[str, Any]:
    chat: dict[str, Any] = {"tool_choice": CHOICES.get(choice.type)}
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError("tool_choice.name: the tool's name is needed")
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    if choice.disable_parallel_tool_use is not None:
        chat["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return chat


def _thinking(thinking: Thinking | None, sent: dict[str, Any]) -> dict[str, Any]:
    """Thinking as template arguments; without the field the template's own default applies."""
    if thinking is None:
        return {}
    said = sent.get("chat_template_kwargs")
    thinks = {"enable_thinking": thinking.type != "disabled"}
    thinks |= said if isinstance(said, dict) else {}
    n_budget = thinking.budget_tokens
    budget = {} if n_budget is None else {"reasoning_budget_tokens": n_budget}
    return {"chat_template_kwargs": thinks} | (budget if thinking.type == "enabled" else {})


def _output(config: OutputConfig | None, older: OutputFormat | None) -> dict[str, Any]:
    chat: dict[str, Any] = {}
    if config is not None and config.effort is not None:
        chat["reasoning_effort"] = config.effort
    if (wanted := (config and config.format) or older) is not None:
        schema = {"name": "output", "schema": wanted.schema_, "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat
