"""Hyper-connections: several residual streams, mixed around every part of a block. Reference in plain torch (arXiv:2409.19606, mHC).

    x       [row, stream, n]        f32  the streams
    fn      [m, stream * n]         f32  one row for each coefficient: m = (2 + stream) * stream, or `stream` for the head
    scale   [3] or [1]              f32  of the coefficients that read, write and mix
    base    [m]                     f32

`split` gives the one row that a part of the block reads, and the coefficients for its output: each stream gets `post` of the output, and
`comb` of all old streams, a matrix whose rows and columns sum to one (Sinkhorn). All in f32: a coefficient that is off is off in every
layer behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda.exact import by_row, linear


@dataclass(frozen=True, slots=True)
class StreamsSpec:
    """eps: of the weightless norm; floor: lower bound of coefficients; n_iter: steps that make `comb` doubly stochastic."""

    device: torch.device
    n_stream: int
    n: int
    n_iter: int
    eps: float
    floor: float


@dataclass(frozen=True, slots=True)
class StreamMix:
    """The coefficients of one part of a block: fn, scale and base as above."""

    fn: Tensor
    scale: Tensor
    base: Tensor


Reading = tuple[Tensor, Tensor, Tensor]  # the row of a part, post, comb


class Streams(Protocol):
    """The launch that the op binds."""

    def split(self, x: Tensor, mix: StreamMix) -> Reading:
        """x -> rows of the part [row, n], post [row, stream], comb [row, from, to]."""
        ...

    def merge(self, y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """Put the part's output y [row, n] back into the streams x."""
        ...

    def merge_split(
        self, y: Tensor, x: Tensor, post: Tensor, comb: Tensor, mix: StreamMix
    ) -> tuple[Tensor, Reading]:
        """`merge`, and `split` of the result for the next part."""
        ...

    def head(self, x: Tensor, mix: StreamMix) -> Tensor:
        """The streams summed up to the row that the model's head reads. [row, n]"""
        ...


def _read(x: Tensor, pre: Tensor) -> tuple[Tensor]:
    return ((x * pre[:, :, None]).sum(1),)


def _merge(y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> tuple[Tensor]:
    return (post[:, :, None] * y[:, None] + torch.einsum("rft,rfn->rtn", comb, x),)


class TorchStreams:
    """Implements `Streams`."""

    def __init__(self, spec: StreamsSpec) -> None:
        self.spec = spec

    def _coefficients(self, x: Tensor, fn: Tensor) -> Tensor:
        flat = x.flatten(1)
        return linear(F.rms_norm(flat, flat.shape[1:], None, self.spec.eps), fn)

    def split(self, x: Tensor, mix: StreamMix) -> Reading:
        pre, post, comb = by_row(partial(self._weights, mix), self._coefficients(x, mix.fn))
        (read,) = by_row(_read, x, pre)
        return read, post, comb

    def _weights(self, mix: StreamMix, m: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights from coefficients [row, ...]: for reading [row, stream], writing, and mixing [row, stream, stream]."""
        n, floor, scale, base = self.spec.n_stream, self.spec.floor, mix.scale, mix.base
        pre = torch.sigmoid(m[:, :n] * scale[0] + base[:n]) + floor
        post = 2 * torch.sigmoid(m[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = (m[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n).softmax(-1) + floor
        comb = comb / (comb.sum(1, keepdim=True) + floor)
        for _ in range(self.spec.n_iter - 1):
            comb = comb / (comb.sum(2, keepdim=True) + floor)
            comb = comb / (comb.sum(1, keepdim=True) + floor)
        return pre, post, comb

    def merge(self, y: Tensor, x: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        (merged,) = by_row(_merge, y, x, post, comb)
        return merged

    def merge_split(
        self, y: Tensor, x: Tensor, post: Tensor, comb: Tensor, mix: StreamMix
    ) -> tuple[Tensor, Reading]:
        x = self.merge(y, x, post, comb)
        return x, self.split(x, mix)

    def head(self, x: Tensor, mix: StreamMix) -> Tensor:
        pre = torch.sigmoid(self._coefficients(x, mix.fn) * mix.scale + mix.base) + self.spec.floor
        (read,) = by_row(_read, x, pre)
        return read


bind = TorchStreams
