"""What one client can learn of another's texts: nothing where they are apart, and no place of a break where they share the cache."""

from __future__ import annotations

import os
import queue
import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from block_view import BlockView
from engine_rig import FIXTURES, GREEDY, Rig, fake_rig, plain_rig, rig
from test_disk_tier import files, settled
from test_slot_files import LLAMA, load

from pyspec.engine.api import Engine
from pyspec.engine.block_events import event_of
from pyspec.engine.loop.block_feed import BlockFeed
from pyspec.engine.policy.affinity import chain_of
from pyspec.errors import BadSlotFile, PyspecError
from pyspec.request import Request
from pyspec.slot_action import SlotAction, SlotAnswer, SlotReport
from pyspec.slots.blocks import BlocksStored

PAGE = 16


def ids(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(3), k=n)


def make(kind: str) -> Rig:
    if kind == "paged":
        return fake_rig(2, ctx=600, n_page=2000)
    if kind == "suffixes":
        return rig(LLAMA, np=2, ctx=600, page_size=PAGE, spec_type="suffix", kv_pool=4000)
    return plain_rig(FIXTURES / "qwen35.gguf", np=2, ctx=600, page_size=PAGE, kv_pool=4000)


def seen(r: Rig, prompt: Sequence[int], n: int, apart: bool, who: str) -> tuple[object, ...]:
    """All of an answer that depends on the cache and on earlier texts."""
    h = r.generate(prompt, n, client=who, cache_salt=who if apart else "")
    t = h.timings
    cached = (t.cache_n, t.draft_n, t.draft_n_accepted, t.suffix_n, t.n_draft_used) if apart else ()
    return (tuple(h.tokens), t.cache_break_at, *cached)


def story(kind: str, apart: bool, secret: list[int] | None) -> list[tuple[object, ...]]:
    """What "b" sees of its requests, which it makes of guesses at the text of "a", who is there if there is a secret."""
    r, draw, found = make(kind), random.Random(4), []
    mine: list[list[int]] = []
    guess = ids(7, 120)
    for i in range(40 if kind == "paged" else 12):
        n_secret = draw.randrange(30, 121)
        if secret is not None and i % 3 == 0:
            seen(r, secret[:n_secret], 4, apart, "a")
        base = draw.choice([guess, *mine])
        prompt = [*base[: draw.randrange(1, 120)], *draw.choices(range(3), k=draw.randrange(1, 6))]
        found.append(seen(r, prompt, 6, apart, "b"))
        mine.append([*prompt, *found[-1][0]])  # type: ignore[misc]
    return found


@pytest.mark.parametrize("kind", ["paged", "hybrid", "suffixes"])
def test_one_client_sees_the_same_whether_another_one_is_there(kind: str) -> None:
    with_a, without = story(kind, True, ids(7, 120)), story(kind, True, None)
    assert with_a == without
    assert any(row[1] != -1 for row in without), "it sees breaks of its own texts"
    assert any(row[2] for row in without), "and finds its own texts"


def test_where_the_cache_is_shared_breaks_are_told_of_own_texts_only() -> None:
    with_a, without = story("paged", False, ids(7, 120)), story("paged", False, None)
    assert with_a == without and any(row[1] != -1 for row in without)


@pytest.mark.parametrize("kind", ["paged", "hybrid"])
def test_a_pin_is_not_read_token_by_token(kind: str) -> None:
    """As it was: of the guesses at the next token, the right one was told by a later break."""
    for right in range(3):
        r = make(kind)
        secret = [*ids(1, 50), right, *ids(2, 40)]
        r.generate(secret, 4, client="a")
        guesses = ([*secret[:50], token, 99, 99] for token in range(3))
        places = [r.generate(g, 2, client="b").timings.cache_break_at for g in guesses]
        assert places == [-1, 50, 50]


def test_what_both_have_is_told_to_both() -> None:
    """A page that another client has filed first is one's own once one's text has it, as far as it goes."""
    r = fake_rig(2, ctx=600)
    text = ids(1, 100)
    r.generate(text, 1, client="a")
    r.generate(text[:70], 1, client="b")
    assert r.generate([*text[:60], 5, 5], 1, client="b").timings.cache_break_at == 60
    assert r.generate([*text[:90], 5, 5], 1, client="b").timings.cache_break_at == -1
    assert r.generate([*text[:90], 6, 6], 1, client="a").timings.cache_break_at == 90
    r.loop.cache.check(now=True)


def test_pages_of_many_clients_remember_a_bounded_number() -> None:
    r = fake_rig(1, ctx=600)
    for i in range(40):
        r.generate([*ids(1, 64), i], 1, client=f"c{i}", cache_salt=f"s{i % 3}")
    assert max(len(node.clients) for node in r.loop.table.tree.nodes()) <= 16
    r.loop.table.clear()
    r.loop.cache.check(now=True)
    assert list(r.loop.table.tree._roots) == [""], "salts whose texts are gone are forgotten"


def test_entries_on_disk_have_the_salt_in_their_names(tmp_path: Path) -> None:
    prompt = tuple(random.Random(5).choices(range(256), k=600))
    values = {"ctx": 1000, "cache_disk": tmp_path, "page_size": 16}
    with load("llama without drafts", **values) as e:
        for client in ("a", "b"):
            run(e, ask(prompt, client))
            settled(e)
        names = {f.name for f in files(tmp_path)}
    with load("llama without drafts", **values) as e:
        assert run(e, ask(prompt, "c")) == (0, 0), "another's entries are not found"
        assert run(e, ask(prompt, "a"))[1] > 500, "one's own are"
    assert len(names) == 8, "each has two segments and two ends"


