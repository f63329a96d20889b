"""Every flaw of a file is a one-line error with the numbers."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from craft import ARRAY, STRING, U32, Craft, key, string, tensor, u32, u64

from pyspec.errors import BadGGUF, ModelError
from pyspec.gguf import open_gguf

NAME = key("general.name", STRING, string("x"))
DATA = bytes(64)


def array(kind: int, n: int, data: bytes = b"") -> bytes:
    return key("a", ARRAY, u32(kind) + u64(n) + data)


def one(
    ne: list[int], kind: int = 0, offset: int = 0, n_dims: int | None = None, data: bytes = DATA
) -> Craft:
    return Craft(tensors=[tensor("t", ne, kind, offset, n_dims)], data=data)


def two(second_offset: int, name: str = "b") -> Craft:
    return Craft(tensors=[tensor("a", [16]), tensor(name, [8], offset=second_offset)], data=bytes(128))


def aligned(value: int, kind: int = U32) -> Craft:
    packed = string("x") if kind == STRING else u32(value)
    return Craft(keys=[key("general.alignment", kind, packed)])


CASES: dict[str, tuple[Craft | bytes, str]] = {
    "empty file": (b"", "0 bytes"),
    "header cut": (b"GGUF" + u32(3) + u64(0), "16 bytes .* 24"),
    "magic": (Craft(magic=b"GGML"), "b'GGML'"),
    "version 0": (Craft(version=0), "version 0 "),
    "version 1": (Craft(version=1), "version 1 "),
    "version 4": (Craft(version=4), "version 4 "),
    "big endian": (Craft(version=3 << 24), "0x3000000 .* big-endian"),
    "tensor count above the limit": (Craft(n_tensors=1 << 63), f"{1 << 63}.* 131072"),
    "tensor count beyond the file": (Craft(n_tensors=90_000), "90000, .* 2970000 bytes; .* left"),
    "key count above the limit": (Craft(n_keys=65_537), "65537.* 65536"),
    "key count beyond the file": (Craft(n_keys=60_000), "60000, .* 840000 bytes; .* left"),
    "one key too many": (Craft(n_keys=2), "metadata key 1 of 2"),
    "key of no bytes": (Craft(keys=[key("", U32, u32(1))]), "metadata key 0 of 1 is 0 bytes"),
    "key too long": (Craft(keys=[u64(1 << 40) + bytes(99)]), f"{1 << 40} bytes .* 1..65535"),
    "key longer than the file": (Craft(keys=[u64(60_000) + bytes(99)]), "60000 bytes at offset 32"),
    "key twice": (Craft(keys=[NAME, NAME]), "key 1 repeats 'general.name'"),
    "value type": (Craft(keys=[key("k", 13, u32(1))]), "value type of 'k' is 13; 0..12"),
    "value cut": (Craft(keys=[NAME + u64(1) + b"k" + u32(10) + b"\0"], n_keys=2, alignment=1), "'k' needs 8 bytes"),
    "string too long": (Craft(keys=[key("k", STRING, u64(1 << 62))]), f"{1 << 62} bytes .* {1 << 30}"),
    "string beyond the file": (Craft(keys=[key("k", STRING, u64(5000))]), "'k' needs 5000 bytes"),
    "array element type": (Craft(keys=[array(77, 1, bytes(8))]), "element type of 'a' is 77"),
    "array of arrays": (Craft(keys=[array(ARRAY, 1, bytes(64))]), "array of arrays"),
    "array count above the limit": (Craft(keys=[array(U32, (16 << 20) + 1)]), f"{(16 << 20) + 1}.* {16 << 20}"),
    "array count beyond the file": (Craft(keys=[array(U32, 1000)]), "1000, .* 4000 bytes; .* left"),
    "string count beyond the file": (Craft(keys=[array(STRING, 1000)]), "1000, .* 8000 bytes; .* left"),
    "array string beyond the file": (Craft(keys=[array(STRING, 2, string("x") + u64(9999) + bytes(99))]), "string 1 of 2 has 9999 bytes; .* left"),
    "array strings run out": (Craft(keys=[array(STRING, 3, string("x" * 30))], alignment=1), "string 1 of 3 starts"),
    "alignment type": (aligned(0, STRING), "alignment is 'x'; want a whole number from 8 to 65536"),
    "alignment 0": (aligned(0), "alignment is 0"),
    "alignment odd": (aligned(48), "alignment is 48"),
    "alignment too small": (aligned(4), "alignment is 4"),
    "alignment too large": (aligned(1 << 17), "alignment is 131072"),
    "alignment other than used": (
        Craft(
            keys=[key("general.alignment", U32, u32(64))],
            tensors=[tensor("a", [8]), tensor("b", [8], offset=32)],
            data=bytes(128),
        ),
        "offset 32, not a multiple of the alignment 64",
    ),
    "no tensor name": (Craft(tensors=[tensor("", [8])], data=DATA), "tensor 0 of 1 is 0 bytes"),
    "long tensor name": (Craft(tensors=[tensor("n" * 1025, [8])], data=DATA), "1025 bytes .* 1..1024"),
    "tensor twice": (two(64, name="a"), "tensor 1 repeats the name 'a'"),
    "no dimensions": (one([], n_dims=0), "0 dimensions; 1..4"),
    "five dimensions": (one([1] * 5), "5 dimensions; 1..4"),
    "dimension count huge": (one([4], n_dims=0xFFFF_FFFF), "4294967295 dimensions"),
    "dimension of 0": (one([32, 0]), r"dimension of 0: \[32, 0\]"),
    "dimensions that wrap 64 bits": (one([1 << 32, 1 << 32]), f"{1 << 64} elements"),
    "dimension with the sign bit": (one([1 << 63, 2]), f"{1 << 64} elements"),
    "too many bytes": (one([1 << 40]), f"{4 << 40} bytes at 128, .* file ends at 192"),
    "type": (one([32], kind=99), "type 99"),
    "removed type": (one([32], kind=4), "type 4,"),
    "row of half a block": (one([48], kind=8), "row of 48 .* Q8_0's block of 32"),
    "row shorter than a K block": (one([128, 2], kind=12), "row of 128 .* Q4_K's block of 256"),
    "offset unaligned": (one([4], offset=4), "offset 4, .* alignment 32"),
    "offset beyond the file": (one([4], offset=1 << 60), f"16 bytes at {(1 << 60) + 128}, .* file ends at 192"),
    "data cut": (one([16], data=bytes(63)), "64 bytes at 128, up to 192; the file ends at 191"),
    "tensors overlap": (two(32), r"'b' at offset 32 overlaps 'a' \(0 \+ 64 bytes\)"),
    "directory cut": (Craft(tensors=[tensor("t", [4])[:-9]], alignment=1), "directory entry of 't' needs 20 bytes at offset 82, but 11 of 93"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_malformed_file_is_one_line_with_the_numbers(
    case: tuple[Craft | bytes, str], tmp_path: Path
) -> None:
    content, message = case
    path = tmp_path / "bad.gguf"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(BadGGUF, match=message) as caught:
        open_gguf(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_long_name_does_not_make_a_long_message(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(Craft(keys=[key("k" * 60_000, 13, b"")]).encode())
    with pytest.raises(BadGGUF) as caught:
        open_gguf(path)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "make", [lambda p: p / "none.gguf", lambda p: p], ids=["missing", "a directory"]
)
def test_a_path_that_cannot_be_opened_is_a_model_error(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="cannot open"):
        open_gguf(make(tmp_path))


def shard(no: int, count: int = 2, total: int = 2, name: str | None = None, version: int = 3) -> bytes:
    keys = [
        key("split.no", 2, struct.pack("<H", no)),
        key("split.count", 2, struct.pack("<H", count)),
        key("split.tensors.count", 5, struct.pack("<i", total)),
    ]
    return Craft(
        keys=keys, tensors=[tensor(name or f"t{no}", [16])], data=bytes([no] * 64), version=version
    ).encode()


SPLITS: dict[str, tuple[dict[str, bytes], str]] = {
    "number": ({"m-00001-of-00002": shard(0), "m-00002-of-00002": shard(0)}, "split.no is 0, its name says 1"),
    "count": ({"m-00001-of-00002": shard(0), "m-00002-of-00002": shard(1, 3)}, "split.count is 3, its name says 2"),
    "missing": ({"m-00001-of-00002": shard(0)}, "1 of 2 parts .* m-00002-of-00002.gguf"),
    "name": ({"m": shard(0)}, "one of 2 parts .* not named"),
    "other count in name": ({"m-00001-of-00003": shard(0)}, "one of 2 parts .* not named"),
    "total": ({"m-00001-of-00002": shard(0, 2, 3), "m-00002-of-00002": shard(1)}, "count is 3, the 2 parts have 2"),
    "twice": ({"m-00001-of-00002": shard(0), "m-00002-of-00002": shard(1, name="t0")}, "'t0' is in m-00001"),
    "version": ({"m-00001-of-00002": shard(0), "m-00002-of-00002": shard(1, version=2)}, "version 2, but .* 3"),
    "too many": ({"m-00001-of-09999": shard(0, 9999)}, "split.count is 9999; want a whole number from 0 to 4096"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPLITS.values(), ids=SPLITS.keys())
def test_parts_that_do_not_fit_together_are_refused(
    case: tuple[dict[str, bytes], str], tmp_path: Path
) -> None:
    parts, message = case
    for name, content in parts.items():
        (tmp_path / f"{name}.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        open_gguf(tmp_path / f"{next(iter(parts))}.gguf")


def test_any_part_opens_the_whole_model(tmp_path: Path) -> None:
    for no in range(2):
        (tmp_path / f"m-0000{no + 1}-of-00002.gguf").write_bytes(shard(no))
    for no in range(2):
        with open_gguf(tmp_path / f"m-0000{no + 1}-of-00002.gguf") as file:
            assert [p.name for p in file.paths] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
            assert {k: (t.shard, set(file.raw(k).tolist())) for k, t in file.tensors.items()} == {
                "t0": (0, {0}),
                "t1": (1, {1}),
            }
