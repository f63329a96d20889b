"""Parts that read the same stream, behind one norm or each behind its own, and give one sum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from pyspec.forward.call import Folding, Value
from pyspec.forward.trace import Forward
from pyspec.models.block import BlockSpec
from pyspec.models.part import AttentionShape, Place, Plain
from pyspec.models.wants import Want
from pyspec.slots.parts import LayerParts


@dataclass(frozen=True, slots=True)
class Together(Plain):
    """The parts of a block, side by side, as one part; those without a norm read rows behind its own. At most one is an attention, and one
    a recurrence."""

    of: BlockSpec

    @property
    def attends(self) -> AttentionShape | None:
        return next(iter(self.of.attention), None)

    @property
    def folds(self) -> Folding | None:
        return next((spec.folds for spec in self.of.specs if spec.folds is not None), None)

    def tensors(self, at: Place) -> dict[str, Want]:
        return self.of.tensors(at)

    def memory(self) -> LayerParts:
        return self.of.memory()

    def share(self, n: int) -> Together:
        return Together(self.of.share(n))

    def of_file(self, at: Place) -> Together:
        """See `PartSpec.of_file`."""
        return Together(self.of.of_file(at))

    def forward(self, f: Forward, x: Value, stream: Value | None) -> Value:
        n = f.normed(x)
        return f.add(stream, reduce(f.add, (part.alone(f, n) for part in self.of.parts)))
