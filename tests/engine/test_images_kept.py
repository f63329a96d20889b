"""Pictures that outlive a request: in the prefix cache, slot files, the disk, KV events, and engines that are replaced."""

from __future__ import annotations

import json
import os
import signal
import struct
import time
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
from engine_rig import GREEDY, Heard, Rig, rig, settled
from picture_drafters import drafter_for, guided
from seen import IMAGES, MODELS, N_TOKEN, PROMPTS, Seen, look, mmproj, picture, seeing, seen, watched

from pyspec.engine.api import Engine
from pyspec.engine.loop.block_feed import BlockFeed
from pyspec.engine.policy.queue import CUT_GAP, cuts_of
from pyspec.errors import BadSlotFile
from pyspec.request import Delta, Done, Event, Failed, Request
from pyspec.slots import span_file
from pyspec.slots.blocks import BlockChange, BlocksStored
from pyspec.slots.disk_folder import SEGMENT, DiskFolder, TextKeys
from pyspec.slots.images import (
    IMAGE,
    Handles,
    ImageSpan,
    image_id,
    named,
    runs_of,
    shift_before,
    with_ids,
    without_ids,
)
from pyspec.slots.span_file import SLOT, SpanFile
from pyspec.vision.picture import Placed

QUESTION = (7, 33, 12, 90, 41, 5, 77, 8, 20)


def other_question(s: Seen) -> Seen:
    return replace(s, prompt=s.asked(QUESTION), tokens=[])


def texts_of(name: str, each: Sequence[Seen], n: int = N_TOKEN) -> list[list[int]]:
    """Without a cache, one by one."""
    r = seeing(name, prefix_cache=False, ctx=320)
    return [generate(r, s, n).tokens for s in each]


def generate(r: Rig, s: Seen, n: int = N_TOKEN, **request: object) -> Heard:
    heard = look(r, s, n, **request)
    r.run()
    assert heard.error is None
    return heard


# -- the prefix cache -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "drafter"), [*((name, "none") for name in MODELS), ("qwen35", "mtp")])
def test_another_question_behind_a_picture_encodes_nothing(name: str, drafter: str) -> None:
    s = seen(name, "late")
    asked = other_question(s)
    (want,) = texts_of(name, [asked])
    r = seeing(name, np=2, page_size=16, spec_type=drafter)
    encoder = watched(r)
    assert generate(r, s).tokens == s.tokens
    n_encoded = len(encoder.pictures)
    heard = generate(r, asked)
    end = s.images[-1].first + s.images[-1].picture.n_row
    assert heard.tokens == want
    assert heard.timings.cache_n == end, (
        "the cache goes on exactly behind the picture, on no page's border"
    )
    assert end % 16 and len(encoder.pictures) == n_encoded
    assert generate(r, s).tokens == s.tokens


@pytest.mark.parametrize("name", ["mistral3", "gemma3", "gemma4"])
def test_a_cache_that_ends_within_a_picture_is_used(name: str) -> None:
    s = seen(name, "two")
    last = s.images[-1]
    r = seeing(name, page_size=16, swa_full=True)
    encoder, table = watched(r), r.loop.table
    assert generate(r, s).tokens == s.tokens
    r.loop.pictures._kept.clear()
    ids = with_ids(s.prompt, [ImageSpan(table.handles.of(*(i.picture.digest, i.picture.n_row, i.picture.nx, i.picture.ny)), i.first, i.picture.n_row, i.picture.nx, i.picture.ny) for i in s.images])  # fmt: skip
    while table.tree.path(ids)[1] >= last.first + last.picture.n_row:
        assert table.tree.evict()
    n = table.tree.path(ids)[1]
    assert last.first < n < last.first + last.picture.n_row
    heard = generate(r, s)
    assert heard.tokens == s.tokens and heard.timings.cache_n == n
    assert [p.digest for p in encoder.pictures[2:]] == [last.picture.digest], (
        "the other picture is whole"
    )


