"""The residual bound: one stream, or several that are read and merged around every part of a block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyspec.cuda import fuse
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.cuda.ops.streams.op import streams
from pyspec.cuda.ops.streams.ref import StreamMix, Streams, StreamsSpec
from pyspec.models.binding import Binding, Pass, WorksForStreams
from pyspec.models.block import BlockSpec, Part
from pyspec.models.bound import Block, BoundForward
from pyspec.models.part import OneCall
from pyspec.models.residual import HEAD_MIX, Residual
from pyspec.models.target import Matrix
from pyspec.models.weights import Weights

Normed = tuple[Tensor, Tensor]
"""Rows, and the weights of the norm before them."""


def bound_block(residual: Residual, block: BlockSpec, at: Binding) -> Any:
    """A block of a model with this residual: `Block`, or `StreamsBlock`. at: its norm is each part's own."""
    if residual.n_iter is None:
        return Block(block, at)
    return StreamsBlock([Step(part, replace(at, norm=part.norm)) for part in block.parts])


def bound_residual(
    residual: Residual, weights: Weights, n_embd: int, eps: float, norm: Tensor
) -> BoundResidual:
    """norm: weights of the last one."""
    if residual.n_iter is None:
        return BoundResidual(weights.device, n_embd, eps, norm)
    spec = StreamsSpec(weights.device, residual.n, n_embd, residual.n_iter, eps, residual.floor)
    return BoundStreams(spec, weights, norm)


def mix_of(w: Weights, name: str) -> StreamMix:
    """The coefficients of that name."""
    return StreamMix(*(w.vector(f"{name}_{x}.weight") for x in ("fn", "scale", "base")))


class Step:
    """A bound part between several streams. mix: its coefficients among them."""

    def __init__(self, part: Part, at: Binding) -> None:
        assert part.mix is not None, "a part between streams has coefficients"
        self.mix = mix_of(at.weights, at.name(part.mix.name))
        self.part: Any = None
        if isinstance(part.spec, OneCall):
            self.part = part.spec.bind(at)
        works = isinstance(self.part, WorksForStreams) and not part.post and part.factor == 1.0
        self.fused: WorksForStreams | None = self.part if works else None
        if self.fused is None:
            self.part = BoundForward(part.alone, at, at.n_embd, folds=part.spec.folds)
        self.fold: fuse.Fold | None = None if works else self.part.fold

    def place(self, streams: Streams, n_row: int) -> fuse.RowBuffer | None:
        """As `WorksForStreams`; every part may stand between streams."""
        return None if self.fused is None else self.fused.place(streams, n_row)

    def between(
        self, y: Tensor, run: Pass, place: fuse.RowBuffer | None, streams: Streams | None
    ) -> Tensor | fuse.Shares:
        """As `WorksForStreams`."""
        if self.fused is not None:
            return self.fused.between(y, run, place, streams)
        made: Tensor = self.part(y, run)
        return made


class StreamsBlock:
    """A block of a model of several streams, bound to its weights: its parts run one by one (`residual.py`)."""

    captures_prompts = False

    def __init__(self, steps: list[Step]) -> None:
        self.steps, self.parts = steps, [step.part for step in steps]
        self.capturable = all(part.capturable for part in self.parts)
        self.fold = next((step.fold for step in steps if step.fold is not None), None)


