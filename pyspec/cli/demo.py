"""`pyspec demo`: a real server, eight concurrent chats, and the gain from speculation. Needs no download and no GPU."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from pyspec.cli import verbose_option
from pyspec.cli.chats import DemoBatch, DemoChat, run_chats, served
from pyspec.cli.options import begin_log, setting_option
from pyspec.errors import PyspecError

if TYPE_CHECKING:
    from rich.table import Table

QUESTIONS = (
    "What is speculative decoding?",
    "Implement bubble sort in Python",
    "Count from 17 to 29",
    "How do I check if a number is prime in Python?",
    "How do I plant a tree?",
    "Write a Python class for a stack",
    "What is 36 x 7?",
    "write a function to compute fibonacci numbers",
)
"""Prompts whose greedy answers have 46 to 85 tokens with a clear best token everywhere, so they are the same on any machine."""

ALONE = QUESTIONS[1]
"""The question for the single-stream rates."""

TAIL = 30  # characters of a growing answer in the live table


@dataclass(frozen=True)
class Race:
    """Rates of the same work without and with speculation, measured alternately."""

    title: str
    plain: Sequence[float]  # tokens/s of all streams together, one per turn
    spec: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        return [s / p for p, s in zip(self.plain, self.spec, strict=True)]


@click.command()
@click.option("-np", "--parallel", "np", default=8, type=click.IntRange(1, 32), help="Slots and chats.")
@click.option("-r", "--turns", default=5, type=click.IntRange(1, 20), help="Repetitions.")
@setting_option("threads")
@setting_option("device")
@verbose_option
@click.pass_context
def demo(ctx: click.Context, np: int, turns: int, threads: int, device: str) -> None:
    """Show the packaged pair with and without speculation.

    Starts a server, streams eight chats at once, compares greedy texts, and measures both alternately."""
    from pyspec.engine.api import Engine

    begin_log()
    began = time.perf_counter()
    questions = [QUESTIONS[i % len(QUESTIONS)] for i in range(np)]
    settings = {"np": np, "ctx": 512, "threads": threads, "device": device}
    with Engine.open("demo", "auto", settings, isolated=True) as engine:
        info = engine.info
        load_s = time.perf_counter() - began
        click.echo(f"{info.model_name} on {info.device}, loaded in {load_s:.1f} s")
        click.echo(f"{info.draft_note}; {info.n_slot} slots")
        with served(engine) as port:
            click.echo(f"serving on http://127.0.0.1:{port}/v1, {np} chats at once\n")
            view, watch = _view()
            with view:
                batch = run_chats(port, questions, True, watch)
            _show_chats(batch)
            races = _race(port, questions, turns, batch)
    _show_races(races, np)
    all_s = time.perf_counter() - began
    click.echo(f"greedy answers with and without speculation: identical ({all_s:.0f} s in all)")


def _race(port: int, questions: Sequence[str], turns: int, first: DemoBatch) -> list[Race]:
    """Plain and speculative runs in turns, with all chats at once and with one. Raises PyspecError if a text differs."""
    # a single chat may run plain if that is faster at the moment
    if not any(c.n_drafted for c in first.chats):
        raise PyspecError("speculation was on, but no chat drafted a single token")
    expected = {c.question: c.text for c in first.chats}
    races = []
    for title, asked in ((f"{len(questions)} streams", list(questions)), ("1 stream", [ALONE])):
        rates: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(turns):
            for speculative in (False, True):
                batch = run_chats(port, asked, speculative)
                _check_same(batch.chats, expected, speculative)
                rates[speculative].append(batch.rate)
        races.append(Race(title, rates[False], rates[True]))
    return races


def _check_same(chats: Sequence[DemoChat], expected: dict[str, str], speculative: bool) -> None:
    for c in chats:
        if c.n_drafted and not speculative:
            raise PyspecError(
                f"{c.question!r}: speculation was off, but {c.n_drafted} tokens were drafted",
            )
        text = expected.setdefault(c.question, c.text)
        if c.text != text:
            differing = (i for i, (a, b) in enumerate(zip(c.text, text, strict=False)) if a != b)
            at = next(differing, len(text))
            mode = "speculative" if speculative else "plain"
            raise PyspecError(f"{c.question!r}: the {mode} answer differs from character {at} on")


# -- output --------------------------------------------------------------------------------------------------------


def _view() -> tuple[AbstractContextManager[object], Callable[[Sequence[DemoChat], bool], None]]:
    """A live table on a terminal; otherwise one line when a chat ends."""
    if sys.stdout.isatty():
        from rich.live import Live

        live = Live(refresh_per_second=10, transient=True)
        return live, lambda chats, is_over: live.update(_live_table(chats))
    shown: set[int] = set()

    def tell(chats: Sequence[DemoChat], is_over: bool) -> None:
        for i, c in enumerate(chats):
            if (c.finish or c.error) and i not in shown:
                shown.add(i)
                click.echo(f"chat {i + 1} of {len(chats)} done: {c.question}")

    return nullcontext(), tell


def _live_table(chats: Sequence[DemoChat]) -> Table:
    from pyspec.cli.tables import clipped_row, table

    t = table("question", "answer so far")
    for c in chats:
        line = " ".join(c.text.split())
        clipped_row(t, c.question, line if len(line) <= TAIL else f"...{line[-TAIL:]}")
    return t


def _show_chats(batch: DemoBatch) -> None:
    from pyspec.cli.tables import clipped_row, show, table

    numbers = ("tokens", "accepted", "a round", "tok/s")
    t = table("question", "answer", *numbers, right=numbers)
    for c in batch.chats:
        cells = (f"{c.n_predicted}", f"{c.acceptance:.0%}", f"{c.mean_len:.2f}", f"{c.rate:.0f}")
        clipped_row(t, c.question, c.text, *cells)
    show(t)


def _show_races(races: Sequence[Race], np: int) -> None:
    from statistics import median

    from pyspec.cli.tables import row, show, table

    t = table(
        "tokens/s",
        "plain",
        "speculative",
        "ratio",
        "lowest .. highest turn",
        right=("plain", "speculative", "ratio"),
    )
    for race in races:
        r = race.ratios
        cells = (f"{median(race.plain):.0f}", f"{median(race.spec):.0f}", f"x{median(r):.2f}")
        row(t, race.title, *cells, f"{min(r):.2f} .. {max(r):.2f} of {len(r)}")
    show(t)
    for race in races:
        if median(race.ratios) <= 1:
            click.echo(f"{race.title}: speculation was not faster here; the machine may be busy")
