"""How a model's tensors are divided over ranks: the processes that run it together, each with a share of its heads and inner widths.

All ranks have shapes alike. Where things do not divide, some ranks have zeros in place of the missing ones: zeros of columns and heads add
nothing to the sums of ranks, and the slowest rank has as much work as with unequal shares.

An architecture's manifest has it for every tensor (`Want.cut`). A rank's reads, its memory plan and the refusals of --tp follow from
that. Nothing here runs a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from pyspec.cuda.rank import Rank
from pyspec.errors import ModelError
from pyspec.gguf import GGUFFile, TensorInfo

CHUNK = 4 << 20  # bytes of whole rows that are read at once where a rank keeps some columns of them
ALONE = 1 << 16  # bytes of one row's columns that are worth a read of their own


Run = tuple[int, int]
"""(first, end) of things in a row; (-n, 0) stands for n places of zeros."""


@dataclass(frozen=True, slots=True)
class Units:
    """`n` equal things in a row (heads, columns) that ranks get in order, as many each.

    name    for messages
    copied  where there are fewer than ranks, several ranks have the same one
    uneven  the last rank may get fewer, because nothing depends on equal shares
    block   ranks get whole blocks of so many, and zeros where there are none left (`each_of`); 0: they have to divide
    """

    n: int
    name: str
    copied: bool = False
    uneven: bool = False
    size: int = 1  # rows or columns of each, beside those of the cut's other units
    block: int = 0

    def of(self, rank: Rank) -> tuple[int, int]:
        """(first, end) of a rank's."""
        if self.uneven or self.block:
            most = -(-self.n // rank.n) if self.uneven else each_of(self.n, rank.n, self.block)
            return min(rank.index * most, self.n), min((rank.index + 1) * most, self.n)
        if self.n % rank.n == 0:
            each = self.n // rank.n
            return rank.index * each, (rank.index + 1) * each
        first = rank.index * self.n // rank.n
        return first, first + 1

    def runs(self, rank: Rank) -> list[Run]:
        """A rank's, in the order in which it has them."""
        first, end = self.of(rank)
        missing = each_of(self.n, rank.n, self.block) - (end - first) if self.block else 0
        return [(first, end), (-missing, 0)]

    def flaw(self, n: int) -> str:
        """Why `n` ranks can not have shares of these; "" if they can."""
        if self.uneven:
            return "" if n <= self.n else f"{self.n} {self.name} are fewer than {n} ranks"
        if self.block or self.n % n == 0 or (self.copied and n % self.n == 0):
            return ""
        return f"{self.n} {self.name} do not divide by {n}"


def each_of(n: int, n_rank: int, block: int = 1) -> int:
    """Columns of each of `n_rank` ranks, of `n`: as many on all, in whole blocks of their type. Where they do not divide, they go up to the
    next block, or to 32 of numbers without blocks, because kernels of GPUs take columns by 32."""
    if n_rank == 1 or n % (n_rank * block) == 0:
        return n // n_rank
    step = block if block > 1 else 32 if n % 32 == 0 else 1
    return -(-n // (n_rank * step)) * step


@dataclass(frozen=True, slots=True)
class KeyGroups:
    """`n_key` key heads, each with `n_reader` heads that read it: queries of attention, values of a recurrence.

    All ranks have as many places for key heads, and as many readers at each place. A key head whose readers are on several ranks is
    copied to them. Places that are left over hold zeros. even: kernels want an even number of readers on a rank.
    """

    n_key: int
    n_reader: int
    even: bool = False

    def places(self, n: int) -> tuple[int, int]:
        """(key heads, readers of each) on each of `n` ranks: the fewest key heads, which memory holds for every token, then the fewest
        readers."""
        n_place = -(-self.n_key // n)
        parts = n_place * n // self.n_key  # of a key head's readers, at most
        each = -(-self.n_reader // parts)
        is_odd = self.even and n_place * each % 2 == 1 and self.n_key * self.n_reader % 2 == 0
        return n_place, each + is_odd

    def taken(self, rank: Rank) -> list[tuple[int, int] | None]:
        """(key head, first of its readers) at each place of a rank; None: nothing is left for it."""
        n_place, each = self.places(rank.n)
        parts = -(-self.n_reader // each)
        found: list[tuple[int, int] | None] = []
        for i in range(rank.index * n_place, (rank.index + 1) * n_place):
            found.append((i // parts, i % parts * each) if i < self.n_key * parts else None)
        return found


@dataclass(frozen=True, slots=True)
class Keys:
    """The key heads of `groups`. whole: ranks can not divide a key head's readers, because their rows stand among its own, or copies of it
    would count several times."""

    groups: KeyGroups
    name: str
    size: int = 1
    whole: bool = False
    copied = True

    @property
    def n(self) -> int:
        return self.groups.n_key

    def runs(self, rank: Rank) -> list[Run]:
        """See `Units.runs`."""
        return [(-1, 0) if x is None else (x[0], x[0] + 1) for x in self.groups.taken(rank)]

    def flaw(self, n: int) -> str:
        """See `Units.flaw`."""
        if self.whole and self.groups.places(n)[1] != self.groups.n_reader:
            return f"{self.n} {self.name} are fewer than {n} ranks"
        return ""


@dataclass(frozen=True, slots=True)
class Readers:
    """The readers of `groups`. tiled: the first of every key head stand in front of the second of each; else by key head."""

    groups: KeyGroups
    name: str
    size: int = 1
    tiled: bool = False
    copied = False

    @property
    def n(self) -> int:
        return self.groups.n_key * self.groups.n_reader

    def runs(self, rank: Rank) -> list[Run]:
        """See `Units.runs`."""
        g, (_, each) = self.groups, self.groups.places(rank.n)
        taken = self.groups.taken(rank)
        if self.tiled:
            places = [(x, j) for j in range(each) for x in taken]
        else:
            places = [(x, j) for x in taken for j in range(each)]
        found: list[Run] = []
        for x, j in places:
            if x is None or x[1] + j >= g.n_reader:
                found.append((-1, 0))
                continue
            key, reader = x[0], x[1] + j
            at = reader * g.n_key + key if self.tiled else key * g.n_reader + reader
            found.append((at, at + 1))
        return found

    def flaw(self, n: int) -> str:
        """Zeros take the places that are left: any number of ranks can have shares."""
        return ""


Divided = Units | Keys | Readers
"""Things in a row, a part of which each rank gets: `n` of them in the tensor, each of `size` rows or columns beside those of the cut's other kinds."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor is divided along one axis of its torch shape: its `units` stand there one kind behind the other, and a rank has its
    share of each. The axis may have fewer places than the units say (one number a head, say), in the same proportions."""

    axis: int
    units: tuple[Divided, ...]

    def pieces(self, size: int, rank: Rank) -> list[Run]:
        """Runs along an axis of `size` places: a rank's pieces, in order. Adjoining pieces are one, because blocks may lie across."""
        total = sum(u.n * u.size for u in self.units)
        at = 0
        found: list[Run] = []
        for u in self.units:
            for first, end in u.runs(rank):
                ahead = 0 if first < 0 else at
                here = [(ahead + i * u.size) * size for i in (first, end)]
                if any(x % total for x in here):
                    raise ModelError(f"{total} {u.name} do not stand on {size} places")
                a, b = here[0] // total, here[1] // total
                if a == b:
                    continue
                if found and (a < 0) == (found[-1][0] < 0) and (a < 0 or a == found[-1][1]):
                    last = found.pop()
                    a, b = (last[0] + a, 0) if a < 0 else (last[0], b)
                found.append((a, b))
            at += u.n * u.size
        return found


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's share of a tensor. info: as if it were a tensor of its own; pieces: places along the cut's axis, and runs of zeros."""

    whole: TensorInfo
    info: TensorInfo
    axis: int
    pieces: tuple[Run, ...]

    @property
    def outer(self) -> int:
        """How many times the pieces come one behind the other in the file."""
        return prod(self.whole.shape[: self.axis])

    @property
    def spans(self) -> list[Run]:
        """The pieces in bytes, of one of those times. Zero bytes are zeros in every type: the scales of blocks are 0, too."""
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
            parts = [np.zeros((n_row, -a), np.uint8) if a < 0 else whole[:, a:b] for a, b in spans]
            own = np.concatenate(parts, 1).reshape(-1)
            at = row * n_own - first  # where its first byte goes
            a, b = max(0, -at), min(own.size, out.size - at)
            out[at + a : at + b] = own[a:b]

    def _read_row(self, file: GGUFFile, out: np.ndarray, at: tuple[int, int], spans: list[Run]) -> None:
        """One time of the pieces. at: where their first byte goes in `out`, and where they begin in the file."""
        to, of = at
        for a, b in spans:
            lo, hi = max(to, 0), min(to + b - a, out.size)
            if lo < hi and a < 0:
                out[lo:hi] = 0
            elif lo < hi:
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


def _blocks_flaw(info: TensorInfo, axis: int, pieces: list[Run]) -> str:
    """Along rows numbers lie in blocks, which can not be cut."""
    block = info.type.block_size
    if axis != len(info.shape) - 1 or not any(x % block for piece in pieces for x in piece):
        return ""
    cut_through = [p for p in pieces if p[0] % block or p[1] % block]
    a, b = min(cut_through, key=lambda piece: piece[0] < 0)
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


def surplus(file: GGUFFile, cuts: Mapping[str, Cut], n: int) -> float:
    """Of the tensors that `n` ranks divide: how much more they have together, as a share. Copies of key heads, and zeros."""
    found = [(file.tensors[name], cut) for name, cut in cuts.items() if name in file.tensors]
    whole = sum(info.n_bytes for info, _ in found)
    held = sum(share_of(info, cut, Rank(i, n)).info.n_bytes for info, cut in found for i in range(n))
    return held / whole - 1 if whole else 0.0
