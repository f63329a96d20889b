"""Inputs of each block for each token, besides the stream: a second embedding, and a product of the first (Gemma's E models).

    inputs = (norm(product(x) / sqrt(n_embd)) + table[token] sqrt(n)) / sqrt(2)

x is the row of the embedding that the stream begins with. A block has n numbers of a token; the norm is over each block's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from pyspec.cpu.tensors import add, scaled
from pyspec.cuda.ops.embed.op import embed
from pyspec.cuda.ops.embed.ref import EmbedSpec
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.gguf import GGUFFile
from pyspec.models.part import LoadTypes, Request
from pyspec.models.wants import Want
from pyspec.models.weights import TOKEN_INPUTS, Weights

PRODUCT, NORM = "per_layer_model_proj.weight", "per_layer_proj_norm.weight"


@dataclass(frozen=True, slots=True)
class PerLayer:
    """Inputs of `n_layer` blocks, `n` numbers each, of a model of this width and eps."""

    n_layer: int
    n: int
    n_vocab: int
    n_embd: int
    eps: float

    @property
    def width(self) -> int:
        """Numbers of a token."""
        return self.n_layer * self.n

    @property
    def row_bytes(self) -> int:
        """Bytes of a row while a forward runs."""
        return 4 * 4 * self.width

    def tensors(self) -> dict[str, Want]:
        return {
            TOKEN_INPUTS: Want((self.n_vocab, self.width)),
            PRODUCT: Want((self.width, self.n_embd)),
            NORM: Want((self.n,)),
        }

    def requests(self, file: GGUFFile, on: LoadTypes) -> Iterator[Request]:
        """The ops that binding asks for, products apart."""
        if (table := file.tensors.get(TOKEN_INPUTS)) is not None:
            yield embed, EmbedSpec(on.device, table.type, self.width)
        yield norms, NormsSpec(on.device, self.n, self.eps)

    def bind(self, weights: Weights) -> BoundPerLayer:
        return BoundPerLayer(self, weights)


class BoundPerLayer:
    """Bound to a model's weights."""

    def __init__(self, spec: PerLayer, w: Weights) -> None:
        self.spec = spec
        self.table = w.embedding(TOKEN_INPUTS, spec.n**0.5)
        self.product, self.weight = w.matrix(PRODUCT), w.vector(NORM)
        self.norm = norms.bind(NormsSpec(w.device, spec.n, spec.eps))
        self.capturable = norms.chosen(NormsSpec(w.device, spec.n, spec.eps)).capturable

    def __call__(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Of tokens [row] int64, whose rows of the embedding are x [row, n_embd] f32. [row, n_layer, n] f32"""
        s, n_row = self.spec, len(tokens)
        of_stream = scaled(self.product(x), s.n_embd**-0.5).view(n_row * s.n_layer, s.n)
        both = add(self.norm(of_stream, self.weight), self.table(tokens).view(n_row * s.n_layer, s.n))
        return scaled(both, 0.5**0.5).view(n_row, s.n_layer, s.n)


def rows_of(inputs: Tensor | None, layer: int) -> Tensor:
    """Of one block [row, n]."""
    assert isinstance(inputs, torch.Tensor), "a model whose blocks read them makes them"
    return inputs[:, layer]
