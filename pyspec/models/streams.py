"""The residual bound: one stream, or several that are read and merged around every part of a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from pyspec.cpu.tensors import picked, side_by_side
from pyspec.cuda import fuse
from pyspec.cuda.exact import by_row
from pyspec.cuda.ops.gated_streams.op import gated_streams
from pyspec.cuda.ops.gated_streams.ref import GatedStreams, GatedStreamsSpec
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.cuda.ops.streams.op import streams
from pyspec.cuda.ops.streams.ref import StreamMix, StreamsSpec
from pyspec.models.binding import Binding, Pass
from pyspec.models.block import BlockSpec, Part
from pyspec.models.blocks.gated_part import head_row
from pyspec.models.bound import Block, BoundForward
from pyspec.models.residual import HEAD_MIX, Gates, Residual
from pyspec.models.slice_norms import SliceNorms
from pyspec.models.target import Matrix
from pyspec.models.weights import Weights

Normed = tuple[Tensor, Tensor]
"""Rows, and the weights of the norm before them."""


def bound_block(residual: Residual, block: BlockSpec, at: Binding) -> Any:
    """A block of a model with this residual: `Block`, or `StreamsBlock`."""
    if residual.n_iter is None:
        return Block(block, at)
    return StreamsBlock([Step(part, at) for part in block.parts])


def bound_residual(
    residual: Residual,
    weights: Weights,
    n_embd: int,
    eps: float,
    norm: Tensor | None,
    blocks: Sequence[Any],
    at: Binding | None = None,
) -> BoundResidual:
    """norm: weights of the last one, if there is one. blocks: bound (`bound_block`), as they run. at: where its own gates are, if it has any."""
    if residual.gates is not None:
        assert at is not None, "gates are bound"
        return BoundGated(residual.gates, at)
    assert norm is not None, "every other residual ends with one"
    if residual.n_iter is None:
        return BoundResidual(weights.device, n_embd, eps, norm, residual)
    spec = StreamsSpec(weights.device, residual.n, n_embd, residual.n_iter, eps, residual.floor)
    if residual.means:
        return BoundMean(spec, None, norm, blocks)
    return BoundStreams(spec, mix_of(weights, HEAD_MIX), norm, blocks)


def mix_of(w: Weights, name: str) -> StreamMix:
    """The coefficients of that name."""
    return StreamMix(*(w.vector(f"{name}_{x}.weight") for x in ("fn", "scale", "base")))


class Step(BoundForward):
    """A bound part between several streams, without their sums. mix: its coefficients among them; next: the part behind it; place: as of `fuse.place_of`."""

    next: Step | None = None
    place: Callable[[int], Any] | None = None

    def __init__(self, part: Part, at: Binding) -> None:
        assert part.mix is not None, "a part between streams has coefficients"
        self.mix = mix_of(at.weights, at.name(part.mix.name))
        super().__init__(part.alone, at, at.n_embd, folds=part.spec.folds)

    def leave_sums(self, streams: Any) -> None:
        """Let `streams` sum the outputs of experts, where they are few rows, if the part ends with them."""
        maker = self.program.maker(self.program.output)
        if maker is not None and maker.loads is not None:
            self.sources.loaded(maker).summed_by = streams


@dataclass(slots=True)
class Carried:
    """The streams of a forward on their way, which blocks change in place, so that rows go when they were read.

    x           [row, stream, n_embd] f32
    y           [row, n_embd] f32, what the next part reads of them, or None behind the last
    post, comb  that part's coefficients: of its output, and among the streams
    """

    x: Tensor
    y: Any = None
    post: Any = None
    comb: Any = None


class StreamsBlock:
    """A block of a model of several streams, bound to its weights. residual: merges its parts' outputs, once it is bound behind all blocks."""

    captures_prompts = False
    residual: BoundStreams

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps
        self.capturable = all(step.capturable for step in steps)
        self.fold = next((step.fold for step in steps if step.fold is not None), None)

    def run(self, s: Carried, run: Pass) -> Carried:
        """The same streams behind it."""
        for step in self.steps:
            s.y = step.run(s.y, run)
            self.residual.merge(s, step.next)
        return s


