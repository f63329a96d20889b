"""Reads entries of the disk's prefix cache for prompts, and checks them, on threads beside the engine's (disk_tier.py)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue

from pyspec.cache import n_cores
from pyspec.engine.loop.disk_entry import EntryCodec, Piece, RestoredState
from pyspec.engine.loop.disk_share import OtherShares
from pyspec.errors import BadSlotFile
from pyspec.repeats import limited
from pyspec.slots.disk_folder import END, SEGMENT, DiskEntry, DiskFolder, DiskHit
from pyspec.slots.slot_file import Bytes
from pyspec.slots.table import Slot

log = limited(__name__)

MOST_READ = 256 << 20  # bytes of host memory for what is read and not in a slot yet
TRIES = 4  # times that a prompt is looked up: each damaged file that is found costs one


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
    state: RestoredState | None = None
    advanced: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)


class EntryReader:
    """others   the other ranks' shares of each entry, if there are any
    worth    least number of tokens that are read
    on_read  called when a piece is there
    n_bytes  that were read
    buffers  memory for whole segments, of which there are `n_buffer`
    """

    def __init__(
        self, codec: EntryCodec, others: OtherShares | None, worth: int, on_read: Callable[[], None]
    ) -> None:
        self.codec, self.others, self.worth, self._on_read = codec, others, worth, on_read
        self.n_bytes = 0
        self._is_closed = False
        self._count = threading.Lock()
        n_byte, n_reader = codec.segment_bytes, max(1, min(4, n_cores() // 2))
        self.buffers: SimpleQueue[Bytes] = SimpleQueue()
        self.n_buffer = max(2, min(n_reader + 2, MOST_READ // max(n_byte, 1)))
        for _ in range(self.n_buffer):
            self.buffers.put(codec.host(n_byte))
        self._readers = ThreadPoolExecutor(n_reader, "pyspec-disk-read")

    def give_back(self, piece: Piece) -> None:
        """The memory of a piece is free again. What was not placed is dropped on the other ranks."""
        if piece.buffer is not None:
            self.buffers.put(piece.buffer)
        if self.others is not None:
            self.others.drop(piece.number)

    def stop(self, restore: Restore) -> None:
        """Take nothing more for a prompt."""
        with restore.lock:
            restore.is_stopped = True
        while restore.pieces:
            self.give_back(restore.pieces.popleft())

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
        """Read and check the entry behind segment `i`, on every rank, and offer it to the engine's thread."""
        buffer = self._take_buffer(restore) if entry.kind != END else None
        piece, number = None, -1
        is_wanted = lambda: not (restore.is_stopped or self._is_closed)  # noqa: E731
        try:
            if not is_wanted():
                return False
            tokens = restore.tokens[i * SEGMENT : i * SEGMENT + entry.n]
            if self.others is not None:
                number = self.others.read(entry, i, tokens)
            file = folder.open(entry)
            if file is None:  # another engine has removed it
                folder.list_again()
            else:
                with file:
                    piece = self.codec.read(file, entry, i, tokens, buffer)
            if self.others is not None:
                has_all = self.others.wait(number, is_wanted)
                piece = replace(piece, number=number) if piece is not None and has_all else None
                if not has_all:
                    folder.list_again()
        except BadSlotFile as e:
            log.warning("the prefix cache on disk: %s; it is ignored and removed", e)
            folder.discard(entry)
            piece = None
        finally:
            if piece is None and self.others is not None:
                self.others.drop(number)
            if buffer is not None and (piece is None or piece.buffer is None):
                self.buffers.put(buffer)
        return piece is not None and self._offer(restore, piece)

    def _take_buffer(self, restore: Restore) -> Bytes | None:
        while not restore.is_stopped and not self._is_closed:
            try:
                return self.buffers.get(timeout=0.1)
            except Empty:
                continue
        return None

    def _offer(self, restore: Restore, piece: Piece) -> bool:
        with self._count:
            self.n_bytes += piece.content.size
        with restore.lock:
            if restore.is_stopped:
                self.give_back(piece)
                return False
            restore.pieces.append(piece)
        self._on_read()
        return True
