"""A block: parts in order. Each reads the normed residual stream and adds its output to the stream, or stands between several streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor

from pyspec.cpu.tensors import add, scaled
from pyspec.cuda import fuse
from pyspec.cuda.collective import Collective
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.cuda.ops.streams.ref import StreamMix, Streams
from pyspec.models.part import (
    AttentionShape,
    Binding,
    BoundPart,
    ForwardSize,
    LoadTypes,
    PartSpec,
    Pass,
    Place,
    ReadsBlocks,
    Request,
    WorksForStreams,
)
from pyspec.models.wants import Want
from pyspec.models.weights import Weights
from pyspec.slots.parts import LayerParts


@dataclass(frozen=True, slots=True)
class Mix:
    """The coefficients of a part among `n` streams: its share of each as it reads them, and the way that they go on (op `streams`). name: as a norm's."""

    name: str
    n: int

    def tensors(self, at: Place) -> dict[str, Want]:
        return mix_tensors(at.name(self.name), self.n * at.n_embd, (2 + self.n) * self.n, 3)


def mix_tensors(name: str, n_in: int, n_out: int, n_scale: int) -> dict[str, Want]:
    """Wanted tensors of `n_out` coefficients."""
    shapes = {"fn": (n_out, n_in), "base": (n_out,), "scale": (n_scale,)}
    return {f"{name}_{x}.weight": Want(shape) for x, shape in shapes.items()}


def mix_of(w: Weights, name: str) -> StreamMix:
    """The coefficients of that name."""
    return StreamMix(*(w.vector(f"{name}_{x}.weight") for x in ("fn", "scale", "base")))


@dataclass(frozen=True, slots=True)
class Part:
    """x + f spec(norm(x)), or x + f post(spec(norm(x))). norm, post: GGUF names without prefix and ending; "": none.

    mix     for a model of several streams
    factor  f, of what the part adds to the stream
    """

    norm: str
    spec: PartSpec
    post: str = ""
    mix: Mix | None = None
    factor: float = 1.0

    @property
    def norms(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.norm, self.post)))


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """A block as data. scale: the tensor with one number that the stream behind it is multiplied with, where the file has it; "": none."""

    parts: tuple[Part, ...]
    scale: str = ""

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
            wants |= {} if part.mix is None else part.mix.tensors(at)
        return wants | ({at.name(self.scale): Want((1,), optional=True)} if self.scale else {})

    def memory(self) -> LayerParts:
        """Its memory for the slots."""
        return {name: kept for spec in self.specs for name, kept in spec.memory().items()}

    def scratch_bytes(self, size: ForwardSize) -> int:
        """Bytes that it takes while it runs, beyond those that every model takes."""
        return sum(spec.scratch(size) for spec in self.specs if spec.scratch is not None)

    def share(self, n: int) -> BlockSpec:
        """The block of each of `n` ranks."""
        parts = tuple(replace(part, spec=part.spec.share(n)) for part in self.parts)
        return replace(self, parts=parts)

    def of_file(self, at: Place) -> BlockSpec:
        """The block with the sizes of blocks of this file's types, where shares depend on them."""
        parts = tuple(
            replace(part, spec=part.spec.of_file(at)) if isinstance(part.spec, ReadsBlocks) else part
            for part in self.parts
        )
        return self if parts == self.parts else replace(self, parts=parts)

    def requests(self, at: Place, on: LoadTypes) -> Iterator[Request]:
        """The ops that binding it asks for, products apart."""
        for part in self.parts:
            yield from part.spec.requests(at, on)
            if part.post:
                yield norms, NormsSpec(on.device, at.n_embd, at.eps)

    def bind(self, at: Binding) -> Block:
        """at: its norm is each part's own."""
        scale = at.weights.optional(at.name(self.scale)) if self.scale else None
        factor = 1.0 if scale is None else float(scale.item())
        last = len(self.parts) - 1
        return Block(
            [
                Step(part, replace(at, norm=part.norm), factor if i == last else 1.0)
                for i, part in enumerate(self.parts)
            ]
        )


class Step:
    """A bound part, and the way of its output back to the stream: its last product adds the stream, or a norm or a factor comes first.

    behind  multiplies the stream behind it
    next    what reads that stream first (`link_reads`)
    mix  its coefficients among several streams, which the residual reads and merges (`residual.py`)
    """

    def __init__(self, part: Part, at: Binding, behind: float = 1.0) -> None:
        self.behind = behind
        self.next: fuse.FirstRead | None = None
        self.part: BoundPart = part.spec.bind(at)
        self.mix = None if part.mix is None else mix_of(at.weights, at.name(part.mix.name))
        self.factor, self.adds = part.factor, not part.post and part.factor == 1.0
        self.fused = self.part if isinstance(self.part, WorksForStreams) and self.adds else None
        self.post: Tensor | None = None
        if part.post:
            self.post = at.weights.vector(at.name(f"{part.post}.weight"))
            self.norms = norms.bind(NormsSpec(at.weights.device, at.n_embd, at.eps))

    @property
    def gives(self) -> fuse.GivesSum | None:
        """A sum of ranks that is the stream itself."""
        return self.part.gives if self.adds and self.mix is None and self.behind == 1.0 else None

    def __call__(self, x: Tensor, run: Pass) -> Tensor:
        """One stream behind the part."""
        if self.adds:
            return scaled(self.part(x, x, run), self.behind)
        if self.post is not None and self.factor == 1.0:
            y = self.part(x, None, run)
            return fuse.added(self.norms, y, self.post, x, self.behind, self.next)
        return scaled(add(x, self.alone(x, run)), self.behind)

    @property
    def mixed(self) -> StreamMix:
        """`mix` in a model of several streams."""
        assert self.mix is not None, "a part between streams has coefficients"
        return self.mix

    def place(self, streams: Streams, n_row: int) -> fuse.RowBuffer | None:
        """As `WorksForStreams`; every part may stand between streams."""
        return None if self.fused is None else self.fused.place(streams, n_row)

    def between(
        self, y: Tensor, run: Pass, place: fuse.RowBuffer | None, streams: Streams | None
    ) -> Tensor | fuse.Shares:
        """As `WorksForStreams`."""
        return self.alone(y, run) if self.fused is None else self.fused.between(y, run, place, streams)

    def alone(self, y: Tensor, run: Pass) -> Tensor:
        """What the part adds to the stream y."""
        y = self.part(y, None, run)
        return scaled(y if self.post is None else self.norms(y, self.post), self.factor)


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


def link_reads(blocks: Sequence[Block]) -> None:
    """Tell each part what reads the stream behind it first. The blocks run one after the other."""
    for last, next in pairwise(step for block in blocks for step in block.steps):
        last.next = next.part.reads


def link_sums(ranks: Collective, blocks: Sequence[Block]) -> None:
    """Have the sums of ranks in these blocks prepare the rows of the part behind them, where kernels can. All ranks call it together."""
    steps = [step for block in blocks for step in block.steps]
    fuse.link(ranks, [(last.gives, next.part.reads) for last, next in pairwise(steps)])
