"""A forward as data: calls of ops over tensors whose rows are not known yet, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

Fold = Callable[[Any, int, int], None]
"""Folds records of a layer's state: (the layer, a slot, how many)."""
Folding = tuple[str, Fold]
"""The op that keeps records of slots, and the reference of folding them."""


@dataclass(eq=False, slots=True)
class Value:
    """A tensor [row, *shape] f32 of a forward. means_of: weights of norms, if its rows are means of normed rows."""

    shape: tuple[int, ...]
    means_of: Weight | None = None

    @property
    def width(self) -> int:
        """Numbers of a row."""
        n = 1
        for dim in self.shape:
            n *= dim
        return n


@dataclass(frozen=True, slots=True)
class Weight:
    """Tensors of the file, by the names that they have behind a block's prefix.

    kind  the method of `models.weights.Weights` that reads them, or a function of weights and names
    how   its other arguments, as pairs
    """

    kind: str | Callable[..., Any]
    names: tuple[str, ...]
    how: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class RunInput:
    """An input of each forward besides values: an attribute of `models.binding.Pass`, or a part of one, by its place (a layer, a rope)."""

    name: str
    place: Any = None


@dataclass(eq=False, slots=True)
class OpCall:
    """A call of an op.

    op       its name: an op of `pyspec.cuda.ops`, or one of `lower.PLAIN`
    spec     the spec that the op is bound with; of a product its `Weight`
    inputs   values, weights, given things and constants. A call among them is a preparation that its reader does on the way
    more     further arguments by name
    loads    weights that its launch is loaded with, which keeps them in a form of its own
    """

    op: str
    spec: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Value, ...]
    more: dict[str, Any] = field(default_factory=dict)
    loads: Weight | None = None

    @property
    def output(self) -> Value:
        (only,) = self.outputs
        return only

    def reads(self) -> Iterator[Value]:
        """The values that it reads, those of its preparations among them."""
        for x in (*self.inputs, *self.more.values()):
            if isinstance(x, OpCall):
                yield from x.reads()
            elif isinstance(x, tuple):
                yield from (one for one in x if isinstance(one, Value))
            elif isinstance(x, Value):
                yield x


@dataclass(slots=True)
class ForwardProgram:
    """Calls in order. inputs: values of the caller; output: the returned value."""

    inputs: tuple[Value, ...]
    calls: list[OpCall]
    output: Value

    def readers(self, value: Value) -> list[OpCall]:
        """The calls that read it; one that reads it twice stands twice."""
        return [call for call in self.calls for read in call.reads() if read is value]

    def maker(self, value: Any) -> OpCall | None:
        """The call that makes it; None: it is an input, or no value."""
        return next((c for c in self.calls if any(made is value for made in c.outputs)), None)

    def read_once(self, value: Any) -> bool:
        """Whether one call reads it, once, and it is not returned."""
        return value is not self.output and len(self.readers(value)) == 1

    def peak(self) -> int:
        """Bytes of a row that its values take at most at once, its inputs among them; views are of no cost."""
        own = {id(v): id(v) for v in self.inputs}
        size = {id(v): 4 * v.width for v in self.inputs}
        last: dict[int, int] = {}
        for i, call in enumerate(self.calls):
            first = next((v for v in call.reads()), None)
            for made in call.outputs:
                is_view = call.op == "view" and first is not None
                own[id(made)] = own[id(first)] if is_view else id(made)
                size.setdefault(own[id(made)], 4 * made.width)
                last[own[id(made)]] = i
            for read in call.reads():
                last[own[id(read)]] = i
        last[own[id(self.output)]] = len(self.calls)
        given = {own[id(v)] for v in self.inputs}  # the caller holds them
        live, most = given, 0
        for i, call in enumerate(self.calls):
            live = live | {own[id(made)] for made in call.outputs}
            most = max(most, sum(size[x] for x in live))
            live = given | {x for x in live if last.get(x, -1) > i}
        return most
