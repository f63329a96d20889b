"""How far a load is: whoever loads says so here, whoever shows it listens. It costs nothing if nobody does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str, float], None]
"""Takes the stage and how much of it is done, 0 to 1; called on any thread, must not block."""

_listeners: list[Listener] = []


def report(stage: str, fraction: float = 0.0) -> None:
    """Say how far a load is."""
    for listener in tuple(_listeners):
        listener(stage, fraction)


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Tell a listener of every report of this process, and of its engine's process, while the block runs."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
