"""The file of a span of tokens, a saved slot or an entry of the prefix cache: a head, then the content, each piece with a digest. No torch here.

    magic      8 bytes, "PYSPSLOT" or "PYSPPAGE"
    version    u32, little-endian like all numbers
    n_head     u32   bytes of the head
    head             a JSON object: the model, and the sizes of the content
    digest     16    of all of the above: SHA-256, for which processors have instructions, cut short
    then, repeated up to the end: CHUNK bytes of content (fewer the last time), and their digest

A digest is keyed with that of the head and with its place, so a piece is not valid in another file or place. Nothing is allocated
before the file has exactly the length that its head implies.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from pyspec.errors import BadSlotFile, StorageFull
from pyspec.ranges import printable

MAX_LISTED = 300  # characters of a reason, which quotes the file
CHUNK = 1 << 20  # bytes of content between digests: damage is located this closely
MAX_HEAD = 16 << 20
DIGEST = 16
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
VERSION = 2  # of the content, too (engine/loop/span.py)
_START = struct.Struct("<8sII")

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class FileKind:
    """What a file is for.

    name   for messages
    syncs  the system has stored the content before the file has its name. The file is locked until then
    """

    name: str
    magic: bytes
    syncs: bool = False


SLOT = FileKind("slot file", b"PYSPSLOT")
ENTRY = FileKind("cache file", b"PYSPPAGE", syncs=True)


def digest(data: Any, key: bytes = b"", place: int = 0) -> bytes:
    """The digest of a head, or of the piece at a place behind the head with the digest `key`."""
    found = sha256(key + place.to_bytes(8, "little"))
    found.update(data)
    return found.digest()[:DIGEST]


def file_bytes(n_head: int, n_content: int) -> int:
    """Bytes of a whole file."""
    return _START.size + n_head + DIGEST + n_content + -(-n_content // CHUNK) * DIGEST


def write(path: Path, head: dict[str, Any], pieces: Sequence[Bytes], kind: FileKind) -> int:
    """Write a file atomically. Returns its bytes.

    Raises BadSlotFile if it can not be created there, StorageFull if the disk is full.
    """
    written = path.with_name(f".{path.name[:200]}.{os.getpid()}-{os.urandom(4).hex()}")
    try:
        _check_place(path, kind)
        with open(written, "xb", opener=_private) as f:
            if kind.syncs:
                _lock(f)
            _write(f, head, pieces, kind)
            n = f.tell()
            if kind.syncs:
                f.flush()
                os.fsync(f.fileno())
                os.replace(written, path)  # while it is locked
        if not kind.syncs:
            os.replace(written, path)
    except (OSError, ValueError) as e:  # a name with a NUL in it
        with suppress(OSError, ValueError):
            written.unlink()
        reason, number = (
            (e.strerror or type(e).__name__, e.errno) if isinstance(e, OSError) else (str(e), None)
        )
        error = StorageFull if number in NO_ROOM else BadSlotFile
        raise error(
            f"{kind.name} {printable(path.name, MAX_LISTED)} can not be written: {reason}"
        ) from None
    return n


def _private(path: str, flags: int) -> int:
    """A file for this user alone: it has people's texts."""
    return os.open(path, flags, 0o600)


