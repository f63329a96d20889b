"""What agents put into a system prompt and change with each request, kept from costing the prefix cache.

Whatever stands behind a changed token has to be computed anew: there is no exact way around it. So a line that is no part of the text at
all is taken out, and a line that the operator names (`--volatile-lines`) is moved behind everything that stays the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

BILLING = re.compile(
    r"\Ax-anthropic-billing-header:[ \t]*(?:[\w.-]+=[^;\n]*;[ \t]*)*(?:[\w.-]+=[^;\s]*[ \t]*(?=\n|\Z))?\n?"
)
"""A header of one agent's requests, which it writes into the system prompt. It has another checksum each time and says nothing to a model."""

SYSTEM = ("system", "developer")


def without_transport(text: str) -> str:
    """A system prompt without the header in front that is meant for a server and not for the model."""
    return BILLING.sub("", text) if text.startswith("x-anthropic-billing-header:") else text


def steady(messages: Any, volatile: Sequence[re.Pattern[str]]) -> tuple[Any, list[str]]:
    """Messages without what changes in their system prompt, and the lines of it in which one of `volatile` is found.

    Shapes that nobody knows are left for others to refuse; where nobody is left to be told of them, lines stay where they are.
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

    return [_changed(message, change) if message.get("role") in SYSTEM else message for message in messages], moved


def with_lines(messages: list[dict[str, Any]], lines: Sequence[str]) -> list[dict[str, Any]]:
    """Messages with `lines` at the end of the last one of a user or a tool."""
    at = _listener(messages)
    assert at is not None
    content, more = messages[at]["content"], "\n".join(lines)
    longer = f"{content}\n\n{more}" if isinstance(content, str) else [*content, {"type": "text", "text": f"\n{more}"}]
    return [*messages[:at], messages[at] | {"content": longer}, *messages[at + 1 :]]


def _listener(messages: list[dict[str, Any]]) -> int | None:
    """The last message that a line can be added to."""
    for i in reversed(range(len(messages))):
        if messages[i].get("role") in ("user", "tool") and isinstance(messages[i].get("content"), str | list):
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
        part | {"text": change(part["text"])} if isinstance(part, dict) and isinstance(part.get("text"), str) else part
        for part in content
    ]
    return message | {"content": parts}
