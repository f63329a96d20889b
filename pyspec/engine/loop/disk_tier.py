"""The prefix cache's tier on disk: texts that requests leave are written beside the rounds, and prompts that begin like them are read back.

The engine's thread never waits for the disk. It copies pages and states to host memory, one piece a round, and a thread writes them. A request
whose prompt may be there is seated, and its pages are filled between rounds while other threads read and check the files. If
anything is wrong with a file, the request goes on with what the engine has itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from pyspec.cache import n_cores
from pyspec.device.worker import Worker, is_device_error, stamp
from pyspec.engine.aside import AsideThread
from pyspec.engine.loop.span import SpanCodec, StoredSpan, encoded, host_copies
from pyspec.errors import BadSlotFile, PyspecError
from pyspec.repeats import limited
from pyspec.slots.cache import PrefixCache
from pyspec.slots.disk_folder import END, SEGMENT, DiskEntry, DiskFolder, DiskHit
from pyspec.slots.prefix import Hit
from pyspec.slots.span_file import Bytes
from pyspec.slots.states import Saved, bytes_of
from pyspec.slots.table import Slot

# -- reading and checking entries ------------------------------------------------------------------------------------
# Reads entries for prompts, and checks them, on threads beside the engine's.

log = limited(__name__)

MOST_READ = 256 << 20  # bytes of host memory for entries that are read and not in a slot yet
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
        """Find a prompt, and read the pages found. Runs on a thread of its own."""
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
            if span.tokens != list(text[first : first + entry.n]):
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


MOST_TEXTS = 64  # texts that wait to be compared with the folder; the oldest ones go
MOST_IN_FLIGHT = 256 << 20  # bytes of host memory for what is copied and not written yet
SHARE, MOST_SHARE_S = 0.1, 0.1  # of the time of a round that copies beside it take; most seconds of them
PATIENCE_S = 10.0  # without an answer of the disk, after which a request goes on without it
REST_S = 60.0  # after a failure, in which nothing is written, or read


@dataclass(frozen=True, slots=True)
class KeptText:
    """A text in the prefix tree, whose first `n` tokens are worth keeping. ends: places where entries end besides whole segments."""

    tokens: tuple[int, ...]
    n: int
    ends: tuple[int, ...]
    salt: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class WantedEntry:
    """An entry that the folder lacks. at: tokens of the text up to its end; used: when the text was, in nanoseconds."""

    text: KeptText
    at: int
    entry: DiskEntry
    used: int


class DiskTier:
    """open_folder  opens the folder, on the tier's own thread: naming a model reads parts of its file
    worth        least number of tokens that are written, or read
    on_work      called from other threads when `step` has something to do
    """

    def __init__(
        self,
        open_folder: Callable[[], DiskFolder],
        worker: Worker,
        cache: PrefixCache,
        worth: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.codec, self.cache, self.worth, self.clock = SpanCodec(worker), cache, worth, clock
        self.table, self.worker = worker.table, worker
        self.on_work: Callable[[], None] = lambda: None
        self.folder: DiskFolder | None = None
        self.written_bytes = 0
        self._open_folder = open_folder
        self._opened, self._arrived = threading.Event(), threading.Event()
        self._texts: deque[KeptText] = deque(maxlen=MOST_TEXTS)
        self._wants: deque[WantedEntry] = deque()
        self._known: set[str] = set()  # entries that are wanted or being written
        self._in_flight = 0
        self._count = threading.Lock()
        self._copying: Generator[None, None, None] | None = None
        self._no_write_until = self._no_read_until = 0.0
        self._stepped = 0.0
        self._is_closed = False
        self._failure = ""  # the reason why the last write failed
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.reader = EntryReader(self.codec, worth, self._has_read)
        self._thread = AsideThread(self._run, "pyspec-disk")
        self._thread.start()

    # -- writing: on the engine's thread --------------------------------------------------------------------------

    def keep(self, tokens: Sequence[int], n_prompt: int, salt: str = "") -> None:
        """A request has left these tokens in the prefix tree; `n_prompt` of them were its prompt."""
        if self._is_closed or self.clock() < self._no_write_until or len(tokens) < self.worth:
            return
        nodes, n = self.table.tree.path(tokens, salt)
        states = [s for node in nodes for s in node.states.values() if s.n_past <= n and not s.is_start]
        ends = {s.n_past for s in states}
        if self.worker.memory.needs_state:
            n = max(ends, default=0)
        else:
            ends |= {n, min(n, n_prompt // self.table.page_size * self.table.page_size)}
        worth = sorted((at for at in ends if at >= self.worth), reverse=True)
        if n >= self.worth:
            self._texts.append(KeptText(tuple(tokens), n, tuple(worth), salt))
            self._tasks.put(self._compare)

    @property
    def has_work(self) -> bool:
        """`step` has something to copy."""
        return self._copying is not None or (bool(self._wants) and self._in_flight < MOST_IN_FLIGHT)

    def step(self) -> None:
        """Start the copy of one piece to host memory, and of more within a share of the time of a round."""
        began = time.monotonic()
        until, self._stepped = began + _share(began - self._stepped), began
        while self.has_work:
            self._copy_piece()
            if time.monotonic() >= until:
                break

    def _copy_piece(self) -> None:
        if self._copying is None:
            self._copying = self._copy(self._wants.popleft())
        try:
            if next(self._copying, self) is self:
                self._copying = None
        except Exception as e:
            self._copying = None
            if is_device_error(e):
                raise
            self._no_write_until = self.clock() + REST_S
            log.exception("the prefix cache on disk: a text could not be copied")

    def _copy(self, want: WantedEntry) -> Generator[None, None, None]:
        """Copy an entry's content, piece by piece. Filed pages and states never change; what was evicted meanwhile is not written."""
        entry, at = want.entry, want.at
        nodes, n = self.table.tree.path(want.text.tokens[:at], want.text.salt)
        saved = None
        if n == at and entry.kind == END:
            state = next((s for s in (node.states.get(at) for node in nodes) if s is not None), None)
            saved = state.content if state is not None and isinstance(state.content, Saved) else None
        lacks_state = entry.kind == END and saved is None and self.worker.memory.needs_state
        if n < at or lacks_state or (entry.n == 0 and saved is None):
            self._known.discard(entry.name)
            return
        first, n_page = at - entry.n, self.table.pages_for(entry.n)
        behind = first // self.table.page_size
        pages = [node.page for node in nodes[behind : behind + n_page]]
        states = [] if saved is None else [replace(saved, logits=None)]
        span = self.codec.take(want.text.tokens[first:at], pages, states, lambda t: t, first)
        n_bytes = bytes_of(span)
        self._count_in_flight(n_bytes)
        try:
            here = yield from host_copies(span)
            copied = stamp(self.worker.device)
        except BaseException:
            self._known.discard(entry.name)
            self._count_in_flight(-n_bytes)
            raise
        self._tasks.put(partial(self._write, want, here, copied))

    # -- writing: on the tier's thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.folder = self._open_folder()
            self.folder.prepare()
            log.info("the prefix cache on disk: %s, %d MiB used", self.folder.path, self.n_bytes >> 20)
            for words in unlike(self.folder):
                log.info("the prefix cache on disk: %s", words)
        except (PyspecError, OSError) as e:
            log.warning("the prefix cache on disk (--cache-disk) is not used: %s", e)
            self._is_closed = True
        finally:
            self._opened.set()
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                log.exception("the prefix cache on disk failed")
            del task

    def _compare(self) -> None:
        """Find the entries of a text that the folder lacks."""
        if not self._texts or self.folder is None:
            return
        text = self._texts.popleft()
        chain, now = self.folder.chain(text.tokens, text.salt), time.time_ns()
        for at, entry in self.folder.missing(chain, text.n, text.ends, now):
            if entry.name not in self._known:
                self._known.add(entry.name)
                self._wants.append(WantedEntry(text, at, entry, now))
        if self._wants:
            self.on_work()

    def _write(self, want: WantedEntry, span: StoredSpan, copied: Any) -> None:
        try:
            if self.folder is not None and self.clock() >= self._no_write_until:
                if copied is not None:
                    copied.synchronize()
                self.written_bytes += self.folder.write(
                    want.at, want.entry, *encoded(span, self.table.handles), want.used
                )
                self._failure = ""
        except PyspecError as e:
            self._can_not_write(str(e))
        finally:
            self._known.discard(want.entry.name)
            self._count_in_flight(-bytes_of(span))
            self.on_work()

    def _can_not_write(self, why: str) -> None:
        self._no_write_until = self.clock() + REST_S
        reason = why.rpartition(": ")[2]
        level = logging.DEBUG if reason == self._failure else logging.WARNING
        log.log(level, "the prefix cache on disk: %s; nothing is written until that works", why)
        self._failure = reason

    def _count_in_flight(self, n_bytes: int) -> None:
        with self._count:
            self._in_flight += n_bytes

    def _drop(self, is_in: Callable[[KeptText], bool]) -> None:
        """Copy nothing more of these texts."""
        if self._copying is not None:
            copying, self._copying = self._copying, None
            copying.close()
        for want in list(self._wants):  # a copy: the tier's thread may add to them
            if is_in(want.text):
                self._wants.remove(want)
                self._known.discard(want.entry.name)

    def forget(self, tokens: Sequence[int], salt: str = "") -> None:
        """Remove the entries of a text."""
        first = tuple(tokens[:SEGMENT])
        self._drop(lambda text: text.salt == salt and text.tokens[:SEGMENT] == first)
        self._tasks.put(lambda: None if self.folder is None else self.folder.forget(tokens, salt))

    def clear(self) -> None:
        """Remove all entries that engines with these models and settings have written."""
        self._texts.clear()
        self._drop(lambda text: True)
        self._tasks.put(lambda: None if self.folder is None else self.folder.clear())

    # -- reading: on the engine's thread --------------------------------------------------------------------------

    def begin(self, slot: Slot, tokens: Sequence[int], hit: Hit) -> Restore | None:
        """Look for a prompt that has just been seated with `hit`; None if that is not worth it."""
        if self._is_closed or len(tokens) - 1 - hit.n < self.worth or self.clock() < self._no_read_until:
            return None
        restore = Restore(slot, tokens, hit.n, self.clock())
        AsideThread(partial(self._read, restore), "pyspec-disk-look").start()
        return restore

    def _has_read(self) -> None:
        self._arrived.set()
        self.on_work()

    def has_news(self, restore: Restore) -> bool:
        """`advance` has something to do."""
        is_late = self.clock() - restore.heard > PATIENCE_S
        return bool(restore.pieces) or restore.is_read or is_late

    def wait(self, seconds: float) -> None:
        """Wait for something to read."""
        self._arrived.wait(max(0.0, seconds))
        self._arrived.clear()

    def advance(self, restore: Restore) -> bool:
        """Put one piece or more into the slot's pages, within a share of the time of a round. Returns True once no more comes."""
        began = time.monotonic()
        until, restore.advanced = began + _share(began - restore.advanced), began
        while True:
            is_read = restore.is_read
            if restore.pieces and not self._put(restore, restore.pieces.popleft()):
                return True
            if is_read and not restore.pieces:
                return True
            if time.monotonic() >= until:
                break
            if not restore.pieces:
                self.wait(until - time.monotonic())
        if self.clock() - restore.heard <= PATIENCE_S:
            return False
        self._no_read_until = self.clock() + REST_S
        log.warning(
            "the prefix cache on disk has not answered for %.0f s: it is not read for %.0f s",
            PATIENCE_S,
            REST_S,
        )
        self.stop(restore)
        return True

    def _put(self, restore: Restore, piece: Piece) -> bool:
        """Returns False if that failed, for want of memory perhaps: the model reads the prompt then."""
        try:
            restore.state = self._place(restore.slot, piece.span) or restore.state
        except Exception as e:
            if is_device_error(e):
                raise
            log.exception("the prefix cache on disk: a prompt could not be restored")
            self._no_read_until = self.clock() + REST_S
            self.stop(restore)
            return False
        finally:
            self.reader.give_back(piece.buffer)
        restore.heard = self.clock()
        return True

    def _place(self, slot: Slot, span: StoredSpan) -> Saved | None:
        """Write an entry into the slot's pages, but those that other slots read. Returns its state, if it has one."""
        self.table.grow(slot, span.end)
        first, n_page = span.first // self.table.page_size, self.table.pages_for(span.n_token)
        shared = min(max(0, len(slot.nodes) - first), n_page)
        here = span.on(self.worker.device)
        self.codec.place(here, slot.pages[first + shared : first + n_page], shared)
        for head, tensors in self.codec.states(here):
            draft, _ = self.codec.extras(head, tensors)
            return Saved(self.worker.memory.make_state(head.n_past, iter(tensors)), draft)
        return None

    def finish(self, restore: Restore) -> object | None:
        """Give the slot the tokens that were restored, and their state. Returns the drafter's share."""
        slot, found, state = restore.slot, restore.found, restore.state
        if restore.is_stopped or found is None or found.n <= slot.n_past:
            self.stop(restore)
            return None
        if found.end is None or state is None or state.checkpoint.n_past != found.n:
            state = None
        if self.worker.memory.needs_state:
            if state is None:
                return None
            self.worker.memory.restore(slot.index, state.checkpoint)
        slot.tokens[:] = restore.tokens[: found.n]
        draft = None if state is None else state.draft
        self.cache.file_copy(slot, draft, self.worker.fold, self.worker.pools())
        return draft

    def stop(self, restore: Restore) -> None:
        """Take nothing more."""
        self.reader.stop(restore)

    # -- reading: on other threads --------------------------------------------------------------------------------

    def _read(self, restore: Restore) -> None:
        try:
            if self._opened.wait(PATIENCE_S) and self.folder is not None:
                self.reader.look(self.folder, restore)
        except Exception:
            if not self._is_closed:
                log.exception("the prefix cache on disk could not be read")
        finally:
            restore.is_read = True
            self._has_read()

    # -- the end -------------------------------------------------------------------------------------------------

    @property
    def n_bytes(self) -> int:
        """Bytes of all entries in the folder, by the last count."""
        return 0 if self.folder is None else self.folder.n_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes that were read."""
        return self.reader.n_bytes

    def flush(self, limit_s: float) -> None:
        """Copy and write what requests have left, within a limit. Called on the engine's thread when it ends."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            looked = threading.Event()
            self._tasks.put(looked.set)
            if not looked.wait(max(0.0, until - time.monotonic())) or not (self._wants or self._copying):
                break
            while self.has_work:
                self.step()

    def join(self, limit_s: float) -> None:
        """Wait for the thread that writes, after `close`."""
        self._thread.join(limit_s)

    def close(self) -> None:
        """End the threads; what is copied is still written."""
        self._is_closed, self.on_work = True, lambda: None
        self._tasks.put(None)
        self.reader.close()


def _share(seconds: float) -> float:
    """Seconds that are spent on the disk's behalf beside a round that took so many."""
    return min(SHARE * seconds, MOST_SHARE_S)


def unlike(folder: DiskFolder) -> list[str]:
    """A sentence about each set of entries of the same model that belongs to other settings or another number of ranks."""
    own, found = folder.identity, []
    for other in folder.others():
        if other.get("model") == own.get("model"):
            names = [x for x in sorted({*own, *other}) if own.get(x) != other.get(x)]
            ranks = f"--tp {other.get('ranks', 1)}" if "ranks" in names else ", ".join(names)
            found.append(
                f"it also has texts of this model with another layout ({ranks}), which are not used"
            )
    return found
