"""The tools that an answer may or must call, as a chat requests it over HTTP and from Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pyspec.errors import NotSupported, RequestError
from pyspec.text.left_out import own_tools
from pyspec.text.markup.dialect import NAMES, Dialect

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
