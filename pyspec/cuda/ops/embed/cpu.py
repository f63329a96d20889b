"""`embed` on CPUs (cpu/native/embed.cpp): rows from the bytes of the file, in every packed type that products read."""

from __future__ import annotations

import torch
from torch import Tensor

from pyspec.cpu.kernels import CpuKernel, empty
from pyspec.cuda.ops.angles.cpu import angles
from pyspec.cuda.ops.embed.ref import EmbedSpec
from pyspec.cuda.ops.linear.cpu import TYPES, table_of

_RUN = CpuKernel("pyspec_embed", "9q")


def limits(spec: EmbedSpec) -> str | None:
    if spec.type not in TYPES:
        return f"the embedding is {spec.type.name}"
    if spec.n_in % spec.type.block_size:
        return f"{spec.n_in} columns are no whole blocks of {spec.type.block_size}"
    return None


class CpuEmbed:
    """Implements `Embed`."""

    def __init__(self, spec: EmbedSpec) -> None:
        self.spec, self.table = spec, table_of(spec.type)
        self.row_bytes = spec.n_in // spec.type.block_size * spec.type.type_size

    def rows(self, raw: Tensor, tokens: Tensor) -> Tensor:
        assert raw.dtype == torch.uint8 and raw.is_contiguous() and raw.shape[1] == self.row_bytes
        assert tokens.dtype == torch.int64 and tokens.is_contiguous()
        n_row, n_in = tokens.shape[0], self.spec.n_in
        out = empty(n_row, n_in)
        _RUN(
            raw, self.table, tokens, out, int(self.spec.type), raw.shape[0], self.row_bytes, n_row, n_in
        )
        return out

    def rows_and_angles(
        self, raw: Tensor, tokens: Tensor, positions: Tensor, freq: Tensor, factor: float
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return self.rows(raw, tokens), angles(positions, freq, factor)


bind = CpuEmbed
