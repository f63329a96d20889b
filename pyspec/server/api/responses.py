"""OpenAI's responses, converted to a body of chat completions. Fields that are not part of a chat pass unchanged.

Nothing is stored: `store` is ignored, and requests that need a stored answer are refused. Tools that OpenAI's servers run, and their
results, are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field

from pyspec.errors import NotSupported, RequestError
from pyspec.server.api.out_of_scope import is_foreign_item, words
from pyspec.server.api.schema import (
    AsSent,
    Body,
    Count,
    image_part,
    string_of,
    tools_field,
    validate,
)
from pyspec.server.settings import Limits
from pyspec.text.left_out import NO_IMAGE, own_tools

HANDLED = words("input instructions tools tool_choice max_output_tokens reasoning text top_logprobs")
IGNORED = words(
    "client_metadata include max_tool_calls metadata prompt_cache_key prompt_cache_options"
    " prompt_cache_retention safety_identifier service_tier store truncation user"
)
STORED = {
    "previous_response_id": "nothing is stored here: send the whole conversation as input",
    "conversation": "nothing is stored here: send the whole conversation as input",
    "prompt": "no prompts are stored here: send instructions and input",
    "background": "nothing is stored here, so an answer can not be fetched later: leave it out",
}
FUNCTION = frozenset({"name", "description", "parameters", "strict"})
REPEATED = words(
    "instructions max_output_tokens metadata parallel_tool_calls reasoning temperature text"
    " tool_choice tools top_p truncation user"
)


class ResponsesTool(AsSent):
    """A function for the model."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Effort(Body):
    """The effort of thinking."""

    effort: str | None = None


class TextFormat(Body):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(Body):
    """`text`: its format. Verbosity is ignored."""

    format: TextFormat | None = None


class ResponsesBody(Body):
    """`/v1/responses`. Sampling parameters of chat completions are accepted, too."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    stream: bool | None = None
    store: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True)] | None = tools_field("function")
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Effort | None = None
    text: TextConfig | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    top_logprobs: Count | None = None


def repeated(sent: dict[str, Any]) -> dict[str, Any]:
    """Fields of the body that the answer repeats."""
    return {name: sent[name] for name in REPEATED if sent.get(name) is not None}


def to_chat(sent: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """The same request as a body of `/v1/chat/completions`. Raises RequestError, NotSupported."""
    body = validate(ResponsesBody, sent | {"tools": own_tools(sent.get("tools"), "function")})
    for name, why in STORED.items():
        if sent.get(name):
            raise NotSupported(f"{name} is not supported: {why}")
    if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
        raise NotSupported(
            "top_logprobs are not supported on this path; /v1/chat/completions has them",
        )
    unused = HANDLED | IGNORED | STORED.keys()
    chat = {name: value for name, value in sent.items() if name not in unused}
    chat["messages"] = _messages(body, limits)
    if body.max_output_tokens is not None:
        chat["max_tokens"] = body.max_output_tokens
    if body.tools:
        chat["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        chat["tool_choice"] = _tool_choice(body.tool_choice)
    if body.reasoning is not None and body.reasoning.effort is not None:
        chat["reasoning_effort"] = body.reasoning.effort
    return chat | _format(body.text)


def _messages(body: ResponsesBody, limits: Limits) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    if len(body.input) > limits.messages:
        raise RequestError(f"input: {len(body.input)} items; at most {limits.messages} are taken")
    elsewhere: set[str] = set()  # calls that another server ran: their results are left out, too
    for i, item in enumerate(body.input):
        kind, call = item.get("type", "message"), item.get("call_id")
        read = ITEMS.get(kind) if isinstance(kind, str) else None
        if read is not None:
            if not isinstance(call, str) or call not in elsewhere:
                read(messages, item, f"input.{i}")
        elif not is_foreign_item(item):
            raise NotSupported(f"input.{i}: items of type {str(kind)[:40]!r} are not supported")
        elif isinstance(call, str):
            elsewhere.add(call)
    if not messages:
        raise RequestError("input: the list is empty")
    return messages


def _message(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    role = item.get("role")
    if role not in ("user", "system", "developer", "assistant"):
        raise RequestError(f"{where}.role: one of user, system, developer and assistant")
    if role == "assistant":
        said = _answering(messages)
        said["content"] += "".join(_texts(item.get("content"), f"{where}.content"))
    else:
        messages.append({"role": role, "content": _content(item.get("content"), f"{where}.content")})


def _reasoning(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Thoughts as they were returned. Encrypted ones cannot be read, and a summary is not the model's own text."""
    parts = item.get("content") or []
    if not isinstance(parts, list):
        raise RequestError(f"{where}.content: a list of parts")
    kinds = ("reasoning_text", "text")
    texts = [_text(part, f"{where}.content.{i}", kinds) for i, part in enumerate(parts)]
    if texts:
        said = _answering(messages, after=("",))
        said["reasoning_content"] = said.get("reasoning_content", "") + "".join(texts)


