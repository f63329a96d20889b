"""Product with a packed matrix. Reference in plain torch.

    x         [row, n_in]     f32 or bf16  1..n rows
    packed    linear_pack.Packed           of n_out rows; 2 n_out, gates and ups interleaved, when gated
    residual  [row, n_out]    f32          added when the epilogue is RESIDUAL
    out       [row, n_out]    f32          written

`rounded` models the arithmetic of linear_cuda: rows rounded to f16 over a power of two of their own, weights as they are,
float32 sums. That is 2^-11 of a value at most, 2e-4 of an output in relative L2 norm (measured); llama.cpp's int8
activations, one scale for 32, are at 5e-3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from pyspec.cuda import exact
from pyspec.cuda.cut import cut_gates, cut_macros
from pyspec.cuda.ops.linear.pack import Packed, unpack
from pyspec.cuda.ops.rows.ref import Prep, power_of
from pyspec.gguf import GGMLType

PROBE_ROWS = 272  # rows of the matrix in a check, which holds for all matrices with as many columns

USUAL_TYPES = (GGMLType.Q8_0, GGMLType.Q4_0, GGMLType.Q4_K, GGMLType.Q6_K)
"""Of the weights of most files: `pyspec doctor` shows ops that read weights for these."""


class Epilogue(IntEnum):
    """Operation on a product before it is written; the values are linear.cu's."""

    PLAIN = 0
    RESIDUAL = 1
    GATED = 2  # silu(gate) * up


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """A matrix of n_in columns; n_out counts the numbers written for a row, half of the matrix's rows when gated.

    limit  of gates and ups (`cuda/cut.py`)
    hands  > 0: the product is written, over this power of two, into the next product's rows; for launchers that can, never for the op
    parts  the matrix consists of so many, one after the other, each for its part of a row's parts * n_in columns
    """

    device: torch.device
    type: GGMLType
    n_out: int
    n_in: int
    epilogue: Epilogue = Epilogue.PLAIN
    limit: float = 0.0
    parts: int = 1
    hands: float = 0.0

    @property
    def n_weight_row(self) -> int:
        return self.n_out * (2 if self.epilogue is Epilogue.GATED else 1)


def epilogue_macros(epilogue: Epilogue, limit: float, hands: float = 0.0) -> dict[str, int | str]:
    """HANDS_POWER: linear_block.cuh."""
    macros: dict[str, int | str] = {"EPILOGUE": int(epilogue)}
    if epilogue is Epilogue.GATED:
        macros |= cut_macros(limit)
    return macros | ({"HANDS_POWER": f"{float(hands)!r}f"} if hands else {})


def finish(y: Tensor, epilogue: Epilogue, residual: Tensor | None, limit: float = 0.0) -> Tensor:
    """[row, weight row] products -> [row, n_out]."""
    if epilogue is Epilogue.GATED:
        gate, up = y.unflatten(-1, (-1, 2, 8)).unbind(2)
        gate, up = cut_gates(gate, up, limit)
        return (F.silu(gate) * up).flatten(1)
    return y if residual is None else residual + y


def rounded(x: Tensor) -> Tensor:
    """[row, n_in] float64: each row rounded to f16 over the power of two that brings its largest into [1, 2)."""
    x = x.double()
    power = power_of(x)
    return (x / power).half().double() * power


Linear = Callable[[Tensor, Any, Tensor, Tensor | None], None]
"""linear(x, packed, out, residual): an implementation may have a layout of its own, which it has `pack` for"""


class PromptProduct(Protocol):
    """A product of the many rows of a prompt. least: rows from which on it is worth while."""

    @property
    def least(self) -> int: ...

    def __call__(
        self,
        x: Tensor,
        packed: Packed,
        out: Tensor,
        residual: Tensor | None = None,
        prep: Prep | None = None,
    ) -> None: ...


def bind(spec: LinearSpec) -> Linear:
    def linear(x: Tensor, packed: Packed, out: Tensor, residual: Tensor | None = None) -> None:
        assert (packed.n_out, packed.n_in) == (spec.n_weight_row, spec.n_in)
        assert x.shape[1] == spec.parts * spec.n_in
        weights, parts = unpack(packed).chunk(spec.parts), x.float().chunk(spec.parts, -1)
        y = torch.cat([exact.linear(part, own) for part, own in zip(parts, weights, strict=True)], -1)
        out.copy_(finish(y, spec.epilogue, residual, spec.limit))

    return linear
