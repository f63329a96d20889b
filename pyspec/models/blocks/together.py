"""Parts that read the same stream, each behind its own norms, and give one sum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

from torch import Tensor

from pyspec.cpu.tensors import add
from pyspec.models.block import Block, BlockSpec
from pyspec.models.part import Binding, ForwardSize, LoadTypes, Pass, Place, Request
from pyspec.models.wants import Want
from pyspec.slots.parts import LayerParts


@dataclass(frozen=True, slots=True)
class Together:
    """The parts of a block, side by side, as one part. No attention may be among them."""

    of: BlockSpec
    attends = None

    @property
    def captures_prompts(self) -> bool:
        return self.of.captures_prompts

    def scratch(self, size: ForwardSize) -> int:
        return self.of.scratch_bytes(size)

    def tensors(self, at: Place) -> dict[str, Want]:
        return self.of.tensors(at)

    def memory(self) -> LayerParts:
        return self.of.memory()

    def share(self, n: int) -> Together:
        return Together(self.of.share(n))

    def of_file(self, at: Place) -> Together:
        """As of ReadsBlocks."""
        return Together(self.of.of_file(at))

    def requests(self, at: Place, on: LoadTypes) -> Iterator[Request]:
        yield from self.of.requests(at, on)

    def bind(self, at: Binding) -> BoundTogether:
        return BoundTogether(self.of.bind(at))


class BoundTogether:
    """The sum of the parts' outputs."""

    reads = gives = fold = None

    def __init__(self, block: Block) -> None:
        self.steps = block.steps
        self.capturable, self.captures_prompts = block.capturable, block.captures_prompts

    def __call__(self, x: Tensor, residual: Tensor | None, run: Pass) -> Tensor:
        made = reduce(add, (step.alone(x, run) for step in self.steps))
        return made if residual is None else add(residual, made)
