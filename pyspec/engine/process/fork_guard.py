"""Engines of this process do not survive a fork."""

from __future__ import annotations

import os

from pyspec.errors import Unavailable

_LOADED_IN: list[int] = []  # the process that loaded the first engine


def refuse_fork() -> None:
    """Refuse a fork of a process that has loaded an engine: torch's threads do not survive it, and its first product would hang."""
    here = os.getpid()
    if not _LOADED_IN:
        _LOADED_IN.append(here)
    elif _LOADED_IN[0] != here:
        raise Unavailable(
            f"an engine was loaded in process {_LOADED_IN[0]}, and its threads and device do not survive a fork: "
            f"in process {here} load one with isolated=True, or start that with spawn"
        )
