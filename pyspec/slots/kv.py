"""Keys and values of attention layers in pages, and their types, which may differ (`KvFormat` of kv_types.py).

Codes and factors (kv_codes.py) are separate planes. A value is rounded once, by operations that every device rounds alike, from its row alone:
drafts, neighbours and the chunks of a prompt do not change the bits of a row.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from pyspec.slots.kv_codes import decoded, encoded
from pyspec.slots.kv_types import BLOCK, KvType
from pyspec.slots.kv_types import KvFormat as KvFormat
from pyspec.slots.mapped import zeros
from pyspec.slots.parts import rows_per_page


def raw(plane: Tensor) -> Tensor:
    """The same memory in a dtype that all of torch's copies support."""
    return plane.view(torch.uint8) if plane.dtype is torch.float8_e4m3fn else plane


class KVPool:
    """Keys and values of one attention layer for every page.

    k, v              [row, head, n_code]   codes  row = page * page_size + offset
    k_scale, v_scale  [row, head, n_scale]  f16    factors of types that have any, else None

    tokens_per_row: tokens of a row, see `rows_of`. keys_only: v is k, so both have one type.
    """

    paged: ClassVar[bool] = True
    n_ring = 0  # pages of a slot's ring (ring_pool.py); 0: pages are those of the page table

    def __init__(
        self,
        n_row: int,
        n_head: int,
        head_dim: int,
        kv: KvFormat,
        device: torch.device,
        *,
        tokens_per_row: int = 1,
        keys_only: bool = False,
    ) -> None:
        assert kv.is_one or not keys_only, "keys that are values have one type"
        self.kv = kv
        self.n_row, self.n_head, self.head_dim = n_row, n_head, head_dim
        self.tokens_per_row = tokens_per_row
        self.keys_only = keys_only
        shape = n_row, n_head, head_dim
        self.k, self.k_scale = _planes(shape, kv.k, device)
        self.v, self.v_scale = (self.k, self.k_scale) if keys_only else _planes(shape, kv.v, device)

    @property
    def planes(self) -> list[Tensor]:
        """All tensors, by rows."""
        planes = (
            (self.k, self.k_scale) if self.keys_only else (self.k, self.v, self.k_scale, self.v_scale)
        )
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
        for of, plane, scales, x in (
            (self.kv.k, self.k, self.k_scale, k),
            (self.kv.v, self.v, self.v_scale, v),
        ):
            if x is None:
                continue
            codes, factors = encoded(x, of)
            raw(plane).index_copy_(0, rows, raw(codes))
            if scales is not None and factors is not None:
                scales.index_copy_(0, rows, factors)

    def read(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [row, head, dim] of pool rows `rows` [row]."""
        return (
            _read(self.kv.k, self.k, self.k_scale, rows, dtype),
            _read(self.kv.v, self.v, self.v_scale, rows, dtype),
        )


def _planes(
    shape: tuple[int, int, int], of: KvType, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Codes [row, head, n_code] and the factors that their type has, zeroed."""
    n_row, n_head, dim = shape
    codes = zeros((n_row, n_head, of.n_code(dim)), of.dtype, device)
    if not of.n_factor:
        return codes, None
    assert dim % BLOCK == 0, f"{dim} dims are no whole blocks of {BLOCK}"
    return codes, zeros((n_row, n_head, of.n_scale(dim)), torch.float16, device)


def _read(of: KvType, codes: Tensor, scale: Tensor | None, rows: Tensor, dtype: torch.dtype) -> Tensor:
    found = raw(codes)[rows].view(codes.dtype)
    return decoded(found, None if scale is None else scale[rows], of, dtype)
