"""The types of keys and values, as data, and a pool's pair of them (`KvFormat`).

f32, f16, bf16 and f8_e4m3 (float8_e4m3fn, saturating) are plain numbers. The others have whole codes and f16 factors for every 32 dims of a
head, with the values of llama.cpp's types of the same names. Codes and factors are separate planes, so that kernels load both in whole words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pyspec.errors import ModelError

BLOCK = 32  # dims that share factors
MOST_TURNED = 64  # dims of values: more of them lose more (docs/kv.md)


@dataclass(frozen=True, slots=True, repr=False)
class KvType:
    """A type of keys or values.

    name      as -ctk names it
    dtype     of the plane of codes; bytes where codes are packed
    bits      of a code
    n_factor  f16 factors of a block: 0, 1 (a scale) or 2 (a scale and the least value)
    kind      its number in native kernels (kv.h, kv_types.cuh)
    turns     rows are turned before they are rounded, and queries or sums of values with them (`KvFormat.turned_k`, `turned_v`)
    """

    name: str
    dtype: torch.dtype
    bits: int
    n_factor: int
    kind: int
    turns: bool = False

    def __repr__(self) -> str:
        return self.name + " unturned" * (self.is_packed and not self.turns)

    @property
    def is_packed(self) -> bool:
        """Several codes share a byte."""
        return self.bits < 8

    @property
    def is_float(self) -> bool:
        """Codes are the numbers themselves, of 16 or 32 bits."""
        return self.bits >= 16

    def n_code(self, dim: int) -> int:
        """Elements of a head's codes: dims, or bytes where they are packed."""
        return dim * self.bits // 8 if self.is_packed else dim

    def n_scale(self, dim: int) -> int:
        """Factors of a head."""
        return dim // BLOCK * self.n_factor

    def head_bytes(self, dim: int, flag: str) -> int:
        """Bytes of a head of `dim` values. Raises ModelError if they are no whole blocks; flag: the option that chose the type."""
        if self.n_factor and dim % BLOCK:
            raise ModelError(
                f"keys and values of type {self.name} come in blocks of {BLOCK} dims; "
                f"the heads are {dim} wide: {flag} f16 does"
            )
        return self.n_code(dim) * self.dtype.itemsize + 2 * self.n_scale(dim)


F32 = KvType("f32", torch.float32, 32, 0, 0)
F16 = KvType("f16", torch.float16, 16, 0, 1)
BF16 = KvType("bf16", torch.bfloat16, 16, 0, 2)
Q8_0 = KvType("q8_0", torch.int8, 8, 1, 3)
F8 = KvType("f8_e4m3", torch.float8_e4m3fn, 8, 0, 4)
Q5_1 = KvType("q5_1", torch.uint8, 5, 2, 5, turns=True)
Q5_0 = KvType("q5_0", torch.uint8, 5, 1, 6, turns=True)
Q4_1 = KvType("q4_1", torch.uint8, 4, 2, 7, turns=True)
Q4_0 = KvType("q4_0", torch.uint8, 4, 1, 8, turns=True)

TYPES = {t.name: t for t in (F16, BF16, F32, Q8_0, F8, Q5_1, Q5_0, Q4_1, Q4_0)}
"""By the names of config.KV_TYPES."""


def floats_of(of: KvType) -> KvType:
    """The type of rows that are floats beside keys of this type: the same, or f16."""
    return of if of.is_float else F16


def type_of(of: KvType | torch.dtype) -> KvType:
    """A type, or the one whose codes alone have this dtype."""
    if isinstance(of, KvType):
        return of
    (found,) = (t for t in TYPES.values() if t.dtype is of)
    return found


def name_of(dtype: torch.dtype) -> str:
    """The name of `type_of`, or else of the dtype."""
    names = [t.name for t in TYPES.values() if t.dtype is dtype]
    return names[0] if len(names) == 1 else str(dtype)


@dataclass(frozen=True, slots=True)
class KvFormat:
    """The types of keys and of values of a pool."""

    k: KvType = F16
    v: KvType = F16

    @classmethod
    def both(cls, of: KvType) -> KvFormat:
        """One type for keys and values."""
        return cls(of, of)

    @classmethod
    def named(cls, k: str, v: str | None = None) -> KvFormat:
        """By the names of -ctk and -ctv. v: None is the type of keys."""
        return cls(TYPES[k], TYPES[v or k])

    @property
    def name(self) -> str:
        """As -ctk names it; "f16/q8_0" if values have another type than keys."""
        return self.k.name if self.is_one else f"{self.k.name}/{self.v.name}"

    @property
    def floats(self) -> KvFormat:
        """Of rows that stay numbers whatever keys are: their type, or f16 where it has codes."""
        return KvFormat.both(floats_of(self.k))

    @property
    def is_one(self) -> bool:
        """Keys and values have one type."""
        return self.k == self.v

    @property
    def half(self) -> torch.dtype:
        """The 16-bit type that holds both for libraries: bf16 if one of them is, because f16 lacks its range."""
        return torch.bfloat16 if BF16 in (self.k, self.v) else torch.float16

    @property
    def has_f32(self) -> bool:
        return F32 in (self.k, self.v)

    def turned_k(self, dim: int) -> int:
        """Dims of a head that are turned together in keys, and in the queries that meet them: the largest power of two that divides it.
        0: none."""
        return dim & -dim if self.k.turns else 0

    def turned_v(self, dim: int) -> int:
        """The same of values, up to MOST_TURNED. Sums of them are turned back."""
        return min(dim & -dim, MOST_TURNED) if self.v.turns else 0


PLAIN = KvFormat()
"""The format unless settings name another."""


def row_bytes(n_head: int, head_dim: int, kv: KvFormat) -> int:
    """Bytes of one row's keys and values. Raises ModelError if a type does not support heads of this width."""
    return n_head * (kv.k.head_bytes(head_dim, "-ctk") + kv.v.head_bytes(head_dim, "-ctv"))


def key_bytes(n_head: int, head_dim: int, kv: KvFormat) -> int:
    """The same of keys that are the values, too. Raises ModelError also if values have another type."""
    if not kv.is_one:
        raise ModelError(
            "keys of this model are its values, so they have one type: "
            f"-ctk {kv.k.name} and -ctv {kv.v.name} differ"
        )
    return n_head * kv.k.head_bytes(head_dim, "-ctk")
