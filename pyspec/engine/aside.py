"""Work of an engine without a waiting caller: closing it with the last reference, and passing events to a coroutine."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from pyspec.engine.protocol import Core
from pyspec.request import Event
from pyspec.text.template import ChatTemplate

log = logging.getLogger(__name__)


def end_aside(core: Core, templates: list[ChatTemplate]) -> None:
    """Close an engine and its templates' processes after its last reference is gone. This may run on any thread, even the core's own, so
    nothing waits."""
    with suppress(RuntimeError):  # the program ends, and the core with it
        threading.Thread(target=_end, args=([core], templates), name="pyspec-end", daemon=True).start()


def _end(held: list[Core], templates: list[ChatTemplate]) -> None:
    """Close a core and release it. Errors of coroutines hold their frames in reference cycles, which would keep the core's memory:
    collect them now."""
    held.pop().close()
    for template in templates:
        template.close()
    gc.collect()


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
