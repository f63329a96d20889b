"""Inputs of blocks besides the stream (`per_layer.py`), bound to a model's weights."""

from __future__ import annotations

from torch import Tensor

from pyspec.cpu.tensors import add, scaled
from pyspec.cuda.ops.norms.op import norms
from pyspec.cuda.ops.norms.ref import NormsSpec
from pyspec.models.per_layer import NORM, PRODUCT, PerLayer
from pyspec.models.wants import TOKEN_INPUTS
from pyspec.models.weights import Weights


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
