"""Progress of work of more than two seconds: a bar on a terminal, otherwise occasional lines; on stderr, never on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import click

if TYPE_CHECKING:
    from pyspec.cli.choice import EngineChoice
    from pyspec.engine.api import Engine

FIRST_S = 2.0  # shorter work is not reported
EVERY_S = 10.0  # between lines, without a terminal


class OnProgress(Protocol):
    """Receives the done amount, the total, and a new label if it changes."""

    def __call__(self, done: int, whole: int, what: str = "") -> None: ...


@contextmanager
def meter(what: str) -> Iterator[OnProgress]:
    """A progress display; any thread may report to it."""
    if sys.stderr.isatty():
        with _bar(what) as report:
            yield report
    else:
        with _lines(what) as report:
            yield report


@contextmanager
def load_meter() -> Iterator[None]:
    """Show the progress of a load."""
    from pyspec.progress import listening

    with meter("loading") as report:

        def show(stage: str, part: float) -> None:
            report(int(1000 * part), 1000, f"loading: {stage}")

        with listening(show, draws=sys.stderr.isatty()):
            yield


@contextmanager
def pull_lines() -> Iterator[None]:
    """Print the progress of downloads and hashes in lines; on a terminal the download library draws its own bars."""
    from pyspec.progress import DOWNLOAD, listening

    has_bars = sys.stderr.isatty()
    with _lines("") as report:

        def report_stage(stage: str, part: float) -> None:
            if not (has_bars and stage.startswith(DOWNLOAD)):
                report(int(1000 * part), 1000, stage)

        with listening(report_stage):
            yield


def load_with_meter(choice: EngineChoice, np: int, *, isolated: bool = False) -> Engine:
    """`choice.load` with a progress display."""
    with load_meter():
        return choice.load(np, isolated=isolated)


@contextmanager
def _bar(what: str) -> Iterator[OnProgress]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}")
    columns = (text, BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def report(done: int, whole: int, what: str = "") -> None:
            bar.update(task, completed=done, total=max(whole, 1), description=what or None)

        yield report


@contextmanager
def _lines(first: str) -> Iterator[OnProgress]:
    """Lines now and then. Where there was one, another says that the work is over."""
    began = time.monotonic()
    due, last = began + FIRST_S, ""

    def report(done: int, whole: int, what: str = "") -> None:
        nonlocal due, last
        if (now := time.monotonic()) >= due and done < whole:
            due, last = now + EVERY_S, what or first
            click.echo(f"{last}: {100 * done // max(whole, 1)} %", err=True)

    yield report
    if last:
        click.echo(f"{first or last}: done after {time.monotonic() - began:.1f} s", err=True)