def _call(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    arguments = string_of(item, "arguments", where)
    function = {"name": string_of(item, "name", where), "arguments": arguments}
    call = {"id": string_of(item, "call_id", where), "type": "function", "function": function}
    _answering(messages).setdefault("tool_calls", []).append(call)


def _call_output(messages: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    output = item.get("output")
    if isinstance(output, list):
        output = [NO_FILE if _is_stored(part) else part for part in output]
    content = _content(output, f"{where}.output")
    call = string_of(item, "call_id", where)
    messages.append({"role": "tool", "tool_call_id": call, "content": content})


ITEMS: dict[str, Callable[[list[dict[str, Any]], dict[str, Any], str], None]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _call,
    "function_call_output": _call_output,
}


def _answering(
    messages: list[dict[str, Any]],
    after: tuple[str, ...] | None = None,
) -> dict[str, Any]:
    """The assistant's message to add to, or a new one: thoughts, text and calls of one answer are separate items.

    `after` has the last message's contents for which the item still belongs to it.
    """
    if messages and messages[-1]["role"] == "assistant":
        last = messages[-1]
        if after is None or (last["content"] in after and not last.get("tool_calls")):
            return last
    messages.append({"role": "assistant", "content": ""})
    return messages[-1]


TEXTS = ("input_text", "output_text", "text", "refusal")


def _texts(content: Any, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [_text(part, at, TEXTS) for part, at in _parts(content, where)]


def _parts(content: Any, where: str) -> list[tuple[Any, str]]:
    """Parts of a content and their places in the body."""
    if not isinstance(content, list):
        raise RequestError(f"{where}: a string or a list of parts")
    return [(part, f"{where}.{i}") for i, part in enumerate(content)]


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Content with images as parts of chat completions; without, as text."""
    if isinstance(content, str):
        return content
    parts = _parts(content, where)
    if not any(isinstance(part, dict) and part.get("type") == "input_image" for part, _ in parts):
        return "\n".join(_text(part, at, TEXTS) for part, at in parts)
    return [_part(part, at) for part, at in parts]


NO_FILE = {"type": "input_text", "text": NO_IMAGE}


def _is_stored(part: Any) -> bool:
    """True for an image that OpenAI's servers have. Of a tool's result it costs the model a line, not the client every later turn."""
    is_image = isinstance(part, dict) and part.get("type") == "input_image"
    return is_image and bool(part.get("file_id")) and not part.get("image_url")


def _part(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, dict) or part.get("type") != "input_image":
        return {"type": "text", "text": _text(part, where, TEXTS)}
    if _is_stored(part):
        raise NotSupported(f"{where}.file_id is not supported: nothing is stored here; send image_url")
    return image_part(string_of(part, "image_url", where), where)


def _text(part: Any, where: str, kinds: tuple[str, ...]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise RequestError(f"{where}: a part is an object with a type")
    if kind not in kinds:
        raise NotSupported(f"{where}: parts of type {kind[:40]!r} are not supported here")
    return string_of(part, "refusal" if kind == "refusal" else "text", where)


def _tool(tool: ResponsesTool) -> dict[str, Any]:
    function = {key: tool.sent[key] for key in tool.sent if key in FUNCTION}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    """The tool choice in the form of chat completions, where the function or the allowed tools are one level deeper."""
    if isinstance(choice, str):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        tools = choice.get("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise RequestError("tool_choice.tools: a list of objects with a type and a name")
        named = [{**t, "function": t} if t.get("type") == "function" else t for t in tools]
        return {"type": kind, kind: {"mode": choice.get("mode"), "tools": named}}
    if kind != "function":
        raise NotSupported(
            f"tool_choice: tools of type {str(kind)[:40]!r} can not be called here; name a function",
        )
    return {"type": "function", "function": {"name": string_of(choice, "name", "tool_choice")}}


def _format(text: TextConfig | None) -> dict[str, Any]:
    """`text.format` as `response_format`, which nests it one level deeper."""
    wanted = text.format if text is not None else None
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"response_format": {"type": "json_object"}}
    if wanted.schema_ is None:
        raise RequestError("text.format.schema: the JSON Schema is needed")
    is_strict = wanted.strict is not False
    schema = {"name": wanted.name or "output", "schema": wanted.schema_, "strict": is_strict}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}
