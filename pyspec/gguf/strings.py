"""An array of texts of a file as one piece of memory: 250,000 tokens as texts of Python's take five times as much."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

PREFIX = 8  # bytes of a length in front of each text
_LARGEST = (1 << 32) - 1


class Strings(Sequence[str]):
    """Texts in order, each made when it is asked for. Equal to any sequence of the same texts.

    data  [n_byte] the texts one behind the other, PREFIX bytes in front of each, in UTF-8 or not: bytes that are not
          become lone surrogates (surrogateescape)
    ends  [n_text] the end of each in `data`
    """

    __slots__ = ("_data", "_ends")

    def __init__(self, data: bytes, ends: array[int]) -> None:
        assert (ends[-1] if ends else 0) == len(data)
        self._data = data
        self._ends = array("I", ends) if len(data) <= _LARGEST else ends

    @classmethod
    def of(cls, texts: Iterable[str]) -> Strings:
        """Texts from elsewhere than a file."""
        parts: list[bytes] = []
        ends, at, prefix = array("Q"), 0, bytes(PREFIX)
        for part in map(_bytes, texts):
            at += PREFIX + len(part)
            ends.append(at)
            parts += prefix, part
        return cls(b"".join(parts), ends)

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[str]:
        data, at = self._data, 0
        for end in self._ends:
            yield _text(data[at + PREFIX : end])
            at = end

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        end = self._ends[index]
        at = self._ends[index - 1] if index not in (0, -len(self)) else 0
        return _text(self._data[at + PREFIX : end])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Strings) and self._data == other._data:
            return self._ends == other._ends
        if isinstance(other, str) or not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as of a list

    def __reduce__(self) -> tuple[type[Strings], tuple[bytes, array[int]]]:
        return type(self), (self._data, self._ends)  # protocols 0 and 1 do not know slots

    def __repr__(self) -> str:
        return f"<Strings: {len(self)} texts>"


def _text(part: bytes) -> str:
    return part.decode("utf-8", "surrogateescape")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
