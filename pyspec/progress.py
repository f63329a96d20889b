"""How far a load is: whoever loads says so here, whoever shows it listens. It costs nothing if nobody does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

DOWNLOAD = "download"  # how the stage of a file that is fetched begins; its name follows
Listener = Callable[[str, float], None]
"""Takes the stage and how much of it is done, 0 to 1; called on any thread, must not block."""

_listeners: list[Listener] = []
_drawn: list[Listener] = []  # those of them that draw a bar


def report(stage: str, fraction: float = 0.0) -> None:
    """Say how far a load is."""
    for listener in tuple(_listeners):
        listener(stage, fraction)


def is_drawn() -> bool:
    """Whether somebody draws a bar of what is reported: a library that has bars of its own draws none then."""
    return bool(_drawn)


@contextmanager
def heard_by(listener: Listener, *, draws: bool = False) -> Iterator[None]:
    """Tell a listener of every report of this process, and of its engine's process, while the block runs.

    draws  it draws a bar of it
    """
    lists = [_listeners, _drawn] if draws else [_listeners]
    for each in lists:
        each.append(listener)
    try:
        yield
    finally:
        for each in lists:
            each.remove(listener)
