"""How a model's residual goes: in one stream, or in several that are mixed around every part of a block (hyper-connections).

A model's data has it as a value. Bound, it carries rows from the embedding through the blocks to the head, and those of an MTP block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyspec.cuda import fuse
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.cuda.ops.streams.op import streams
from pyspec.cuda.ops.streams.ref import StreamsSpec
from pyspec.models.block import BlockSpec, StreamsBlock, mix_of, mix_tensors
from pyspec.models.matrices import Matrix
from pyspec.models.part import Binding, Pass
from pyspec.models.wants import Want
from pyspec.models.weights import Weights

HEAD_MIX = "output_hc"  # of streams to the row that the head reads

Normed = tuple[Tensor, Tensor]
"""Rows, and the weights of the norm before them."""


@dataclass(frozen=True, slots=True)
class Residual:
    """The way of the residual as data: `n` streams with `n_iter` steps and a lower bound of their coefficients (op `streams`).

    n_iter  None: one stream, to which every part adds its output
    """

    n: int = 1
    n_iter: int | None = None
    floor: float = 0.0

    def tensors(self, n_embd: int) -> dict[str, Want]:
        """The tensors between blocks and head, besides the last norm. They have no prefix."""
        return {} if self.n_iter is None else mix_tensors(HEAD_MIX, self.n * n_embd, self.n, 1)

    def row_bytes(self, n_embd: int) -> int:
        """Bytes of a row while a forward runs, beyond those that every model takes."""
        return 0 if self.n_iter is None else 4 * 3 * self.n * n_embd

    def bind_block(self, block: BlockSpec, at: Binding) -> Any:
        """A block of such a model: `Block`, or `StreamsBlock`."""
        return block.bind(at) if self.n_iter is None else block.bind_between(at)

    def bind(self, weights: Weights, n_embd: int, eps: float, norm: Tensor) -> BoundResidual:
        """norm: weights of the last one."""
        if self.n_iter is None:
            return BoundResidual(weights.device, n_embd, eps, norm)
        return BoundStreams(
            StreamsSpec(weights.device, self.n, n_embd, self.n_iter, eps, self.floor), weights, norm
        )


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
