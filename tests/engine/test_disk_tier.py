"""The prefix cache's tier on disk: texts and drafts are those without it, after a restart and beside other engines, with any content of the disk."""

from __future__ import annotations

import errno
import logging
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest
from engine_rig import DEMO, DEMO_DRAFT, GREEDY, settled
from known_texts import demo_prompts
from sampling import few
from test_slot_files import KINDS
from test_slot_files import load as load_kind

from pyspec.engine.api import Engine
from pyspec.engine.loop import disk_tier
from pyspec.engine.loop.disk_tier import EntryReader
from pyspec.request import Delta, Done, Event, Timings
from pyspec.server.api.answers import timings_dict
from pyspec.slots.disk_folder import SEGMENT, DiskFolder

PROMPT = tuple(random.Random(8).choices(range(256), k=2 * SEGMENT + 71))
TRAINED: dict[str, dict[str, object]] = {
    "dflash": {},
    "mtp": {"draft_path": None, "spec_type": "mtp"},
    "a recurrent draft model": {"draft_path": str(DEMO), "spec_type": "draft"},
}
ALONE = next(kind for kind in KINDS if "ranks" not in kind)


def load(kind: str, folder: Path | None, **more: object) -> Engine:
    return load_kind(kind, **{"ctx": 1000, "cache_disk": folder, **more})


def load_demo(folder: Path | None, **more: object) -> Engine:
    values = {"ctx": 700, "page_size": 16, "kv_type": "f32", "device": "cpu", "warm_up": False}
    values |= {"check_tap_shift": False, "n_draft_fixed": True, "draft_path": str(DEMO_DRAFT)}
    return Engine.open(str(DEMO), "auto", {**values, "cache_disk": folder, **more})


def drafts(t: Timings) -> tuple[int, int]:
    return t.draft_n, t.draft_n_accepted


def files(folder: Path) -> list[Path]:
    return sorted(f for f in folder.rglob("*") if f.is_file())


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "pyspec.engine.loop.disk_tier")
    caplog.set_level(logging.WARNING, "pyspec.engine.load.disk")
    return lambda: [r.getMessage() for r in caplog.records if "disk" in r.name]


# -- the same text --------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1, most=3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_goes_on_after_a_restart_as_it_would_have(kind: str, tmp_path: Path) -> None:
    with load(kind, None) as e:
        first = e.generate(PROMPT, params=GREEDY, max_tokens=20)
        turn = [*PROMPT, *first.tokens, 3, 4, 5]
        want = e.generate(turn, params=GREEDY, max_tokens=24)
    with load(kind, tmp_path) as e:
        assert e.generate(PROMPT, params=GREEDY, max_tokens=20).tokens == first.tokens
    assert files(tmp_path)
    with load(kind, tmp_path) as e:
        again = e.generate(turn, params=GREEDY, max_tokens=24)
        t = again.timings
        assert again.tokens == want.tokens
        assert (t.cache_n, t.disk_n) == (want.timings.cache_n, want.timings.cache_n)
        assert "suffix" in kind or drafts(t) == drafts(want.timings), "the drafter goes on, too"
        m = e.metrics()
        assert m.prompt_tokens_disk == t.disk_n and m.disk_read_bytes > 0 and m.disk_bytes > 0
        settled(e)
        e.loop.cache.check(now=True)
        same = e.generate(turn, params=GREEDY, max_tokens=24)
        assert same.tokens == want.tokens
        assert same.timings.disk_n == 0 and same.timings.cache_n >= t.cache_n, "what was read is kept"
        here = e.generate([*turn, *again.tokens, 9], params=GREEDY, max_tokens=3).timings
        assert here.disk_n == 0 and here.cache_n == len(turn) + 23, "memory comes before the disk"


@pytest.mark.parametrize("drafter", few(TRAINED, "dflash"))
def test_a_trained_drafter_drafts_as_if_nothing_had_happened(drafter: str, tmp_path: Path) -> None:
    """The models that come with the package, whose drafts are good: as many are accepted."""
    rows = [p for p, a in demo_prompts() if len(a) > 12]
    filler = tuple(t for p, a in demo_prompts()[:40] for t in (*p, *a))[:330]
    with load_demo(tmp_path, **TRAINED[drafter]) as e:
        first = e.generate((*filler, *rows[0]), params=GREEDY, max_tokens=30)
        turn = (*filler, *rows[0], *first.tokens, *rows[1])
        want = e.generate(turn, params=GREEDY, max_tokens=40)
        assert want.timings.draft_n_accepted > 0 and want.timings.disk_n == 0
    with load_demo(tmp_path, **TRAINED[drafter]) as e:
        got = e.generate(turn, params=GREEDY, max_tokens=40)
    assert got.tokens == want.tokens and drafts(got.timings) == drafts(want.timings)
    assert got.timings.disk_n == want.timings.cache_n > SEGMENT


