"""Reference of `rows` in plain torch: the preparation of rows for a product.

A `Prep` is callable: prep(x) [row, n_in] f32 is multiplied with the matrix. Kernels do the same while they round the rows
to f16 (rows_cuda.py), so a model hands the preparation to the product instead of running it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

# Activations of gates that a gated product has; others take a plain product, and torch behind it
GATES = ("silu",)


class PrepKind(IntEnum):
    """The preparations; the values are rows.cu's."""

    PLAIN = 0
    NORM = 1
    HEADS = 2
    GATE = 3
    GLU = 4
    GROUPS = 5
    RELU2 = 6
    GEGLU = 7

    @property
    def halves(self) -> int:
        """Columns of x for each of a row: gates and what they are multiplied with are two."""
        return 2 if self in (PrepKind.GLU, PrepKind.GEGLU) else 1


def norm_power(weight: Tensor) -> float:
    """The power of two that normed rows are divided by in f16. Call it at load, because it waits for the device.

    Normed values are at most sqrt(columns) times a weight, so one power serves all rows, and it is 1 for weights of usual size.
    """
    largest = float(weight.abs().amax())
    usual = 2.0**-6 <= largest <= 2.0**7 or not 0.0 < largest < float("inf")
    return 1.0 if usual else 2.0 ** torch.tensor(largest).log2().floor().item()


class Norm:
    """RMSNorm over the row. weight [n_in] f32. `power`: norm_power of the weights."""

    kind, dim = PrepKind.NORM, 0

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self.eps, self.power = weight, eps, norm_power(weight)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


HEAD_POWER = 16.0


def head_power(weight: Tensor) -> float:
    """A HeadNorm's power of two for its weights. Call it at load, because it waits for the device.

    Not each row's own, since a head's columns would have to wait for those of all others to know it. Normed values
    are at most sqrt(dim) times a weight. silu(gate) has no bound, but f16 over 16 holds 1e6: with weights about 1 and
    heads of 128, gates of 9e4, where they are sums of products of normed rows, below 100. Small values keep f16's
    2^-11 of themselves down to 1e-3, and are off by 5e-7 below, which is negligible in their row.
    """
    largest = float(weight.abs().amax())
    usual = 2.0**-6 <= largest <= 2.0**4 or not 0.0 < largest < float("inf")
    return HEAD_POWER if usual else HEAD_POWER * 2.0 ** torch.tensor(largest).log2().floor().item()


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm over every head's `dim` columns, times silu(gate). weight [dim] f32; gate [row, n_in], rows strided.

    `power`: the power of two that f16 rows are divided by, `head_power(weight)`.
    """

    weight: Tensor
    eps: float
    gate: Tensor
    power: float = HEAD_POWER

    @property
    def kind(self) -> PrepKind:
        return PrepKind.HEADS

    @property
    def dim(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (-1, self.dim))
        return (F.rms_norm(heads, (self.dim,), self.weight, self.eps)).flatten(-2) * F.silu(self.gate)


@dataclass(frozen=True, slots=True)
class HeadGate:
    """Times sigmoid(gate). gate [row, head, dim], rows and heads strided."""

    gate: Tensor

    @property
    def kind(self) -> PrepKind:
        return PrepKind.GATE

    @property
    def dim(self) -> int:
        return self.gate.shape[2]

    def __call__(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.gate).flatten(1)


class Glu:
    """silu of the first half of the columns times the second half: [row, 2 n_in] -> [row, n_in]."""

    kind, dim = PrepKind.GLU, 0

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


class GeluGlu:
    """The same with gelu, by its tanh form."""

    kind, dim = PrepKind.GEGLU, 0

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.gelu(gate, approximate="tanh") * up


class SquaredRelu:
    """max(x, 0)^2."""

    kind, dim = PrepKind.RELU2, 0

    def __call__(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


RELU2 = SquaredRelu()


@dataclass(frozen=True, slots=True)
class GroupNorm:
    """Times silu(gate), then RMSNorm over every group of columns. weight [n_in] f32; gate [row, n_in], rows strided.

    `power`: norm_power of the weights. Not each row's own, since groups would have to wait for each other.
    """

    weight: Tensor
    eps: float
    gate: Tensor
    n_group: int
    power: float = 1.0

    @property
    def kind(self) -> PrepKind:
        return PrepKind.GROUPS

    @property
    def dim(self) -> int:
        return self.weight.shape[0] // self.n_group

    def __call__(self, x: Tensor) -> Tensor:
        groups = (F.silu(self.gate) * x).unflatten(-1, (self.n_group, self.dim))
        return F.rms_norm(groups, (self.dim,), None, self.eps).flatten(-2) * self.weight


Prep = Norm | HeadNorm | HeadGate | Glu | GeluGlu | GroupNorm | SquaredRelu


def of_rows(prep: Prep | None, part: slice) -> Prep | None:
    """The preparation of some of the rows."""
    return (
        replace(prep, gate=prep.gate[part])
        if isinstance(prep, HeadNorm | HeadGate | GroupNorm)
        else prep
    )


@dataclass(frozen=True, slots=True)
class RowsSpec:
    """Rows of n_in columns, prepared as `kind` says; `dim` columns a head or group (HEADS, GATE, GROUPS)."""

    device: torch.device
    n_in: int
    kind: PrepKind = PrepKind.PLAIN
    dim: int = 0


def power_of(x: Tensor) -> Tensor:
    """[row, 1]: the power of two that brings a row's largest magnitude into [1, 2); 1 for rows of zeros."""
    largest = x.abs().amax(-1, keepdim=True)
    return torch.exp2(torch.log2(largest).floor()).where(largest > 0, torch.ones_like(largest))