@pytest.mark.parametrize("name", ["qwen35", "gemma4"])
def test_pictures_that_differ_share_what_is_before_them(name: str) -> None:
    s = seen(name, "late")
    first = s.images[0].first
    other = picture(name, "odd.png")
    behind = s.prompt[first + s.images[0].picture.n_row :]
    changed = Seen((*s.prompt[:first], *[IMAGE] * other.n_row, *behind), (Placed(other, first),), [])
    (want,) = texts_of(name, [changed])
    r = seeing(name, np=2, page_size=16)
    generate(r, s)
    heard = generate(r, changed)
    assert heard.tokens == want != s.tokens
    assert heard.timings.cache_n <= first


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize(("name", "drafter", "n_slot"), [("qwen35", "mtp", 1), ("qwen35", "dflash", 1), ("qwen35", "eagle3", 7), ("gemma3", "eagle3", 1), ("mistral3", "dflash", 7)])  # fmt: skip
def test_requests_that_are_put_off_go_on_with_their_pictures(
    name: str, drafter: str, n_slot: int, keeps: bool
) -> None:
    """In a prompt, within a picture where it may be cut, and in the text behind it. keeps: the cache still has their beginning"""
    s, plain = seen(name, "late"), seeing(name)
    want = generate(plain, s, 40).tokens
    beside = generate(plain, replace(s, prompt=s.text, images=()), 40).tokens
    own = {} if drafter == "mtp" else {"draft_path": drafter_for(IMAGES / f"{name}.gguf", drafter)}
    r = seeing(name, np=n_slot, page_size=16, ubatch=9, spec_type=drafter, n_draft_fixed=True, **own)
    guided(r.loop.drafter, [[*s.text, *want], [*s.text, *beside]])
    first, middle = s.first.first, s.first.first + s.first.picture.n_row // 2
    for at in (first, middle, len(s.prompt), len(s.prompt) + 5):
        r.loop.table.clear()
        running = [r.submit(s.text, 40) for _ in range(n_slot // 3)]
        heard = look(r, s, 40)
        while heard.job.slot is None or heard.job.slot.n_past < at:
            r.loop.step()
        r.loop.committer.suspend(heard.job)
        r.loop.queue.put_back(heard.job)
        if not keeps:
            r.loop.table.clear()
            r.loop.pictures._kept.clear()
        r.run()
        assert heard.tokens == want and all(h.tokens == beside for h in running)
        assert drafter == "mtp" or heard.timings.draft_n_accepted > 0
    assert not r.loop.worker.shown and not r.loop.speculator.lost_track


def test_a_picture_that_the_cache_has_lost_since_it_was_asked_is_encoded_in_its_slot() -> None:
    s = seen("gemma4", "late")
    r = seeing("gemma4", page_size=16)
    encoder = watched(r)
    generate(r, s)
    r.loop.pictures._kept.clear()
    running = r.submit(s.text, 20)
    r.loop.step()
    waiting = look(r, s)
    r.loop.admit()
    assert waiting.job.may_sit and waiting.job.n_seen > s.first.first and not r.loop.pictures.is_busy
    r.loop.table.clear()
    r.run()
    assert not running.error and waiting.tokens == s.tokens
    assert len(encoder.pictures) == 2 and waiting.timings.cache_n < s.first.first + s.first.picture.n_row
    again = look(r, s)
    r.loop.table.clear()
    r.loop.pictures._kept.clear()
    while not r.loop.admission.restoring:
        again.job.may_sit, again.job.n_seen = True, len(s.prompt)
        r.loop.step()
    r.loop.cancel(again.job)
    r.run()
    assert again.finish == "cancelled"


def test_checkpoints_are_behind_pictures_and_in_none() -> None:
    images = [ImageSpan(0, 50, 30, 6, 5), ImageSpan(1, 200, 131, 16, 8)]
    cuts = cuts_of(500, 16, 0, {60, 210, 400}, 90, images=images)
    assert {80, 331} <= {*cuts} and 400 in cuts
    assert not any(i.first < cut < i.end for i in images for cut in cuts)
    assert all(b - a >= CUT_GAP for a, b in pairwise(cuts))
    assert cuts_of(340, 16, 0, set(), 0, images=images)[-1] == 331
    assert 331 not in cuts_of(332, 16, 0, set(), 0, images=images), "the rest is its end"
    assert cuts_of(60, 16, 0, set(), 0, images=[ImageSpan(0, 3, 30, 6, 5)]) == ()
    assert cuts_of(500, 16, 0, {60, 210, 400}, 90) == cuts_of(500, 16, 0, {60, 210, 400}, 90, images=())


# -- ids ------------------------------------------------------------------------------------------------------------


def test_names_of_pieces_depend_on_pictures_and_places_and_not_on_handles() -> None:
    one, two = Handles(), Handles()
    two.of(b"z" * 32, 5, 5, 1)
    spans = [[ImageSpan(h.of(b"a" * 32, 40, 8, 5), 3, 40, 8, 5), ImageSpan(h.of(b"b" * 32, 40, 8, 5), 43, 40, 8, 5)] for h in (one, two)]  # fmt: skip
    texts = [with_ids([7] * 100, own) for own in spans]
    assert texts[0] != texts[1] and without_ids(texts[0]) == without_ids(texts[1])
    for a, b in ((0, 100), (5, 60), (44, 60), (90, 100)):
        pieces = named(texts[0][a:b], one), named(texts[1][a:b], two)
        assert pieces[0] == pieces[1] and bool(pieces[0]) is (a < 83)
    assert named(texts[0][5:20], one) != named(texts[0][6:21], one)
    assert [*runs_of(texts[0][10:50])] == [(0, spans[0][0].handle, 7), (33, spans[0][1].handle, 0)]
    keys = [TextKeys("0" * 32, text, own) for text, own in zip(texts, (one, two), strict=True)]
    assert keys[0].end(70).key == keys[1].end(70).key
    assert (
        keys[0].end(70).key
        != TextKeys("0" * 32, [*texts[0][:69], image_id(9, 3)], one_more(one)).end(70).key
    )


def one_more(handles: Handles) -> Handles:
    for i in range(9):
        handles.of(bytes([i]) * 32, 9, 9, 1)
    return handles


def test_texts_without_pictures_have_the_keys_that_they_had() -> None:
    tokens = [*range(1000, 1000 + SEGMENT + 9)]
    keys = TextKeys("ab" * 16, tokens, Handles())
    whole = struct.pack(f"<{SEGMENT}i", *tokens[:SEGMENT])
    assert keys.keys[1] == sha256(bytes.fromhex("ab" * 16) + whole).hexdigest()[:32]


def test_text_behind_pictures_goes_on_behind_their_positions() -> None:
    spans = [ImageSpan(0, 5, 30, 6, 5), ImageSpan(1, 40, 12, 4, 3), ImageSpan(2, 60, 9, 9, 1)]
    assert [shift_before(spans, row) for row in (0, 5, 34, 35, 52, 69)] == [0, 0, 0, 24, 32, 32]


def test_a_handle_stands_for_one_picture() -> None:
    h = Handles()
    first = h.of(b"a" * 32, 4, 2, 2)
    assert h.of(b"a" * 32, 4, 2, 2) == first and h.of(b"a" * 32, 6, 3, 2) != first
    assert h.of(b"b" * 32, 4, 2, 2) != first and h.digest(first) == b"a" * 32


# -- files ----------------------------------------------------------------------------------------------------------


def load(name: str, **settings: object) -> Engine:
    values = {"np": 2, "ctx": 320, "page_size": 16, "kv_type": "f32", "device": "cpu", "warm_up": False}
    values |= {"mmproj": mmproj(name), "spec_type": "mtp" if name == "qwen35" else "none"}
    return Engine.open(
        str(IMAGES / f"{name}.gguf"), "auto" if name == "qwen35" else None, {**values, **settings}
    )


def asked(s: Seen, n: int = N_TOKEN) -> Request:
    return Request(prompt=s.prompt, images=s.images, params=GREEDY, max_tokens=n)


@pytest.mark.parametrize("name", ["qwen35", "gemma4", "mistral3"])
def test_a_saved_slot_goes_on_in_another_engine(name: str, tmp_path: Path) -> None:
    s = seen(name, "late")
    (want,) = texts_of(name, [other_question(s)])
    file = tmp_path / "slot.bin"
    with load(name) as e:
        e.run(replace(asked(seen(name, "side"))))  # so handles differ
        done = next(d for d in e.stream(replace(asked(s), slot=0)) if isinstance(d, Done))
        assert e.save_slot(0, file).n_tokens == len(s.prompt) + N_TOKEN - 1 and done.finish == "length"
    with SpanFile(file, SLOT) as span:
        (row,) = span.head["images"]
    own = s.images[0]
    assert row == [
        own.first,
        own.picture.n_row,
        own.picture.nx,
        own.picture.ny,
        own.picture.digest.hex(),
    ]
    with load(name) as e:
        encoder = watched(e)
        e.restore_slot(1, file)
        again = e.run(asked(s))
        assert list(again.tokens) == s.tokens
        assert again.timings.cache_n >= own.first + own.picture.n_row
        other = e.run(asked(other_question(s)))
        assert list(other.tokens) == want and other.timings.cache_n >= own.first + own.picture.n_row
        assert not encoder.pictures
        e.save_slot(1, tmp_path / "again.bin")
    with load(name, mmproj=None) as e:  # the text may go on where nothing is seen
        e.restore_slot(0, file)


def test_a_slot_without_pictures_is_saved_as_before(tmp_path: Path) -> None:
    file = tmp_path / "slot.bin"
    with load("qwen35") as e:
        e.generate("the text then tell", max_tokens=4, slot=0, temperature=0)
        e.save_slot(0, file)
    with SpanFile(file, SLOT) as span:
        assert "images" not in span.head


@pytest.mark.parametrize(
    "rows",
    [
        [[0, 5, 5, 1, "00" * 32]],
        [[60, 128, 16, 8, "0g" * 32]],
        [[60, 128, 16, 8, "00" * 31]],
        [[60, 1 << 20, 16, 8, "00" * 32]],
        [[60, 128, 16, 8]],
        [[True, 128, 16, 8, "00" * 32]],
        [[-5, 5, 5, 1, "00" * 32]],
        [["a", 5, 5, 1, "00" * 32]],
        {"a": 1},
        [],
        None,
    ],
)
def test_damaged_lists_of_pictures_are_refused(rows: object, tmp_path: Path) -> None:
    file, bad = tmp_path / "slot.bin", tmp_path / "bad.bin"
    with load("mistral3") as e:
        e.run(replace(asked(seen("mistral3", "late")), slot=0))
        e.save_slot(0, file)
        with SpanFile(file, SLOT) as span:
            n_content = span.size - span_file.file_bytes(span._n_head, 0)
            n_chunk = -(-n_content // (span_file.CHUNK + span_file.DIGEST))
            content = span.read(n_content - n_chunk * span_file.DIGEST)
            head = {**span.head, "images": rows}
        if rows is None:
            del head["images"]
        span_file.write(bad, json.loads(json.dumps(head)), [content], SLOT)
        with pytest.raises(BadSlotFile, match=r"picture|token outside"):
            e.restore_slot(1, bad)
        e.restore_slot(1, file)


@pytest.mark.parametrize("name", ["qwen35", "gemma3"])
def test_the_disk_has_pictures_for_the_next_engine(name: str, tmp_path: Path) -> None:
    s = seen(name, "late")
    (want,) = texts_of(name, [other_question(s)])
    with load(name, cache_disk=tmp_path) as e:
        e.run(asked(seen(name, "one")))
        assert list(e.run(asked(s)).tokens) == s.tokens
        settled(e)
    with load(name, cache_disk=tmp_path) as e:
        encoder = watched(e)
        again = e.run(asked(s))
        assert list(again.tokens) == s.tokens and again.timings.disk_n > 0
        n_seen = len(encoder.pictures)
        other = e.run(asked(other_question(s)))
        assert list(other.tokens) == want
        end = s.images[0].first + s.images[0].picture.n_row
        assert n_seen == (again.timings.cache_n < end) and len(encoder.pictures) == n_seen
        changed = e.run(asked(replace(s, images=(replace(s.images[0], picture=replace(s.images[0].picture, digest=b"q" * 32)),))))  # fmt: skip
        assert changed.timings.cache_n <= s.images[0].first, (
            "another picture of the same size is another text"
        )


def test_a_disk_folder_finds_pictures_by_their_digests(tmp_path: Path) -> None:
    handles = Handles()
    folder = DiskFolder(tmp_path, {"model": "m"}, 1 << 20, handles)
    text = with_ids([3] * 600, [ImageSpan(handles.of(b"a" * 32, 400, 20, 20), 100, 400, 20, 20)])
    other = with_ids([3] * 600, [ImageSpan(handles.of(b"b" * 32, 400, 20, 20), 100, 400, 20, 20)])
    folder.prepare()
    chain = folder.chain(text)
    for i in range(2):
        folder.write(SEGMENT * (i + 1), chain.segment(i), {}, [np.zeros(8, np.uint8)], time.time_ns())
    later = DiskFolder(tmp_path, {"model": "m"}, 1 << 20, handles)
    found = later.find(text, 0, at_end=False)
    assert found is not None and found.n == 2 * SEGMENT
    assert later.find(other, 0, at_end=False) is None


# -- routers, and engines that are replaced -------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mistral3", "qwen35"])
def test_no_block_is_published_from_a_picture_on(name: str) -> None:
    r, s = seeing(name, page_size=16), seen(name, "late")
    stored: list[BlocksStored] = []

    def take(changes: Sequence[BlockChange]) -> None:
        stored.extend(c for c in changes if isinstance(c, BlocksStored))

    feed = BlockFeed(r.loop.cache, take)
    heard = look(r, s)
    while not heard.over:
        r.loop.step()
        feed.send_news()
    feed.send_news()
    ids = [t for change in stored for t in change.tokens]
    n = s.first.first // 16 * 16
    assert ids == list(s.prompt[:n]) if name == "mistral3" else {*ids} <= {*s.prompt[:n]}
    plain = look(r, replace(s, prompt=s.text, images=()))
    while not plain.over:
        r.loop.step()
        feed.send_news()
    assert len([t for change in stored for t in change.tokens]) > len(ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen35", "gemma3"])
def test_a_replaced_engine_encodes_again_and_the_text_goes_on(name: str) -> None:
    s = seen(name, "late")
    (want,) = texts_of(name, [s], 90)
    values = {"np": 2, "ctx": 320, "page_size": 16, "kv_type": "f32", "device": "cpu", "warm_up": False}
    values |= {"mmproj": mmproj(name), "spec_type": "none"}
    with Engine.open(str(IMAGES / f"{name}.gguf"), None, values, isolated=True) as e:
        heard: SimpleQueue[Event] = SimpleQueue()
        e.submit(asked(s, 90), heard.put)
        tokens: list[int] = []
        is_killed = False
        while True:
            event = heard.get(timeout=120)
            assert not isinstance(event, Failed), event
            if isinstance(event, Delta):
                tokens += event.tokens
            if tokens and not is_killed:
                is_killed = True
                os.kill(e.core._child.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            if isinstance(event, Done):
                break
        assert tokens == want and e.metrics().restarts == 1


def test_a_plain_model_reads_a_text_with_and_without_a_projector_alike() -> None:
    s = seen("qwen35", "late")
    r, plain = seeing("qwen35", np=3), rig(IMAGES / "qwen35.gguf", spec_type="none", np=3, kv_pool=2048)
    texts = [[each.submit(s.text[i:], 30) for i in range(3)] for each in (r, plain)]
    r.run()
    plain.run()
    assert [h.tokens for h in texts[0]] == [h.tokens for h in texts[1]]


@pytest.mark.slow
def test_ranks_are_sent_the_rows_that_the_first_one_encodes() -> None:
    with load("qwen35", tp=2) as e:
        for s in (seen("qwen35", p) for p in PROMPTS):
            assert list(e.run(asked(s)).tokens) == s.tokens
