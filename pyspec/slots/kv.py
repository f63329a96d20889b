"""Keys and values of attention layers, and the types they are kept in.

A type is known by the dtype of its codes. f32, f16, bf16 and f8_e4m3 (float8_e4m3fn, saturating) stand for themselves.
q8_0 (int8) has an f16 scale for every 32 dims of a head, as in llama.cpp; codes and scales lie in planes of their own, so
that kernels can load both in whole words.

What is written is rounded once, to nearest even, by operations that every device rounds alike and from that row alone:
drafts, neighbours and the way a prompt was cut leave the bits of a row as they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pyspec.errors import ModelError

KV_DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "q8_0": torch.int8,
    "f8_e4m3": torch.float8_e4m3fn,
}
"""By the names of config.KV_TYPES."""

BLOCK = 32  # dims that share a scale
MAX_SCALE = 515.5  # 127 of it are still finite in f16, which kernels compute with
MAX_F8 = 448.0


def name_of(dtype: torch.dtype) -> str:
    """What -ctk calls a type."""
    return next((name for name, known in KV_DTYPES.items() if known is dtype), str(dtype))


def row_bytes(n_head: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one row's keys and values. ModelError if heads of this width can not be kept in this type."""
    if dtype is not torch.int8:
        return 2 * n_head * head_dim * dtype.itemsize
    if head_dim % BLOCK:
        raise ModelError(
            f"keys and values of type q8_0 come in blocks of {BLOCK} dims; the heads are {head_dim} wide: -ctk f16 does"
        )
    return 2 * n_head * (head_dim + head_dim // BLOCK * 2)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., dim] -> codes [..., dim] int8 and scales [..., dim / 32] f16.

    The scale is rounded before the codes are made, so that they fit what is read back. A NaN makes the scale of its block NaN.
    """
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = (blocks.abs().amax(-1) * (1 / 127)).clamp(max=MAX_SCALE).half()
    wide = scale.float()[..., None]
    codes = (blocks * wide.reciprocal()).round().clamp(-127, 127)
    return torch.where(wide > 0, codes, 0.0).to(torch.int8).flatten(-2), scale


def dequantized(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of q8_0, exact in f32."""
    return (codes.to(dtype).unflatten(-1, (-1, BLOCK)) * scale.to(dtype)[..., None]).flatten(-2)


def _raw(plane: Tensor) -> Tensor:
    """The same memory in a dtype that all of torch's copies take."""
    return plane.view(torch.uint8) if plane.dtype is torch.float8_e4m3fn else plane


class KVPool:
    """Keys and values of one attention layer for every page.

    k, v              [row, head, dim]       codes  row = page * page_size + offset
    k_scale, v_scale  [row, head, dim / 32]  f16    of q8_0, else None
    """

    def __init__(self, n_row: int, n_head: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.head_dim = dtype, head_dim
        self.k = torch.zeros(n_row, n_head, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros_like(self.k)
        self.k_scale = self.v_scale = None
        if dtype is torch.int8:
            assert head_dim % BLOCK == 0, f"{head_dim} dims are no whole blocks of {BLOCK}"
            self.k_scale = torch.zeros(n_row, n_head, head_dim // BLOCK, dtype=torch.float16, device=device)
            self.v_scale = torch.zeros_like(self.k_scale)

    @property
    def planes(self) -> list[Tensor]:
        """Everything that is kept, by rows."""
        return [t for t in (self.k, self.v, self.k_scale, self.v_scale) if t is not None]

    def write(self, rows: Tensor, k: Tensor, v: Tensor) -> None:
        """k, v [row, head, dim] go to pool rows `rows` [row]."""
        for plane, scales, x in ((self.k, self.k_scale, k), (self.v, self.v_scale, v)):
            if scales is not None:
                x, scale = quantized(x)
                scales.index_copy_(0, rows, scale)
            elif self.dtype is torch.float8_e4m3fn:
                x = x.float().clamp(-MAX_F8, MAX_F8)
            _raw(plane).index_copy_(0, rows, _raw(x.to(self.dtype)))

    def read(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [row, head, dim] of pool rows `rows` [row]."""
        k, v = (_raw(plane)[rows].view(self.dtype) for plane in (self.k, self.v))
        if self.k_scale is None or self.v_scale is None:
            return k.to(dtype), v.to(dtype)
        return dequantized(k, self.k_scale[rows], dtype), dequantized(v, self.v_scale[rows], dtype)

    @property
    def n_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.planes)


def copy_rows(pools: Iterable[KVPool], new: slice, old: slice) -> None:
    """Rows `old` of every pool to its rows `new`, bit by bit; on a GPU few launches for all."""
    planes = [_raw(plane) for pool in pools for plane in pool.planes]
    if planes:
        torch._foreach_copy_([plane[new] for plane in planes], [plane[old] for plane in planes])
