"""Items and tools that only OpenAI's or Anthropic's own servers can run or read: left out of the prompt (see `text/left_out.py`).

Agents send such tools with every request, and return their results later. A tool choice that requires one is refused by its reader.
"""

from __future__ import annotations

from typing import Any

from pyspec.text.left_out import log_left_out


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
