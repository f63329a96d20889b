"""Reads entries of the disk's prefix cache for prompts, and checks them, on threads beside the engine's (disk_tier.py)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue

from pyspec.cache import n_cores
from pyspec.engine.loop.span import SpanCodec, StoredSpan
from pyspec.errors import BadSlotFile
from pyspec.repeats import limited
from pyspec.slots.disk_folder import END, SEGMENT, DiskEntry, DiskFolder, DiskHit
from pyspec.slots.span_file import Bytes
from pyspec.slots.states import Saved
from pyspec.slots.table import Slot

log = limited(__name__)

MOST_READ = 256 << 20  # bytes of host memory for what is read and not in a slot yet
TRIES = 4  # times that a prompt is looked up: each damaged file that is found costs one


@dataclass(frozen=True, slots=True)
class Piece:
    """An entry's content, checked. buffer: the reader's memory that holds it, to be given back; None: its own."""

    span: StoredSpan
    buffer: Bytes | None


@dataclass(eq=False)
class Restore:
    """A prompt that is looked for on the disk, for the request in a slot that has the first `n_have` of its tokens.

    pieces  checked content that is not in the slot yet
    found   what was read, once `is_read`; None: nothing
    state   behind the pages, once it is here
    """

    slot: Slot
    tokens: Sequence[int]
    n_have: int
    heard: float
    pieces: deque[Piece] = field(default_factory=deque)
    found: DiskHit | None = None
    is_read: bool = False
    is_stopped: bool = False
    state: Saved | None = None
    advanced: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)


class EntryReader:
    """worth    least number of tokens that are read
    on_read  called when a piece is there
    n_bytes  that were read
    buffers  memory for whole segments
    """

    def __init__(self, codec: SpanCodec, worth: int, on_read: Callable[[], None]) -> None:
        self.codec, self.worth, self._on_read = codec, worth, on_read
        self.n_bytes = 0
        self._is_closed = False
        self._count = threading.Lock()
        n_byte, n_reader = codec.bytes_of(SEGMENT), max(1, min(4, n_cores() // 2))
        self.buffers: SimpleQueue[Bytes] = SimpleQueue()
        for _ in range(max(2, min(n_reader + 2, MOST_READ // max(n_byte, 1)))):
            self.buffers.put(codec.host(n_byte))
        self._readers = ThreadPoolExecutor(n_reader, "pyspec-disk-read")

    def give_back(self, buffer: Bytes | None) -> None:
        """The memory of a piece is free again."""
        if buffer is not None:
            self.buffers.put(buffer)

    def stop(self, restore: Restore) -> None:
        """Take nothing more for a prompt."""
        with restore.lock:
            restore.is_stopped = True
        while restore.pieces:
            self.give_back(restore.pieces.popleft().buffer)

    def close(self) -> None:
        """End the threads."""
        self._is_closed = True
        self._readers.shutdown(wait=False, cancel_futures=True)

    def look(self, folder: DiskFolder, restore: Restore) -> None:
        """Find a prompt, and read what is found. Runs on a thread of its own."""
        at_end = self.codec.memory.needs_state
        for _ in range(TRIES):
            found = folder.find(
                restore.tokens, restore.n_have, at_end=at_end, salt=restore.slot.owner.salt
            )
            if found is None or found.n - restore.n_have < self.worth or restore.is_stopped:
                return
            if self._read_all(folder, restore, found):
                restore.found = found
                folder.touch(found.used, time.time_ns())
                return

    def _read_all(self, folder: DiskFolder, restore: Restore, found: DiskHit) -> bool:
        """Read entries for the slot. Returns False if one is damaged or gone."""
        n_segment = found.first + len(found.pages)
        if found.end is not None and not self._read_one(folder, restore, n_segment, found.end):
            return False
        read = partial(self._read_one, folder, restore)
        numbers = range(found.first, n_segment)
        return all([*self._readers.map(read, numbers, found.pages)]) and not restore.is_stopped

    def _read_one(self, folder: DiskFolder, restore: Restore, i: int, entry: DiskEntry) -> bool:
        """Read the entry behind segment `i`, and offer it to the engine's thread."""
        buffer, span = self._take_buffer(restore) if entry.kind != END else None, None
        try:
            if not (restore.is_stopped or self._is_closed):
                span = self._checked(folder, restore.tokens, i, entry, buffer)
        except BadSlotFile as e:
            log.warning("the prefix cache on disk: %s; it is ignored and removed", e)
            folder.discard(entry)
        finally:
            if span is None:
                self.give_back(buffer)
        return span is not None and self._offer(restore, Piece(span, buffer))

    def _checked(
        self, folder: DiskFolder, text: Sequence[int], i: int, entry: DiskEntry, into: Bytes | None
    ) -> StoredSpan | None:
        """The content of an entry, which is behind segment `i` of a text. None if it is gone. Raises BadSlotFile."""
        file = folder.open(entry)
        if file is None:  # another engine has removed it
            folder.list_again()
            return None
        with file:
            first = i * SEGMENT
            span = self.codec.read(file, first, entry.n, into)
            if span.content[0].tolist() != list(text[first : first + entry.n]):
                raise file.bad("it has other tokens than its name says")
            states = [state.n_past for state in span.states]
            wanted = [span.end] if entry.kind == END else []
            if states != wanted and (states or self.codec.memory.needs_state):
                raise file.bad("it has not the state that it should have")
        return span

    def _offer(self, restore: Restore, piece: Piece) -> bool:
        assert piece.span.whole is not None
        with self._count:
            self.n_bytes += piece.span.whole.numel()
        with restore.lock:
            if restore.is_stopped:
                self.give_back(piece.buffer)
                return False
            restore.pieces.append(piece)
        self._on_read()
        return True

    def _take_buffer(self, restore: Restore) -> Bytes | None:
        while not restore.is_stopped and not self._is_closed:
            try:
                return self.buffers.get(timeout=0.1)
            except Empty:
                continue
        return None
