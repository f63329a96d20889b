"""The dialect of a model's tool calls: as named by the user, as recognised in its template, or generic."""

from __future__ import annotations

from pyspec.text.markup.dialect import GENERIC, Dialect, dialect, recognised


def spoken(template: str, parser: str) -> Dialect | None:
    """The dialect of an answer; None if calls are not parsed.

    parser  the name of a dialect; "auto": recognise it in the template; "none": calls are not parsed
    """
    if parser == "auto":
        return recognised(template) or GENERIC
    return None if parser == "none" else dialect(parser)


def why_spoken(template: str, parser: str) -> str:
    """A sentence for the log: the dialect and the reason for it."""
    speaks = spoken(template, parser)
    if speaks is None:
        return "tool calls are not read: --tool-call-parser none"
    if parser != "auto":
        return f"tool calls are written as {speaks.name}: --tool-call-parser {parser}"
    if speaks is GENERIC:
        return "tool calls are written as generic: the chat template has no dialect that is known (--tool-call-parser names one)"
    return f"tool calls are written as {speaks.name}: the chat template says so"
