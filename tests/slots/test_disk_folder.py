"""The folder of the prefix cache on disk: what it finds, what it never believes, and its bound among several processes."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pyspec.errors import BadSlotFile, StorageFull
from pyspec.slots.disk_folder import END, PAGES, SEGMENT, DiskEntry, DiskFolder
from pyspec.slots.span_file import CHUNK, ENTRY, SLOT, Bytes, SpanFile, write

ROOT = Path(__file__).parents[2]
TOKENS = tuple(random.Random(3).choices(range(50_000), k=3 * SEGMENT + 99))
MIB = 1 << 20
SLOW = pytest.mark.slow


def folder_of(path: Path, model: str = "a", limit: int = 64 * MIB) -> DiskFolder:
    folder = DiskFolder(path, {"model": model}, limit)
    folder.prepare()
    return folder


def bytes_of(entry: DiskEntry, n: int = 3000) -> Bytes:
    return np.random.default_rng(int(entry.key[:8], 16)).integers(0, 256, n, dtype=np.uint8)


def put(
    folder: DiskFolder,
    tokens: tuple[int, ...] = TOKENS,
    ends: tuple[int, ...] = (),
    n: int = 3000,
    now: int = 0,
) -> list[DiskEntry]:
    """Write a text's missing entries."""
    used, chain = now or time.time_ns(), folder.chain(tokens)
    lacks = folder.missing(chain, len(tokens), ends, used)
    for at, entry in lacks:
        folder.write(at, entry, {"n": n}, [bytes_of(entry, n)], used)
    return [entry for _, entry in lacks]


def read(folder: DiskFolder, entry: DiskEntry) -> Bytes | None:
    file = folder.open(entry)
    if file is None:
        return None
    with file:
        return file.read(file.head["n"])


def test_a_prompt_finds_the_longest_text_that_begins_like_it(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    ends = (len(TOKENS), 2 * SEGMENT, 2 * SEGMENT + 33)
    assert len(put(folder, ends=ends)) == 6 and put(folder, ends=ends) == []
    turn = (*TOKENS, 1, 2, 3)
    find = folder_of(tmp_path).find  # another engine's
    for at_end in (True, False):
        found = find(turn, 0, at_end=at_end)
        assert found is not None and found.n == len(TOKENS) and len(found.pages) == 3
        assert found.end is not None and found.end.n == 99 and len(found.used) == 4
    found = find(turn, SEGMENT + 20, at_end=True)
    assert found is not None and (found.first, len(found.pages)) == (1, 2), "what is here is not read"
    assert find(turn, len(TOKENS), at_end=True) is None
    # the last token's logits have to be computed, so that the whole text is not found
    again = find(TOKENS, 0, at_end=False)
    assert again is not None and (again.n, again.end) == (3 * SEGMENT, None)
    again = find(TOKENS, 0, at_end=True)
    assert again is not None and again.n == 2 * SEGMENT + 33
    # a text that goes on otherwise
    other = (*TOKENS[: 2 * SEGMENT + 40], 7, 7, 7)
    found = find(other, 0, at_end=True)
    assert found is not None and found.n == 2 * SEGMENT + 33
    found = find((*TOKENS[: 2 * SEGMENT + 20], 7, 7), 0, at_end=False)
    assert found is not None and found.n == 2 * SEGMENT
    assert find((5, *TOKENS), 0, at_end=False) is None and find((5,), 0, at_end=True) is None


def test_a_segment_that_is_missing_ends_the_text(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    put(folder, ends=(len(TOKENS), 90))
    os.unlink(folder.here / folder.chain(TOKENS).segment(1).name)
    found = folder.find((*TOKENS, 1), 0, at_end=False)
    assert found is not None and found.n == SEGMENT
    found = folder.find((*TOKENS, 1), 0, at_end=True)
    assert found is not None and found.n == 90
    assert [e.kind for e in put(folder, ends=(len(TOKENS), 90))] == [PAGES]


def test_other_models_and_settings_find_nothing(tmp_path: Path) -> None:
    put(folder_of(tmp_path, "a"), ends=(700,))
    other = folder_of(tmp_path, "b")
    assert other.find((*TOKENS, 1), 0, at_end=False) is None
    here = folder_of(tmp_path, "a")
    # even where a file has the other one's name, because of a mistake or an attack
    for mine, theirs in ((here.chain(TOKENS).segment(0), other.chain(TOKENS).segment(0)),):
        other.here.mkdir(exist_ok=True)
        os.link(here.here / mine.name, other.here / theirs.name)
        with pytest.raises(BadSlotFile, match="for other models or settings"):
            other.open(theirs)
        os.rename(here.here / here.chain(TOKENS).segment(1).name, here.here / mine.name)
        with pytest.raises(BadSlotFile, match="another entry's content"):
            here.open(mine)


def test_a_torn_or_changed_file_is_never_believed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    entry = put(folder, TOKENS[: SEGMENT + 1], n=CHUNK + 777)[0]
    path, rng = folder.here / entry.name, random.Random(1)
    good = path.read_bytes()
    content = read(folder, entry)
    assert content is not None and np.array_equal(content, bytes_of(entry, CHUNK + 777))
    cuts = {0, 1, 7, 8, 15, 16, 40, len(good) - 1, len(good) - 16, *rng.sample(range(len(good)), 60)}
    for n in cuts:
        path.write_bytes(good[:n])
        with pytest.raises(BadSlotFile):
            read(folder, entry)
    for at in (0, 9, 12, 17, 300, len(good) - 1, *rng.sample(range(len(good)), 60)):
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << rng.randrange(8))]) + good[at + 1 :])
        with pytest.raises(BadSlotFile):
            read(folder, entry)
    path.write_bytes(good + b"\0")
    with pytest.raises(BadSlotFile, match="its head implies"):
        read(folder, entry)
    piece = CHUNK + 16
    at = len(good) - 777 - 16 - piece
    path.write_bytes(good[:at] + good[at + piece :] + good[at : at + piece])
    with pytest.raises(BadSlotFile):
        read(folder, entry)
    path.write_bytes(good[:8] + b"\x01" + good[9:])
    with pytest.raises(BadSlotFile, match="version 1; this program reads version 2"):
        read(folder, entry)
    write(path, {"of": folder.identity, "entry": entry.name, "n": 3}, [np.zeros(3, np.uint8)], SLOT)
    with pytest.raises(BadSlotFile, match="not a cache file"):  # a slot's
        read(folder, entry)
    folder.discard(entry)
    assert read(folder, entry) is None and entry.name not in folder.index().names
    path.write_bytes(good)
    folder.list_again()
    assert read(folder, entry) is not None


