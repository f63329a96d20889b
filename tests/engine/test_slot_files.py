"""Slots saved to files and restored: the same text as without, and damaged files are refused."""

from __future__ import annotations

import errno
import json
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine_rig import DEMO, FIXTURES, GREEDY
from known_texts import tiny

from pyspec.engine.api import Engine
from pyspec.engine.loop.slot_actions import SlotActions
from pyspec.errors import BadSlotFile, PyspecError, RequestError
from pyspec.request import Delta
from pyspec.slot_action import SlotAction, SlotAnswer
from pyspec.slots.span_file import CHUNK, DIGEST, SLOT, VERSION, digest, write

QWEN35, NEMOTRON = FIXTURES / "qwen35.gguf", FIXTURES / "nemotron_latent.gguf"
LLAMA = FIXTURES / "llama.gguf"
DEEPSEEK4 = FIXTURES / "deepseek4.gguf"
PROMPT = tuple(random.Random(5).choices(range(256), k=75))
KINDS = {
    "llama without drafts": (LLAMA, {"spec_type": "none"}),
    "llama with n-grams, f8_e4m3": (LLAMA, {"spec_type": "ngram", "ngram_match": 1, "kv_type": "f8_e4m3"}),
    "qwen35 with mtp": (QWEN35, {"spec_type": "mtp"}),
    "qwen35 with mtp, q8_0 and f16": (QWEN35, {"spec_type": "mtp", "kv_type": "q8_0", "kv_type_v": "f16"}),
    "qwen35 with mtp, q4_0 and q5_1": (QWEN35, {"spec_type": "mtp", "kv_type": "q4_0", "kv_type_v": "q5_1", "draft_kv_type": "q8_0"}),
    "qwen35 with dflash": ("tiny", {}),
    "qwen35 with suffixes": (QWEN35, {"spec_type": "suffix"}),
    "qwen35 with mtp and suffixes": (QWEN35, {"spec_type": "mtp,suffix"}),
    "nemotron with mtp": (NEMOTRON, {"spec_type": "mtp"}),
    "deepseek4 with mtp": (DEEPSEEK4, {"draft_path": FIXTURES / "deepseek4_mtp.gguf", "n_draft_max": 2}),
    "lfm2moe with n-grams": (FIXTURES / "lfm2moe.gguf", {"spec_type": "ngram", "ngram_match": 1}),
    "gemma4-e with n-grams": (FIXTURES / "gemma4-e.gguf", {"spec_type": "ngram", "ngram_match": 1}),
    "gpt-oss with rings": (FIXTURES / "gpt-oss.gguf", {"spec_type": "ngram", "ngram_match": 1, "batch": 21}),
    "gpt-oss with rings over two ranks": (FIXTURES / "gpt-oss.gguf", {"spec_type": "none", "batch": 21, "tp": 2, "threads": 1}),
    "deepseek2": (FIXTURES / "deepseek2.gguf", {"spec_type": "none"}),
    "qwen35 with mtp over two ranks": (QWEN35, {"spec_type": "mtp", "tp": 2, "threads": 1}),
    "deepseek4 over two ranks": (DEEPSEEK4, {"spec_type": "none", "tp": 2, "threads": 1}),
}  # fmt: skip


