"""Kernels that work for their neighbours: a launch may write the next product's rows, or fetch its weights ahead. Models ask here only.

A launch that an op binds keeps the op's contract. More abilities are optional; each is a protocol below (`Fetches`,
`Prepares`, `Folds`, `ReadsInto`, `SumsShares`, `WritesRows`, `Readies`, `LeavesRest`, `TakesSome`, `GivesShares`, `KeysBeside`,
`JoinsBeside`, `AddsInto`, `RunsBeside`), and a launch has it if it has the protocol's names. The torch reference has none of them and runs in
the same models. A product that ranks sum (`Summed`) is asked for this rank's own part, which reads the rows. Sums behind it may prepare the
rows of the next product (`link`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Protocol, TypeGuard, TypeVar, TypeVarTuple, cast

from torch import Tensor

from pyspec.cuda.collective import Collective
from pyspec.cuda.ops.norms.ref import Norms
from pyspec.cuda.ops.rows.cuda import RowBuffer, Rows, is_aligned
from pyspec.cuda.ops.rows.ref import HeadNorm, Norm, Prep
from pyspec.cuda.ops.sparse_attend.ref import KeyTail
from pyspec.cuda.streamed import Handing, Streamed, StreamedParts
from pyspec.cuda.streamed import handing as handing_of
from pyspec.cuda.sum_rows import sums_into
from pyspec.slots.batch import Batch
from pyspec.slots.recurrent import StateLayer

Product = Callable[..., Tensor]  # as models.weights.Matrix
Fold = Callable[[StateLayer, int, int], None]
Ability = TypeVar("Ability")
Given = TypeVarTuple("Given")  # arguments of a call


class ProductInParts(Protocol):
    """As models.grouped.Grouped. few: runs few rows as one product."""

    @property
    def few(self) -> object: ...

    def __call__(self, x: Tensor) -> Tensor: ...


class RankSum(Protocol):
    """A product that ranks sum. own: this rank's part."""

    @property
    def own(self) -> object: ...


class Fetches(Protocol):
    """Calls take `after`: packed weights of the next product, which are on their way to L2 meanwhile."""

    fetches: bool


class Folds(Protocol):
    """`folder` makes a call that folds a slot's records without rows, to the bits of the launch's own calls."""

    def folder(self) -> Fold: ...


class Prepares(Protocol):
    """`prepared` runs as a call does, and puts its output where the next product reads it (`GatedRowBuffer` or `RowBuffer`)."""

    @property
    def prepared(self) -> Callable[..., Any]: ...


class ReadsInto(Protocol):
    """Calls of streams take `into`: the rows that they give are also normed and put where the next product reads them. `sums_of` rows they take
    back as the outputs of single experts, not summed."""

    reads_into: bool

    def sums_of(self, n_row: int) -> bool: ...


class LeavesRest(Protocol):
    """A product that may leave the last step of its work to the preparation of the next one's rows (`unfinished`)."""

    def unfinished(self, x: Tensor, prep: Prep | None = None) -> tuple[Tensor, Prep | None]: ...


class WritesRows(Protocol):
    """Calls of a router take `into` and `power`: it norms its own input for another reader, too."""

    writes_rows: bool


class KeysBeside(Protocol):
    """Attention whose new keys are made beside a product of few rows, of which they read nothing."""

    def take_keys(self, n_row: int) -> Tensor | None: ...

    def keys_beside(self, kv: Tensor, tail: KeyTail, batch: Batch, own: Tensor) -> None: ...


class JoinsBeside(Protocol):
    """A compressor that may run in one launch with another one of its class."""

    @property
    def with_beside(self) -> Callable[[Any], Callable[..., None] | None]: ...


class AddsInto(Protocol):
    """Norms whose sums with the stream are put, normed once more, where the next product reads them."""

    added_into: Callable[..., Tensor]
    takes: Callable[[Any], bool]


class RunsBeside(Protocol):
    """A compressor that may run beside a product of few rows, of which it reads nothing."""

    runs_beside: bool


def has(launch: object, ability: type[Ability]) -> TypeGuard[Ability]:
    """True if `launch` has every member of the protocol `ability`. Forwards ask this for each layer, and `isinstance` of a protocol takes
    a hundred times as long."""
    names = _members(ability)  # type: ignore[arg-type]  # mypy takes protocols for unhashable
    return all(hasattr(launch, name) for name in names)


@cache
def _members(ability: Any) -> tuple[str, ...]:
    declared = {**vars(ability).get("__annotations__", {}), **vars(ability)}
    return tuple(name for name in declared if not name.startswith("_"))


def part_of(product: Any) -> Any:
    """This rank's part of a product."""
    return product.own if has(product, RankSum) else product


def read_next(launch: object, product: Product) -> dict[str, Tensor]:
    """Further arguments of `launch`, whose output `product` reads: the product's weights, if the launch fetches them ahead."""
    own = part_of(product)
    if has(launch, Fetches) and isinstance(own, Streamed):
        return {"after": own.packed.data}
    return {}


def folder(launch: object, reference: Fold) -> Fold:
    """The call that folds the states of `launch`: its own, or the reference's."""
    return launch.folder() if has(launch, Folds) else reference


def leaves_rest(product: object) -> bool:
    """Whether a product may leave the last step of its work to the preparation of the next one's rows."""
    return has(product, LeavesRest)


def unfinished(product: Product, x: Tensor, prep: Prep | None = None) -> tuple[Tensor, Prep | None]:
    """A product, and the preparation that is left to the next product."""
    return product.unfinished(x, prep) if has(product, LeavesRest) else (product(x, prep), None)


