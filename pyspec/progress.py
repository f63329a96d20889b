"""Progress of a load: the loader reports it here, displays listen. Without a listener it costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

DOWNLOAD = "download"  # the stage of a download starts with this; its file's name follows
Listener = Callable[[str, float], None]
"""Receives the stage and its done fraction, 0 to 1; called on any thread, must not block."""

part: ContextVar[str] = ContextVar("part", default="weights")
"""The part of the load that runs in this context: what it reads is reported under its name."""
is_stopped: ContextVar[Callable[[], bool]] = ContextVar("is_stopped", default=lambda: False)
"""Whether the download of this context is to end."""
_listeners: list[Listener] = []
_drawn: list[Listener] = []  # listeners that draw a bar


def report(stage: str, fraction: float = 0.0) -> None:
    """Report the progress of a load."""
    for listener in tuple(_listeners):
        listener(stage, fraction)


def is_drawn() -> bool:
    """True if a listener draws a bar: a library with its own bars then draws none."""
    return bool(_drawn)


@contextmanager
def listening(listener: Listener, *, draws: bool = False) -> Iterator[None]:
    """During the block, send every report of this process and of its engine's process to a listener.

    draws  the listener draws a bar
    """
    lists = [_listeners, _drawn] if draws else [_listeners]
    for each in lists:
        each.append(listener)
    try:
        yield
    finally:
        for each in lists:
            each.remove(listener)
