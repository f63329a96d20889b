"""The folder of the prefix cache on disk: entries by content, shared by all engines of a host. No torch here.

A text is cut into segments of SEGMENT tokens. The key of a segment is a digest of the key before it and its tokens, and the first key is a
digest of everything else that decides the content (models, types, layout), and of the text's salt if it has one. Rows of pictures have no ids
outside their process: their segment's key also digests which rows of which pictures they are. So equal keys mean equal content, whichever process wrote it,
and no index is shared: the names of the files are the index.

    DIR/<identity>/<parent>-<n>-<key>.pages   the pages of the whole segment behind `parent`
    DIR/<identity>/<parent>-<n>-<key>.end     the pages of n < SEGMENT tokens behind `parent`, and the state there

A file is written under another name, stored by the system, and renamed. Its head and every piece are checked before they are used
(span_file.py). Any file may vanish at any time: processes remove the least recently used ones to stay within the limit.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyspec.errors import BadSlotFile
from pyspec.slots.images import IMAGE, STORED, Handles, named
from pyspec.slots.span_file import ENTRY, Bytes, SpanFile, file_bytes, is_abandoned, write

FORMAT = 2  # raise it when the same tokens get another content
SEGMENT = 256  # tokens, a multiple of every page size
PAGES, END = "pages", "end"
_NAME = re.compile(r"([0-9a-f]{32})-(\d{1,4})-([0-9a-f]{32})\.(pages|end)")
_FILE = re.compile(rf"{_NAME.pattern}(?:\.[1-9]\d?)?")  # earlier versions wrote one for each rank
_FOLDER = re.compile(r"[0-9a-f]{32}")
_HIDDEN = re.compile(rf"\.{_FILE.pattern}\.\d+-[0-9a-f]+")  # a file that is being written
YOUNG_S = (
    2.0  # age from which a file that is being written is locked by its writer, or has none any more
)
SETTLED_NS = 100_000_000  # a folder that changed within this time may change again under the same time
SCAN_S = 1.0  # seconds after which all files are counted again
SCAN_SHARE = 0.01  # of the limit, after whose writing they are, too: other processes write as well
SLACK = 0.97  # of the limit, which is left when files are removed

Tokens = NDArray[np.int32] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DiskEntry:
    """`n` tokens behind those of `parent`, whose key is `key`; kind: PAGES or END."""

    parent: str
    n: int
    key: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.parent}-{self.n}-{self.key}.{self.kind}"

    @classmethod
    def of(cls, name: str) -> DiskEntry | None:
        """The entry with this file name; None if it is another file."""
        found = _NAME.fullmatch(name)
        return None if found is None else cls(found[1], int(found[2]), found[3], found[4])


@dataclass(frozen=True, slots=True)
class DiskHit:
    """The part of a prompt in the folder.

    n      tokens
    first  index of the first segment to read
    pages  whole segments from there on
    end    the entry behind them, if any
    used   all entries of this prefix, each with the number of tokens up to its end
    """

    n: int
    first: int
    pages: tuple[DiskEntry, ...]
    end: DiskEntry | None
    used: tuple[tuple[int, DiskEntry], ...]


class TextKeys:
    """The keys of a text: after each whole segment, and at any place behind one. handles: of the pictures in it."""

    def __init__(
        self, root: str, tokens: Sequence[int] | Tokens, handles: Handles | None = None
    ) -> None:
        self.ids, self.handles = np.asarray(tokens, dtype=np.int64), handles
        self.has_images = len(self.ids) > 0 and int(self.ids.max()) >= IMAGE
        self.tokens = np.where(self.ids >= IMAGE, STORED, self.ids).astype("<u4")
        self.keys = [root]
        for i in range(len(self.tokens) // SEGMENT):
            self.keys.append(self._key(i, SEGMENT))

    def _key(self, i: int, n: int) -> str:
        at = i * SEGMENT
        content = self.tokens[at : at + n].tobytes()
        if self.has_images:
            assert self.handles is not None
            content += named(self.ids[at : at + n].tolist(), self.handles)
        return sha256(bytes.fromhex(self.keys[i]) + content).hexdigest()[:32] if n else self.keys[i]

    def segment(self, i: int) -> DiskEntry:
        """The entry of a whole segment."""
        return DiskEntry(self.keys[i], SEGMENT, self.keys[i + 1], PAGES)

    def end(self, n_past: int) -> DiskEntry:
        """The entry of the text's first `n_past` tokens, behind their whole segments."""
        i, n = divmod(n_past, SEGMENT)
        return DiskEntry(self.keys[i], n, self._key(i, n), END)

    def has(self, i: int, entry: DiskEntry) -> bool:
        """The text goes on behind its segment `i` as the entry does."""
        return i * SEGMENT + entry.n <= len(self.tokens) and self._key(i, entry.n) == entry.key


@dataclass(slots=True)
class FolderIndex:
    """Entries of one identity, and the folder's time of change when they were listed.

    names  of all entries
    ends   by parent
    """

    changed: int = -1
    names: set[str] = field(default_factory=set)
    ends: dict[str, list[DiskEntry]] = field(default_factory=dict)


