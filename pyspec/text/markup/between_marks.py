"""Content up to a call's mark, and behind the call content again: what the dialects with marks have in common."""

from __future__ import annotations

from collections.abc import Callable

from pyspec.text.markup.reader import AnswerReader, Steps, Trimmed

ReadCalls = Callable[[AnswerReader, str], Steps[str]]
"""Reads what stands behind a mark. Returns what turned out to be content, mark and all; "" if all of it was told."""


def read_answer(
    reader: AnswerReader, marks: tuple[str, ...], read_calls: ReadCalls, *, trims_start: bool
) -> Steps[None]:
    """An answer without its reasoning. Spaces around calls are dropped."""
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
