"""Work of an engine that no caller waits for: its end when the last reference goes, and events on their way to a coroutine."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable
from contextlib import suppress

from pyspec.engine.protocol import Core
from pyspec.request import Event

log = logging.getLogger(__name__)


def end_aside(core: Core) -> None:
    """Nobody has the engine any more. This may be said on any thread, even the core's own, in the middle of anything: nothing waits."""
    with suppress(RuntimeError):  # the program ends, and the core with it
        threading.Thread(target=_end, args=([core],), name="pyspec-end", daemon=True).start()


def _end(held: list[Core]) -> None:
    """Close a core, and let go of it. Errors of coroutines hold what they passed through in circles, so that the core's processes would be there
    until Python looks for those: it looks now."""
    held.pop().close()
    gc.collect()


def to_loop(
    loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Event], cancel: Callable[[str], None]
) -> Callable[[Event], None]:
    """A listener that puts events where a coroutine of `loop` waits for them. Once the loop is closed nobody does: the request ends."""

    def on_event(event: Event) -> None:
        try:
            loop.call_soon_threadsafe(events.put_nowait, event)
        except RuntimeError:
            if not loop.is_closed():
                raise
            cancel(event.request)

    return on_event
