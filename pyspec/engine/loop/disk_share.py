"""The prefix cache on disk over several ranks (--tp): each rank writes and reads its share of an entry in a file of its own.

The first rank decides (disk_tier.py): what is written, and what is read. `OtherShares` is its view of the others. It places an entry only
once every rank has read and checked its own file. `DiskShare` is one of the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from pyspec.cache import n_cores
from pyspec.device.commands import (
    DropEntry,
    ForgetEntries,
    OfDisk,
    OpenDisk,
    PlaceEntry,
    ReadEntry,
    StoreEntry,
)
from pyspec.device.follow import Follower
from pyspec.device.lead import KeptElsewhere, Leader
from pyspec.device.worker import is_device_error, stamp
from pyspec.engine.aside import AsideThread
from pyspec.engine.loop.disk_entry import EntryCodec, PageRun, Piece, WantedEntry, host_copies
from pyspec.engine.messages import EntryNews
from pyspec.errors import BadSlotFile, PyspecError
from pyspec.repeats import limited
from pyspec.slots.disk_folder import END, DiskEntry, DiskFolder
from pyspec.slots.memory import Checkpoint
from pyspec.slots.slot_file import Bytes
from pyspec.slots.states import Saved, to_host

log = limited(__name__)

TICK_S = 0.1  # between looks at whether an answer is still wanted


@dataclass(eq=False)
class _Asked:
    """Files that the other ranks read or write: of how many no news came. n_bytes: in host memory of each of them meanwhile."""

    left: int
    n_bytes: int = 0
    why_not: str = ""
    has_all: bool = True
    over: threading.Event = field(default_factory=threading.Event)


class OtherShares:
    """The other ranks' files, seen from the first rank. Call `store` and `place` on the engine's thread, the rest on any.

    in_flight                  bytes that they have copied and not written yet
    read_bytes, written_bytes  of all of them
    on_written                 called with the reason, "" if there is none, when one of them has written or refused a file
    """

    def __init__(self, leader: Leader) -> None:
        self.leader, self.n = leader, leader.ranks.rank.n - 1
        self.in_flight = self.read_bytes = self.written_bytes = 0
        self.on_written: Callable[[str], None] = lambda failure: None
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._reads: dict[int, _Asked] = {}
        self._writes: dict[int, _Asked] = {}

    def open(self, folder: DiskFolder, n_buffer: int) -> None:
        """Have them use a folder. n_buffer: whole segments that are read at a time."""
        self.leader.tell(OpenDisk(str(folder.path), folder.identity, folder.limit, n_buffer))

    def hear(self, index: int, news: EntryNews) -> None:
        """A rank has read or written its file."""
        with self._lock:
            is_read = news.number in self._reads
            asked = self._reads.get(news.number) or self._writes.get(news.number)
            if is_read:
                self.read_bytes += news.n_bytes
            else:
                self.written_bytes += news.n_bytes
            if asked is None:  # of something that was dropped
                return
            asked.left -= 1
            asked.has_all &= not news.failure and not news.gone
            if news.failure:
                asked.why_not = f"rank {index}: {news.failure}"
            if not is_read:
                self.in_flight -= asked.n_bytes
            if not asked.left:
                self._writes.pop(news.number, None)
                asked.over.set()
        if not is_read:
            self.on_written(asked.why_not if news.failure else "")

    # -- writing -------------------------------------------------------------------------------------------------

    def store(self, want: WantedEntry, pages: Sequence[int], saved: Saved | None, n_bytes: int) -> None:
        """Have them copy and write an entry's content. n_bytes: of the first rank's share."""
        number, kept = next(self._numbers), None if saved is None else saved.checkpoint.elsewhere
        state = kept.number if isinstance(kept, KeptElsewhere) else -1
        with self._lock:
            self._writes[number] = _Asked(self.n, n_bytes)
            self.in_flight += self.n * n_bytes
        entry, at = want.entry, want.at
        tokens = want.text.tokens[at - entry.n : at]
        self.leader.send(StoreEntry(number, entry, tokens, at, want.used, tuple(pages), state))

    def forget(self, tokens: Sequence[int] | None, salt: str = "") -> None:
        """Have them remove a text's entries, or all, behind what they write."""
        self.leader.tell(ForgetEntries(None if tokens is None else tuple(tokens), salt))

    # -- reading -------------------------------------------------------------------------------------------------

    def read(self, entry: DiskEntry, i: int, tokens: Sequence[int]) -> int:
        """Have them read and check their files of an entry behind segment `i`. Returns the number for `wait`."""
        number = next(self._numbers)
        with self._lock:
            self._reads[number] = _Asked(self.n)
        self.leader.tell(ReadEntry(number, entry, i, tuple(tokens)))
        return number

    def wait(self, number: int, is_wanted: Callable[[], bool]) -> bool:
        """Wait until all have answered. Returns True if each of them has its share, whole and right. Raises BadSlotFile if one is damaged."""
        asked = self._reads[number]
        while not asked.over.wait(TICK_S):
            if not is_wanted():
                return False
        if asked.why_not:
            raise BadSlotFile(asked.why_not)
        return asked.has_all

    def place(self, number: int, run: PageRun, *, has_state: bool) -> KeptElsewhere | None:
        """Have them write what they have read into their pages. Returns their part of its state."""
        with self._lock:
            self._reads.pop(number, None)
        kept = self.leader.keep() if has_state else None
        state = -1 if kept is None else kept.number
        self.leader.send(PlaceEntry(number, run.shared, tuple(run.pages), state))
        return kept

    def drop(self, number: int) -> None:
        """Have them drop what they have read, unless it was placed."""
        with self._lock:
            if self._reads.pop(number, None) is None:
                return
        self.leader.tell(DropEntry(number))


