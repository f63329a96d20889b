"""The common part of dialects with marks: content up to a call's mark, the call, then content again."""

from __future__ import annotations

from collections.abc import Callable

from pyspec.text.markup.reader import AnswerReader, Steps, Trimmed

ReadCalls = Callable[[AnswerReader, str], Steps[str]]
"""Reads the text behind a mark. Returns text that turned out to be content, with the mark, or "" if it emitted all of it."""


def read_section(
    reader: AnswerReader, text: str, call: str, close: tuple[str, ...], read_call: ReadCalls
) -> Steps[str]:
    """Read calls up to one of `close`, or to other text. Each call begins with the mark `call`, and `read_call` reads the rest of it.

    text  a mark read so far: the section's, or `call` itself if the model left out the section's
    """
    if text != call:
        text += yield from reader.take_spaces()
        if not (yield from reader.take_mark(call)):
            return text
        text += call
    while True:
        if text := (yield from read_call(reader, text)):
            return text
        yield from reader.take_spaces()
        if not (yield from reader.take_mark(call)):
            yield from reader.take_mark(*close)
            return ""
        text = call


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
