"""Parts of a streamed answer that go straight to their connection: a task, five wrappers and an HTTP state machine for each token of each
stream took two thirds of the server's time."""

from __future__ import annotations

from typing import Protocol

PARTS = "pyspec.parts"
"""Key of a request's `scope["state"]` with the PartWriter of its connection, if that has one."""


class PartWriter(Protocol):
    """Writes parts of the answer that is being sent. Used on the event loop."""

    @property
    def has_room(self) -> bool:
        """A part may be written now: the answer's head was sent, its end was not, and the client reads."""
        ...

    def write_part(self, data: bytes) -> None:
        """Write a part of the answer's body, which is not empty."""
        ...
