"""Progress of what takes more than two seconds: a bar on a terminal, a line now and then elsewhere; on stderr, never on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

FIRST_S = 2.0  # what is over before needs no word
EVERY_S = 10.0  # between lines, where there is no terminal

Tell = Callable[[int, int], None]
"""Takes how much is done, and of how much."""


@contextmanager
def progress(what: str) -> Iterator[Tell]:
    """Something under way; tell it how far it is, from any thread."""
    if sys.stderr.isatty():
        with _bar(what) as tell:
            yield tell
    else:
        yield _lines(what)


@contextmanager
def _bar(what: str) -> Iterator[Tell]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, whole: bar.update(task, completed=done, total=max(whole, 1))


def _lines(what: str) -> Tell:
    due = time.monotonic() + FIRST_S

    def tell(done: int, whole: int) -> None:
        nonlocal due
        if (now := time.monotonic()) >= due and done < whole:
            due = now + EVERY_S
            click.echo(f"{what}: {100 * done // max(whole, 1)} %", err=True)

    return tell
