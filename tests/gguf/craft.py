"""GGUF bytes built field by field, so that any field can be wrong."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

U32, STRING, ARRAY = 4, 8, 9


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return string(name) + u32(kind) + value


def tensor(name: str, ne: list[int], kind: int = 0, offset: int = 0, n_dims: int | None = None) -> bytes:
    dims = b"".join(u64(n) for n in ne)
    return string(name) + u32(len(ne) if n_dims is None else n_dims) + dims + u32(kind) + u64(offset)


@dataclass
class Craft:
    """One file. Counts match the lists unless set."""

    keys: list[bytes] = field(
        default_factory=lambda: [key("general.architecture", STRING, string("llama"))]
    )
    tensors: list[bytes] = field(default_factory=list)
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    n_tensors: int | None = None
    n_keys: int | None = None
    alignment: int = 32

    def encode(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_keys = len(self.keys) if self.n_keys is None else self.n_keys
        head = self.magic + u32(self.version) + u64(n_tensors) + u64(n_keys)
        head += b"".join(self.keys) + b"".join(self.tensors)
        return head + bytes(-len(head) % self.alignment) + self.data
