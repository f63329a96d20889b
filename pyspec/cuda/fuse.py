"""Kernels that work for their neighbours: who may write whose rows, and who fetches what ahead. Models ask here, and nowhere else.

A launch that an op binds keeps the op's contract. What it can do besides, it says by what it has, and none has to:

    fetches      its calls take `after`: packed weights that the next product reads are on their way to L2 meanwhile
    writes_rows  its calls take `into` and `power`: it norms its own input for another reader, too
    prepared     runs as a call does, and puts what comes out where the next product reads it (`Into`)
    reads_into   its calls take `into`: what they give is normed and put where the next product reads it, too
    folder       gives what folds a slot's records without rows, to the bits of its own calls
    sums_of      of streams: whether so many rows may go back as what experts gave each, not summed
    room, prepare, shares, most   of experts: rows that are ready before it is known which expert reads them, so many at a time, and products
                            that the next launch sums
    take_keys, keys_beside, runs_beside   of attention's new keys, and of compressors: that they run beside a product of few rows, of which they
                            read nothing

So the torch reference, and every implementation without these, runs in the same models as it is. A product that ranks sum (`Summed`) is asked for what
this rank has of it (`own`): that reads the rows. Sums behind it may prepare those of the next product (`link`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVarTuple, cast

import torch
from torch import Tensor

from pyspec.cuda.collective import Collective
from pyspec.cuda.ops.moe.ref import NOTHING, Added, ExpertsRun, Routes
from pyspec.cuda.ops.rows.cuda import Place, Rows, Shares, is_aligned
from pyspec.cuda.ops.rows.op import rows
from pyspec.cuda.ops.rows.ref import HeadNorm, Norm, Prep, PrepKind, RowsSpec
from pyspec.cuda.ops.sparse_attend.ref import KeyTail
from pyspec.cuda.ops.streams.ref import Reading, StreamMix, Streams
from pyspec.cuda.streamed import Handing, Streamed, StreamedParts
from pyspec.cuda.streamed import handing as handing_of
from pyspec.cuda.sum_rows import sums_into
from pyspec.slots.batch import Batch
from pyspec.slots.recurrent import StateLayer

Product = Callable[..., Tensor]  # as models.weights.Matrix
Fold = Callable[[StateLayer, int, int], None]
Given = TypeVarTuple("Given")  # what a call is given


class ProductInParts(Protocol):
    """As models.grouped.Grouped. few: what runs few rows as one product."""

    @property
    def few(self) -> object: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class FusedStreams(Protocol):
    """What `reads_into` and `sums_of` say that streams can do besides their contract."""

    def split(self, x: Tensor, mix: StreamMix, into: Place) -> Reading: ...

    def merge_split(
        self, y: Tensor | Shares, x: Tensor, post: Tensor, comb: Tensor, mix: StreamMix, into: Place | None
    ) -> tuple[Tensor, Reading]: ...


def _own(product: Any) -> Any:
    """What this rank has of a product."""
    return getattr(product, "own", product)


def read_next(launch: object, product: Product) -> dict[str, Tensor]:
    """What calls of `launch` are told besides, where `product` reads what they give: its weights, if they are fetched ahead."""
    own = _own(product)
    if getattr(launch, "fetches", False) and isinstance(own, Streamed):
        return {"after": own.packed.data}
    return {}


def folder(launch: object) -> Fold | None:
    """What the states that `launch` runs over are folded with; None where the reference's own way will do."""
    make = getattr(launch, "folder", None)
    return None if make is None else make()


def unfinished(product: Product, x: Tensor, prep: Prep | None = None) -> tuple[Tensor, Prep | None]:
    """A product, and what is left to do to it: the next one may do that on the way."""
    return product.unfinished(x, prep) if isinstance(product, Streamed) else (product(x, prep), None)


def then(
    launch: Callable[[*Given], Tensor], given: tuple[*Given], product: Product, prep: HeadNorm, residual: Tensor
) -> Tensor:
    """residual + product(prep(launch(*given))). Of few rows the launch writes those that the product reads."""
    prepared, own = getattr(launch, "prepared", None), _own(product)
    if prepared is not None and isinstance(own, Streamed):
        into = own.place(len(residual), prep)
        if into is not None:
            return product(prepared(*given, into=into), residual=residual)
    return product(launch(*given).flatten(1), prep, residual=residual)


