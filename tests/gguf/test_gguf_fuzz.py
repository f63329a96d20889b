"""Mutated files either open or raise ModelError: quickly, in bounded memory."""

from __future__ import annotations

import struct
import time
import tracemalloc
from pathlib import Path

import pytest
from craft import ARRAY, STRING, U32, Craft, key, string, tensor, u32, u64
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyspec.errors import ModelError
from pyspec.gguf import open_gguf
from pyspec.gguf.inspect import describe

VALID = Craft(
    keys=[
        key("general.architecture", STRING, string("llama")),
        key("general.alignment", U32, u32(32)),
        key("llama.block_count", U32, u32(2)),
        key("eps", 6, struct.pack("<f", 1e-6)),
        key("flag", 7, b"\x01"),
        key("scores", ARRAY, u32(6) + u64(3) + bytes(12)),
        key("tokens", ARRAY, u32(STRING) + u64(3) + string("a") + string("bc") + string("Ġd")),
    ],
    tensors=[
        tensor("token_embd.weight", [32, 4], kind=8),
        tensor("blk.0.attn_norm.weight", [32], offset=160),
        tensor("blk.0.ffn_up.weight", [256, 1], kind=12, offset=288),
    ],
    data=bytes(range(256)) + bytes(288 + 144 - 256),
).encode()
HEAD = VALID.index(b"blk.0.ffn_up") + 60
INTERESTING = (
    0,
    1,
    31,
    0xFF,
    0xFFFF,
    0x7FFFFFFF,
    0xFFFFFFFF,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """A valid file with some bytes flipped, fields replaced, or pieces removed, doubled or cut off."""
    data = bytearray(VALID)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, min(HEAD, max(len(data) - 9, 0))))
        match draw(st.sampled_from(["byte", "u32", "u64", "cut", "drop", "double"])):
            case "byte":
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "u32":
                data[at : at + 4] = struct.pack("<I", draw(st.sampled_from(INTERESTING)) & 0xFFFFFFFF)
            case "u64":
                data[at : at + 8] = struct.pack("<Q", draw(st.sampled_from(INTERESTING)))
            case "cut":
                del data[draw(st.integers(0, len(data))) :]
            case "drop":
                del data[at : at + draw(st.integers(1, 40))]
            case "double":
                data[at:at] = data[at : at + draw(st.integers(1, 40))]
    return bytes(data)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "m.gguf"


def use(path: Path) -> None:
    with open_gguf(path) as file:
        for name, info in file.tensors.items():
            assert len(file.raw(name)) == info.n_bytes
        describe(file)


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=mutations())
def test_a_mutated_file_opens_or_raises_a_model_error(content: bytes, place: Path) -> None:
    place.write_bytes(content)
    start = time.process_time()  # not wall time: the machine may be busy
    try:
        use(place)
    except ModelError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1000
    assert time.process_time() - start < 1.0


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.one_of(mutations(), st.binary(max_size=600).map(lambda tail: VALID[:24] + tail)))
def test_memory_stays_in_proportion_to_the_file(content: bytes, place: Path) -> None:
    place.write_bytes(content)
    tracemalloc.start()
    try:
        use(place)
    except ModelError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1 << 20


def test_every_truncation_is_refused(place: Path) -> None:
    for n in range(0, len(VALID), 3):
        place.write_bytes(VALID[:n])
        with pytest.raises(ModelError):
            open_gguf(place)
    place.write_bytes(VALID)
    use(place)
