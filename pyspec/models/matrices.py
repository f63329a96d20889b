"""Matrices of a model as callables, by the form that their weights are kept in, and its embedding."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cpu.tensors import scaled
from pyspec.cuda.exact import in_passes
from pyspec.cuda.kernel_context import current
from pyspec.cuda.ops.embed.op import embed
from pyspec.cuda.ops.embed.ref import EmbedSpec
from pyspec.cuda.ops.linear.dequant import dequantize
from pyspec.cuda.ops.moe.ref import gated_halves
from pyspec.cuda.ops.rows.op import rows
from pyspec.cuda.ops.rows.ref import GeluGlu, Glu, Norm, Prep, PrepKind, RowsSpec
from pyspec.gguf import GGMLType, TensorInfo
from pyspec.models.target import Matrix

GLU, GELU_GLU = Glu(), GeluGlu()
GateAct = Literal["silu", "gelu"]


def _finish(y: Tensor, gated: bool, residual: Tensor | None) -> Tensor:
    y = GLU(y) if gated else y
    return y if residual is None else residual + y


class Dense:
    """An unpacked weight [out, in]; gated: the first half of its rows are gates."""

    def __init__(self, weight: Tensor, gated: bool = False) -> None:
        self.weight, self.gated = weight, gated

    def __call__(self, x: Tensor, prep: Prep | None = None, residual: Tensor | None = None) -> Tensor:
        own = prep if isinstance(prep, Norm) else None  # of rows alone, so that it may go with each pass
        x = x if prep is None or own is not None else prep(x)
        y = in_passes(x, partial(self._product, own)) if current().is_exact else self._product(own, x)
        return _finish(y, self.gated, residual)

    def _product(self, prep: Norm | None, x: Tensor) -> Tensor:
        x = x if prep is None else prep(x)
        return F.linear(x.to(self.weight.dtype), self.weight).float()


class Halves(Dense):
    """A weight [out, in] in f16. Rows become f16 over a power of two, as kernels round them: in bf16 both would lose three bits, and choices
    of experts turn; rows as they are may be too large for f16."""

    def _product(self, prep: Norm | None, x: Tensor) -> Tensor:
        kind = PrepKind.PLAIN if prep is None else prep.kind
        half, powers = rows.bind(RowsSpec(x.device, self.weight.shape[1], kind))(x, prep)
        y = torch.mm(half, self.weight.T, out_dtype=torch.float32)
        return y if powers is None else y.mul_(powers[:, None])


class Unpacked:
    """Parts as in the file, unpacked at each use: right everywhere, slow."""

    def __init__(self, parts: Sequence[tuple[Tensor, TensorInfo, float]], gated: bool = False) -> None:
        self.parts, self.gated = parts, gated

    def whole(self) -> Tensor:
        """[out, in] f32"""
        weights = [dequantize(raw, info.type, info.shape) * scale for raw, info, scale in self.parts]
        return torch.cat(weights) if len(weights) > 1 else weights[0]

    def __call__(self, x: Tensor, prep: Prep | None = None, residual: Tensor | None = None) -> Tensor:
        x, product = x if prep is None else prep(x), partial(F.linear, weight=self.whole())
        y = in_passes(x, product) if current().is_exact else product(x)
        return _finish(y, self.gated, residual)


class Joined:
    """Matrices of one input, their outputs side by side."""

    def __init__(self, matrices: Sequence[Matrix], gated: bool = False) -> None:
        self.matrices, self.gated = matrices, gated

    def __call__(self, x: Tensor, prep: Prep | None = None, residual: Tensor | None = None) -> Tensor:
        own = prep if current().is_exact else None  # torch's norms sum otherwise where rows are many
        x = x if prep is None or own is not None else prep(x)
        return _finish(torch.cat([m(x, own) for m in self.matrices], -1), self.gated, residual)


class CutGates:
    """silu(gate) * up of a matrix of gates and ups, cut at `limit` first."""

    def __init__(self, both: Matrix, limit: float) -> None:
        self.both, self.limit = both, limit

    def __call__(self, x: Tensor, prep: Prep | None = None, residual: Tensor | None = None) -> Tensor:
        y = gated_halves(self.both(x, prep), self.limit)
        return y if residual is None else residual + y


class GeluGates:
    """gelu(gate) * up of a matrix of gates and ups, gelu by its tanh form. On GPUs the next product may do it on its way (fuse.py)."""

    def __init__(self, both: Matrix) -> None:
        self.both = both

    def __call__(self, x: Tensor, prep: Prep | None = None, residual: Tensor | None = None) -> Tensor:
        y = GELU_GLU(self.both(x, prep))
        return y if residual is None else residual + y

    def unfinished(self, x: Tensor, prep: Prep | None = None) -> tuple[Tensor, Prep | None]:
        y = self.both(x, prep)
        return (y, GELU_GLU) if y.is_cuda else (GELU_GLU(y), None)


def reader_of(product: Matrix) -> Matrix:
    """The product that reads the input of `product` itself."""
    return product.both if isinstance(product, CutGates | GeluGates) else product


class Embedding:
    """Rows of a table by token id; only the asked rows are unpacked.

    raw [token, bytes of a row] uint8 of `type`.
    """

    def __init__(self, raw: Tensor, type: GGMLType, scale: float) -> None:
        self.raw, self.type, self.scale = raw, type, scale
        self.embed = embed.bind(
            EmbedSpec(raw.device, type, raw.shape[1] // type.type_size * type.block_size)
        )

    def __call__(self, tokens: Tensor) -> Tensor:
        return self._scaled(self.embed.rows(self.raw, tokens))

    def with_angles(
        self, tokens: Tensor, positions: Tensor, freq: Tensor, factor: float
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The rows, and the angles of their positions as the op `angles` makes them."""
        rows, angles = self.embed.rows_and_angles(self.raw, tokens, positions, freq, factor)
        return self._scaled(rows), angles

    def _scaled(self, rows: Tensor) -> Tensor:
        return scaled(rows, self.scale)
