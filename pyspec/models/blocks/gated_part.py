"""A part between several residual streams, which it reads and writes by gates of low rank (op `gated_streams`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self, cast

from pyspec.cuda.ops.gated_streams.ref import GatedStreamsSpec
from pyspec.forward.call import Folding, Value
from pyspec.forward.trace import Forward
from pyspec.models.part import AttentionShape, PartSpec, Place, Plain
from pyspec.models.residual import Gates
from pyspec.models.wants import Want
from pyspec.slots.parts import LayerParts

INJECT = "inject.weight"


def read_streams(gates: Gates, f: Forward, x: Value, *more: tuple[str, int]) -> tuple[Value, ...]:
    """The row [row, n] read of streams x [row, n_stream * n], and products of the normed streams with further matrices of the gates, by their
    names and widths."""
    n = gates.n_stream
    spec, names = GatedStreamsSpec(f.device, n, x.width // n, f.eps), gates.names
    normed = f.op("gated_streams.norm", spec, x, f.vector(names[0]), shape=x.shape)
    others = [f"{gates.name}_{name}" for name, _ in more]
    widths = gates.n_low, *(width for _, width in more)
    low, found = f.product(normed, names[1], *others, n_out=sum(widths)), []
    if more:
        low, *found = f.split(low, widths)
    low = f.op("gated_streams.bend", spec, low, shape=low.shape)
    up = f.product(low, names[2], n_out=x.width)
    return f.op("gated_streams.read", spec, normed, up, shape=(spec.n,)), *found


def head_row(gates: Gates, f: Forward, x: Value) -> Value:
    """The row that the head reads of streams x."""
    (row,) = read_streams(gates, f, x)
    return row


class AroundPart(Plain):
    """A part that reads and writes the stream for another one, `part`, which takes normed rows (`Binding.norm` of "")."""

    __slots__ = ()
    part: PartSpec

    @property
    def attends(self) -> AttentionShape | None:
        return self.part.attends

    @property
    def folds(self) -> Folding | None:
        return self.part.folds

    def memory(self) -> LayerParts:
        return self.part.memory()

    def share(self, n: int) -> Self:
        return self._of(self.part.share(n))

    def of_file(self, at: Place) -> Self:
        return self._of(self.part.of_file(at))

    def _of(self, part: PartSpec) -> Self:
        changed: Self = replace(cast(Any, self), part=part)
        return changed


@dataclass(frozen=True, slots=True)
class GatedPart(AroundPart):
    """The part as data."""

    part: PartSpec
    gates: Gates

    def tensors(self, at: Place) -> dict[str, Want]:
        n = self.gates.n_stream
        inject = Want((n, n * at.n_embd))
        own = {f"{self.gates.name}_{INJECT}": inject, **self.gates.tensors(at.n_embd)}
        return self.part.tensors(at) | {at.name(name): want for name, want in own.items()}

    def forward(self, f: Forward, x: Value, stream: Value | None) -> Value:
        """The streams behind it."""
        n = self.gates.n_stream
        row, inject = read_streams(self.gates, f, x, (INJECT, n))
        y = self.part.forward(f.behind(""), row, None)
        spec = GatedStreamsSpec(f.device, n, row.width, f.eps)
        return f.op("gated_streams.merge", spec, x, y, inject, shape=x.shape)