def writes_rows_of(launch: object, product: Product) -> bool:
    """Whether `launch` can write the rows that the product reads."""
    return has(launch, Prepares) and isinstance(part_of(product), Streamed)


def then(
    launch: Any,
    given: tuple[Tensor, *tuple[Any, ...]],
    product: Product,
    prep: HeadNorm,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + product(prep(launch(*given))). Of few rows the launch writes the rows that the product reads (`writes_rows_of`)."""
    into = part_of(product).place(len(given[0]), prep)
    if into is not None:
        return product(launch.prepared(*given, into=into), residual=residual)
    return product(launch(*given).flatten(1), prep, residual=residual)


def reads_into(streams: object) -> bool:
    """Whether a launch of streams may put the rows that it gives, normed, where the next product reads them (`place_for`), and sum what
    experts made of few rows."""
    return has(streams, ReadsInto)


def place_for(product: Product, norm: Norm, n_row: int) -> RowBuffer | None:
    """Where `n_row` rows may be put, normed, for `product` to read; None: the product prepares them."""
    return product.normed(n_row, norm) if isinstance(product, Streamed) else None


def writes_rows(route: object) -> bool:
    """Whether a router may norm its own input for another reader, too."""
    return has(route, WritesRows)


def both(main: object, beside: object) -> Callable[..., None] | None:
    """Two compressors of the same tokens in one launch; None where they run one after the other."""
    if has(main, JoinsBeside) and type(main) is type(beside):
        return main.with_beside(beside)
    return None


def handing(first: Product | StreamedParts | None, next: Product | None, bound: float) -> Handing | None:
    """Runs `first`, of few rows, straight into the rows of `next`: no launch prepares them. None where no kernel does that.
    bound: of the magnitudes that `first` gives, 0 if there is none."""
    own = part_of(next)
    if not isinstance(first, Streamed | StreamedParts) or not isinstance(own, Streamed):
        return None
    return handing_of(first, own, bound)


def handed(
    hands: Handing, first: Product, next: Product, x: Tensor, prep: Prep | None, residual: Tensor | None
) -> Tensor:
    """residual + next(first(prep(x))). Of few rows `first` writes the rows of `next`."""
    ready = hands(x, prep)
    return next(first(x, prep) if ready is None else ready, None, residual)


def attended(
    launch: Callable[[Tensor, *Given, Batch], Tensor],
    given: tuple[Tensor, *Given],
    batch: Batch,
    product: ProductInParts,
    power: float,
    hands: Handing | None,
) -> Tensor | Rows:
    """product(launch(*given, batch)), or the rows that it hands on. If rows are few, and the launch can, it writes the product's rows, over
    `power`."""
    few = product.few
    if has(launch, Prepares) and isinstance(few, StreamedParts):
        into = few.place(len(given[0]), power)
        if into is not None:
            rows = launch.prepared(given, batch, into)
            ready = None if hands is None else hands(rows)
            return few(rows) if ready is None else ready
    return product(launch(*given, batch).flatten(1))


def keys_room(
    attend: object, compressors: Sequence[object], product: Product, given: Sequence[Tensor]
) -> Tensor | None:
    """Memory for new keys, where they and compressors run beside `product`, which is launched next, `late`; None where they run behind it.
    given: their inputs. A copy of these would be made too late.

    Both sides keep to this: the product lets them start when all before the product is over; they read nothing else, write to memory taken
    before the product was launched, and are not over before the product is (overlap.cuh).
    """
    n_row = len(given[0])
    if not has(attend, KeysBeside) or not isinstance(product, Streamed) or not product.has_late(n_row):
        return None
    may = all(map(is_aligned, given)) and all(has(c, RunsBeside) for c in compressors)
    return attend.take_keys(n_row) if may else None


def put_keys(attend: object, kv: Tensor, tail: KeyTail, batch: Batch, own: Tensor) -> None:
    """The new keys into `own`, which `keys_room` gave, for the call of `attend` with just this kv."""
    cast(KeysBeside, attend).keys_beside(kv, tail, batch, own)


# -- norms behind parts --------------------------------------------------------------------------------------------

FirstRead = tuple[Product, Norm]  # how the next part begins
ADDS_INTO = 1  # 0: a launch of its own prepares these rows


def added(
    launch: Norms, x: Tensor, weight: Tensor, stream: Tensor, factor: float, read: FirstRead | None
) -> Tensor:
    """launch.added(x, weight, stream, factor). read: what reads the result next; its rows are prepared on the way where a launch can."""
    product = None if read is None else read[0]
    if read is not None and isinstance(product, Streamed) and has(launch, AddsInto) and ADDS_INTO:
        to = product.reads(len(x))
        if 0 < len(x) <= product.most_ready(read[1]) and launch.takes(to):
            return launch.added_into(x, weight, stream, factor, to, read[1])
    return launch.added(x, weight, stream, factor)


# -- ranks -------------------------------------------------------------------------------------------------------


class GivesSum(Protocol):
    """The end of a part that sums over ranks. into: makes the sum of this rank's part."""

    into: Callable[[Tensor], Tensor]


def link(ranks: Collective, pairs: Sequence[tuple[GivesSum | None, FirstRead | None]]) -> None:
    """Have sums prepare the rows of the product that reads them next, where kernels can, on all ranks together. pairs: a sum, and the product
    with its norm that reads the sum first."""
    readers = [
        (read[0], read[1])
        if gives is not None and read is not None and isinstance(read[0], Streamed)
        else None
        for gives, read in pairs
    ]
    if not any(readers):
        return
    for (gives, _), into in zip(pairs, sums_into(ranks, readers), strict=True):
        if gives is not None and into is not None:
            gives.into = into
