"""A block: parts in order. Each reads the normed residual stream and adds its output to the stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from pyspec.cpu.tensors import add
from pyspec.cuda import fuse
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.models.part import AttentionShape, Binding, BoundPart, LoadTypes, PartSpec, Pass, Place, Request
from pyspec.models.wants import Want
from pyspec.slots.parts import LayerParts


@dataclass(frozen=True, slots=True)
class Part:
    """x + spec(norm(x)), or x + post(spec(norm(x))). norm, post: GGUF names without prefix and ending; post "": none."""

    norm: str
    spec: PartSpec
    post: str = ""

    @property
    def norms(self) -> tuple[str, ...]:
        return (self.norm, self.post) if self.post else (self.norm,)


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """A block as data."""

    parts: tuple[Part, ...]

    @property
    def specs(self) -> tuple[PartSpec, ...]:
        return tuple(part.spec for part in self.parts)

    @property
    def captures_prompts(self) -> bool:
        return all(spec.captures_prompts for spec in self.specs)

    @property
    def attention(self) -> tuple[AttentionShape, ...]:
        """Shapes of its attentions."""
        return tuple(spec.attends for spec in self.specs if spec.attends is not None)

    def tensors(self, at: Place) -> dict[str, Want]:
        """Every tensor that it needs."""
        wants: dict[str, Want] = {}
        for part in self.parts:
            wants |= {at.name(f"{norm}.weight"): Want((at.n_embd,)) for norm in part.norms}
            wants |= part.spec.tensors(at)
        return wants

    def memory(self) -> LayerParts:
        """Its memory for the slots."""
        return {name: kept for spec in self.specs for name, kept in spec.memory().items()}

    def share(self, n: int) -> BlockSpec:
        """The block of each of `n` ranks."""
        return BlockSpec(tuple(replace(part, spec=part.spec.share(n)) for part in self.parts))

    def requests(self, at: Place, on: LoadTypes) -> Iterator[Request]:
        """The ops that binding it asks for, products apart."""
        for part in self.parts:
            yield from part.spec.requests(at, on)
            if part.post:
                yield norms, NormsSpec(on.device, at.n_embd, at.eps)

    def bind(self, at: Binding) -> Block:
        """at: its norm is each part's own."""
        return Block([Step(part, replace(at, norm=part.norm)) for part in self.parts])


class Step:
    """A bound part, and the way of its output back to the stream: its last product adds the stream, or a norm comes first."""

    def __init__(self, part: Part, at: Binding) -> None:
        self.part: BoundPart = part.spec.bind(at)
        self.post: Tensor | None = None
        if part.post:
            self.post = at.weights.vector(at.name(f"{part.post}.weight"))
            self.norms = norms.bind(NormsSpec(at.weights.device, at.n_embd, at.eps))

    @property
    def gives(self) -> fuse.GivesSum | None:
        """A sum of ranks that is the stream itself."""
        return self.part.gives if self.post is None else None

    def __call__(self, x: Tensor, run: Pass) -> Tensor:
        if self.post is None:
            return self.part(x, x, run)
        return add(x, self.norms(self.part(x, None, run), self.post))


class Block:
    """A block bound to its weights."""

    def __init__(self, steps: list[Step]) -> None:
        self.steps, self.parts = steps, [step.part for step in steps]
        self.capturable = all(part.capturable for part in self.parts)
        self.captures_prompts = self.capturable and all(part.captures_prompts for part in self.parts)

    @property
    def fold(self) -> fuse.Fold:
        """Folds the records of its state, if it has one."""
        return next(part.fold for part in self.parts if part.fold is not None)

    def __call__(self, x: Tensor, run: Pass) -> Tensor:
        """The residual stream x [row, n_embd] f32 behind the block."""
        for step in self.steps:
            x = step(x, run)
        return x