class BoundResidual:
    """One stream x [row, n_embd] f32. Hidden states are normed. capturable: a CUDA graph may hold it."""

    capturable = True

    def __init__(
        self,
        device: torch.device,
        n_embd: int,
        eps: float,
        norm: Tensor,
        spec: Residual = Residual(),  # noqa: B008 - frozen
    ) -> None:
        self.n_embd, self.norm = n_embd, norm
        bound = norms.bind(NormsSpec(device, n_embd, eps, spec.last.takes_mean))
        if spec.last.n_slice > 1:
            bound = SliceNorms(device, n_embd // spec.last.n_slice, eps)
        self.norms = self.last_norm = bound
        self.of_rows = torch.ones(n_embd, device=device) if spec.norms_rows else None
        self.seeds_raw = spec.seeds_raw

    def begin(self, rows: Tensor) -> Any:
        """What blocks take (`run`), of the embedding's rows [row, n_embd]."""
        return rows if self.of_rows is None else self.norms(rows, self.of_rows)

    def tapped(self, x: Any) -> Tensor:
        """The rows [row, n_embd] that drafters read behind a block."""
        rows: Tensor = x
        return rows

    def end(self, x: Any, out_rows: Tensor) -> tuple[Tensor, Tensor]:
        """(hidden states of all rows, normed rows of `out_rows` for the head)."""
        hidden, wanted = self.norms.picked(x, self.norm, out_rows)
        return (x if self.seeds_raw else hidden), wanted

    def paired(self, product: Matrix, tokens: Normed, hidden: Normed) -> Any:
        """What an MTP block takes: product(norm(token), norm(hidden state))."""
        return product(self.norms.paired(*tokens, *hidden))

    def state(self, x: Any) -> Tensor:
        """The hidden states behind an MTP block."""
        return x if self.seeds_raw else self.last_norm(x, self.norm)

    def headed(self, hidden: Tensor) -> Tensor:
        """The rows [row, n_embd] that the head reads of hidden states."""
        return self.last_norm(hidden, self.norm) if self.seeds_raw else hidden


class BoundGated(BoundResidual):
    """Several streams side by side x [row, n_stream * n_embd] f32, which parts read and write by gates. Hidden states are all of them, not normed."""

    def __init__(self, gates: Gates, at: Binding) -> None:
        self.n, self.n_embd = gates.n_stream, at.n_embd
        wide = self.n * self.n_embd
        self.row = BoundForward(partial(head_row, gates), at, wide)
        self.capturable = self.row.capturable
        self.norms = norms.bind(NormsSpec(at.device, self.n_embd, at.eps))
        spec = GatedStreamsSpec(at.device, self.n, self.n_embd, at.eps)
        self.streams: GatedStreams = gated_streams.bind(spec)

    def begin(self, rows: Tensor) -> Tensor:
        return side_by_side((rows,) * self.n)

    def tapped(self, x: Tensor) -> Tensor:
        return x.view(len(x), self.n, self.n_embd).mean(1)

    def end(self, x: Tensor, out_rows: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.headed(picked(x, out_rows))

    def paired(self, product: Matrix, tokens: Normed, hidden: Normed) -> Tensor:
        """The token's row goes with each stream of the hidden state. Weights of the streams' norm are each stream's own, or one for all."""
        rows, weight = hidden
        if weight.numel() == self.n_embd:
            weight = weight.repeat(self.n)
        e, h = self.norms(*tokens), self.streams.norm(rows, weight.flatten())
        pairs = [part for own in h.split(self.n_embd, 1) for part in (e, own)]
        return product(side_by_side(pairs).view(-1, 2 * self.n_embd)).view(len(rows), -1)

    def state(self, x: Tensor) -> Tensor:
        return x

    def headed(self, hidden: Tensor) -> Tensor:
        row: Tensor = self.row.run(hidden, None)
        return row


class BoundStreams(BoundResidual):
    """Several streams (`Carried`). Hidden states are all streams side by side, not normed.

    Merging a part's output and reading for the next part are one step, so that kernels may do both at once.
    """

    def __init__(
        self,
        spec: StreamsSpec,
        mix: StreamMix | None,
        norm: Tensor,
        blocks: Sequence[StreamsBlock],
    ) -> None:
        super().__init__(spec.device, spec.n, spec.eps, norm)
        self.n, self.mix = spec.n_stream, mix
        self.streams: Any = streams.bind(spec)
        self.capturable = streams.chosen(spec).capturable
        steps = [step for block in blocks for step in block.steps]
        self.first, prepares = steps[0], fuse.reads_into(self.streams)
        for block in blocks:
            block.residual = self
        for step, next in zip_longest(steps, steps[1:]):
            step.next = next
            if prepares:
                step.place = fuse.place_of(step.first())
            # They are merged and read in one launch, which may make sums
            if prepares and next is not None:
                step.leave_sums(self.streams)

    def begin(self, rows: Tensor) -> Carried:
        return self._split(rows[:, None].repeat(1, self.n, 1))

    def _split(self, x: Tensor) -> Carried:
        """Streams x [row, stream, n_embd] f32 before the first part."""
        return Carried(x, *self.streams.split(x, self.first.mix, **self._into(self.first, len(x))))

    def merge(self, s: Carried, next: Step | None) -> None:
        """Add a part's output s.y to the streams, and read them for the next part, if there is one."""
        if next is None:
            s.x, s.y = self.streams.merge(s.y, s.x, s.post, s.comb), None
            return
        given = s.y, s.x, s.post, s.comb, next.mix
        s.x, (s.y, s.post, s.comb) = self.streams.merge_split(*given, **self._into(next, len(s.x)))

    def _into(self, step: Step, n_row: int) -> dict[str, Any]:
        """Where a launch may put the rows of a step's first product, normed, as a further argument of the launch."""
        return {} if step.place is None else {"into": step.place(n_row)}

    def tapped(self, x: Carried) -> Tensor:
        return x.x.mean(1)

    def end(self, x: Carried, out_rows: Tensor) -> tuple[Tensor, Tensor]:
        return x.x.flatten(1), self._read(x.x[out_rows])

    def paired(self, product: Matrix, tokens: Normed, hidden: Normed) -> Carried:
        """The token's row goes with each stream of the hidden state."""
        n_row, shape = len(hidden[0]), (-1, self.n, self.n_embd)
        e = self.norms(*tokens)[:, None].expand(shape)
        h = self.norms(hidden[0].view(n_row * self.n, -1), hidden[1]).view(shape)
        return self._split(product(torch.cat((e, h), -1).view(n_row * self.n, -1)).view(shape))

    def state(self, x: Carried) -> Tensor:
        return x.x.flatten(1)

    def headed(self, hidden: Tensor) -> Tensor:
        return self._read(hidden.view(len(hidden), self.n, self.n_embd))

    def merged(self, x: Tensor) -> Tensor:
        """Streams as one row each [row, n_embd], not normed."""
        merged: Tensor = self.streams.head(x, self.mix)
        return merged

    def _read(self, x: Tensor) -> Tensor:
        return self.norms(self.merged(x), self.norm)


class BoundMean(BoundStreams):
    """Several streams whose mean the head reads. Hidden states [row, n_embd] are that, normed."""

    def end(self, x: Carried, out_rows: Tensor) -> tuple[Tensor, Tensor]:
        return self.norms.picked(self.merged(x.x), self.norm, out_rows)

    def state(self, x: Carried) -> Tensor:
        return self._read(x.x)

    def headed(self, hidden: Tensor) -> Tensor:
        return hidden

    def merged(self, x: Tensor) -> Tensor:
        (mean,) = by_row(lambda own: (own.mean(1),), x)
        return mean
