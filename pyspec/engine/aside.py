"""Work of an engine without a waiting caller: threads that the program waits for at its end, closing an engine with its last reference,
and passing events to a coroutine."""

from __future__ import annotations

import asyncio
import atexit
import gc
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import ParamSpec, TypeVar

from pyspec.engine.block_events import BlockPublisher
from pyspec.engine.protocol import Core
from pyspec.engine.result import Deadline
from pyspec.errors import PyspecError
from pyspec.request import Event
from pyspec.text.template import ChatTemplate

P = ParamSpec("P")
T = TypeVar("T")

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


def end_aside(
    core: Core, templates: list[ChatTemplate], publishers: Sequence[BlockPublisher] = ()
) -> None:
    """Close an engine, its templates' processes and its publishers after its last reference is gone. This may run on any thread, even the core's own, so
    nothing waits."""
    held = [core]
    with suppress(RuntimeError):  # the program ends, and the core with it
        AsideThread(lambda: _end(held, templates, publishers), "pyspec-end").start()


def _end(
    held: list[Core], templates: list[ChatTemplate], publishers: Sequence[BlockPublisher] = ()
) -> None:
    """Close a core and release it. Errors of coroutines hold their frames in reference cycles, which would keep the core's memory:
    collect them now."""
    held.pop().close()
    for template in templates:
        template.close()
    for publisher in publishers:
        publisher.close()
    gc.collect()


async def in_time(deadline: Deadline, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `make` on a thread. Raises its error, or TimedOut where it takes longer."""
    try:
        async with asyncio.timeout(deadline.left()):
            return await asyncio.to_thread(make, *args, **kwargs)
    except TimeoutError as e:
        raise (e if isinstance(e, PyspecError) else deadline.error()) from None


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