def test_foreign_files_stay_and_are_no_entries(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, limit=20_000)
    mine = [
        tmp_path / "notes.txt",
        folder.here / "readme",
        folder.here / "0-1-2.pages",
        tmp_path / "x" / "y",
    ]
    mine.append(folder.here / f"{'0' * 32}-300-{'1' * 32}.end")  # longer than a segment
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 50_000)
        os.utime(path, (1e9, 1e9))
    mine.pop()
    (folder.here / folder.chain(TOKENS).segment(2).name).mkdir()
    put(folder, TOKENS[: 2 * SEGMENT])
    assert all(path.exists() for path in mine)
    assert folder.find((*TOKENS, 5), 0, at_end=True) is None
    found = folder.find((*TOKENS, 5), 0, at_end=False)
    assert found is not None and len(found.pages) == 3, "by its name alone"
    with pytest.raises(BadSlotFile, match="directory"):
        folder.open(found.pages[2])
    folder.discard(found.pages[2])  # it can not be removed, so it is not looked at again
    found = folder.find((*TOKENS, 5), 0, at_end=False)
    assert found is not None and len(found.pages) == 2


def test_the_least_recently_used_text_goes_first_and_from_its_end(tmp_path: Path) -> None:
    texts = [tuple(random.Random(i).choices(range(9999), k=2 * SEGMENT)) for i in range(4)]
    folder = folder_of(tmp_path, limit=21_000)  # six entries, with their heads
    now = time.time_ns() - 10**12
    for i in range(3):
        put(folder, texts[i], now=now + i * 10**9)
    n_found = lambda: [  # noqa: E731
        0 if (f := folder.find((*t, 1), 0, at_end=False)) is None else f.n // SEGMENT for t in texts
    ]
    assert n_found() == [2, 2, 2, 0]
    found = folder.find((*texts[0], 1), 0, at_end=False)
    assert found is not None
    folder.touch(found.used, now + 5 * 10**9)
    put(folder, texts[3][: SEGMENT + 1], now=now + 6 * 10**9)
    assert n_found() == [2, 1, 2, 1], "of the text that was not used for longest, its end"
    put(folder, texts[3], now=now + 7 * 10**9)
    assert n_found() == [2, 0, 2, 2]


