"""Keys and values of attention layers, and their types.

A type is identified by the dtype of its codes. f32, f16, bf16 and f8_e4m3 (float8_e4m3fn, saturating) are their own codes. q8_0 (int8)
has an f16 scale for every 32 dims of a head, as in llama.cpp; codes and scales are separate planes, so that kernels can load both in
whole words.

A value is rounded once, to nearest even, by operations that every device rounds alike, from its row alone: drafts, neighbours and the
chunks of a prompt do not change the bits of a row.
"""

from __future__ import annotations

from typing import ClassVar

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
MAX_SCALE = 515.5  # 127 times this is finite in f16, which kernels compute with
MAX_F8 = 448.0


def name_of(dtype: torch.dtype) -> str:
    """The -ctk name of a type."""
    return next((name for name, known in KV_DTYPES.items() if known is dtype), str(dtype))


def row_bytes(n_head: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one row's keys and values. Raises ModelError if the type does not support heads of this width."""
    if dtype is not torch.int8:
        return 2 * n_head * head_dim * dtype.itemsize
    if head_dim % BLOCK:
        raise ModelError(
            f"keys and values of type q8_0 come in blocks of {BLOCK} dims; the heads are {head_dim} wide: -ctk f16 does"
        )
    return 2 * n_head * (head_dim + head_dim // BLOCK * 2)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., dim] -> codes [..., dim] int8 and scales [..., dim / 32] f16.

    The scale is rounded before the codes are made, so that they match it when read. A NaN makes the scale of its block NaN.
    """
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = (blocks.abs().amax(-1) * (1 / 127)).clamp(max=MAX_SCALE).half()
    wide = scale.float()[..., None]
    codes = (blocks * wide.reciprocal()).round().clamp(-127, 127)
    return torch.where(wide > 0, codes, 0.0).to(torch.int8).flatten(-2), scale


def dequantized(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of q8_0, exact in f32."""
    return (codes.to(dtype).unflatten(-1, (-1, BLOCK)) * scale.to(dtype)[..., None]).flatten(-2)


def raw(plane: Tensor) -> Tensor:
    """The same memory in a dtype that all of torch's copies support."""
    return plane.view(torch.uint8) if plane.dtype is torch.float8_e4m3fn else plane


def rows_per_page(page_size: int, tokens_per_row: int) -> int:
    """Rows of a page, if every `tokens_per_row` tokens have one."""
    return -(-page_size // tokens_per_row)


class KVPool:
    """Keys and values of one attention layer for every page.

    k, v              [row, head, dim]       codes  row = page * page_size + offset
    k_scale, v_scale  [row, head, dim / 32]  f16    of q8_0, else None

    tokens_per_row: tokens of a row, see `rows_of`. keys_only: v is k.
    """

    paged: ClassVar[bool] = True

    def __init__(
        self,
        n_row: int,
        n_head: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        tokens_per_row: int = 1,
        keys_only: bool = False,
    ) -> None:
        self.dtype = dtype
        self.head_dim = head_dim
        self.tokens_per_row = tokens_per_row
        self.keys_only = keys_only
        self.k = torch.zeros(n_row, n_head, head_dim, dtype=dtype, device=device)
        self.v = self.k if keys_only else torch.zeros_like(self.k)
        self.k_scale = self.v_scale = None
        if dtype is torch.int8:
            assert head_dim % BLOCK == 0, f"{head_dim} dims are no whole blocks of {BLOCK}"
            self.k_scale = torch.zeros(n_row, n_head, head_dim // BLOCK, dtype=torch.float16, device=device)
            self.v_scale = self.k_scale if keys_only else torch.zeros_like(self.k_scale)

    @property
    def planes(self) -> list[Tensor]:
        """All tensors, by rows."""
        planes = (self.k, self.k_scale) if self.keys_only else (self.k, self.v, self.k_scale, self.v_scale)
        return [t for t in planes if t is not None]

    @property
    def read_planes(self) -> list[Tensor]:
        """Keys, values and their scales in the order of kernels that read both: keys appear twice if they are the values."""
        return [t for t in (self.k, self.v, self.k_scale, self.v_scale) if t is not None]

    def tensors(self) -> list[Tensor]:
        return self.planes

    def rows_of(self, token_rows: Tensor, page_size: int) -> Tensor:
        """Rows of this pool for the tokens that make them: the last of each `tokens_per_row`.

        token_rows [n] int64 are the tokens' rows at one row a token: page * page_size + offset.
        """
        page, offset = token_rows // page_size, token_rows % page_size
        return page * rows_per_page(page_size, self.tokens_per_row) + offset // self.tokens_per_row

    def page(self, page: int, page_size: int) -> list[Tensor]:
        """The rows of a page."""
        n = rows_per_page(page_size, self.tokens_per_row)
        return [plane[page * n : (page + 1) * n] for plane in self.planes]

    def saved(self, slot: int, n_past: int) -> tuple[Tensor, ...]:
        return ()

    def own(self, slot: int) -> tuple[Tensor, ...]:
        """Nothing to reset: no row beyond a slot's length is read."""
        return ()

    def write(self, rows: Tensor, k: Tensor, v: Tensor | None) -> None:
        """Write k, v [row, head, dim] to pool rows `rows` [row]."""
        for plane, scales, x in ((self.k, self.k_scale, k), (self.v, self.v_scale, v)):
            if x is None:
                continue
            if scales is not None:
                x, scale = quantized(x)
                scales.index_copy_(0, rows, scale)
            elif self.dtype is torch.float8_e4m3fn:
                x = x.float().clamp(-MAX_F8, MAX_F8)
            raw(plane).index_copy_(0, rows, raw(x.to(self.dtype)))

    def read(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [row, head, dim] of pool rows `rows` [row]."""
        k, v = (raw(plane)[rows].view(self.dtype) for plane in (self.k, self.v))
        if self.k_scale is None or self.v_scale is None:
            return k.to(dtype), v.to(dtype)
        return dequantized(k, self.k_scale[rows], dtype), dequantized(v, self.v_scale[rows], dtype)
