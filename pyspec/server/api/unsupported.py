"""Fields that would change the text but are not supported: refused, never ignored.

Each has values that mean "not set"; those pass, so clients that send every default keep working.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyspec.errors import NotSupported

_EMPTY: tuple[Any, ...] = ("", [], {}, False, 0)


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: any(value == x and type(value) is type(x) for x in values)


def _empty(value: Any) -> bool:
    return value in _EMPTY


def _not_positive(value: Any) -> bool:
    return type(value) in (int, float) and value <= 0


NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "grammar_lazy": _empty,
    "grammar_triggers": _empty,
    "structural_tag": _empty,
    "functions": _empty,
    "function_call": _is("none"),
    "lora": _empty,
    "image_data": _empty,
    "audio": _empty,
    "modalities": _is([], ["text"]),
    "web_search_options": lambda value: False,
    "mcp_servers": _empty,
    "n_indent": _not_positive,
    "bad_words": _empty,
    "stop_token_ids": _empty,
    "allowed_token_ids": _empty,
    "use_beam_search": _empty,
    "length_penalty": _is(1, 1.0),
    "chat_template": _empty,
}


WHY: dict[str, str] = {
    "lora": "LoRA adapters are out of scope; merge them into the model's file",
    "image_data": "images are out of scope: pyspec reads and writes text",
    "audio": "audio is out of scope: pyspec reads and writes text",
    "web_search_options": "built-in tools are out of scope; a client's own are given in `tools`",
    "mcp_servers": "MCP is out of scope: clients call MCP servers, and pass their tools in `tools`",
}
"""Alternatives to fields that clients often ask for."""

ELSEWHERE: dict[str, tuple[tuple[str, ...], Callable[[Any], bool]]] = {
    "echo": (("text",), _empty),
    "suffix": (("text",), _empty),
    "prompt_logprobs": (("text", "chat"), _not_positive),
}
"""Fields of some paths only, and the values that mean "not set" on the others."""


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Raise NotSupported for the first field whose value requests an unsupported feature."""
    for name, is_neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and not is_neutral(value):
            why = f": {WHY[name]}" if name in WHY else "; leave it out"
            raise NotSupported(f"{name} is not supported{why}")


def refuse_elsewhere(kind: str, body: dict[str, Any]) -> None:
    """Raise NotSupported for a field that only other paths answer."""
    for name, (kinds, is_neutral) in ELSEWHERE.items():
        value = body.get(name)
        if value is not None and kind not in kinds and not is_neutral(value):
            paths = "completions" if kinds == ("text",) else "completions and chats"
            raise NotSupported(f"{name} is not supported here: only /v1/{paths} answer with it")