class DiskShare:
    """The share of a rank that follows. tell: sends its news to the first rank."""

    def __init__(
        self, follower: Follower, index: int, n: int, tell: Callable[[EntryNews], None]
    ) -> None:
        self.follower, self.index, self.n, self._tell = follower, index, n, tell
        memory, device = follower.memory, follower.target.device
        self.codec = EntryCodec(memory, follower.table, device, lambda: memory.paged, lambda: None)
        self.folder: DiskFolder | None = None
        self._lock = threading.Lock()
        self._reading: set[int] = set()
        self._pieces: dict[int, Piece] = {}
        self._free: SimpleQueue[Bytes] = SimpleQueue()
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._readers: ThreadPoolExecutor | None = None

    @torch.inference_mode()
    def obey(self, command: OfDisk) -> None:
        """Run one command, on the rank's thread. Only a failure of the device ends it."""
        if isinstance(command, OpenDisk):
            self.folder = DiskFolder(
                Path(command.path), command.identity, command.limit, self.index, self.n
            )
            self._readers = ThreadPoolExecutor(max(1, min(4, n_cores() // 2)), "pyspec-disk-read")
            for _ in range(command.n_buffer):  # here: another thread would lock pages for the first GPU
                self._free.put(self.codec.host(self.codec.segment_bytes))
            AsideThread(self._run, "pyspec-disk").start()
        elif isinstance(command, StoreEntry):
            self._store(command)
        elif isinstance(command, ReadEntry):
            assert self._readers is not None
            self._reading.add(command.number)
            self._readers.submit(self._read, command)
        elif isinstance(command, PlaceEntry):
            self._place(command)
        elif isinstance(command, DropEntry):
            with self._lock:
                self._reading.discard(command.number)
                piece = self._pieces.pop(command.number, None)
            self._give_back(piece)
        else:
            self._tasks.put(partial(self._forget, command))

    # -- writing -------------------------------------------------------------------------------------------------

    def _store(self, c: StoreEntry) -> None:
        try:
            state = None if c.state < 0 else self.follower.kept_states[c.state]
            tensors = self.codec.taken(c.pages)
            head: dict[str, Any] = {}
            if c.entry.kind == END:
                head, more = self.codec.state_of(state, None)
                tensors += more
            here = _run_through(host_copies(tensors))
            copied = stamp(self.codec.device)
        except Exception as e:
            if is_device_error(e):
                raise
            self._tell(EntryNews(c.number, failure=f"{type(e).__name__}: {str(e)[:200]}"))
            return
        self._tasks.put(partial(self._write, c, head, here, copied))

    def _write(self, c: StoreEntry, head: dict[str, Any], tensors: list[Tensor], copied: Any) -> None:
        failure, n_bytes = "", 0
        try:
            if copied is not None:
                copied.synchronize()
            assert self.folder is not None
            pieces = self.codec.pieces(c.tokens, tensors)
            n_bytes = self.folder.write(c.at, c.entry, head, pieces, c.used)
        except PyspecError as e:
            failure = str(e)
        except Exception as e:
            log.exception("the prefix cache on disk failed")
            failure = f"{type(e).__name__}: {str(e)[:200]}"
        self._tell(EntryNews(c.number, n_bytes, failure))

    def _forget(self, c: ForgetEntries) -> None:
        assert self.folder is not None
        if c.tokens is None:
            self.folder.clear()
        else:
            self.folder.forget(c.tokens, c.salt)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except OSError:  # the first rank has ended
                return
            except Exception:
                log.exception("the prefix cache on disk failed")
            del task

    # -- reading -------------------------------------------------------------------------------------------------

    def _read(self, c: ReadEntry) -> None:
        piece, failure, buffer = None, "", None
        assert self.folder is not None
        if c.entry.kind != END:
            with suppress(Empty):  # the first rank has as many, and a buffer for each that it asks for
                buffer = self._free.get_nowait()
        try:
            file = self.folder.open(c.entry)
            if file is not None:
                with file:
                    piece = self.codec.read(file, c.entry, c.i, c.tokens, buffer)
        except BadSlotFile as e:
            failure = str(e)
            self.folder.discard(c.entry)
        except Exception as e:
            log.exception("the prefix cache on disk could not be read")
            failure = f"{type(e).__name__}: {str(e)[:200]}"
        with self._lock:
            is_wanted = c.number in self._reading
            self._reading.discard(c.number)
            if is_wanted and piece is not None:
                self._pieces[c.number] = piece
        if not is_wanted:
            self._give_back(piece)
        if buffer is not None and (piece is None or piece.buffer is None):
            self._free.put(buffer)
        n_bytes = 0 if piece is None else piece.content.size
        with suppress(OSError):  # the first rank has ended
            self._tell(EntryNews(c.number, n_bytes, failure, piece is None and not failure))

    def _give_back(self, piece: Piece | None) -> None:
        if piece is not None and piece.buffer is not None:
            self._free.put(piece.buffer)

    def _place(self, c: PlaceEntry) -> None:
        with self._lock:
            piece = self._pieces.pop(c.number)
        restored = self.codec.fill(piece, PageRun(c.shared, c.pages))
        if c.state >= 0:
            assert restored is not None and restored.checkpoint is not None
            state: Checkpoint = to_host(restored.checkpoint)
            self.follower.kept_states[c.state] = state
        self._give_back(piece)

    def close(self) -> None:
        """End the threads; what is copied is still written."""
        self._tasks.put(None)
        if self._readers is not None:
            self._readers.shutdown(wait=False, cancel_futures=True)


def _run_through(copies: Generator[None, None, list[Tensor]]) -> list[Tensor]:
    """The result of copies without a pause."""
    while True:
        try:
            next(copies)
        except StopIteration as e:
            found: list[Tensor] = e.value
            return found