@pytest.mark.slow
def test_three_conversations_come_back_at_once(tmp_path: Path) -> None:
    rows = [(p, a) for p, a in demo_prompts() if len(a) > 12][:3]
    filler = tuple(t for p, a in demo_prompts()[:40] for t in (*p, *a))
    turns = [(*filler[i * 90 : i * 90 + 330], *p) for i, (p, _) in enumerate(rows)]

    def texts(e: Engine) -> list[tuple[list[int], int]]:
        results = e.generate_many(turns, params=GREEDY, max_tokens=30)
        return [(list(r.tokens), r.timings.disk_n) for r in results]

    with load_demo(None, np=3) as e:
        want = texts(e)
    with load_demo(tmp_path, np=3) as e:
        texts(e)
    with load_demo(tmp_path, np=3) as e:
        got = texts(e)
        e.loop.cache.check(now=True)
    assert [tokens for tokens, _ in got] == [tokens for tokens, _ in want]
    assert all(n_disk >= SEGMENT for _, n_disk in got)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["qwen35 with mtp", "nemotron with mtp", "gemma4-e with n-grams", "llama without drafts"]
)
def test_prompts_are_restored_beside_texts_that_run(kind: str, tmp_path: Path) -> None:
    rng = random.Random(4)
    prompts = [tuple(rng.choices(range(250), k=n)) for n in (300, 411, 600, 513, 97)]

    def texts(e: Engine) -> list[list[int]]:
        requests = [e.request(p, params=GREEDY, max_tokens=17 + 9 * i) for i, p in enumerate(prompts)]
        with ThreadPoolExecutor(len(prompts)) as pool:
            return [list(r.tokens) for r in pool.map(e.run, requests)]

    with load(kind, None, np=3) as e:
        want = texts(e)
    with load(kind, tmp_path, np=3) as e:
        assert texts(e) == want
    with load(kind, tmp_path, np=3) as e:
        assert texts(e) == want
        assert e.metrics().prompt_tokens_disk > 900
        e.loop.cache.check(now=True)


def test_engines_share_a_folder_and_others_leave_it_alone(tmp_path: Path) -> None:
    with load(ALONE, tmp_path) as a, load(ALONE, tmp_path) as b:
        first = a.generate(PROMPT, params=GREEDY, max_tokens=5)
        settled(a)
        turn = [*PROMPT, *first.tokens, 7]
        shared = b.generate(turn, params=GREEDY, max_tokens=9)
        assert shared.timings.disk_n == len(PROMPT) + 4
        assert shared.tokens == a.generate(turn, params=GREEDY, max_tokens=9).tokens
        settled(b)
    n = len(files(tmp_path))
    for more in (
        {"kv_type": "f16"},
        {"page_size": 32},
        {"rope_freq_base": 5000.0},
        {"spec_type": "ngram"},
    ):
        with load(ALONE, tmp_path, **more) as e:
            assert e.generate(turn, params=GREEDY, max_tokens=2).timings.disk_n == 0, more
    with load("deepseek2", tmp_path) as e:
        assert e.generate(turn, params=GREEDY, max_tokens=2).timings.disk_n == 0
    assert len({f.parent for f in files(tmp_path)}) == 6 and len(files(tmp_path)) > n


