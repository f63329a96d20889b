"""Keep changing parts of an agent's system prompt from invalidating the prefix cache.

All tokens after a changed one have to be computed again; no exact method avoids this. So a header that is not meant for the model is
removed, and lines that the operator names (`--volatile-lines`) are moved behind the unchanged conversation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

BILLING = re.compile(
    r"\Ax-anthropic-billing-header:[ \t]*(?:[\w.-]+=[^;\n]*;[ \t]*)*(?:[\w.-]+=[^;\s]*[ \t]*(?=\n|\Z))?\n?"
)
"""A header that one agent writes into its system prompt. Its checksum changes with each request, and it has no meaning for a model."""

SYSTEM = ("system", "developer")


def without_transport(text: str) -> str:
    """A system prompt without the leading header that is meant for a server."""
    return BILLING.sub("", text) if text.startswith("x-anthropic-billing-header:") else text


def steady(messages: Any, volatile: Sequence[re.Pattern[str]]) -> tuple[Any, list[str]]:
    """Messages without the changing lines of their system prompt, and these lines: those in which a pattern of `volatile` is found.

    Malformed messages are left for later checks; without a message to move lines to, they stay.
    """
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return messages, []
    moved: list[str] = []
    patterns = volatile if _listener(messages) is not None else ()

    def stays(line: str) -> bool:
        if not any(pattern.search(line) for pattern in patterns):
            return True
        moved.append(line)
        return False

    def change(text: str) -> str:
        text = without_transport(text)
        return "\n".join(line for line in text.split("\n") if stays(line)) if patterns else text

    changed = [_changed(m, change) if m.get("role") in SYSTEM else m for m in messages]
    return changed, moved


def with_lines(messages: list[dict[str, Any]], lines: Sequence[str]) -> list[dict[str, Any]]:
    """Messages with `lines` added to the end of the last message of a user or a tool."""
    at = _listener(messages)
    assert at is not None
    content, more = messages[at]["content"], "\n".join(lines)
    is_text = isinstance(content, str)
    part = {"type": "text", "text": f"\n{more}"}
    longer = f"{content}\n\n{more}" if is_text else [*content, part]
    return [*messages[:at], messages[at] | {"content": longer}, *messages[at + 1 :]]


def _listener(messages: list[dict[str, Any]]) -> int | None:
    """Index of the last message that lines can be added to."""
    for i in reversed(range(len(messages))):
        role, content = messages[i].get("role"), messages[i].get("content")
        if role in ("user", "tool") and isinstance(content, str | list):
            return i
    return None


def _changed(message: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """The message with each of its texts changed."""
    content = message.get("content")
    if isinstance(content, str):
        return message | {"content": change(content)}
    if not isinstance(content, list):
        return message
    parts = [
        part | {"text": change(part["text"])}
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else part
        for part in content
    ]
    return message | {"content": parts}
