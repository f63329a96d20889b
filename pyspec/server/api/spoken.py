"""How a model writes its tool calls: as the server was told, as its template says, or as we tell it."""

from __future__ import annotations

from pyspec.server.settings import ServerSettings
from pyspec.text.markup.dialect import GENERIC, Dialect, dialect, recognised


def spoken(template: str, settings: ServerSettings) -> Dialect | None:
    """The dialect of an answer; None where calls are not to be read."""
    if settings.tool_call_parser == "auto":
        return recognised(template) or GENERIC
    return None if settings.tool_call_parser == "none" else dialect(settings.tool_call_parser)


def why_spoken(template: str, settings: ServerSettings) -> str:
    """In a sentence, for the log."""
    speaks, asked = spoken(template, settings), settings.tool_call_parser
    if speaks is None:
        return "tool calls are not read: --tool-call-parser none"
    if asked != "auto":
        return f"tool calls are written as {speaks.name}: --tool-call-parser {asked}"
    if speaks is GENERIC:
        return "tool calls are written as generic: the chat template has no dialect that is known (--tool-call-parser names one)"
    return f"tool calls are written as {speaks.name}: the chat template says so"
