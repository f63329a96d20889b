"""How a model's residual goes: in one stream, or in several that are mixed around every part of a block (hyper-connections).

A model's data has it as a value. Bound (`streams.py`), it carries rows from the embedding through the blocks to the head, and those of an
MTP block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pyspec.models.block import RMS, NormKind, mix_tensors
from pyspec.models.wants import Want

MTP_GATES = "nextn.hc_head"
HEAD_MIX = "output_hc"  # of streams to the row that the head reads


@dataclass(frozen=True, slots=True)
class Gates:
    """Gates of low rank, by which `n_stream` streams are read as one row (op `gated_streams`): through `n_low` numbers. name: of their tensors."""

    name: str
    n_stream: int
    n_low: int

    @property
    def names(self) -> tuple[str, str, str]:
        """The weights of the streams' norms, and the matrices to the low rank and back."""
        norm, down, up = (f"{self.name}_{x}.weight" for x in ("norm", "down", "up"))
        return norm, down, up

    def tensors(self, n_embd: int) -> dict[str, Want]:
        """Those, without a prefix."""
        n = self.n_stream * n_embd
        shapes = (n,), (self.n_low, n), (n, self.n_low)
        return dict(zip(self.names, map(Want, shapes), strict=True))


@dataclass(frozen=True, slots=True)
class Residual:
    """The way of the residual as data: `n` streams with `n_iter` steps and a lower bound of their coefficients (op `streams`).

    n_iter  None: one stream, to which every part adds its output, or streams side by side as one
    means   of several streams: the head reads their mean, which is also the hidden state, and an MTP block has one stream
    gates   of streams side by side, which parts read and write themselves: those of the row that the head reads. None: there are none
    norms_rows  of one stream: rows of the embedding are normed, without weights
    last    of one stream: the kind of the last norm
    seeds_raw  of one stream: hidden states that an MTP block reads and makes are not normed
    n_kept  of one stream: rows of it that are kept until the forward ends (`bank.Bank`)
    """

    n: int = 1
    n_iter: int | None = None
    floor: float = 0.0
    norms_rows: bool = False
    last: NormKind = RMS
    n_kept: int = 0
    seeds_raw: bool = False
    means: bool = False
    gates: Gates | None = None

    def tensors(self, n_embd: int) -> dict[str, Want]:
        """The tensors between blocks and head, besides the last norm. They have no prefix."""
        if self.gates is not None:
            return self.gates.tensors(n_embd)
        if self.n_iter is None or self.means:
            return {}
        return mix_tensors(HEAD_MIX, self.n * n_embd, self.n, 1)

    @property
    def of_mtp(self) -> Residual:
        """That of an MTP block, whose head has gates of its own."""
        if self.means:
            return Residual()
        return self if self.gates is None else replace(self, gates=replace(self.gates, name=MTP_GATES))

    def row_bytes(self, n_embd: int) -> int:
        """Bytes of a row while a forward runs, beyond those that every model takes."""
        if self.n == 1:
            return 4 * n_embd * self.n_kept
        return 4 * 3 * self.n * n_embd
