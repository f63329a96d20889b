"""A part between two convolutions over the rows before each row: of its normed input, and of its output. DFlash2's blocks have two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from pyspec.cuda.ops.convolve.op import convolve
from pyspec.cuda.ops.convolve.ref import ConvolveSpec
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.models.part import (
    AttentionShape,
    Binding,
    ForwardSize,
    LoadTypes,
    PartSpec,
    Pass,
    Place,
    ReadsBlocks,
    Request,
)
from pyspec.models.wants import Want
from pyspec.slots.parts import LayerParts


@dataclass(frozen=True, slots=True)
class Convolved:
    """The part as data.

    part   takes normed rows (`Binding.norm` of "")
    name   of its tensors, without their endings
    n_tap  rows that each row is made of, itself included
    group  columns that share the weights that a row gives
    """

    part: PartSpec
    name: str
    n_tap: int
    group: int

    @property
    def captures_prompts(self) -> bool:
        return self.part.captures_prompts

    @property
    def attends(self) -> AttentionShape | None:
        return self.part.attends

    @property
    def scratch(self) -> Callable[[ForwardSize], int] | None:
        return self.part.scratch

    def tensors(self, at: Place) -> dict[str, Want]:
        n = at.n_embd
        own = {
            at.name(f"{self.name}_base"): Want((2, self.n_tap, n)),
            at.name(f"{self.name}_proj.weight"): Want((2 * self.n_tap * (n // self.group), n)),
        }
        return self.part.tensors(at) | own

    def memory(self) -> LayerParts:
        return self.part.memory()

    def share(self, n: int) -> Convolved:
        return replace(self, part=self.part.share(n))

    def of_file(self, at: Place) -> Convolved:
        """As of ReadsBlocks."""
        return replace(self, part=self.part.of_file(at)) if isinstance(self.part, ReadsBlocks) else self

    def requests(self, at: Place, on: LoadTypes) -> Iterator[Request]:
        yield from self.part.requests(at, on)
        yield norms, NormsSpec(on.device, at.n_embd, at.eps)
        yield convolve, ConvolveSpec(on.device, at.n_embd, self.n_tap, self.group)

    def bind(self, at: Binding) -> BoundConvolved:
        return BoundConvolved(self, at)


class BoundConvolved:
    """residual + after(part(before(n))) with n = norm(x). Weights of both convolutions are made of n."""

    reads = gives = None

    def __init__(self, spec: Convolved, at: Binding) -> None:
        w, name = at.weights, at.name(spec.name)
        own = ConvolveSpec(w.device, at.n_embd, spec.n_tap, spec.group)
        self.norm, self.norms = (
            w.vector(at.name(f"{at.norm}.weight")),
            norms.bind(NormsSpec(w.device, at.n_embd, at.eps)),
        )
        self.proj, self.base = w.matrix(f"{name}_proj.weight"), w.vector(f"{name}_base")
        self.part, self.convolve = spec.part.bind(replace(at, norm="")), convolve.bind(own)
        self.fold = self.part.fold
        self.capturable = self.part.capturable and convolve.chosen(own).capturable
        self.captures_prompts = self.capturable and self.part.captures_prompts

    def __call__(self, x: Tensor, residual: Tensor | None, run: Pass) -> Tensor:
        n, row_seq = self.norms(x, self.norm), run.batch.row_seq
        given = self.proj(n)
        y = self.part(self.convolve(n, given, self.base, row_seq, 0), None, run)
        return self.convolve(y, given, self.base, row_seq, 1, residual)
