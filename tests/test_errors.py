"""Errors are data: they cross processes unchanged."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

import pytest

from pyspec.errors import OutOfBounds, PromptTooLong, PyspecError, QueueFull, SlotError
from pyspec.server.http.envelope import Refused

ARGUMENTS: dict[type[PyspecError], tuple[object, ...]] = {
    PromptTooLong: (9000, 8192),
    QueueFull: (32, 3),
    OutOfBounds: ("page", 77, 64, 3),
    Refused: (405, "use POST"),
}
"""Of errors that make their message themselves."""


def kinds(of: type[PyspecError] = PyspecError) -> Iterator[type[PyspecError]]:
    yield of
    for kind in of.__subclasses__():
        if kind.__module__.startswith("pyspec."):  # tests have kinds of their own
            yield from kinds(kind)


@pytest.mark.parametrize("kind", [*kinds()], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "send",
    [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy],
    ids=["pickled", "copied", "deep"],
)
def test_an_error_arrives_as_it_was_sent(
    kind: type[PyspecError], send: Callable[[PyspecError], PyspecError]
) -> None:
    error = kind(*ARGUMENTS.get(kind, ("page 7 is gone; load again",)))
    error.add_note("seen in a child process")
    if isinstance(error, SlotError):
        error.slot = 5
    there = send(error)
    assert type(there) is kind and str(there) == str(error) and there.args == error.args
    assert vars(there) == vars(error) and (there.status, there.kind, there.exit_code) == (
        error.status,
        error.kind,
        error.exit_code,
    )