def place_for(launch: object, product: Product | None, n_row: int, norm: Norm) -> Place | None:
    """Where `launch` may put its so many rows, normed, for `product` to read; None: the product prepares them."""
    if not getattr(launch, "reads_into", False) or not isinstance(product, Streamed):
        return None
    return product.normed(n_row, norm)


def product_of(product: Product, x: Tensor, norm: Norm, place: Place | None) -> Tensor:
    """product(norm(x)), of rows that lie in `place` already if that is not None."""
    if place is None or not isinstance(product, Streamed):
        return product(x, norm)
    return product(place.rows.room(len(x)))


def both(main: object, beside: object) -> Callable[..., None] | None:
    """What does both, two compressors of the same tokens, in one launch; None where they run one after the other."""
    make = getattr(main, "with_beside", None)
    return None if make is None or type(main) is not type(beside) else make(beside)


def handing(first: Product | StreamedParts | None, next: Product | None, bound: float) -> Handing | None:
    """What of few rows runs `first` into the rows of `next`, which the one that prepares them has no launch for; None where that can not be.
    bound: of the magnitudes that `first` gives, 0 if there is none."""
    own = _own(next)
    if not isinstance(first, Streamed | StreamedParts) or not isinstance(own, Streamed):
        return None
    return handing_of(first, own, bound)


def one_after_other(
    first: Product, next: Product, hands: Handing | None, x: Tensor, norm: Norm, place: Place | None
) -> Tensor:
    """next(first(norm(x))), of rows that lie in `place` already if that is not None."""
    ready = None if hands is None else hands(x, norm) if place is None else hands(place.rows.room(len(x)))
    return next(product_of(first, x, norm, place)) if ready is None else next(ready)


def attended(
    launch: Callable[[Tensor, *Given, Batch], Tensor],
    given: tuple[Tensor, *Given],
    batch: Batch,
    product: ProductInParts,
    power: float,
    hands: Handing | None,
) -> Tensor | Rows:
    """product(launch(*given, batch)), or the rows that it hands on. The launch writes the rows that it reads, over `power`, where they
    are few enough and it can."""
    prepared, few = getattr(launch, "prepared", None), product.few
    if prepared is not None and isinstance(few, StreamedParts):
        into = few.place(len(given[0]), power)
        if into is not None:
            rows = prepared(given, batch, into)
            ready = None if hands is None else hands(rows)
            return few(rows) if ready is None else ready
    return product(launch(*given, batch).flatten(1))


def reading(launch: Streams, x: Tensor, mix: StreamMix, place: Place | None) -> Reading:
    """launch.split of streams x; place: what `place_for` gave, where the row goes normed, too."""
    return launch.split(x, mix) if place is None else cast(FusedStreams, launch).split(x, mix, into=place)


def merged(
    launch: Streams,
    y: Tensor | Shares,
    x: Tensor,
    beside: tuple[Tensor, Tensor],
    mix: StreamMix,
    place: Place | None,
) -> tuple[Tensor, Reading]:
    """launch.merge_split of streams x: y goes back into them, or what it is a sum of (`experts_into`); place as for a reading."""
    if place is None and isinstance(y, Tensor):
        return launch.merge_split(y, x, *beside, mix)
    return cast(FusedStreams, launch).merge_split(
        y, x, *beside, mix, into=place
    )  # who gave a place or shares has asked it


class KeysBeside(Protocol):
    """What `take_keys` says that attention can do besides its contract."""

    def take_keys(self, n_row: int) -> Tensor | None: ...

    def keys_beside(self, kv: Tensor, tail: KeyTail, batch: Batch, own: Tensor) -> None: ...


def keys_room(
    attend: object, compressors: Sequence[object], product: Product, given: Sequence[Tensor]
) -> Tensor | None:
    """Memory for new keys, where they and compressors run beside `product`, which is launched next, `late`; None where they run behind it.
    given: what they are made of. A copy of it would be made too late.

    Both sides keep to this: the product lets them start when all before the product is over; they read nothing else, write what was taken
    before the product was launched, and are not over before the product is (overlap.cuh).
    """
    take, n_row = getattr(attend, "take_keys", None), len(given[0])
    if (
        take is None
        or not isinstance(product, Streamed)
        or not product.has_late(n_row)
        or not all(map(is_aligned, given))
    ):
        return None
    return cast(KeysBeside, attend).take_keys(n_row) if all(hasattr(c, "runs_beside") for c in compressors) else None


