"""Processes that a test has started."""

from __future__ import annotations

from pathlib import Path


def lives(pid: int) -> bool:
    """Whether it runs; a process that ended but was not reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(parent: int, name: str) -> list[int]:
    """Processes below one that run a module."""
    found, todo = [], [parent]
    while todo:
        pid = todo.pop()
        for task in Path(f"/proc/{pid}/task").glob("*"):
            try:
                below = [int(x) for x in (task / "children").read_text().split()]
                found += [p for p in below if name in Path(f"/proc/{p}/cmdline").read_text()]
            except OSError:  # it ended meanwhile
                continue
            todo += below
    return found