def test_a_text_larger_than_the_limit_leaves_its_beginning(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, limit=8_000)
    put(folder, ends=(len(TOKENS),))
    found = folder.find((*TOKENS, 1), 0, at_end=False)
    assert found is not None and found.n == 2 * SEGMENT
    assert sum(f.stat().st_size for f in folder.here.iterdir()) <= 8_000
    entry = folder.chain(TOKENS).segment(2)
    assert folder.write(3 * SEGMENT, entry, {}, [np.zeros(9_000, np.uint8)], time.time_ns()) == 0


def test_the_limit_holds_for_all_identities_and_counts_what_dead_writers_left(tmp_path: Path) -> None:
    a, b = folder_of(tmp_path, "a", 20_000), folder_of(tmp_path, "b", 20_000)
    put(a)
    half = a.here / f".{a.chain(TOKENS).segment(0).name}.77-ab"
    half.write_bytes(b"x" * 9_000)
    put(b, now=time.time_ns() + 10**9)
    n_bytes = sum(f.stat().st_size for f in tmp_path.rglob("*") if f.is_file())
    assert n_bytes <= 20_000 and len(b.index().names) == 3
    with half.open("rb") as f:
        fcntl.flock(f.fileno(), fcntl.LOCK_EX)  # as its writer does
        os.utime(half, (1e9, 1e9))
        a.prepare()
        assert half.exists()
    a.prepare()
    assert half.exists(), "it was counted a moment ago"
    folder_of(tmp_path, "a", 20_000)
    assert not half.exists(), "a writer that has ended leaves no file for ever"


def test_an_entry_may_vanish_while_it_is_read(tmp_path: Path) -> None:
    folder, other = folder_of(tmp_path), folder_of(tmp_path)
    (entry,) = put(folder, TOKENS[: SEGMENT + 1])
    file = folder.open(entry)
    assert file is not None
    other.forget(TOKENS)
    assert not list(folder.here.iterdir())
    with file:
        assert np.array_equal(file.read(3000), bytes_of(entry))
    assert folder.open(entry) is None
    for _ in range(3):
        other.discard(entry)
        other.touch([(SEGMENT, entry)], time.time_ns())


def test_forgetting_a_text_leaves_others(tmp_path: Path) -> None:
    folder, rest = folder_of(tmp_path), tuple(random.Random(9).choices(range(999), k=2 * SEGMENT))
    put(folder, ends=(700, len(TOKENS)))
    put(folder, rest, ends=(2 * SEGMENT,))
    folder.forget((*TOKENS, 4))
    assert folder.find((*TOKENS, 1), 0, at_end=False) is None
    found = folder.find((*rest, 1), 0, at_end=True)
    assert found is not None and found.n == 2 * SEGMENT and found.end is not None and found.end.n == 0
    folder.clear()
    assert not folder.index().names


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_takes_nothing_is_an_error_that_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    folder, real = folder_of(tmp_path), os.fsync

    def full(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageFull if number != errno.EROFS else BadSlotFile, match="cache file"):
        put(folder)
    assert not list(folder.here.iterdir())
    monkeypatch.setattr(os, "fsync", real)
    assert len(put(folder)) == 3


def test_a_folder_that_can_not_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError):
        folder_of(tmp_path / "file")


