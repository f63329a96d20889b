"""How a model writes its tool calls: as it was said, as its template says, or as we tell it."""

from __future__ import annotations

from pyspec.text.markup.dialect import GENERIC, Dialect, dialect, recognised


def spoken(template: str, parser: str) -> Dialect | None:
    """The dialect of an answer; None where calls are not to be read.

    parser  the name of a dialect; "auto": as the template's text says; "none": calls are not to be read
    """
    if parser == "auto":
        return recognised(template) or GENERIC
    return None if parser == "none" else dialect(parser)


def why_spoken(template: str, parser: str) -> str:
    """In a sentence, for the log."""
    speaks = spoken(template, parser)
    if speaks is None:
        return "tool calls are not read: --tool-call-parser none"
    if parser != "auto":
        return f"tool calls are written as {speaks.name}: --tool-call-parser {parser}"
    if speaks is GENERIC:
        return "tool calls are written as generic: the chat template has no dialect that is known (--tool-call-parser names one)"
    return f"tool calls are written as {speaks.name}: the chat template says so"
