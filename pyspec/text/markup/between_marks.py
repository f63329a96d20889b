"""The common part of dialects with marks: content up to a call's mark, the call, then content again."""

from __future__ import annotations

from collections.abc import Callable

from pyspec.text.markup.reader import AnswerReader, Steps, Trimmed

ReadCalls = Callable[[AnswerReader, str], Steps[str]]
"""Reads the text behind a mark. Returns text that turned out to be content, with the mark, or "" if it emitted all of it."""


def read_answer(
    reader: AnswerReader, marks: tuple[str, ...], read_calls: ReadCalls, *, trims_start: bool
) -> Steps[None]:
    """Read an answer without its reasoning. Spaces around calls are dropped."""
    content = Trimmed(reader.content, trims_start=trims_start)
    every = (*marks, reader.stray) if reader.stray else marks
    while mark := (yield from reader.until(every, content)):
        if mark == reader.stray:
            content.drop()
            continue
        n_calls = reader.n_calls
        text = yield from read_calls(reader, mark)
        if reader.n_calls > n_calls:
            content.drop()
        if text:
            content(text)
    content.flush()