def test_files_are_read_while_others_are_written_and_removed(tmp_path: Path) -> None:
    """Two writers and a reader in one folder that holds a third of the texts: whatever is believed is right."""
    texts = [tuple(random.Random(i).choices(range(9999), k=SEGMENT + 5)) for i in range(12)]
    folder, wrong, n_read = folder_of(tmp_path, limit=4 * 30_000), [0], [0]

    def fill(seed: int) -> None:
        own, rng = folder_of(tmp_path, limit=4 * 30_000), random.Random(seed)
        for _ in range(60):
            put(own, rng.choice(texts), n=29_000)

    writers = [threading.Thread(target=fill, args=(i,)) for i in range(2)]
    for t in writers:
        t.start()
    while any(t.is_alive() for t in writers):
        for text in texts:
            found = folder.find((*text, 1), 0, at_end=False)
            for entry in () if found is None else found.pages:
                content = read(folder, entry)
                if content is not None:
                    n_read[0] += 1
                    wrong[0] += not np.array_equal(content, bytes_of(entry, 29_000))
    assert wrong == [0] and n_read[0] > 0
    n_bytes = sum(f.stat().st_size for f in folder.here.iterdir())
    assert n_bytes <= 6 * 30_000, "each writer counts the other's files"


def kill_writers(folder: Path, n_kill: int, seed: int, n_writer: int = 1) -> dict[str, int]:
    command = [sys.executable, str(Path(__file__).with_name("disk_writer.py")), str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(n_kill), str(seed), "9", str(n_writer)],
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("n_kill", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_nothing_wrong_is_read_after_a_writer_was_killed(tmp_path: Path, n_kill: int) -> None:
    found = kill_writers(tmp_path, n_kill, n_kill)
    assert found["kills"] == n_kill and found["wrong"] == 0
    assert found["read"] > n_kill and found["halves"] >= n_kill // 8, "many die in the middle of a file"
    assert found["most_bytes"] <= 9 * MIB
    folder = DiskFolder(tmp_path, {"model": "a"}, 9 * MIB)
    for name in folder.index().names:
        entry = DiskEntry.of(name)
        assert entry is not None and entry.kind in (PAGES, END)
        SpanFile(folder.here / name, ENTRY).__exit__(None, None, None)


# -- others' files --------------------------------------------------------------------------------------------------


def of_ranks(path: Path, n: int) -> DiskFolder:
    return DiskFolder(path, {"model": "a", "ranks": n}, 64 * MIB)


def test_entries_of_other_ranks_are_known_by_their_settings(tmp_path: Path) -> None:
    put(of_ranks(tmp_path, 2))
    alone = folder_of(tmp_path)
    assert alone.find(TOKENS, 0, at_end=False) is None
    assert [of["ranks"] for of in alone.others()] == [2]
    put(alone)
    assert sorted(of.get("ranks", 1) for of in of_ranks(tmp_path, 3).others()) == [1, 2]


def test_files_of_earlier_versions_are_no_entries_and_go_first(tmp_path: Path) -> None:
    """One for each rank among them: in a folder of their own, because the version is a part of the identity."""
    older = tmp_path / ("a" * 32)
    older.mkdir()
    folder = folder_of(tmp_path, limit=16_000)
    (entry, *_) = put(folder, TOKENS[:SEGMENT])
    data = (folder.here / entry.name).read_bytes()
    for name in (entry.name, f"{entry.name}.1", f"{entry.name}.12"):
        (older / name).write_bytes(data[:8] + b"\x01" + data[9:])
        os.utime(older / name, (1e9, 1e9))
    assert folder.others() == [] and len(folder.index().names) == 1
    os.link(folder.here / entry.name, folder.here / f"{entry.name}.1")
    folder.list_again()
    assert folder.index().names == {entry.name}
    other = tuple(reversed(TOKENS))
    put(folder_of(tmp_path, limit=16_000), other)
    assert not list(older.iterdir()), "they count, and were used least recently"
    assert folder.find((*other, 1), 0, at_end=False) is not None


@pytest.mark.parametrize(
    ("n_kill", "n_writer"), [(6, 2), pytest.param(100, 2, marks=SLOW), pytest.param(70, 3, marks=SLOW)]
)
def test_nothing_wrong_is_read_after_writers_of_the_same_texts_were_killed(
    tmp_path: Path, n_kill: int, n_writer: int
) -> None:
    found = kill_writers(tmp_path, n_kill, n_kill, n_writer)
    # how many entries are whole depends on the machine's load
    assert found["kills"] == n_kill * n_writer and found["wrong"] == 0 and found["read"] > 0
    assert found["halves"] >= n_kill // 8, "many die in the middle of a file"
    most = 3 << 19  # bytes of an entry: what each writer adds before it counts the others' files
    assert found["most_bytes"] <= 9 * MIB + n_writer * most
