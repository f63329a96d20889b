"""Rows of the stream that are kept for the blocks behind, and mixed with it (Kimi K3's residual attention)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyspec.cuda.ops.banked.ref import BankedSpec
from pyspec.forward.call import RunInput, Value
from pyspec.forward.trace import Forward
from pyspec.models.part import Place
from pyspec.models.wants import Want

ROWS = RunInput("kept_rows")


@dataclass(frozen=True, slots=True)
class Bank:
    """A mix of a stream's row with `n` rows that were kept of it (op `banked`), as data; of none it is the row.

    name      of the scores' weights, with ending
    of_model  they have no block's prefix
    restarts  the stream is kept as it is, and goes on with what the part adds alone
    """

    name: str
    n: int
    of_model: bool = False
    restarts: bool = False

    def tensors(self, at: Place) -> dict[str, Want]:
        return {self.name if self.of_model else at.name(self.name): Want((at.n_embd,))}

    def forward(self, f: Forward, x: Value) -> Value:
        if not self.n:
            return x
        weight = f.read(_of_model, name=self.name) if self.of_model else f.vector(self.name)
        spec = BankedSpec(f.device, x.width, self.n, f.eps)
        return f.op("banked", spec, ROWS, x, weight, shape=x.shape)

    def keep(self, f: Forward, x: Value) -> None:
        f.op("keep_row", None, ROWS, x, shape=())


def _of_model(w: Any, *, name: str) -> Tensor:
    vector: Tensor = w.vector(name)
    return vector