class BoundResidual:
    """One stream x [row, n_embd] f32. Hidden states are normed. capturable: a CUDA graph may hold it."""

    capturable = True

    def __init__(self, device: torch.device, n_embd: int, eps: float, norm: Tensor) -> None:
        self.n_embd, self.norm = n_embd, norm
        self.norms = self.last_norm = norms.bind(NormsSpec(device, n_embd, eps))

    def begin(self, rows: Tensor) -> Tensor:
        """Streams of the embedding's rows [row, n_embd]."""
        return rows

    def through(self, x: Tensor, blocks: Sequence[Any], run: Pass) -> Iterator[Tensor]:
        """The streams behind each block, which `Residual.bind_block` bound."""
        for block in blocks:
            x = block(x, run)
            yield x

    def tapped(self, x: Tensor) -> Tensor:
        """The rows [row, n_embd] that drafters read of the streams behind a block."""
        return x

    def end(self, x: Tensor, out_rows: Tensor) -> tuple[Tensor, Tensor]:
        """(hidden states of all rows, normed rows of `out_rows` for the head)."""
        return self.norms.picked(x, self.norm, out_rows)

    def paired(self, product: Matrix, tokens: Normed, hidden: Normed) -> Tensor:
        """Streams of product(norm(token), norm(hidden state)), with which an MTP block begins."""
        return product(self.norms.paired(*tokens, *hidden))

    def state(self, x: Tensor) -> Tensor:
        """The hidden states of streams behind an MTP block."""
        return self.last_norm(x, self.norm)

    def headed(self, hidden: Tensor) -> Tensor:
        """The rows [row, n_embd] that the head reads of hidden states."""
        return hidden


class BoundStreams(BoundResidual):
    """Streams x [row, stream, n_embd] f32. Hidden states are all streams side by side, not normed.

    Merging a part's output and reading for the next part are one step, so that kernels may do both at once.
    """

    def __init__(self, spec: StreamsSpec, weights: Weights, norm: Tensor) -> None:
        super().__init__(spec.device, spec.n, spec.eps, norm)
        self.n, self.mix = spec.n_stream, mix_of(weights, HEAD_MIX)
        self.streams, self.capturable = streams.bind(spec), streams.chosen(spec).capturable

    def begin(self, rows: Tensor) -> Tensor:
        return rows[:, None].repeat(1, self.n, 1)

    def through(self, x: Tensor, blocks: Sequence[StreamsBlock], run: Pass) -> Iterator[Tensor]:
        n_row, (first, *others) = len(x), [step for block in blocks for step in block.steps]
        following = iter([*others, None])
        place = first.place(self.streams, n_row)
        y: Tensor | fuse.Shares
        y, post, comb = fuse.reading(self.streams, x, first.mix, place)
        for block in blocks:
            for step in block.steps:
                behind = next(following)
                y = step.between(y, run, place, None if behind is None else self.streams)
                if behind is None:
                    assert isinstance(y, Tensor)  # no streams were given to sum the experts' outputs
                    x = self.streams.merge(y, x, post, comb)
                else:
                    place = behind.place(self.streams, n_row)
                    x, (y, post, comb) = fuse.merged(self.streams, y, x, (post, comb), behind.mix, place)
            yield x

    def tapped(self, x: Tensor) -> Tensor:
        return x.mean(1)

    def end(self, x: Tensor, out_rows: Tensor) -> tuple[Tensor, Tensor]:
        return x.flatten(1), self._read(x[out_rows])

    def paired(self, product: Matrix, tokens: Normed, hidden: Normed) -> Tensor:
        """The token's row goes with each stream of the hidden state."""
        n_row, shape = len(hidden[0]), (-1, self.n, self.n_embd)
        e = self.norms(*tokens)[:, None].expand(shape)
        h = self.norms(hidden[0].view(n_row * self.n, -1), hidden[1]).view(shape)
        return product(torch.cat((e, h), -1).view(n_row * self.n, -1)).view(shape)

    def state(self, x: Tensor) -> Tensor:
        return x.flatten(1)

    def headed(self, hidden: Tensor) -> Tensor:
        return self._read(hidden.view(len(hidden), self.n, self.n_embd))

    def merged(self, x: Tensor) -> Tensor:
        """Streams as one row each [row, n_embd], not normed."""
        return self.streams.head(x, self.mix)

    def _read(self, x: Tensor) -> Tensor:
        return self.norms(self.merged(x), self.norm)