# -- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama without drafts", "qwen35 with mtp"])
def test_damaged_files_cost_their_tokens_and_nothing_else(
    kind: str, tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    with load(kind, tmp_path) as e:
        first = e.generate(PROMPT, params=GREEDY, max_tokens=20)
        turn = [*PROMPT, *first.tokens, 3, 4, 5]
        want = e.generate(turn, params=GREEDY, max_tokens=12)
    good = {f: f.read_bytes() for f in files(tmp_path)}
    rng, n_disk = random.Random(2), set()
    with load(kind, tmp_path) as e:
        settled(e)  # its folder is open
        for i, file in enumerate(good):
            for f, data in good.items():
                f.write_bytes(data)
            data = good[file]
            at = rng.randrange(len(data))
            file.write_bytes(data[:at] if i % 2 else data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            e.loop.disk.folder.list_again()
            e.loop.table.clear()
            before = len(said())
            got = e.generate(turn, params=GREEDY, max_tokens=12)
            n_disk.add(got.timings.disk_n)
            assert got.tokens == want.tokens
            assert len(said()) <= before + 1 and all("ignored and removed" in s for s in said()[before:])
            settled(e)
        e.loop.cache.check(now=True)
    assert said() and len(n_disk) > 1 and max(n_disk) >= len(PROMPT)


def test_a_full_disk_is_one_line_and_writing_goes_on_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with load(ALONE, tmp_path) as e:
        clock = [0.0]
        e.loop.disk.clock = lambda: clock[0]
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            for i in range(3):
                assert e.generate([i, *PROMPT], params=GREEDY, max_tokens=3).tokens
                settled(e)
                clock[0] += disk_tier.REST_S + 1
        assert len(said()) == 1 and "No space left on device" in said()[0]
        assert not files(tmp_path)
        e.generate([9, *PROMPT], params=GREEDY, max_tokens=3)
        settled(e)
        assert len(files(tmp_path)) == 4


def test_a_folder_that_can_not_be_used_is_one_line(
    tmp_path: Path, said: Callable[[], list[str]]
) -> None:
    (tmp_path / "file").write_text("x")
    with load(ALONE, tmp_path / "file") as e:
        for _ in range(2):
            assert e.generate(PROMPT, params=GREEDY, max_tokens=3).timings.disk_n == 0
    assert len(said()) == 1 and "--cache-disk" in said()[0]


def test_a_disk_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """A request goes on without it, and one that is cancelled meanwhile ends."""
    with load(ALONE, tmp_path) as e:
        first = e.generate(PROMPT, params=GREEDY, max_tokens=3)
        settled(e)
        e.loop.table.clear()
        asked, answer, clock = threading.Semaphore(0), threading.Event(), [0.0]
        find = DiskFolder.find

        def hangs(self: DiskFolder, *args: object, **named: object) -> object:
            asked.release()
            answer.wait(60)
            return find(self, *args, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(DiskFolder, "find", hangs)
        e.loop.disk.clock = lambda: clock[0]
        events: SimpleQueue[Event] = SimpleQueue()
        request = e.request(PROMPT, params=GREEDY, max_tokens=3)
        name = e.submit(request, events.put)
        assert asked.acquire(timeout=60)
        e.cancel(name)
        cancelled = events.get(timeout=60)
        assert isinstance(cancelled, Done) and cancelled.finish == "cancelled"
        e.submit(request, events.put)
        assert asked.acquire(timeout=60)
        until = time.monotonic() + 60
        while not e.slots()[0].is_processing and time.monotonic() < until:
            time.sleep(0.001)
        assert e.slots()[0].is_processing and e.metrics().requests_processing == 1
        clock[0] += disk_tier.PATIENCE_S + 1
        heard = [events.get(timeout=60)]
        while not isinstance(heard[-1], Done):
            heard.append(events.get(timeout=60))
        assert [t for d in heard if isinstance(d, Delta) for t in d.tokens] == list(first.tokens)
        assert heard[-1].timings.disk_n == 0
        assert len(said()) == 1 and "has not answered" in said()[0]
        answer.set()
        e.loop.table.clear()
        assert e.generate(PROMPT, params=GREEDY, max_tokens=3).timings.disk_n == 0, "it rests"
        clock[0] += disk_tier.REST_S + 1
        e.loop.table.clear()
        assert e.generate(PROMPT, params=GREEDY, max_tokens=3).timings.disk_n == 2 * SEGMENT + 64


def test_what_fails_while_a_prompt_is_restored_costs_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load("qwen35 with mtp", tmp_path) as e:
        clock = [0.0]
        e.loop.disk.clock = lambda: clock[0]
        n_buffer = e.loop.disk.reader.buffers.qsize()
        want = e.generate(PROMPT, params=GREEDY, max_tokens=3)
        settled(e)

        def fails(*args: object) -> None:
            raise RuntimeError("a bug")

        with monkeypatch.context() as patch:
            for name in ("read", "place"):
                patch.setattr(e.loop.disk.codec, name, fails)
                e.loop.table.clear()
                got = e.generate(PROMPT, params=GREEDY, max_tokens=3)
                assert got.tokens == want.tokens and got.timings.disk_n == 0
                patch.undo()
                clock[0] += disk_tier.REST_S + 1
        e.loop.table.clear()
        again = e.generate(PROMPT, params=GREEDY, max_tokens=3)
        assert again.tokens == want.tokens and again.timings.disk_n > 0
        e.loop.cache.check(now=True)
        assert e.loop.disk.reader.buffers.qsize() == n_buffer, "every buffer came back"


# -- its entries ---------------------------------------------------------------------------------------------


def test_an_erased_slot_is_erased_on_the_disk(tmp_path: Path) -> None:
    with load(ALONE, tmp_path) as e:
        e.generate(PROMPT, params=GREEDY, max_tokens=3, slot=0)
        settled(e)
        assert files(tmp_path)
        e.erase_slot(0)
        settled(e)
        assert not files(tmp_path)


def test_requests_that_keep_nothing_and_short_ones_write_nothing(tmp_path: Path) -> None:
    with load(ALONE, tmp_path) as e:
        e.generate(PROMPT, params=GREEDY, max_tokens=3, cache_prompt=False)
        e.generate(PROMPT[:40], params=GREEDY, max_tokens=3)
        settled(e)
        assert not files(tmp_path)
        assert e.metrics().disk_written_bytes == 0


def test_pages_that_were_evicted_come_back_from_the_disk(tmp_path: Path) -> None:
    """Two texts that do not fit beside each other in the pages."""
    with load("qwen35 with mtp", tmp_path, np=1, kv_pool=700) as e:
        other = tuple(reversed(PROMPT))
        want = []
        for p in (PROMPT, other):
            want.append(e.generate(p, params=GREEDY, max_tokens=9).tokens)
            settled(e)
        for _ in range(2):
            for p, tokens in zip((PROMPT, other), want, strict=True):
                settled(e)
                got = e.generate(p, params=GREEDY, max_tokens=9)
                assert got.tokens == tokens and got.timings.disk_n > SEGMENT
        e.loop.cache.check(now=True)


def test_what_it_does_not_work_with_is_said(tmp_path: Path, said: Callable[[], list[str]]) -> None:
    with load(ALONE, tmp_path, prefix_cache=False) as e:
        assert e.generate(PROMPT, params=GREEDY, max_tokens=3).timings.disk_n == 0
    assert said() == ["--cache-disk is ignored: the prefix cache is off"]


def test_timings_name_the_tokens_of_the_disk() -> None:
    assert timings_dict(Timings(cache_n=9, disk_n=5))["cache_disk_n"] == 5
    assert "cache_disk_n" not in timings_dict(Timings(cache_n=9))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["qwen35 with mtp", "qwen35 with dflash", "llama with n-grams, f8_e4m3"]
)
def test_texts_stay_the_same_while_pages_and_files_come_and_go(kind: str, tmp_path: Path) -> None:
    """Three slots in few pages, a folder that holds a part of the texts, cancelled requests, and files that are damaged or removed."""
    rng = random.Random(6)
    bases = [tuple(rng.choices(range(250), k=700)) for _ in range(5)]
    asks = [(*rng.choice(bases)[: rng.randrange(90, 700)], rng.randrange(250)) for _ in range(60)]
    with load(kind, None, np=1) as e:
        want = {p: e.generate(p, params=GREEDY, max_tokens=11).tokens for p in asks}

    def ask(e: Engine, p: tuple[int, ...]) -> int:
        if hash(p) % 5 == 0:
            events: SimpleQueue[Event] = SimpleQueue()
            e.cancel(e.submit(e.request(p, params=GREEDY, max_tokens=11), events.put))
            while not isinstance(events.get(timeout=60), Done):
                pass
        r = e.generate(p, params=GREEDY, max_tokens=11)
        assert r.tokens == want[p]
        return r.timings.disk_n

    n_disk = n_damaged = 0
    with load(kind, tmp_path, np=3, kv_pool=1500, cache_disk_size=6) as e:
        n_before = e.loop.disk.reader.buffers.qsize()
        for i in range(0, len(asks), 5):
            with ThreadPoolExecutor(5) as pool:
                n_disk += sum(pool.map(ask, [e] * 5, asks[i : i + 5]))
            settled(e)
            e.loop.cache.check(now=True)
            for file in rng.sample(found := files(tmp_path), min(2, len(found))):
                data = bytearray(file.read_bytes())
                data[rng.randrange(len(data))] ^= 32
                file.write_bytes(data[: rng.choice((len(data), len(data) // 2))])
                n_damaged += 1
        assert sum(f.stat().st_size for f in files(tmp_path)) <= 6 << 20
        n_buffer = e.loop.disk.reader.buffers.qsize()
    assert n_disk > 1000 and n_damaged > 10 and n_buffer == n_before


def test_a_request_that_waits_for_the_disk_keeps_its_clients_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another client asks meanwhile, and neither owes for what the first one is only expected to take."""
    prompt = tuple(random.Random(1).choices(range(250), k=800))
    goes_on, look = threading.Event(), EntryReader.look
    monkeypatch.setattr(EntryReader, "look", lambda *a: goes_on.wait(60) and look(*a))
    with load_demo(tmp_path, ctx=1000, np=2) as e:
        begun = threading.Thread(
            target=lambda: e.run(replace(e.request(prompt, params=GREEDY, max_tokens=3), client="a"))
        )
        begun.start()
        while not e.loop.admission.restoring:
            time.sleep(0.001)
        e.run(replace(e.request((1, 2, 3), params=GREEDY, max_tokens=2), client="b"))
        given = e.loop.queue._given
        assert given["a"] > 800 and given["b"] < 10
        goes_on.set()
        begun.join()
        assert 0 < given["a"] < 810
