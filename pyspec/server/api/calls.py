"""Which tools an answer may or must call, and the grammar that holds it to that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pyspec.errors import NotSupported, RequestError
from pyspec.server.api.left_out import own_tools
from pyspec.server.api.schema import Chat, Tool
from pyspec.text.markup.dialect import NAMES, Dialect

Wanted = Literal["auto", "none", "required"]


@dataclass(frozen=True)
class CallPlan:
    """What a body says on tools.

    schemas   the arguments' schema of each tool that may be called; empty: calls are not parsed
    is_bound  the answer consists of calls
    is_held   what is called, and with what, is held to the tools' schemas
    is_single one call at most
    """

    schemas: Mapping[str, Mapping[str, Any]]
    is_bound: bool = False
    is_held: bool = False
    is_single: bool = False


BEYOND_BARE = frozenset({"pattern", "format", "minLength", "maxLength"})
NO_CALLS = CallPlan({})


def call_plan(body: Chat, dialect: Dialect | None) -> CallPlan:
    """Raises RequestError, and NotSupported where calls could not be read."""
    choice, allowed = tool_choice(body)
    tools = {tool.function.name: tool for tool in body.tools or ()}
    if len(tools) < len(body.tools or ()):
        raise RequestError("tools: two of them have the same name")
    wanted = tools if allowed is None else {name: tools[name] for name in allowed if name in tools}
    if lost := [name for name in allowed or () if name not in tools]:
        raise RequestError(f"tool_choice: there is no tool {lost[0][:80]!r}")
    if choice == "required" and not wanted:
        raise RequestError("tool_choice: there are no tools to choose from")
    if not wanted or choice == "none":
        return NO_CALLS
    if body.parse_tool_calls is False:
        if choice == "required":
            raise RequestError("parse_tool_calls: it can not be false where a call is required")
        return NO_CALLS
    if dialect is None:
        raise NotSupported(
            'tools: this server reads no calls (--tool-call-parser none); send tool_choice "none", or start it with'
            f" --tool-call-parser auto, or one of {', '.join(NAMES)}"
        )
    if dialect.is_bare:
        for tool in wanted.values():
            _check_bare(tool)
    is_held = choice == "required" or len(wanted) < len(tools) or any(tool.function.strict for tool in wanted.values())
    return CallPlan(
        schemas={each: _schema(tool) for each, tool in wanted.items()},
        is_bound=choice == "required",
        is_held=is_held or body.parallel_tool_calls is False,
        is_single=is_one_named(body) or body.parallel_tool_calls is False,
    )


def tool_choice(body: Chat) -> tuple[Wanted, tuple[str, ...] | None]:
    """What may be called, and the functions that alone may be; None: all."""
    choice = body.tool_choice
    if choice is None:
        return "auto", None
    if choice == "auto" or choice == "none" or choice == "required":
        return choice, None
    if isinstance(choice, str):
        raise RequestError(f'tool_choice: {choice[:40]!r} is none of "auto", "none" and "required"')
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools"))
    return "required", (_named(choice, "tool_choice"),)


def is_one_named(body: Chat) -> bool:
    """Whether the one function is named that has to be called."""
    return isinstance(body.tool_choice, dict) and body.tool_choice.get("type") == "function"


def _allowed(said: Any) -> tuple[Wanted, tuple[str, ...]]:
    """Of OpenAI's `allowed_tools` the functions: tools of other types are left out, here as in the prompt."""
    tools = said.get("tools") if isinstance(said, dict) else None
    mode = said.get("mode") if isinstance(said, dict) else None
    if mode not in ("auto", "required", None):
        raise RequestError('tool_choice: the mode of allowed_tools is "auto" or "required"')
    if not isinstance(tools, list):
        raise RequestError("tool_choice: allowed_tools is an object with a mode and a list of tools")
    own = own_tools(tools, "function")
    return mode or "auto", tuple(dict.fromkeys(_named(tool, "tool_choice.allowed_tools") for tool in own))


def _named(said: Any, where: str) -> str:
    function = said.get("function") if isinstance(said, dict) and said.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError(f'{where}: a word, or an object such as {{type: "function", function: {{name: "..."}}}}')
    return str(function["name"])


def _check_bare(tool: Tool) -> None:
    """Raise RequestError if a strict tool says of a string what bare text is not held to."""
    properties = (tool.function.parameters or {}).get("properties")
    for name, schema in (properties if tool.function.strict and isinstance(properties, dict) else {}).items():
        said = BEYOND_BARE & schema.keys() if isinstance(schema, dict) and "enum" not in schema else ()
        if said and schema.get("type", "string") == "string":
            raise RequestError(
                f"tools: {tool.function.name} is strict, but {min(said)} of argument {name[:80]!r} can not be kept: this model writes"
                " strings as bare text"
            )


def _schema(tool: Tool) -> Mapping[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}}
