"""How a model's residual goes: in one stream, or in several that are mixed around every part of a block (hyper-connections).

A model's data has it as a value. Bound (`streams.py`), it carries rows from the embedding through the blocks to the head, and those of an
MTP block.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyspec.models.block import RMS, NormKind, mix_tensors
from pyspec.models.wants import Want

HEAD_MIX = "output_hc"  # of streams to the row that the head reads


@dataclass(frozen=True, slots=True)
class Residual:
    """The way of the residual as data: `n` streams with `n_iter` steps and a lower bound of their coefficients (op `streams`).

    n_iter  None: one stream, to which every part adds its output
    norms_rows  of one stream: rows of the embedding are normed, without weights
    last    of one stream: the kind of the last norm
    """

    n: int = 1
    n_iter: int | None = None
    floor: float = 0.0
    norms_rows: bool = False
    last: NormKind = RMS

    def tensors(self, n_embd: int) -> dict[str, Want]:
        """The tensors between blocks and head, besides the last norm. They have no prefix."""
        return {} if self.n_iter is None else mix_tensors(HEAD_MIX, self.n * n_embd, self.n, 1)

    def row_bytes(self, n_embd: int) -> int:
        """Bytes of a row while a forward runs, beyond those that every model takes."""
        return 0 if self.n_iter is None else 4 * 3 * self.n * n_embd
