"""What pyspec does not serve: fields and paths are refused with the reason, tools and items of hosted services are left out of the prompt."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pyspec.errors import NotSupported
from pyspec.text.left_out import log_left_out

# -- fields that would change the text: each has values that mean "not set", which clients send along ----------------------

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
    "image_data": "images are parts of messages, or prompt.multimodal_data of /completion",
    "audio": "audio is out of scope: pyspec writes text",
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


# -- paths of other servers ------------------------------------------------------------------------------------------------

_REASONS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
NOT_HERE: dict[str, str] = {path: why for why, paths in _REASONS.items() for path in paths}


def routes_not_here() -> list[Route]:
    """A route for each of these paths, and for writing to `/props`."""
    both, read_only = ["GET", "POST"], "it is read-only; use the server's flags"
    routes = [Route(path, partial(_refuse, path, why), methods=both) for path, why in NOT_HERE.items()]
    return [*routes, Route("/props", partial(_refuse, "/props", read_only), methods=["POST"])]


async def _refuse(path: str, why: str, request: Request) -> Response:
    raise NotSupported(f"{request.method} {path} is not supported: {why}")


# -- items and tools that only OpenAI's or Anthropic's own servers can run or read (text/left_out.py) -----------------------
# Agents send such tools with every request, and return their results later. A choice that requires one is refused by its reader.


def words(text: str) -> frozenset[str]:
    """The names of kinds or fields in a text."""
    return frozenset(text.split())


ITEMS = words(
    "item_reference compaction compaction_summary compaction_trigger context_compaction"
    " additional_tools ghost_snapshot tool_search_output program program_output"
)
ITEM_ENDS = ("_call", "_call_output")
BLOCKS = words(
    "server_tool_use mcp_tool_use tool_reference container_upload compaction redacted_thinking"
)
BLOCK_END = "_tool_result"


def is_foreign_item(item: dict[str, Any]) -> bool:
    """True for an item of a response's input that another server's tool made: its call, its result, or a reference to stored data."""
    kind = item.get("type")
    if not isinstance(kind, str) or "role" in item:
        return False
    if kind not in ITEMS and not kind.endswith(ITEM_ENDS) and not kind.startswith("mcp_"):
        return False
    log_left_out("input items", kind)
    return True


def is_foreign_block(kind: str) -> bool:
    """True for such a block of an Anthropic message."""
    if kind not in BLOCKS and not kind.endswith(BLOCK_END):
        return False
    log_left_out("blocks", kind)
    return True
