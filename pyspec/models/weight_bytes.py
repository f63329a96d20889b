"""Bytes of tensors on a device, for the memory plan. No tensor is read."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch

from pyspec.cuda.ops.heads.op import kept_bytes
from pyspec.cuda.ops.linear.formats import FORMATS
from pyspec.cuda.ops.linear.pack import packed_bytes
from pyspec.cuda.rank import Rank
from pyspec.gguf import GGUFFile, TensorInfo
from pyspec.models.cuts import share_of
from pyspec.models.wants import TOKEN_INPUTS, Want
from pyspec.models.weights import GROUPED, HEADS, OF_HEADS, PLAIN, cuts_of

# Of a tensor from which on torch asks the driver for one piece, in steps of PIECE
LARGE_BYTES, PIECE = 10 << 20, 2 << 20


def shares_of(file: GGUFFile, wants: Mapping[str, Want], n: int) -> dict[str, TensorInfo]:
    """The file's tensors as the first of `n` ranks has them."""
    cuts, rank = cuts_of(wants) if n > 1 else {}, Rank(0, n)
    return {
        name: share_of(t, cuts[name], rank).info if name in cuts else t
        for name, t in file.tensors.items()
    }


def weight_bytes(
    file: GGUFFile,
    dense: torch.dtype | None,
    repacked: bool = False,
    without: Collection[str] = (),
    shares: Mapping[str, TensorInfo] | None = None,
) -> int:
    """Bytes the file's tensors take on the device; the basis of the memory plan. `repacked`: as GPU kernels stream them.
    `shares`: the tensors as a rank has them."""
    size = 0 if dense is None else torch.empty((), dtype=dense).element_size()
    tensors = [t for name, t in (shares or file.tensors).items() if name not in without]
    big = [t for t in tensors if len(t.shape) > 1 and t.name != TOKEN_INPUTS]
    small = sum(4 * t.n_elements for t in tensors if len(t.shape) == 1)
    # Its rows are read as they lie in the file
    small += sum(t.n_bytes for t in tensors if t.name == TOKEN_INPUTS)
    if size:
        return small + size * sum(t.n_elements for t in big)
    copies = sum(2 * t.n_elements for t in big if t.name.endswith(GROUPED)) if repacked else 0
    return small + copies + sum(repacked_bytes(t) if repacked else t.n_bytes for t in big)


def row_bytes(n_ff: int, n_embd: int) -> int:
    """Bytes of a row in a feed-forward: gate and up in f32, their product in f16, a few rows of the residual stream."""
    return 2 * n_ff * 4 + n_ff * 2 + 5 * n_embd * 4


def n_large(tensors: Iterable[TensorInfo]) -> int:
    """Matrices that have a piece of the device's memory each, which torch's allocator rounds up."""
    return sum(t.n_bytes >= LARGE_BYTES for t in tensors)


def repacked_bytes(t: TensorInfo) -> int:
    """A matrix, or one of every expert or head; as many as in the file where there is no packed form."""
    if t.name.endswith(OF_HEADS):
        return kept_bytes(t)
    n_out, n_in = t.shape[-2:]
    return (
        t.n_elements // (n_out * n_in) * packed_bytes(t.type, n_out, n_in)
        if t.type in FORMATS
        else t.n_bytes
    )


def wide_bytes(tensors: Mapping[str, TensorInfo]) -> int:
    """Bytes of f16 copies of the matrices that kernels stream, as torch's allocator holds them."""
    sizes = (
        2 * t.n_elements
        for name, t in tensors.items()
        if len(t.shape) == 2
        and t.type not in PLAIN
        and name not in (TOKEN_INPUTS, *HEADS)
        and not name.endswith(GROUPED)
    )
    return sum(-(-n // PIECE) * PIECE if n >= LARGE_BYTES else n for n in sizes)
