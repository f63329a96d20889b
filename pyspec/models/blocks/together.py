"""Parts that read the same stream, each behind its own norms, and give one sum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from pyspec.forward.call import Value
from pyspec.forward.trace import Forward
from pyspec.models.block import BlockSpec
from pyspec.models.part import Place, Plain
from pyspec.models.wants import Want
from pyspec.slots.parts import LayerParts


@dataclass(frozen=True, slots=True)
class Together(Plain):
    """The parts of a block, side by side, as one part. No attention may be among them."""

    of: BlockSpec

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
        return f.add(stream, reduce(f.add, (part.alone(f, x) for part in self.of.parts)))
