"""The first thing of a forward, in plain torch: tokens' rows of the embedding, and angles of their positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pyspec.cuda.guard import FaultPlace, Guard
from pyspec.cuda.ops.angles.ref import angles
from pyspec.cuda.ops.linear.dequant import dequantize_rows
from pyspec.gguf import GGMLType

GUARD = Guard(8, FaultPlace.ROW)


@dataclass(frozen=True, slots=True)
class EmbedSpec:
    """An embedding of n_in columns in the file's type, for any number of tokens."""

    device: torch.device
    type: GGMLType
    n_in: int


class Embed(Protocol):
    """The launch that the op binds. raw [token, bytes of a row] uint8 as in the file, tokens [row] int64."""

    def rows(self, raw: Tensor, tokens: Tensor) -> Tensor:
        """[row, n_in] f32."""
        ...

    def rows_and_angles(
        self, raw: Tensor, tokens: Tensor, positions: Tensor, freq: Tensor, factor: float
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The same, and the results of `angles`."""
        ...


class TorchEmbed:
    """Implements `Embed`."""

    def __init__(self, spec: EmbedSpec) -> None:
        self.type = spec.type

    def rows(self, raw: Tensor, tokens: Tensor) -> Tensor:
        return dequantize_rows(raw, self.type, tokens)

    def rows_and_angles(
        self, raw: Tensor, tokens: Tensor, positions: Tensor, freq: Tensor, factor: float
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return self.rows(raw, tokens), angles(positions, freq, factor)


bind = TorchEmbed