def put_keys(attend: object, kv: Tensor, tail: KeyTail, batch: Batch, own: Tensor) -> None:
    """The new keys into `own`, which `keys_room` gave, for the call of `attend` with just this kv."""
    cast(KeysBeside, attend).keys_beside(kv, tail, batch, own)


# -- ranks -------------------------------------------------------------------------------------------------------


class GivesSum(Protocol):
    """What gives a sum of ranks. into: makes it of this rank's part."""

    into: Callable[[Tensor], Tensor]


FirstRead = tuple[Product, Norm]  # how the next part begins


def link(ranks: Collective, pairs: Sequence[tuple[GivesSum | None, FirstRead | None]]) -> None:
    """Have sums prepare what is read of them next, where kernels can: of each pair what gives one, and the product behind a norm that reads it first. On
    all ranks together."""
    readers = [
        (read[0], read[1]) if gives is not None and read is not None and isinstance(read[0], Streamed) else None
        for gives, read in pairs
    ]
    for (gives, _), into in zip(pairs, sums_into(ranks, readers), strict=True):
        if gives is not None and into is not None:
            gives.into = into


# -- experts -----------------------------------------------------------------------------------------------------


def norms_on_the_way(device: torch.device, n_in: int) -> bool:
    """Whether every reader norms the rows itself; in plain torch it is done once for all but the router."""
    return device.type == "cuda" and rows.chosen(RowsSpec(device, n_in, PrepKind.NORM)) is not rows.reference


def before_choice(
    route: object, experts: object, x: Tensor, prep: Prep | None, norm: Norm
) -> tuple[object, dict[str, Any]]:
    """(rows that experts read, or None; what the call of `route` is told besides).

    Rows need no choice to be prepared: by the router, where it norms the same rows (`prep` is its `norm`), else by a launch before.
    """
    room, prepare = getattr(experts, "room", None), getattr(experts, "prepare", None)
    if room is None or prepare is None:
        return None, {}
    if prep is norm and getattr(route, "writes_rows", False) and (into := room(len(x))) is not None:
        return into, {"into": into, "power": norm.power}
    return prepare(x, prep), {}


def at_once(route: object, experts: object, n_row: int, prep: Prep | None, norm: Norm) -> list[slice]:
    """Which of so many rows go to the experts together. More than they take at once come in parts where the router prepares rows (`before_choice`):
    another launch sums their squares in another order, and a row's bits must not depend on how many there are."""
    most = getattr(experts, "most", 0) if prep is norm and getattr(route, "writes_rows", False) else 0
    step = most or max(n_row, 1)
    return [slice(first, min(first + step, n_row)) for first in range(0, max(n_row, 1), step)]


def by_parts(parts: Sequence[slice], run: Callable[..., Any], *rows: Tensor | None) -> Any:
    """run(*rows), which is a tensor of as many rows if there are several parts, part after part."""
    if len(parts) == 1:
        return run(*rows)
    return torch.cat([run(*(None if t is None else t[part] for t in rows)) for part in parts])


def experts_into(
    experts: ExpertsRun,
    x: Tensor,
    routes: Routes,
    prep: Norm | None,
    added: Added,
    ready: object,
    streams: Streams | None,
) -> Tensor | Shares:
    """experts(x) + added; or, of few rows, what they gave each, where `streams` sums that on its way (`merged`)."""
    shares, sums_of = getattr(experts, "shares", None), getattr(streams, "sums_of", None)
    if (
        shares is not None
        and sums_of is not None
        and isinstance(ready, Rows)
        and added.gate is None
        and sums_of(len(x))
    ):
        return shares(ready, routes.ids, routes.weights, added)
    return experts(x, routes.ids, routes.weights, prep, added, ready)


def experts_then(
    experts: ExpertsRun, x: Tensor, routes: Routes, ready: object, product: Product, residual: Tensor | None
) -> Tensor:
    """residual + product(experts(x)). Of few rows the launch that prepares sums for the product makes them, too."""
    shares = getattr(experts, "shares", None)
    if isinstance(product, Streamed) and shares is not None and ready is not None:
        sums = product.sums_of(len(x))
        if sums is not None:
            return product(sums.summed(shares(ready, routes.ids, routes.weights)), residual=residual)
    return product(experts(x, routes.ids, routes.weights, None, NOTHING, ready), residual=residual)
