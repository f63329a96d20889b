"""The prefix cache on disk over ranks: an entry has every rank's part in one file, which the first rank writes and deals out again."""

from __future__ import annotations

import logging
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_rig import DEMO, DEMO_DRAFT, FIXTURES, GREEDY, settled
from known_texts import demo_prompts
from waiting import children

from pyspec.engine.api import Engine

pytestmark = pytest.mark.slow

QWEN35 = str(FIXTURES / "qwen35.gguf")
PROMPT = tuple(random.Random(8).choices(range(256), k=2 * 256 + 71))
SETTINGS = {"ctx": 1000, "np": 2, "page_size": 16, "kv_type": "f32", "device": "cpu", "threads": 1}
SETTINGS |= {"warm_up": False, "check_tap_shift": False, "n_draft_fixed": True}


def load(folder: Path | None, tp: int, **more: object) -> Engine:
    values = {**SETTINGS, "spec_type": "mtp", "tp": tp, "cache_disk": folder, **more}
    return Engine.open(QWEN35, "auto", values)


def load_demo(folder: Path | None, tp: int) -> Engine:
    """A drafter that ranks divide."""
    values = {**SETTINGS, "draft_path": str(DEMO_DRAFT), "weights": "dense", "tp": tp}
    return Engine.open(str(DEMO), "auto", {**values, "cache_disk": folder})


def files(folder: Path) -> list[Path]:
    return sorted(f for f in folder.rglob("*") if f.is_file())


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, "pyspec.engine.loop")
    return lambda: [r.getMessage() for r in caplog.records if "disk" in r.name]


@pytest.mark.parametrize("tp", [2, 3])
def test_a_divided_drafter_goes_on_after_a_restart(tp: int, tmp_path: Path) -> None:
    rows = [p for p, a in demo_prompts() if len(a) > 12]
    filler = tuple(t for p, a in demo_prompts()[:40] for t in (*p, *a))[:330]
    with load_demo(tmp_path, tp) as e:
        first = e.generate((*filler, *rows[0]), params=GREEDY, max_tokens=30)
        turn = (*filler, *rows[0], *first.tokens, *rows[1])
        want = e.generate(turn, params=GREEDY, max_tokens=40)
        assert want.timings.draft_n_accepted > 0
    with load_demo(None, tp) as e:
        cold = e.generate(turn, params=GREEDY, max_tokens=40)
    with load_demo(tmp_path, tp) as e:
        got = e.generate(turn, params=GREEDY, max_tokens=40)
    assert got.tokens == cold.tokens == want.tokens
    assert got.timings.disk_n == want.timings.cache_n > 256
    drafts = [(r.timings.draft_n, r.timings.draft_n_accepted) for r in (got, want)]
    assert drafts[0] == drafts[1], "the drafter goes on, too"


def test_a_file_has_the_parts_of_all_ranks_and_other_layouts_are_left_alone(
    tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    texts = {}
    for tp in (1, 2, 3):
        with load(tmp_path, tp) as e:
            r = e.generate(PROMPT, params=GREEDY, max_tokens=9)
            assert r.timings.disk_n == 0, "what others wrote is not for it"
            texts[tp] = r.tokens
            if tp > 1:
                settled(e)
                m = e.metrics()
                assert m.disk_written_bytes == sum(
                    f.stat().st_size for f in e.loop.disk.folder.here.iterdir()
                )
    folders = {f.parent for f in files(tmp_path)}
    assert len({sum(f.parent == folder for f in files(tmp_path)) for folder in folders}) == 1
    assert any("another layout (--tp 2), which are not used" in s for s in said())
    for tp in (2, 3):
        with load(tmp_path, tp) as e:
            again = e.generate([*PROMPT, *texts[tp], 5], params=GREEDY, max_tokens=3)
            assert again.timings.disk_n == len(PROMPT) + 8
            m = e.metrics()
            assert m.prompt_tokens_disk == len(PROMPT) + 8 and m.disk_read_bytes > 0
            e.loop.cache.check(now=True)


def test_a_damaged_file_costs_its_tokens_and_nothing_else(
    tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    with load(tmp_path, 2) as e:
        want = e.generate(PROMPT, params=GREEDY, max_tokens=12)
    good = {f: f.read_bytes() for f in files(tmp_path)}
    rng, n_disk = random.Random(2), set()
    with load(tmp_path, 2) as e:
        n_buffer = e.loop.disk.reader.buffers.qsize()
        settled(e)  # its folder is open
        for i, file in enumerate(good):
            for f, data in good.items():
                f.write_bytes(data)
            data = good[file]
            at = rng.randrange(len(data))
            if i % 3:
                file.write_bytes(
                    data[:at] if i % 2 else data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]
                )
            else:
                file.unlink()
            e.loop.disk.folder.list_again()
            e.loop.table.clear()
            before = len(said())
            got = e.generate(PROMPT, params=GREEDY, max_tokens=12)
            n_disk.add(got.timings.disk_n)
            assert got.tokens == want.tokens
            assert len([s for s in said()[before:] if "ignored and removed" in s]) <= 1
            settled(e)
        e.loop.cache.check(now=True)
        assert e.loop.disk.reader.buffers.qsize() == n_buffer, "every buffer came back"
    assert len(n_disk) > 1


def test_an_erased_slot_is_erased_and_the_limit_counts_all_ranks_parts(tmp_path: Path) -> None:
    with load(tmp_path, 2, np=1, cache_disk_size=3) as e:
        e.generate(PROMPT, params=GREEDY, max_tokens=3, slot=0)
        settled(e)
        assert files(tmp_path)
        e.erase_slot(0)
        until = time.monotonic() + 60
        while files(tmp_path) and time.monotonic() < until:
            time.sleep(0.01)
        assert not files(tmp_path)
        n_text = 0
        for i in range(12):
            e.generate((i, *PROMPT), params=GREEDY, max_tokens=3)
            settled(e)
            n_text = max(n_text, len(files(tmp_path)))
        n_bytes = sum(f.stat().st_size for f in files(tmp_path))
        most = max(f.stat().st_size for f in files(tmp_path))
        assert n_bytes <= (3 << 20) + most, "the parts of all ranks together"
        assert n_text > len(files(tmp_path)) // 2


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_are_killed_while_they_write_never_leave_a_wrong_text(
    seed: int, tmp_path: Path
) -> None:
    """An engine whose ranks, and then whose whole process, are killed at random moments: its next requests have the text of a cold start."""
    rng = random.Random(seed)
    base = tuple(rng.choices(range(250), k=600))
    asks = [(*base[: rng.randrange(300, 600)], rng.randrange(250)) for _ in range(8)]
    with load(None, 2) as e:
        want = {p: e.generate(p, params=GREEDY, max_tokens=11).tokens for p in asks}
    n_disk = 0
    values = {**SETTINGS, "spec_type": "mtp", "tp": 2, "cache_disk": tmp_path}
    for turn in range(3):
        with Engine.open(QWEN35, "auto", values, isolated=True) as e:
            for p in asks:
                got = e.generate(p, params=GREEDY, max_tokens=11)
                assert got.tokens == want[p]
                n_disk += got.timings.disk_n
            time.sleep(rng.random() * 0.05)
            what = ("rank_main", "process.engine_main")[turn % 2]
            (pid,) = children(os.getpid(), what)
            os.kill(pid, signal.SIGKILL)
            assert e.generate(asks[0], params=GREEDY, max_tokens=11).tokens == want[asks[0]]
    assert n_disk > 0
