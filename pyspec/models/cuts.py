"""How a model's tensors are divided over ranks: the processes that run it together, each with a share of its heads and inner widths.

An architecture's manifest has it for every tensor (`Want.cut`). A rank's reads, its memory plan and the refusals of --tp follow from
that. Nothing here runs a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from pyspec.config import MAX_RANKS
from pyspec.cuda.collective import Rank
from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile, TensorInfo

CHUNK = 4 << 20  # bytes of whole rows that are read at once where a rank keeps some columns of them
ALONE = 1 << 16  # bytes of one row's columns that are worth a read of their own


@dataclass(frozen=True, slots=True)
class Units:
    """`n` equal things in a row (heads, columns) that ranks get in order, as many each.

    name    for messages
    copied  where there are fewer than ranks, several ranks have the same one
    uneven  the last rank may get fewer, because nothing depends on equal shares
    """

    n: int
    name: str
    copied: bool = False
    uneven: bool = False
    size: int = 1  # rows or columns of each, beside those of the cut's other units

    def of(self, rank: Rank) -> tuple[int, int]:
        """(first, end) of a rank's."""
        if self.uneven:
            most = -(-self.n // rank.n)
            return min(rank.index * most, self.n), min((rank.index + 1) * most, self.n)
        if self.n % rank.n == 0:
            each = self.n // rank.n
            return rank.index * each, (rank.index + 1) * each
        first = rank.index * self.n // rank.n
        return first, first + 1

    def flaw(self, n: int) -> str:
        """Why `n` ranks can not have shares of these; "" if they can."""
        if self.uneven:
            return "" if n <= self.n else f"{self.n} {self.name} are fewer than {n} ranks"
        if self.n % n == 0 or (self.copied and n % self.n == 0):
            return ""
        return f"{self.n} {self.name} do not divide by {n}"


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor is divided along one axis of its torch shape: its `units` stand there one kind behind the other, and a rank has its
    share of each. The axis may have fewer places than the units say (one number a head, say), in the same proportions."""

    axis: int
    units: tuple[Units, ...]

    def pieces(self, size: int, rank: Rank) -> list[tuple[int, int]]:
        """(first, end) along an axis of `size` places: a rank's pieces, in order. Adjoining pieces are one, because blocks may lie across."""
        total = sum(u.n * u.size for u in self.units)
        at = 0
        found = [(0, 0)]
        for u in self.units:
            first, end = u.of(rank)
            here = [(at + i * u.size) * size for i in (first, end)]
            if any(x % total for x in here):
                raise ModelError(f"{total} {u.name} do not stand on {size} places")
            a, b = here[0] // total, here[1] // total
            if a == found[-1][1]:
                a = found.pop()[0]
            found.append((a, b))
            at += u.n * u.size
        return [piece for piece in found if piece[1]]


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of a tensor. info: as if it were a tensor of its own; pieces: places along the cut's axis."""

    whole: TensorInfo
    info: TensorInfo
    axis: int
    pieces: tuple[tuple[int, int], ...]

    @property
    def outer(self) -> int:
        """How many times the pieces come one behind the other in the file."""
        return prod(self.whole.shape[: self.axis])

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The pieces in bytes, of one of those times."""
        n_byte, n = self.whole.n_bytes // self.outer, self.whole.shape[self.axis]
        return [(first * n_byte // n, end * n_byte // n) for first, end in self.pieces]

    def read_into(self, file: GGUFFile, out: np.ndarray, first: int = 0) -> None:
        """Bytes of the share, from its byte `first` on, as many as `out` [n] uint8 takes."""
        spans, n_file = self.spans, self.whole.n_bytes // self.outer
        n_own, end = sum(b - a for a, b in spans), first + out.size
        if self.outer == 1 or n_own >= ALONE:
            for row in range(first // n_own, -(-end // n_own)):
                self._read_row(file, out, (row * n_own - first, row * n_file), spans)
            return
        step = max(1, CHUNK // n_file)
        for row in range(first // n_own, -(-end // n_own), step):
            n_row = min(step, -(-end // n_own) - row)
            whole = np.empty((n_row, n_file), np.uint8)
            file.read_into(self.whole.name, whole.reshape(-1), row * n_file)
            own = np.concatenate([whole[:, a:b] for a, b in spans], 1).reshape(-1)
            at = row * n_own - first  # where its first byte goes
            a, b = max(0, -at), min(own.size, out.size - at)
            out[at + a : at + b] = own[a:b]

    def _read_row(
        self, file: GGUFFile, out: np.ndarray, at: tuple[int, int], spans: list[tuple[int, int]]
    ) -> None:
        """One time of the pieces. at: where their first byte goes in `out`, and where they begin in the file."""
        to, of = at
        for a, b in spans:
            lo, hi = max(to, 0), min(to + b - a, out.size)
            if lo < hi:
                file.read_into(self.whole.name, out[lo:hi], of + a + lo - to)
            to += b - a


def share_of(info: TensorInfo, cut: Cut, rank: Rank) -> Share:
    """A rank's share. ModelError if it can not be cut there."""
    axis = cut.axis % len(info.shape)
    pieces = cut.pieces(info.shape[axis], rank)
    if flaw := _blocks_flaw(info, axis, pieces):
        raise ModelError(f"{info.name}: {flaw}")
    shape = (*info.shape[:axis], sum(b - a for a, b in pieces), *info.shape[axis + 1 :])
    own = replace(info, shape=shape, n_bytes=info.n_bytes // info.shape[axis] * shape[axis])
    if axis == len(info.shape) - 1:  # a row's bytes need not divide by its columns
        own = replace(own, n_bytes=prod(shape) // info.type.block_size * info.type.type_size)
    return Share(info, own, axis, tuple(pieces))


def _blocks_flaw(info: TensorInfo, axis: int, pieces: list[tuple[int, int]]) -> str:
    """Along rows numbers lie in blocks, which can not be cut."""
    block = info.type.block_size
    if axis != len(info.shape) - 1 or not any(x % block for piece in pieces for x in piece):
        return ""
    a, b = next(p for p in pieces if p[0] % block or p[1] % block)
    return f"columns {a} to {b} are no whole blocks of {block} ({info.type.name})"


def flaws(file: GGUFFile, cuts: Mapping[str, Cut], n: int) -> Iterator[str]:
    """Why `n` ranks can not run this file, for every tensor for which they can not."""
    for name, cut in cuts.items():
        if (info := file.tensors.get(name)) is None:
            continue
        why = next(filter(None, (u.flaw(n) for u in cut.units)), "")
        try:
            if not why:
                for i in range(n):
                    share_of(info, cut, Rank(i, n))
        except ModelError as e:
            why = str(e).removeprefix(f"{name}: ")
        if why:
            yield f"{name}: {why}"


def check_ranks(file: GGUFFile, cuts: Mapping[str, Cut], n: int) -> None:
    """Raise ModelError with the tensor that does not divide by `n`, and the numbers of ranks that would do."""
    if (flaw := next(flaws(file, cuts, n), None)) is None:
        return
    good = [str(m) for m in range(1, MAX_RANKS + 1) if next(flaws(file, cuts, m), None) is None]
    raise ModelError(
        f"--tp {n} does not divide {file.path.name}: {flaw}; --tp {' or '.join(good)} would do"
    )