def _lock(f: BinaryIO) -> bool:
    """Lock a file for this process, until it is closed or the process ends. Returns False if another has the lock."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(f.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_abandoned(path: str) -> bool:
    """The writer of an unfinished file has ended."""
    try:
        with open(path, "rb") as f:
            return _lock(f)
    except OSError:
        return False


def _check_place(path: Path, kind: FileKind) -> None:
    """Refuse a folder, a pipe or a device: moving a file to its name would replace it."""
    with suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise BadSlotFile(
                f"{kind.name} {printable(path.name, MAX_LISTED)} can not be written: it exists and is no regular file"
            )


def _write(f: BinaryIO, head: dict[str, Any], pieces: Sequence[Bytes], kind: FileKind) -> None:
    text = json.dumps(head, separators=(",", ":")).encode()
    start = _START.pack(kind.magic, VERSION, len(text)) + text
    key, place, held = digest(start), 0, bytearray()
    f.write(start + key)
    for piece in pieces:
        view, at = piece.data, 0
        while at < len(view):
            n = min(CHUNK - len(held), len(view) - at)
            part: memoryview | bytearray = view[at : at + n]
            at += n
            if held or n < CHUNK:  # chunks go across pieces
                held += part
                if len(held) < CHUNK:
                    continue
                part, held = held, bytearray()
            f.write(part)
            f.write(digest(part, key, place))
            place += 1
    if held:
        f.write(held)
        f.write(digest(held, key, place))


class SpanFile:
    """An opened file with a valid head. A context manager. Every failure is a BadSlotFile that names the path."""

    def __init__(self, path: Path, kind: FileKind) -> None:
        self.name, self.kind = path.name, kind
        try:
            self._file = os.fdopen(
                os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0)), "rb"
            )
        except OSError as e:
            raise self.bad(e.strerror or type(e).__name__) from None
        except ValueError as e:  # a name with a NUL in it
            raise self.bad(str(e)) from None
        try:
            status = os.fstat(self._file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise self.bad("it is no regular file")
            self.size = status.st_size
            self.head = self._read_head()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> SpanFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def bad(self, why: str) -> BadSlotFile:
        """The error to raise."""
        name = printable(self.name, MAX_LISTED)
        return BadSlotFile(f"{self.kind.name} {name}: {printable(why, MAX_LISTED)}")

    def _take(self, n: int, part: str) -> bytes:
        at = self._file.tell()
        if n > self.size - at:
            raise self.bad(
                f"{part} needs {n} bytes at offset {at}, but {self.size - at} of {self.size} are left"
            )
        try:
            data = self._file.read(n)
        except OSError as e:
            raise self.bad(f"{part} can not be read: {e.strerror}") from None
        if len(data) != n:
            raise self.bad(
                f"it became shorter while it was read: {part} ends at offset {at + len(data)}"
            )
        return data

    def _read_head(self) -> dict[str, Any]:
        start = self._take(_START.size, "the start")
        magic, version, n_head = _START.unpack(start)
        kind = self.kind
        if magic != kind.magic:
            raise self.bad(f"it is not a {kind.name} of pyspec")
        if version != VERSION:
            raise self.bad(f"it has version {version}; this program reads version {VERSION}")
        if n_head > MAX_HEAD:
            raise self.bad(f"a head of {n_head} bytes is more than the {MAX_HEAD} allowed")
        text = self._take(n_head, "the head")
        self._key = self._take(DIGEST, "the head's digest")
        if self._key != digest(start + text):
            raise self.bad(
                f"the head is damaged: bytes 0 to {self._file.tell() - 1} do not match their digest"
            )
        self._n_head = n_head
        try:
            head = json.loads(text)
        except (ValueError, RecursionError):
            raise self.bad("the head is not JSON") from None
        if not isinstance(head, dict):
            raise self.bad("the head is not a JSON object")
        return head

    def read(self, n: int, into: Bytes | None = None) -> Bytes:
        """The content, of `n` bytes. They are compared with the file's length before memory is allocated.

        into: memory for it, if it is large enough; the content is a view of that
        """
        if (want := file_bytes(self._n_head, n)) != self.size:
            raise self.bad(f"it has {self.size} bytes; its head implies {want}")
        content = np.empty(n, np.uint8) if into is None or into.size < n else into[:n]
        for place, at in enumerate(range(0, n, CHUNK)):
            end, offset = min(at + CHUNK, n), self._file.tell()
            self._fill(content[at:end])
            if self._take(DIGEST, "a digest") != digest(content[at:end].data, self._key, place):
                raise self.bad(
                    f"it is damaged: bytes {offset} to {self._file.tell() - 1} do not match their digest"
                )
        return content

    def _fill(self, place: Bytes) -> None:
        """Read the next bytes of the content into `place`."""
        try:
            n = self._file.readinto(place.data)
        except OSError as e:
            raise self.bad(f"the content can not be read: {e.strerror}") from None
        if n != place.size:
            raise self.bad(
                f"it became shorter while it was read: the content ends at offset {self._file.tell()}"
            )
