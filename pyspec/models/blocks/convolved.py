"""A part between two convolutions over the rows before each row: of its normed input, and of its output. DFlash2's blocks have two."""

from __future__ import annotations

from dataclasses import dataclass

from pyspec.cuda.ops.convolve.ref import ConvolveSpec
from pyspec.forward.call import RunInput, Value
from pyspec.forward.trace import Forward
from pyspec.models.blocks.gated_part import AroundPart
from pyspec.models.part import PartSpec, Place
from pyspec.models.wants import Want


@dataclass(frozen=True, slots=True)
class Convolved(AroundPart):
    """The part as data.

    name   of its tensors, without their endings
    n_tap  rows that each row is made of, itself included
    group  columns that share the weights that a row gives
    """

    part: PartSpec
    name: str
    n_tap: int
    group: int

    def tensors(self, at: Place) -> dict[str, Want]:
        n = at.n_embd
        own = {
            at.name(f"{self.name}_base"): Want((2, self.n_tap, n)),
            at.name(f"{self.name}_proj.weight"): Want((2 * self.n_tap * (n // self.group), n)),
        }
        return self.part.tensors(at) | own

    def forward(self, f: Forward, x: Value, stream: Value | None) -> Value:
        spec = ConvolveSpec(f.device, x.width, self.n_tap, self.group)
        n = f.norm_apart(x, f.vector(f"{f.at.norm}.weight"))
        given = f.product(n, f"{self.name}_proj.weight", n_out=2 * self.n_tap * (x.width // self.group))
        base, rows = f.vector(f"{self.name}_base"), RunInput("row_seq")
        y = f.op("convolve", spec, n, given, base, rows, 0, None, shape=x.shape)
        y = self.part.forward(f.behind(""), y, None)
        return f.op("convolve", spec, y, given, base, rows, 1, stream, shape=x.shape)
