"""Cases from public bug reports: their list (cases.toml), their inputs, and GGUF files with changed metadata."""

from __future__ import annotations

import json
import struct
import tomllib
from pathlib import Path
from typing import Any

import pyspec

HERE = Path(__file__).parent
DEMO = Path(pyspec.__file__).parent / "demo" / "pyspec-demo.gguf"
Case = dict[str, Any]
CASES: list[Case] = tomllib.loads((HERE / "cases.toml").read_text(encoding="utf-8"))["case"]

STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def read(name: str) -> Any:
    """An input: JSON if its name ends so, else text."""
    text = (HERE / "inputs" / name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else text


def cases_on(kind: str) -> list[Case]:
    return [case for case in CASES if case["on"] == kind]


def _behind_string(data: bytes, pos: int) -> int:
    return pos + 8 + int(struct.unpack_from("<Q", data, pos)[0])


def _behind_value(data: bytes, pos: int, kind: int) -> int:
    if kind == STRING:
        return _behind_string(data, pos)
    if kind != ARRAY:
        return pos + struct.calcsize("<" + SCALARS[kind])
    kind, n = struct.unpack_from("<IQ", data, pos)
    pos += 12
    for _ in range(n):
        pos = _behind_value(data, pos, kind)
    return pos


def _pair(key: str, kind: int, value: Any) -> bytes:
    name = key.encode()
    packed = (
        struct.pack("<Q", len(value.encode())) + value.encode()
        if kind == STRING
        else struct.pack("<" + SCALARS[kind], value)
    )
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + packed


def write_edited(source: Path, target: Path, edit: dict[str, Any]) -> None:
    """Write a copy of a GGUF file with changed metadata: `edit` has "drop", keys, and "set", [key, number of its type, value]."""
    data = source.read_bytes()
    n_tensors, n_pairs = struct.unpack_from("<QQ", data, 8)
    new = {key: (kind, value) for key, kind, value in edit.get("set", ())}
    pos, kept = 24, []
    for _ in range(n_pairs):
        begin, pos = pos, _behind_string(data, pos)
        key = data[begin + 8 : pos].decode()
        pos = _behind_value(data, pos + 4, struct.unpack_from("<I", data, pos)[0])
        if key not in new and key not in edit.get("drop", ()):
            kept.append(data[begin:pos])
    kept += [_pair(key, kind, value) for key, (kind, value) in new.items()]
    tensors = pos
    for _ in range(n_tensors):
        pos = _behind_string(data, pos)
        pos += 4 + 8 * struct.unpack_from("<I", data, pos)[0] + 12
    head = data[:16] + struct.pack("<Q", len(kept)) + b"".join(kept) + data[tensors:pos]
    target.write_bytes(head + bytes(-len(head) % 32) + data[pos + -pos % 32 :])
