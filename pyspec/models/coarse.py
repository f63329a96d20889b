"""A four-bit copy of a matrix, for drafts: each draft of a round reads the head once, and the head is the largest matrix.

The copy is made on the device from the matrix that is there, some rows at a time: no second upload, and no peak.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pyspec.cuda.ops.linear.dequant import dequantize
from pyspec.cuda.ops.linear.fit_q4 import BLOCK, fit_q4
from pyspec.cuda.ops.linear.formats import FORMATS
from pyspec.cuda.ops.linear.pack import TILE, Packed, packed_bytes, repack, unpack
from pyspec.cuda.ops.linear.ref import Epilogue, LinearSpec
from pyspec.cuda.ops.linear.tiles import tile, untiled
from pyspec.cuda.packed_cpu import CpuMatrix, runs_packed
from pyspec.cuda.streamed import Streamed
from pyspec.cuda.streamed_tiles import StreamedTiles
from pyspec.cuda.temporary import temporary
from pyspec.gguf import GGMLType, TensorInfo
from pyspec.models.matrices import Dense, Unpacked
from pyspec.models.target import Matrix
from pyspec.models.weights import tier_of

WORTH_BITS = 6  # a weight: a copy of fewer saves less than guesses that get worse may cost
PIECE = 1 << 22  # weights made into a copy at once: about 40 bytes each
TILE_ROWS = TILE * 16


def bits(type: GGMLType) -> float:
    """Of one weight."""
    return 8 * type.type_size / type.block_size


def refusal(info: TensorInfo, to: GGMLType) -> str | None:
    """Why no copy of this tensor can be made, or why it would not be coarser."""
    if len(info.shape) != 2 or info.shape[1] % BLOCK:
        return f"its rows of {info.shape[-1]} are not a multiple of {BLOCK}"
    if bits(info.type) <= bits(to):
        return f"it has {bits(info.type):.3g} bits a weight ({info.type.name}), the copy would have {bits(to):.3g}"
    return None


def is_worth(info: TensorInfo) -> bool:
    """Whether a copy saves time where kernels stream this tensor as it is."""
    return bits(info.type) >= WORTH_BITS and info.type in FORMATS


def coarse_bytes(info: TensorInfo, to: GGMLType, device: torch.device) -> int:
    """Bytes that `coarse` will allocate: packed for the kernel of a GPU; at most f32 on a CPU."""
    n_out, n_in = info.shape
    return packed_bytes(to, n_out, n_in) if device.type == "cuda" else 4 * n_out * n_in


def coarse(matrix: Matrix, info: TensorInfo, to: GGMLType, device: torch.device) -> Matrix | None:
    """The copy of `matrix`, which is the tensor `info`; None where a GPU's kernel does not take it."""
    n_out, n_in = info.shape
    step = max(1, PIECE // n_in // TILE_ROWS) * TILE_ROWS
    ends = [(first, min(first + step, n_out)) for first in range(0, n_out, step)]
    pieces = (rows_of(matrix, *each) for each in ends)
    if isinstance(matrix, CpuMatrix) and runs_packed(to):
        return CpuMatrix([(_fitted(pieces, to), to, 1.0)])
    if device.type != "cuda":
        weight = torch.empty(n_out, n_in)
        for (first, end), rows in zip(ends, pieces, strict=True):
            weight[first:end] = dequantize(fit_q4(rows, to), to, rows.shape)
        return Dense(weight)
    tier = tier_of(LinearSpec(device, to, n_out, n_in), (Epilogue.PLAIN, Epilogue.RESIDUAL))
    if tier is None:
        return None
    if tier == "triton":
        with temporary(device):
            raw = _fitted(pieces, to)
        return StreamedTiles(tile(raw, to, (n_out, n_in)), device, gated=False, wide=None)
    return Streamed(_packed(pieces, n_out, n_in, to, device), device, gated=False, wide=None)


def _fitted(pieces: Iterable[Tensor], to: GGMLType) -> Tensor:
    """[row, bytes of a row] uint8"""
    return torch.cat([fit_q4(rows, to).view(len(rows), -1) for rows in pieces])


def _packed(
    pieces: Iterable[Tensor], n_out: int, n_in: int, to: GGMLType, device: torch.device
) -> Packed:
    """Whole tiles at a time: they lie one behind the other."""
    data, at = torch.empty(packed_bytes(to, n_out, n_in), dtype=torch.uint8, device=device), 0
    with temporary(device):
        for rows in pieces:
            n = packed_bytes(to, rows.shape[0], n_in)
            repack(fit_q4(rows, to), to, (rows.shape[0], n_in), out=data[at : at + n])
            at += n
    assert at == data.numel()
    return Packed(data, to, n_out, n_in)


def rows_of(matrix: Matrix, first: int, end: int) -> Tensor:
    """[end - first, n_in] f32: the weights of some rows; `first` is that of a tile."""
    if isinstance(matrix, Streamed):
        return unpack(matrix.packed, first, end)
    if isinstance(matrix, StreamedTiles):
        return untiled(matrix.matrix, first, end)
    if isinstance(matrix, Dense):
        return matrix.weight[first:end].float()
    assert isinstance(matrix, CpuMatrix | Unpacked) and len(matrix.parts) == 1, "a head is one matrix"
    if isinstance(matrix, CpuMatrix):
        own, kind, factor = matrix.parts[0]
        n_in = own.shape[1] // kind.type_size * kind.block_size
        return dequantize(own[first:end].reshape(-1), kind, (end - first, n_in)) * factor
    raw, info, scale = matrix.parts[0]
    rows = raw.view(info.shape[0], -1)[first:end]
    return dequantize(rows, info.type, (end - first, info.shape[1])) * scale
