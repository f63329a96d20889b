"""Checked reads of a file's header: every read checks its size against the file before it reads, slices or allocates.

Every read takes a name for its errors, as a format and the values for it. The text is made only for an error, because a file may
have a hundred thousand tensors.
"""

from __future__ import annotations

import struct
from array import array

import numpy as np

from pyspec.errors import BadGGUF
from pyspec.gguf.source import OpenFile
from pyspec.gguf.strings import PREFIX, Strings
from pyspec.ranges import quoted

MAX_STRING = 1 << 30  # as in llama.cpp; a file has the bytes of each
STEP = 4 << 20  # least bytes of one read
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """A position in a file. Bytes are read from the start of the file as needed."""

    __slots__ = ("at", "data", "size", "source")

    def __init__(self, source: OpenFile) -> None:
        self.source, self.size = source, source.size
        self.data, self.at = b"", 0

    @property
    def left(self) -> int:
        return self.size - self.at

    def bad(self, why: str) -> BadGGUF:
        """The error for a malformed file."""
        return BadGGUF(f"{self.source.path}: {why}")

    def need(self, n_bytes: int, what: str, *of: object) -> None:
        """Read on until the next `n_bytes` bytes are in `data`."""
        end = self.at + n_bytes
        if end > self.size:
            what = _named(what, of)
            need = f"{what} needs {n_bytes} bytes at offset {self.at}"
            raise self.bad(f"{need}, but {self.left} of {self.size} are left")
        if end > len(self.data):
            self._fill(end)

    def _fill(self, end: int) -> tuple[bytes, int]:
        """Read on, at least up to `end`. Returns `data` and its length."""
        have = len(self.data)
        # read twice as much each time
        more = self.source.read(have, min(max(end - have, have, STEP), self.size - have))
        self.data = self.data + more if have else more
        return self.data, len(self.data)

    def count(self, min_bytes: int, limit: int, what: str, *of: object) -> int:
        """A u64 count of things that take at least `min_bytes` each."""
        n = self.u64(what, *of)
        if n > limit:
            raise self.bad(f"{_named(what, of)} is {n}, more than the {limit} allowed")
        if n * min_bytes > self.left:
            need = f"{_named(what, of)} is {n}, which needs at least {n * min_bytes} bytes"
            raise self.bad(f"{need}; {self.left} are left")
        return n

    def u32(self, what: str, *of: object) -> int:
        return int(self.scalar(_U32, what, *of))

    def u64(self, what: str, *of: object) -> int:
        return int(self.scalar(_U64, what, *of))

    def bytes(self, n: int, what: str, *of: object) -> bytes:
        self.need(n, what, *of)
        self.at += n
        return self.data[self.at - n : self.at]

    def scalar(self, packed: struct.Struct, what: str, *of: object) -> int | float:
        return self.numbers_of(packed, what, *of)[0]

    def numbers_of(self, packed: struct.Struct, what: str, *of: object) -> tuple[int | float, ...]:
        """Several consecutive numbers."""
        self.need(packed.size, what, *of)
        values = packed.unpack_from(self.data, self.at)
        self.at += packed.size
        return values

    def name(self, limit: int, what: str, *of: object) -> str:
        """A key or tensor name: not empty. Bytes that are not UTF-8 become lone surrogates, as those of any string."""
        n = self.u64("length of " + what, *of)
        if not 1 <= n <= limit:
            raise self.bad(f"{_named(what, of)} is {n} bytes long; 1..{limit} are allowed")
        return self.bytes(n, what, *of).decode("utf-8", "surrogateescape")

    def string(self, what: str, *of: object) -> str:
        """A string value. Bytes that are not UTF-8 become lone surrogates (surrogateescape), so that no byte is lost."""
        n = self.u64("length of " + what, *of)
        if n > MAX_STRING:
            named = _named(what, of)
            raise self.bad(f"{named} is {n} bytes long, more than the {MAX_STRING} allowed")
        return self.bytes(n, what, *of).decode("utf-8", "surrogateescape")

    def strings(self, n: int, what: str, *of: object) -> Strings:
        """`n` strings in one pass. The caller has checked that their length fields fit the file."""
        data, first, end, unpack, ends = self.data, self.at, self.size, _U64.unpack_from, array("Q")
        at, have = first, len(data)
        for index in range(n):
            if (stop := at + PREFIX) > have:
                if stop > end:
                    string = f"{_named(what, of)}: string {index} of {n}"
                    raise self.bad(f"{string} starts at offset {at}, the file has {end} bytes")
                data, have = self._fill(stop)
            (length,) = unpack(data, at)
            at, stop = stop, stop + length
            if stop > have or length > MAX_STRING:
                if stop > end or length > MAX_STRING:
                    string = f"{_named(what, of)}: string {index} of {n}"
                    raise self.bad(f"{string} has {length} bytes; {end - at} are left")
                data, have = self._fill(stop)
            at = stop
            ends.append(at - first)
        self.at = at
        return Strings(data[first:at], ends)

    def numbers(self, dtype: np.dtype, n: int, what: str, *of: object) -> np.ndarray:
        """[n] `dtype`, read-only. A copy, because the file does not align arrays."""
        self.need(n * dtype.itemsize, what, *of)
        values = np.frombuffer(self.data, dtype, n, self.at).copy()
        values.setflags(write=False)
        self.at += n * dtype.itemsize
        return values


def _named(what: str, of: tuple[object, ...]) -> str:
    """The name of a read; names from the file stand in quotes."""
    return what.format(*(quoted(x) if isinstance(x, str) else x for x in of))