def ask(prompt: Sequence[int], who: str) -> Request:
    return Request(prompt=tuple(prompt), params=GREEDY, max_tokens=4, client=who, cache_salt=who)


def run(e: object, request: Request) -> tuple[int, int]:
    """Tokens from the cache, and from the disk."""
    events: queue.SimpleQueue[object] = queue.SimpleQueue()
    e.submit(request, events.put)  # type: ignore[attr-defined]
    while not hasattr(done := events.get(timeout=60), "finish"):
        pass
    return done.timings.cache_n, done.timings.disk_n  # type: ignore[attr-defined]


def test_blocks_of_events_have_the_salt_in_their_hashes() -> None:
    r, stored = fake_rig(2, ctx=600), []
    view = BlockView()

    def take(changes: Sequence[object]) -> None:
        stored.extend(c for c in changes if isinstance(c, BlocksStored))
        view.take(event_of(change, "map") for change in changes)  # type: ignore[arg-type]

    feed = BlockFeed(r.loop.cache, take)
    for salt in ("", "a", "b"):
        r.generate(ids(1, 100), 1, cache_salt=salt)
        feed.send_news()
    assert [c.parent for c in stored] == [None] * 3, "each is a text of its own"
    assert len({h for c in stored for h in c.hashes}) == sum(len(c.hashes) for c in stored) == 18
    r.loop.table.clear()
    feed.send_news()
    assert not view.texts


def test_routing_and_places_to_wait_know_the_salt() -> None:
    one, other = (chain_of(ask(ids(1, 100), who)) for who in ("a", "b"))
    assert len(one) == 3 and not set(one) & set(other)
    assert chain_of(ask(ids(1, 100), "a")) == one


def act(e: object, kind: str, who: str, path: Path | str = "") -> SlotAnswer:
    answers: list[SlotAnswer] = []
    e.act_on_slot(SlotAction(kind, 0, str(path), who, who), answers.append)  # type: ignore[attr-defined, arg-type]
    until = time.monotonic() + 60
    while not answers and time.monotonic() < until:
        time.sleep(0.01)
    return answers[0]


def n_tokens(answer: SlotAnswer) -> int:
    assert isinstance(answer, SlotReport), answer
    return answer.n_tokens


def test_a_slot_s_text_is_saved_restored_and_erased_by_its_client_only(tmp_path: Path) -> None:
    prompt = tuple(random.Random(5).choices(range(256), k=75))
    with load("llama without drafts", np=1) as e:
        run(e, ask(prompt, "a"))
        assert n_tokens(act(e, "save", "b", tmp_path / "b")) == 0
        assert n_tokens(act(e, "erase", "b")) == 0
        assert n_tokens(act(e, "save", "a", tmp_path / "a")) == 78
        refused = act(e, "restore", "b", tmp_path / "a")
        assert isinstance(refused, BadSlotFile) and "another client" in str(refused)
        assert isinstance(refused, PyspecError) and "'a'" not in str(refused).replace("slot file a", "")
        assert run(e, ask([*prompt, 1], "b"))[0] == 0
        assert n_tokens(act(e, "erase", "a")) == 0, "b's request has the slot now"
        assert n_tokens(act(e, "restore", "a", tmp_path / "a")) == 78
        assert run(e, ask([*prompt, 1], "a"))[0] == 75


def test_files_with_texts_are_for_their_user_alone(tmp_path: Path) -> None:
    prompt = tuple(random.Random(5).choices(range(256), k=600))
    values = {"ctx": 1000, "cache_disk": tmp_path / "new" / "cache", "page_size": 16, "np": 1}
    before = os.umask(0o022)
    try:
        with load("llama without drafts", **values) as e:
            run(e, ask(prompt, "a"))
            settled(e)
            assert n_tokens(act(e, "save", "a", tmp_path / "slot")) > 0
    finally:
        os.umask(before)
    written = [tmp_path / "slot", *files(tmp_path / "new")]
    assert len(written) > 3 and {f.stat().st_mode & 0o777 for f in written} == {0o600}
    folders = [f for f in (tmp_path / "new" / "cache").rglob("*") if f.is_dir()]
    assert {f.stat().st_mode & 0o777 for f in (tmp_path / "new" / "cache", *folders)} == {0o700}


@pytest.mark.parametrize("isolated", [False, True])
def test_a_failed_listener_is_logged_once(isolated: bool, caplog: pytest.LogCaptureFixture) -> None:
    heard: list[object] = []

    def fail(event: object) -> None:
        heard.append(event)
        raise RuntimeError("closed")

    values = {"ctx": 256, "warm_up": False, "device": "cpu", "spec_type": "none"}
    with Engine.open(str(LLAMA), "auto", values, isolated=isolated) as e:
        e.submit(ask(range(40), "a"), fail)
        until = time.monotonic() + 60
        while not any(hasattr(event, "finish") for event in heard) and time.monotonic() < until:
            time.sleep(0.01)
        assert len(heard) > 1
        assert run(e, ask(range(40), "b")) == (0, 0), "others go on"
    assert sum("the listener of request" in message for message in caplog.messages) == 1
