"""A process that forks writers into one folder of the disk's prefix cache, kills each at a random point, and reads everything back.

    python disk_writer.py FOLDER N_KILL SEED MIB N_WRITER

Several writers write the same texts at the same time, as engines of one model do, and all of them are killed. It writes a JSON object: the kills, those in the middle of a file, the entries that were read, and those whose content was wrong.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from hashlib import shake_128
from pathlib import Path

import numpy as np

from pyspec.errors import BadSlotFile
from pyspec.slots import disk_folder, span_file
from pyspec.slots.disk_folder import END, SEGMENT, DiskEntry, DiskFolder
from pyspec.slots.span_file import Bytes

IDENTITY = {"model": "a"}


def content_of(entry: DiskEntry) -> Bytes:
    """The only right content of an entry: of a size that differs from one to the next, over one chunk for some."""
    n = 5000 + int(entry.key[:6], 16) % (3 << 19)
    return np.frombuffer(shake_128(entry.name.encode()).digest(n), np.uint8)


def entries_of(folder: DiskFolder, seed: int) -> list[tuple[int, DiskEntry]]:
    """Entries of a text that shares its first segment with half of the others."""
    rng = random.Random(seed)
    tokens = random.Random(seed % 2).choices(range(1000), k=SEGMENT) + rng.choices(range(1000), k=600)
    chain = folder.chain(tokens)
    return [(SEGMENT * (i + 1), chain.segment(i)) for i in range(3)] + [(800, chain.end(800))]


def write_texts(folder: DiskFolder, seed: int) -> None:
    """Write text after text, for ever."""
    while True:
        for at, entry in entries_of(folder, seed):
            content = content_of(entry)
            folder.write(
                at, entry, {"n": content.size}, [content[:1000], content[1000:]], time.time_ns()
            )
        seed += 1


def kill_at_call(n: int) -> None:
    """Kill this process at its n-th call of the system, before or behind it."""
    left = [n]

    def counted(do: object) -> object:
        def call(*args: object, **named: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return do(*args, **named)  # type: ignore[operator]

        return call

    for name in ("replace", "fsync", "utime", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    span_file.digest = counted(span_file.digest)  # type: ignore[assignment]  # called before each piece is written


def read_all(folder: DiskFolder) -> tuple[int, int]:
    """(entries that are believed, those of them that are wrong)."""
    n_read = n_wrong = 0
    for name in sorted(folder.index().names):
        entry = DiskEntry.of(name)
        assert entry is not None and entry.kind in ("pages", END)
        if (content := content_in(folder, entry)) is not None:
            n_read += 1
            n_wrong += not np.array_equal(content, content_of(entry))
    return n_read, n_wrong


def content_in(folder: DiskFolder, entry: DiskEntry) -> Bytes | None:
    """None: it is gone, or not believed."""
    try:
        file = folder.open(entry)
        if file is None:
            return None
        with file:
            return file.read(file.head["n"])
    except BadSlotFile:
        return None


def begin_writer(path: Path, mib: int, seed: int, at_call: int) -> int:
    """Fork a process that writes texts, and kills itself at a call of the system unless that is 0. Returns its id."""
    pid = os.fork()
    if pid == 0:
        if at_call:
            kill_at_call(at_call)
        write_texts(DiskFolder(path, IDENTITY, mib << 20), seed)
    return pid


def main(path: Path, n_kill: int, seed: int, mib: int, n_writer: int) -> dict[str, int]:
    rng = random.Random(seed)
    if n_writer == 1:
        disk_folder.YOUNG_S = (
            0.0  # one writer after the other: none can be taken for dead before it has its lock
        )
    folder = DiskFolder(path, IDENTITY, mib << 20)
    found = {"kills": 0, "halves": 0, "read": 0, "wrong": 0, "most_bytes": 0}
    for i in range(n_kill):
        hidden = {f for f in path.rglob(".*") if f.is_file()}
        at_calls = [rng.randrange(1, 40) if i % 2 else 0 for _ in range(n_writer)]
        text = rng.randrange(1000)
        pids = [begin_writer(path, mib, text, at) for at in at_calls]
        if not i % 2:
            time.sleep(rng.random() * 0.03)
            for pid in rng.sample(pids, n_writer):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            _, status = os.waitpid(pid, 0)
            found["kills"] += os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        found["halves"] += bool({f for f in path.rglob(".*") if f.is_file()} - hidden)
        for n, name in zip(read_all(folder), ("read", "wrong"), strict=True):
            found[name] += n
        n_bytes = sum(f.stat().st_size for f in path.rglob("*.*") if f.is_file() and f.name[0] != ".")
        found["most_bytes"] = max(found["most_bytes"], n_bytes)
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), *map(int, sys.argv[2:6]))))
