"""Keys and values of attention layers, and their types, which may differ (`KvFormat`).

A type is identified by the dtype of its codes. f32, f16, bf16 and f8_e4m3 (float8_e4m3fn, saturating) are their own codes. q8_0 (int8)
has an f16 scale for every 32 dims of a head, as in llama.cpp; codes and scales are separate planes, so that kernels can load both in
whole words.

A value is rounded once, to nearest even, by operations that every device rounds alike, from its row alone: drafts, neighbours and the
chunks of a prompt do not change the bits of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pyspec.errors import ModelError
from pyspec.slots.mapped import zeros

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


@dataclass(frozen=True, slots=True)
class KvFormat:
    """A KV format: the types of keys and of values, each one of KV_DTYPES."""

    k: torch.dtype
    v: torch.dtype

    @classmethod
    def both(cls, dtype: torch.dtype) -> KvFormat:
        """One type for keys and values."""
        return cls(dtype, dtype)

    @classmethod
    def named(cls, k: str, v: str | None = None) -> KvFormat:
        """By the names of -ctk and -ctv. v: None is the type of keys."""
        return cls(KV_DTYPES[k], KV_DTYPES[v or k])

    @property
    def name(self) -> str:
        """As -ctk names it; "f16/q8_0" if values have another type than keys."""
        return name_of(self.k) if self.is_one else f"{name_of(self.k)}/{name_of(self.v)}"

    @property
    def is_one(self) -> bool:
        """Keys and values have one type."""
        return self.k is self.v

    @property
    def half(self) -> torch.dtype:
        """The 16-bit type that holds both for libraries: bf16 if one of them is, because f16 lacks its range."""
        return torch.bfloat16 if torch.bfloat16 in (self.k, self.v) else torch.float16

    @property
    def has_f32(self) -> bool:
        return torch.float32 in (self.k, self.v)


F16 = KvFormat.both(torch.float16)
"""The format unless settings name another."""


def one_type(kv: KvFormat, op: str) -> str | None:
    """The refusal of kernels that take keys and values of one type. op: "reads" or "writes"."""
    if kv.is_one:
        return None
    return f"keys are {name_of(kv.k)}, values {name_of(kv.v)}; the kernel {op} one type"


def row_bytes(n_head: int, head_dim: int, kv: KvFormat) -> int:
    """Bytes of one row's keys and values. Raises ModelError if a type does not support heads of this width."""
    return sum(_plane_bytes(n_head, head_dim, *of) for of in ((kv.k, "-ctk"), (kv.v, "-ctv")))


def key_bytes(n_head: int, head_dim: int, kv: KvFormat) -> int:
    """The same of keys that are the values, too. Raises ModelError also if values have another type."""
    if not kv.is_one:
        raise ModelError(
            "keys of this model are its values, so they have one type: "
            f"-ctk {name_of(kv.k)} and -ctv {name_of(kv.v)} differ"
        )
    return _plane_bytes(n_head, head_dim, kv.k, "-ctk")


def _plane_bytes(n_head: int, head_dim: int, dtype: torch.dtype, flag: str) -> int:
    if dtype is not torch.int8:
        return n_head * head_dim * dtype.itemsize
    if head_dim % BLOCK:
        raise ModelError(
            f"keys and values of type q8_0 come in blocks of {BLOCK} dims; "
            f"the heads are {head_dim} wide: {flag} f16 does"
        )
    return n_head * (head_dim + head_dim // BLOCK * 2)


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

    tokens_per_row: tokens of a row, see `rows_of`. keys_only: v is k, so both have one type.
    """

    paged: ClassVar[bool] = True

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
        self.head_dim = head_dim
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
        for plane, scales, x in ((self.k, self.k_scale, k), (self.v, self.v_scale, v)):
            if x is None:
                continue
            if scales is not None:
                x, scale = quantized(x)
                scales.index_copy_(0, rows, scale)
            elif plane.dtype is torch.float8_e4m3fn:
                x = x.float().clamp(-MAX_F8, MAX_F8)
            raw(plane).index_copy_(0, rows, raw(x.to(plane.dtype)))

    def read(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values [row, head, dim] of pool rows `rows` [row]."""
        return _read(self.k, self.k_scale, rows, dtype), _read(self.v, self.v_scale, rows, dtype)


def _planes(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Codes [row, head, dim] and the scales that their type has, zeroed."""
    codes = zeros(shape, dtype, device)
    if dtype is not torch.int8:
        return codes, None
    n_row, n_head, dim = shape
    assert dim % BLOCK == 0, f"{dim} dims are no whole blocks of {BLOCK}"
    return codes, zeros((n_row, n_head, dim // BLOCK), torch.float16, device)


def _read(codes: Tensor, scale: Tensor | None, rows: Tensor, dtype: torch.dtype) -> Tensor:
    found = raw(codes)[rows].view(codes.dtype)
    return found.to(dtype) if scale is None else dequantized(found, scale[rows], dtype)
