"""Kernels that work for their neighbours: a launch may write the next product's rows, or fetch its weights ahead. Programs ask here when
they are bound (`forward/rewrite.py`).

A launch that an op binds keeps the op's contract. It may be able to do more, and is, if it has these names. The torch reference has none
of them and runs in the same models.

    fetches                calls take `after`: packed weights of the next product, which are on their way to L2 meanwhile
    folder                 makes a call that folds a slot's records without rows, to the bits of the launch's own calls
    prepared               runs as a call does, and puts its output where the next product reads it (`GatedRowBuffer` or `RowBuffer`)
    unfinished             of a product: leaves the last step of its work to the preparation of the next one's rows
    added_into, takes      norms: their sums with the stream are put, normed once more, where the next product reads them
    reads_into, sums_of    streams: calls take `into`, where their rows are put likewise; and few rows as the outputs of single experts
    writes_rows            a router: calls take `into` and `power`; it norms its own input for another reader, too
    take_keys, keys_beside  attention: new keys are made beside a product of few rows, of which they read nothing
    runs_beside            a compressor: so are its rows
    with_beside            a compressor: may run in one launch with another one of its class

Sums of ranks may prepare the rows of the next product, too (`link`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from pyspec.cuda.collective import Collective
from pyspec.cuda.ops.rows.cuda import RowBuffer, Rows, is_aligned
from pyspec.cuda.ops.rows.ref import HeadNorm, Norm, Prep
from pyspec.cuda.ops.sparse_attend.ref import KeyTail
from pyspec.cuda.streamed import Handing, Streamed, StreamedParts
from pyspec.cuda.streamed import handing as handing_of
from pyspec.cuda.sum_rows import sums_into
from pyspec.slots.batch import Batch
from pyspec.slots.recurrent import StateLayer

Product = Callable[..., Tensor]  # as models.weights.Matrix
FirstRead = tuple[Product, Norm]  # how the next part begins
Fold = Callable[[StateLayer, int, int], None]


def has(launch: object, *names: str) -> bool:
    """Whether a launch is able to do what these names stand for."""
    return all(hasattr(launch, name) for name in names)


def read_next(launch: Any, product: Product) -> dict[str, Tensor]:
    """Further arguments of `launch`, whose output `product` reads: the product's weights, if the launch fetches them ahead."""
    if has(launch, "fetches") and isinstance(product, Streamed):
        return {"after": product.packed.data}
    return {}


def folder(launch: Any, reference: Fold) -> Fold:
    """The call that folds the states of `launch`: its own, or the reference's."""
    return launch.folder() if has(launch, "folder") else reference


def leaves_rest(product: object) -> bool:
    """Whether a product may leave the last step of its work to the preparation of the next one's rows."""
    return has(product, "unfinished")


def writes_rows_of(launch: object, product: Product) -> bool:
    """Whether `launch` can write the rows that the product reads."""
    return has(launch, "prepared") and isinstance(product, Streamed)