class DiskFolder:
    """Entries of one identity in a shared folder. Safe to call from any thread; every call may wait for the disk.

    identity  everything besides tokens that decides the content, as JSON values
    limit     bytes of all entries of all identities
    handles   of the pictures in texts
    """

    def __init__(
        self, path: Path, identity: dict[str, Any], limit: int, handles: Handles | None = None
    ) -> None:
        self.handles = handles
        self.identity = {"format": FORMAT, "segment": SEGMENT, **identity}
        self.root = sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()[:32]
        self.path, self.limit = path, limit
        self.here = path / self.root
        self.n_bytes = self._n_since = (
            0  # of all entries at the last count and those written since; those alone
        )
        self._counted = -SCAN_S
        self._index, self._lock = FolderIndex(), Lock()
        self._shunned: set[str] = set()  # damaged files that can not be removed

    def prepare(self) -> None:
        """Make the folder, and keep to the limit. Raises OSError if nothing could be written there."""
        self._make_folder()
        self._make_room(0, time.time_ns())
        if not os.access(self.here, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.here))

    def _make_folder(self) -> None:
        """For this user alone: entries have the texts that requests sent."""
        for folder in (self.path, self.here):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def chain(self, tokens: Sequence[int] | Tokens, salt: str = "") -> TextKeys:
        """The keys of a text under this identity."""
        root = sha256((self.root + salt).encode()).hexdigest()[:32] if salt else self.root
        return TextKeys(root, tokens, self.handles)

    # -- finding -------------------------------------------------------------------------------------------------

    def index(self) -> FolderIndex:
        """The entries that exist now."""
        with self._lock:
            try:
                changed = os.stat(self.here).st_mtime_ns
                if changed != self._index.changed:
                    settled = time.time_ns() - changed > SETTLED_NS
                    changed = changed if settled else -1
                    self._index = _listed(self.here, changed, self._shunned)
            except OSError:
                self._index = FolderIndex()
            return self._index

    def find(
        self, tokens: Sequence[int], n_have: int, *, at_end: bool, salt: str = ""
    ) -> DiskHit | None:
        """The longest prefix of a prompt, without its last token, beyond the `n_have` tokens that the engine has. None: no more than those.

        at_end  only where an end is: the models have state beside their pages
        """
        most, chain, index = len(tokens) - 1, self.chain(tokens[:-1], salt), self.index()
        n_whole = 0
        while n_whole < most // SEGMENT and chain.segment(n_whole).name in index.names:
            n_whole += 1
        ends = (
            (i, e)
            for i in range(n_whole, -1, -1)
            for e in sorted(index.ends.get(chain.keys[i], ()), key=lambda e: -e.n)
            if chain.has(i, e)
        )
        i, end = next(ends, (0, None))
        n = 0 if end is None else i * SEGMENT + end.n
        if not at_end and n_whole * SEGMENT > n:
            i, n, end = n_whole, n_whole * SEGMENT, None
        first = n_have // SEGMENT
        if n <= n_have:
            return None
        whole = [chain.segment(j) for j in range(i)]
        used = [((j + 1) * SEGMENT, e) for j, e in enumerate(whole)] + (
            [] if end is None else [(n, end)]
        )
        return DiskHit(n, first, tuple(whole[first:]), end, tuple(used))

    def missing(
        self, chain: TextKeys, n: int, ends: Sequence[int], now: int
    ) -> list[tuple[int, DiskEntry]]:
        """Entries of a text's first `n` tokens that do not exist, each with the number of tokens up to its end. The others are marked as used `now`."""
        index = self.index()
        lacks: list[tuple[int, DiskEntry]] = []
        has: list[tuple[int, DiskEntry]] = []
        wanted = [((i + 1) * SEGMENT, chain.segment(i)) for i in range(n // SEGMENT)]
        for at, entry in wanted + [(at, chain.end(at)) for at in ends]:
            (has if entry.name in index.names else lacks).append((at, entry))
        self.touch(has, now)
        return lacks

    def touch(self, entries: Iterable[tuple[int, DiskEntry]], now: int) -> None:
        """Mark entries as used at a time in nanoseconds; those at the end of a text a little earlier, so that they are removed first."""
        for at, entry in entries:
            with suppress(OSError):
                os.utime(self.here / entry.name, ns=(now, _stamp(now, at)))

    # -- reading and writing -------------------------------------------------------------------------------------

    def open(self, entry: DiskEntry) -> SpanFile | None:
        """The file of an entry, with a valid head that belongs here; None if it is gone. Raises BadSlotFile."""
        path = self.here / entry.name
        try:
            file = SpanFile(path, ENTRY)
        except BadSlotFile:
            if not os.path.lexists(path):
                return None
            raise
        if file.head.get("of") != self.identity or file.head.get("entry") != path.name:
            file.__exit__(None, None, None)
            raise file.bad("it has another entry's content, or one for other models or settings")
        return file

    def discard(self, entry: DiskEntry) -> None:
        """Remove an entry with a damaged file, or never look at it again."""
        try:
            os.unlink(self.here / entry.name)
        except FileNotFoundError:
            pass
        except OSError:
            self._shunned.add(entry.name)
        self.list_again()

    def list_again(self) -> None:
        """The next look-up lists the folder, whatever its time says."""
        self._index.changed = -1

    def write(
        self, at: int, entry: DiskEntry, head: dict[str, Any], pieces: Sequence[Bytes], now: int
    ) -> int:
        """Write the file of an entry whose text has `at` tokens up to there and was used `now`, after making room for it. Returns its
        bytes, 0 if only entries that were used later could make room.

        Raises BadSlotFile, StorageFull
        """
        path, head = self.here / entry.name, {"of": self.identity, "entry": entry.name, **head}
        n = file_bytes(len(json.dumps(head, separators=(",", ":"))), sum(p.size for p in pieces))
        if n > self.limit or not self._make_room(n, _stamp(now, at)):
            return 0
        with suppress(OSError):  # else the write fails with the reason
            self._make_folder()
        if os.path.isfile(path):  # another engine has written it meanwhile
            self.touch([(at, entry)], now)
            return 0
        write(path, head, pieces, ENTRY)
        self.touch([(at, entry)], now)
        self.n_bytes += n
        self._n_since += n
        self._shunned.discard(entry.name)
        return n

    # -- the bound -----------------------------------------------------------------------------------------------

    def _make_room(self, n: int, stamp: int) -> bool:
        """Remove the least recently used files, of any engine, until `n` bytes are free. Files that were used after `stamp` stay."""
        is_recent = time.monotonic() - self._counted < SCAN_S and self._n_since < SCAN_SHARE * self.limit
        if is_recent and self.n_bytes + n <= self.limit:
            return True
        files = list(self._files())
        self.n_bytes, self._counted = sum(size for _, size, _ in files), time.monotonic()
        self._n_since = 0
        if self.n_bytes + n <= self.limit:
            return True
        for used, size, path in sorted(files):
            if self.n_bytes + n <= SLACK * self.limit or used >= stamp:
                break
            with suppress(OSError):  # another process has removed it
                os.unlink(path)
            self.n_bytes -= size
        return self.n_bytes + n <= self.limit

    def _files(self) -> Iterator[tuple[int, int, str]]:
        """(time of last use, bytes, path) of each entry. Files that dead processes left half written are removed."""
        now = time.time()
        for folder in _scan(self.path):
            if not _FOLDER.fullmatch(folder.name):
                continue
            for file in _scan(folder.path):
                if not (_FILE.fullmatch(file.name) or _HIDDEN.fullmatch(file.name)):
                    continue
                with suppress(OSError):
                    if not file.is_file(follow_symlinks=False):
                        continue
                    status = file.stat(follow_symlinks=False)
                    is_written = file.name.startswith(".")
                    if is_written and now - status.st_mtime > YOUNG_S and is_abandoned(file.path):
                        os.unlink(file.path)
                    else:  # what is being written counts, but is its writer's alone
                        used = sys.maxsize if is_written else status.st_mtime_ns
                        yield used, status.st_size, file.path

    def forget(self, tokens: Sequence[int], salt: str = "") -> None:
        """Remove the entries of a text."""
        chain, index = self.chain(tokens, salt), self.index()
        for i in range(len(chain.keys)):
            ends = [e for e in index.ends.get(chain.keys[i], ()) if chain.has(i, e)]
            for entry in ends if i + 1 == len(chain.keys) else [chain.segment(i), *ends]:
                self.discard(entry)

    def clear(self) -> None:
        """Remove all entries of this identity."""
        for entry in map(DiskEntry.of, [file.name for file in _scan(self.here)]):
            if entry is not None:
                self.discard(entry)

    def others(self) -> list[dict[str, Any]]:
        """The identities of other models and settings that have entries here, by the head of one file each."""
        found = []
        for folder in _scan(self.path):
            if not _FOLDER.fullmatch(folder.name) or folder.name == self.root:
                continue
            file = next((f for f in _scan(folder.path) if _NAME.fullmatch(f.name)), None)
            with suppress(BadSlotFile):
                if file is not None:
                    with SpanFile(Path(file.path), ENTRY) as entry:
                        of = entry.head.get("of")
                        found += [of] if isinstance(of, dict) else []
        return found


def _stamp(now: int, at: int) -> int:
    """The time of last use of an entry, in nanoseconds, that ends behind `at` tokens of a text used `now`."""
    return now - 1000 * at


def _scan(path: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as found:
            return list(found)
    except OSError:  # it is gone, or can not be read
        return []


def _listed(folder: Path, changed: int, shunned: set[str]) -> FolderIndex:
    index = FolderIndex(changed)
    for entry in map(DiskEntry.of, os.listdir(folder)):
        if entry is None or entry.n > SEGMENT or entry.name in shunned:
            continue
        index.names.add(entry.name)
        if entry.kind == END:
            index.ends.setdefault(entry.parent, []).append(entry)
    return index