def load(kind: str, **more: object) -> Engine:
    path, settings = KINDS[kind]
    if path == "tiny":
        path, settings = tiny("qwen35"), {"draft_path": tiny("qwen35", drafter=True)}
    values = {"np": 2, "ctx": 256, "kv_type": "f32", "page_size": 16, "warm_up": False, "check_tap_shift": False, "device": "cpu"}  # fmt: skip
    return Engine.open(str(path), "auto", {**values, "n_draft_fixed": True, **settings, **more})


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_slot_goes_on_as_it_would_have(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "a.slot"
    with load(kind) as e:
        first = e.generate(PROMPT, params=GREEDY, max_tokens=20)
        saved = e.save_slot(0, file)
        assert (
            saved.n_tokens == len(PROMPT) + 19 and saved.n_bytes == file.stat().st_size and saved.ms > 0
        )
        turn = [*PROMPT, *first.tokens, 3, 4, 5]
        want = e.generate(turn, params=GREEDY, max_tokens=24)
        assert want.timings.cache_n == saved.n_tokens
    with load(kind) as e:
        cold = e.generate(turn, params=GREEDY, max_tokens=24)
        assert cold.tokens == want.tokens and cold.timings.cache_n == 0
        e.erase_slot(0)
        restored = e.restore_slot(1, file)
        assert (restored.slot, restored.n_tokens, restored.n_bytes) == (1, saved.n_tokens, saved.n_bytes)
        again = e.generate(turn, params=GREEDY, max_tokens=24)
        assert again.tokens == want.tokens and again.timings.cache_n == saved.n_tokens
        drafts = lambda r: (r.timings.draft_n, r.timings.draft_n_accepted)  # noqa: E731
        # suffix drafts learn from every text
        assert "suffix" in kind or drafts(again) == drafts(want), (
            "the drafter goes on from what it had, too"
        )
        assert e.erase_slot(0).n_tokens == len(turn) + 23
        e.loop.cache.check(now=True)


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_whose_slot_was_restored_is_not_read_again(kind: str, tmp_path: Path) -> None:
    """The same prompt, and another answer to it, as if nothing had been saved: after a restart, too, and twice."""
    prompt, file = PROMPT[:61], tmp_path / "a.slot"
    warm = replace(GREEDY, temperature=0.75, seed=11)
    with load(kind) as e:
        first = e.generate(prompt, params=GREEDY, max_tokens=9)
        e.save_slot(0, file)
        again, other = (e.generate(prompt, params=p, max_tokens=9) for p in (GREEDY, warm))
        assert again.tokens == first.tokens and again.timings.cache_n == len(prompt) - 1
    with load(kind) as e:
        for slot in (1, 0):
            e.restore_slot(slot, file)
            e.restore_slot(slot, file)
            for params, want in ((GREEDY, again), (warm, other)):
                got = e.generate(prompt, params=params, max_tokens=9)
                assert got.tokens == want.tokens and got.timings.cache_n == len(prompt) - 1
            e.loop.cache.check(now=True)
            e.erase_slot(0)
            e.erase_slot(1)


@pytest.mark.parametrize("other", [{"batch": 40}, {"swa_full": True}])
def test_a_file_with_windows_goes_back_into_rings_of_its_size(
    other: dict[str, object], tmp_path: Path
) -> None:
    """Windows around a ring's end are two tensors each, which other rings cut elsewhere."""
    with load("gpt-oss with rings") as e:
        e.generate(PROMPT, params=GREEDY, max_tokens=9)
        e.save_slot(0, tmp_path / "a.slot")
    with (
        load("gpt-oss with rings", **other) as e,
        pytest.raises(BadSlotFile, match="another layout of caches and states"),
    ):
        e.restore_slot(0, tmp_path / "a.slot")


def test_a_file_of_an_older_version_is_refused_as_that(engine: Engine, saved: Path) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data[:8] + struct.pack("<I", 1) + data[12:])
    with pytest.raises(BadSlotFile, match="it has version 1; this program reads version 2"):
        engine.restore_slot(1, saved)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load("qwen35 with mtp") as e:
        yield e


@pytest.fixture
def saved(engine: Engine, tmp_path: Path) -> Path:
    engine.generate(PROMPT, params=GREEDY, max_tokens=8, slot=0)
    engine.save_slot(0, tmp_path / "a.slot")
    return tmp_path / "a.slot"


def test_erasing_forgets_what_the_slot_left_and_nothing_of_others(engine: Engine) -> None:
    other = [*PROMPT[:32], *range(40)]
    engine.generate(PROMPT, params=GREEDY, max_tokens=8, slot=0)
    then = [*other, *engine.generate(other, params=GREEDY, max_tokens=8, slot=1).tokens, 1]
    assert engine.erase_slot(0).n_tokens == len(PROMPT) + 7 and engine.erase_slot(0).n_tokens == 0
    assert engine.loop.table.find(PROMPT).n_match == 32, "what slot 1 begins with, too"
    assert engine.generate(then, params=GREEDY, max_tokens=2, slot=1).timings.cache_n == len(then) - 2
    engine.erase_slot(1)
    engine.erase_slot(0)
    engine.loop.cache.check(now=True)
    assert engine.generate(PROMPT, params=GREEDY, max_tokens=2).timings.cache_n == 0


def test_an_empty_slot_is_saved_and_restored_as_one(engine: Engine, tmp_path: Path) -> None:
    engine.erase_slot(1)
    assert engine.save_slot(1, tmp_path / "none").n_tokens == 0
    assert engine.restore_slot(0, tmp_path / "none").n_tokens == 0
    assert engine.erase_slot(0).n_tokens == 0