def then(
    launch: Any,
    given: tuple[Tensor, *tuple[Any, ...]],
    product: Streamed,
    prep: HeadNorm,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + product(prep(launch(*given))). Of few rows the launch writes the rows that the product reads (`writes_rows_of`)."""
    into = product.place(len(given[0]), prep)
    if into is not None:
        return product(launch.prepared(*given, into=into), residual=residual)
    return product(launch(*given).flatten(1), prep, residual=residual)


def reads_into(streams: object) -> bool:
    """Whether a launch of streams may put the rows that it gives, normed, where the next product reads them (`place_of`), and sum what
    experts made of few rows."""
    return has(streams, "reads_into", "sums_of")


def place_of(read: FirstRead | None) -> Callable[[int], RowBuffer | None] | None:
    """By their number, where rows may be put, normed, for the product that reads them first, or None where it prepares them. None: it always does."""
    if read is None or not isinstance(read[0], Streamed):
        return None
    return partial(read[0].normed, norm=read[1])


def writes_rows(route: object) -> bool:
    """Whether a router may norm its own input for another reader, too."""
    return has(route, "writes_rows")


def both(main: Any, beside: Any) -> Callable[..., None] | None:
    """Two compressors of the same tokens in one launch; None where they run one after the other."""
    is_one_kind = has(main, "with_beside") and type(main) is type(beside)
    joined: Callable[..., None] | None = main.with_beside(beside) if is_one_kind else None
    return joined


def handing(first: Any, next: Product, bound: float) -> Handing | None:
    """Runs `first`, of few rows, straight into the rows of `next`: no launch prepares them. None where no kernel does that.
    bound: of the magnitudes that `first` gives, or, if it is in parts, of the norms of theirs."""
    of = first
    if has(first, "few", "reach"):  # one matrix for few rows reads parts as rows of their own
        of = first.few if isinstance(first.few, StreamedParts) else None
    if not isinstance(of, Streamed | StreamedParts) or not isinstance(next, Streamed):
        return None
    return handing_of(of, next, bound if of is first else bound * first.reach())


def handed(
    hands: Handing, first: Any, next: Product, x: Tensor, prep: Prep | None, residual: Tensor | None
) -> Tensor:
    """residual + next(first(prep(x))). Of few rows `first` writes the rows of `next`."""
    ready = hands(x, prep)
    if ready is None:
        ready = first(x) if prep is None else first(x, prep)
    return next(ready, None, residual)


def writes_groups(launch: object, product: Any) -> bool:
    """Whether `launch` can write the rows that the product in groups reads."""
    return has(launch, "prepared") and isinstance(product.few, StreamedParts)


def attended(
    choice: tuple[Any, tuple[Any, ...], dict[str, Any]],
    product: Any,
    power: float,
    hands: Handing | None,
) -> Tensor | Rows:
    """product(launch(*given)), or the rows that it hands on. Of few rows the launch writes the product's rows, over `power` (`writes_groups`)."""
    launch, (*given, batch), _ = choice
    into = product.few.place(len(given[0]), power)
    if into is None:
        made: Tensor = product(launch(*given, batch).flatten(1))
        return made
    rows = launch.prepared(tuple(given), batch, into)
    ready = None if hands is None else hands(rows)
    return product.few(rows) if ready is None else ready


def makes_keys_beside(attend: object, compressors: Sequence[object], product: object) -> bool:
    """Whether new keys and compressors may run beside `product`, which is launched next, `late`.

    Both sides keep to this: the product lets them start when all before the product is over; they read nothing else, write to memory taken
    before the product was launched, and are not over before the product is (overlap.cuh).
    """
    may = has(attend, "take_keys", "keys_beside") and isinstance(product, Streamed)
    return may and all(has(c, "runs_beside") for c in compressors)


def keys_room(attend: Any, product: Streamed, given: Sequence[Tensor]) -> tuple[Tensor | None, bool]:
    """Memory for new keys, and whether there is some: they and compressors run beside `product` then. given: their inputs. A copy of these would be
    made too late."""
    n_row = len(given[0])
    may = product.has_late(n_row) and all(map(is_aligned, given))
    own = attend.take_keys(n_row) if may else None
    return own, own is not None


def put_keys(attend: Any, kv: Tensor, tail: KeyTail, batch: Batch, own: Tensor | None) -> None:
    """The new keys into `own`, which `keys_room` gave, for the call of `attend` with just this kv."""
    if own is not None:
        attend.keys_beside(kv, tail, batch, own)


# -- norms behind parts --------------------------------------------------------------------------------------------


class AddedNorm:
    """stream + norm(x), times a factor.

    next  what reads the result first; the rows of a product are prepared on the way where a launch can
    most  rows up to which it does
    """

    def __init__(self, launch: Any) -> None:
        self.launch, self.most = launch, 0
        self.next: FirstRead | None = None

    def link(self, next: FirstRead | None) -> None:
        self.next = next
        if (
            next is not None
            and isinstance(next[0], Streamed)
            and has(self.launch, "added_into", "takes")
        ):
            self.most = next[0].most_ready(next[1])

    def __call__(self, x: Tensor, weight: Tensor, stream: Tensor, factor: float = 1.0) -> Tensor:
        if self.next is not None and 0 < len(x) <= self.most:
            product, norm = self.next
            to = product.reads(len(x))  # type: ignore[attr-defined]  # it is Streamed
            if self.launch.takes(to):
                ready: Tensor = self.launch.added_into(x, weight, stream, factor, to, norm)
                return ready
        done: Tensor = self.launch.added(x, weight, stream, factor)
        return done


# -- ranks -------------------------------------------------------------------------------------------------------


class RankSum:
    """The sum of all ranks' rows. into: sums, and may prepare the rows of the product that reads the sum."""

    def __init__(self, into: Callable[[Tensor], Tensor]) -> None:
        self.into = into

    def __call__(self, x: Tensor) -> Tensor:
        return self.into(x)


def link(ranks: Collective, pairs: Sequence[tuple[RankSum, FirstRead | None]]) -> None:
    """Have sums prepare the rows of the product that reads them next, where kernels can, on all ranks together. pairs: a sum, and the product
    with its norm that reads the sum first."""
    readers = [
        (read[0], read[1]) if read is not None and isinstance(read[0], Streamed) else None
        for _, read in pairs
    ]
    for (own, _), into in zip(pairs, sums_into(ranks, readers), strict=True):
        if into is not None:
            own.into = into
