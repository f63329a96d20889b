"""Work of an engine without a waiting caller: threads that the program waits for at its end, and passing events to a coroutine."""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections.abc import Callable

from pyspec.request import Event

LIMIT_S = 60.0  # of a close: twice 30 s for an engine in a process of its own


class AsideThread(threading.Thread):
    """A thread that may free tensors, so the program waits for it before the interpreter ends.

    Freeing can release the GIL: mapped memory goes back to the system, weak references call Python. An ending interpreter stops a thread
    that asks for the GIL again. Inside a destructor of C++ that aborts the process, with "terminate called without an active exception".
    """

    def __init__(self, do: Callable[[], None], name: str) -> None:
        super().__init__(target=do, name=name, daemon=True)


@atexit.register
def _wait() -> None:
    """Wait for all of them, within a limit that holds for a device that hangs."""
    limit = time.monotonic() + LIMIT_S
    for thread in threading.enumerate():
        if isinstance(thread, AsideThread):
            thread.join(max(0.0, limit - time.monotonic()))


def to_loop(
    loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Event], cancel: Callable[[str], None]
) -> Callable[[Event], None]:
    """A listener that puts events into a queue of `loop`. If the loop is closed, it ends the request."""

    def on_event(event: Event) -> None:
        try:
            loop.call_soon_threadsafe(events.put_nowait, event)
        except RuntimeError:
            if not loop.is_closed():
                raise
            cancel(event.request)

    return on_event