def test_a_busy_slot_is_waited_for(engine: Engine, tmp_path: Path) -> None:
    heard: list[SlotAnswer] = []
    over = threading.Event()

    def hear(answer: SlotAnswer) -> None:
        heard.append(answer)
        over.set()

    stream = engine.stream(PROMPT, params=GREEDY, max_tokens=40, slot=0)
    assert isinstance(next(stream), Delta)
    engine.act_on_slot(SlotAction("save", 0, str(tmp_path / "b")), hear)
    n = 1 + sum(len(e.tokens) for e in stream if isinstance(e, Delta))
    assert n >= 40 - 4 and over.wait(60)
    assert not isinstance(heard[0], PyspecError) and heard[0].n_tokens == len(PROMPT) + 39


@pytest.mark.parametrize(
    "what", ["folder", "full folder", "pipe", "socket", "long name", "file as a folder"]
)
def test_a_slot_is_not_saved_over_what_is_no_file(engine: Engine, tmp_path: Path, what: str) -> None:
    """The sender's fault, with a sentence; the existing file stays."""
    engine.generate(PROMPT, params=GREEDY, max_tokens=3, slot=0)
    path = tmp_path / "there"
    if "folder" in what and "file" not in what:
        path.mkdir()
        (path / "kept").write_text("x" * ("full" in what))
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "socket":
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(path))
    elif what == "file as a folder":
        path.write_text("x")
        path /= "x.slot"
    else:
        path = tmp_path / ("a" * 3000)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BadSlotFile, match=r"^slot file .{1,300} can not be written: ") as e:
        engine.save_slot(0, path)
    assert e.value.status == 400 and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (errno.ENOSPC, 507),
        (errno.EDQUOT, 507),
        (errno.EFBIG, 507),
        (errno.EACCES, 400),
        (errno.EROFS, 400),
    ],
)
def test_a_disk_that_takes_no_more_is_said_to_be_that(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, status: int
) -> None:
    def fail(*where: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("pyspec.slots.span_file._write", fail)
    with pytest.raises(PyspecError, match=f"slot file a can not be written: {os.strerror(number)}") as e:
        write(tmp_path / "a", {}, [], SLOT)
    assert e.value.status == status and not list(tmp_path.iterdir())


def test_what_can_not_be_is_refused_with_the_reason(engine: Engine, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"slot 2 does not exist; slots are 0\.\.1"):
        engine.save_slot(2, tmp_path / "x")
    with pytest.raises(PyspecError, match="x can not be written: No such file or directory"):
        engine.save_slot(0, tmp_path / "no" / "x")
    with pytest.raises(BadSlotFile, match="slot file x: No such file"):
        engine.restore_slot(0, tmp_path / "x")
    with pytest.raises(BadSlotFile, match="Is a directory"):
        engine.restore_slot(0, tmp_path)
    assert not list(tmp_path.glob(".*")), "no half a file stays"
    with (
        load("qwen35 with mtp", page_size=32) as other,
        pytest.raises(BadSlotFile, match="another page size"),
    ):
        other.restore_slot(0, saved)
    with load("nemotron with mtp") as other, pytest.raises(BadSlotFile, match="another model"):
        other.restore_slot(0, saved)
    with (
        load("qwen35 with mtp", spec_type="none") as other,
        pytest.raises(BadSlotFile, match="another drafter"),
    ):
        other.restore_slot(0, saved)
    with (
        load("qwen35 with mtp", prefix_cache=False) as other,
        pytest.raises(RequestError, match="--cache-prompt"),
    ):
        other.save_slot(0, tmp_path / "y")


def test_a_file_goes_back_to_the_types_of_keys_and_values_that_it_has(tmp_path: Path) -> None:
    """Of one type both the file says what it said before there were two."""
    file, one = tmp_path / "a.slot", tmp_path / "b.slot"
    with load("qwen35 with mtp, q8_0 and f16") as e:
        e.generate(PROMPT, params=GREEDY, max_tokens=4, slot=0)
        e.save_slot(0, file)
        assert SlotActions(e.loop.imager(), e.info).identity()["kv_type"] == "q8_0/f16"
    for types in ({"kv_type": "f16", "kv_type_v": "q8_0"}, {"kv_type": "q8_0"}, {"kv_type": "f16"}):
        with (
            load("qwen35 with mtp", **types) as e,
            pytest.raises(BadSlotFile, match=r"another type of keys and val.*ctv"),
        ):
            e.restore_slot(0, file)
    with load("qwen35 with mtp", kv_type="f16", kv_type_v="f16") as e:
        e.generate(PROMPT, params=GREEDY, max_tokens=4, slot=0)
        e.save_slot(0, one)
    with load("qwen35 with mtp", kv_type="f16") as e:
        assert e.restore_slot(0, one).n_tokens == len(PROMPT) + 3
        assert SlotActions(e.loop.imager(), e.info).identity()["kv_type"] == "f16"


def test_every_flipped_byte_is_refused_with_its_place(engine: Engine, saved: Path) -> None:
    data, rng = saved.read_bytes(), random.Random(1)
    places = [*range(64), *(rng.randrange(len(data)) for _ in range(120)), len(data) - 1]
    for at in places:
        saved.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        with pytest.raises(BadSlotFile) as refused:
            engine.restore_slot(1, saved)
        said = str(refused.value)
        assert said.startswith("slot file a.slot: ") and len(said) < 300
        if "do not match their digest" in said:
            first, last = (int(word) for word in said.split("bytes ")[1].split()[:3:2])
            assert first <= at <= last
    saved.write_bytes(data)
    assert engine.restore_slot(1, saved).n_tokens == len(PROMPT) + 7


def signed(data: bytes, head: bytes) -> bytes:
    """The file with another head and right digests, as an attacker would write it."""
    (n,) = struct.unpack_from("<I", data, 12)
    content = data[16 + n + DIGEST :]
    start = struct.pack("<8sII", b"PYSPSLOT", VERSION, len(head)) + head
    key = digest(start)
    chunks = [content[i : i + CHUNK + DIGEST][:-DIGEST] for i in range(0, len(content), CHUNK + DIGEST)]
    return start + key + b"".join(c + digest(c, key, i) for i, c in enumerate(chunks))


def test_files_that_are_signed_and_wrong_never_crash(engine: Engine, saved: Path) -> None:
    """Heads of every shape, files of every length: refused, or restored as valid."""
    data, rng = saved.read_bytes(), random.Random(2)
    (n,) = struct.unpack_from("<I", data, 12)
    head = data[16 : 16 + n]
    mutants = [data[: len(data) * i // 20] for i in range(20)] + [
        data + b"x",
        data * 2,
        b"",
        b"\0" * 5000,
    ]
    words = [
        b"-1",
        b"0",
        b"1e999",
        b"NaN",
        b"null",
        b"[]",
        b"{}",
        b"[" * 5000,
        b'"x"',
        b'"\\u001b[2J"',
        b"99999999999999999999",
        b"true",
        b"4294967296",
    ]
    for word in words:
        mutants.append(signed(data, word))
        for _ in range(6):
            at = rng.randrange(n)
            mutants.append(signed(data, head[:at] + word + head[at + rng.randrange(9) :]))
        for name in (b'"first":', b'"tokens":', b'"states":'):
            at = head.index(name) + len(name)
            mutants.append(signed(data, head[:at] + word + head[at + 2 :]))
            mutants.append(signed(data, head[:at] + word + b"}"))
    n_restored = 0
    for mutant in mutants:
        saved.write_bytes(mutant)
        try:
            engine.restore_slot(1, saved)
            n_restored += 1
        except BadSlotFile as e:
            assert len(str(e)) < 400 and str(e).isprintable()
    assert n_restored <= 2, "almost none means the same"
    engine.loop.cache.check(now=True)
    saved.write_bytes(data)
    assert engine.restore_slot(1, saved).n_tokens == len(PROMPT) + 7


@pytest.mark.slow
def test_an_engine_in_its_own_process_writes_and_reads_the_file_itself(tmp_path: Path) -> None:
    file = tmp_path / "demo.slot"
    values: dict[str, object] = {"np": 2, "ctx": 256, "warm_up": False, "check_tap_shift": False, "device": "cpu"}  # fmt: skip
    with Engine.open(str(DEMO), "auto", values, isolated=True) as e:
        first = e.generate(PROMPT, params=GREEDY, max_tokens=8)
        saved = e.save_slot(0, file)
        assert saved.n_bytes == file.stat().st_size
        assert e.erase_slot(0).n_tokens == saved.n_tokens
        turn = [*PROMPT, *first.tokens, 5]
        assert e.restore_slot(1, file).n_tokens == saved.n_tokens
        again = e.generate(turn, params=GREEDY, max_tokens=4)
        assert again.timings.cache_n == saved.n_tokens
        with pytest.raises(BadSlotFile, match="Is a directory"):
            e.restore_slot(1, tmp_path)


def test_a_bool_is_no_number_of_tokens(engine: Engine, saved: Path) -> None:
    data = saved.read_bytes()
    (n,) = struct.unpack_from("<I", data, 12)
    head = json.loads(data[16 : 16 + n])
    assert len(head["states"]) >= 2
    for wrong in (True, 1.0):
        head["states"][0][0] = wrong
        saved.write_bytes(signed(data, json.dumps(head).encode()))
        with pytest.raises(BadSlotFile, match="state 0 of"):
            engine.restore_slot(1, saved)
    saved.write_bytes(data)
