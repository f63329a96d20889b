"""Checked reads over one mapped file: nothing is read, sliced or allocated before the bytes are known to be there."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import numpy as np

from pyspec.errors import BadGGUF

MAX_STRING = 16 << 20  # a chat template is the longest string seen, far below this
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class Cursor:
    """A position in a mapped file. Every read names what it wants, so an error says which part lies."""

    __slots__ = ("at", "data", "path", "size")

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path = data, path
        self.size, self.at = len(data), 0

    @property
    def left(self) -> int:
        return self.size - self.at

    def bad(self, why: str) -> BadGGUF:
        """The error to raise. Names come from the file and may be long; the message stays one readable line."""
        why = why if len(why) <= 400 else f"{why[:200]} ... {why[-200:]}"
        return BadGGUF(f"{self.path}: {why}")

    def need(self, n_bytes: int, what: str) -> None:
        if n_bytes > self.left:
            raise self.bad(f"{what} needs {n_bytes} bytes at offset {self.at}, but {self.left} of {self.size} are left")

    def count(self, min_bytes: int, limit: int, what: str) -> int:
        """A u64 count of things that take at least `min_bytes` each."""
        n = self.u64(what)
        if n > limit:
            raise self.bad(f"{what} is {n}, more than the {limit} allowed")
        if n * min_bytes > self.left:
            raise self.bad(f"{what} is {n}, which needs at least {n * min_bytes} bytes; {self.left} are left")
        return n

    def u32(self, what: str) -> int:
        self.need(4, what)
        (value,) = _U32.unpack_from(self.data, self.at)
        self.at += 4
        return value

    def u64(self, what: str) -> int:
        self.need(8, what)
        (value,) = _U64.unpack_from(self.data, self.at)
        self.at += 8
        return value

    def bytes(self, n: int, what: str) -> bytes:
        self.need(n, what)
        value = self.data[self.at : self.at + n]
        self.at += n
        return value

    def scalar(self, packed: struct.Struct, what: str) -> int | float:
        self.need(packed.size, what)
        (value,) = packed.unpack_from(self.data, self.at)
        self.at += packed.size
        return value

    def name(self, limit: int, what: str) -> str:
        """A key or tensor name: not empty, strict UTF-8."""
        n = self.u64(f"length of {what}")
        if not 1 <= n <= limit:
            raise self.bad(f"{what} is {n} bytes long; 1..{limit} are allowed")
        try:
            return self.bytes(n, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.bad(f"{what} is not UTF-8: byte {error.start} of {n}") from None

    def string(self, what: str) -> str:
        """A string value. Bytes that are not UTF-8 become lone surrogates (surrogateescape), so nothing is lost."""
        n = self.u64(f"length of {what}")
        if n > MAX_STRING:
            raise self.bad(f"{what} is {n} bytes long, more than the {MAX_STRING} allowed")
        return self.bytes(n, what).decode("utf-8", "surrogateescape")

    def strings(self, n: int, what: str) -> list[str]:
        """`n` strings in one pass. The caller has checked that their length fields fit the file."""
        data, at, end, unpack, out = self.data, self.at, self.size, _U64.unpack_from, []
        for index in range(n):
            if at + 8 > end:
                raise self.bad(f"{what}: string {index} of {n} starts at offset {at}, the file has {end} bytes")
            (length,) = unpack(data, at)
            at += 8
            stop = at + length
            if stop > end or length > MAX_STRING:
                raise self.bad(f"{what}: string {index} of {n} has {length} bytes; {end - at} are left")
            out.append(data[at:stop].decode("utf-8", "surrogateescape"))
            at = stop
        self.at = at
        return out

    def numbers(self, dtype: np.dtype, n: int, what: str) -> np.ndarray:
        """[n] `dtype`, copied out of the mapping (its place is not aligned) and read-only."""
        self.need(n * dtype.itemsize, what)
        values = np.frombuffer(self.data, dtype, n, self.at).copy()
        values.setflags(write=False)
        self.at += n * dtype.itemsize
        return values
