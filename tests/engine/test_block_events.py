"""KV events over ZeroMQ: a router that has nothing else knows the prefix cache, misses nothing that is kept, and slows no round."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgpack
import pytest
import zmq
from block_view import BlockReader, BlockView, wanted
from draft_fakes import Liar
from engine_rig import DEMO, FIXTURES, Rig, fake_rig, rig

from pyspec.config import EngineSettings
from pyspec.engine import block_events
from pyspec.engine.api import Engine
from pyspec.engine.block_events import BlockPublisher, event_of, of_rank
from pyspec.engine.loop.block_feed import BlockFeed
from pyspec.engine.loop.job import End
from pyspec.engine.process.replicas import Replicas
from pyspec.engine.process.supervisor import Supervisor
from pyspec.errors import ConfigError, RequestError
from pyspec.request import Delta, Done, Event
from pyspec.slots.blocks import CLEARED, BlockChange, BlocksRemoved, BlocksStored

CHILD = Path(__file__).with_name("fake_engine_main.py")
HERE = "tcp://127.0.0.1:0"


class Watched:
    """A rig whose cache is followed round by round."""

    def __init__(self, r: Rig) -> None:
        self.rig, self.view, self.n_batch = r, BlockView(), 0
        self.n_grown = 0  # blocks that were known before a request had filed them
        self.feed = BlockFeed(r.loop.cache, self.take)

    def take(self, changes: Sequence[BlockChange]) -> None:
        assert changes
        self.view.take(event_of(change, "map") for change in changes)
        self.n_batch += 1

    def run(self, cancel: Callable[[int], None] = lambda i: None) -> None:
        for i in itertools.count():
            if self.rig.loop.is_idle:
                return
            self.rig.loop.step()
            cancel(i)
            self.feed.send_news()
            self.check()
            assert i < 5000

    def check(self) -> None:
        """Each round's view is the cache, and the answers so far that will be left there."""
        loop = self.rig.loop
        lost = loop.speculator.lost_track
        growing = [
            job.slot
            for job in loop.jobs.values()
            if job.is_decoding and job.request.cache_prompt and job.slot.index not in lost
        ]
        self.view.check(loop.table, growing)
        self.n_grown += len(self.view.texts) - len(wanted(loop.table))


def traffic(w: Watched, n_request: int, n_ctx: int) -> int:
    """Conversations that go on, leave, are cancelled and evict each other. Returns the largest number of known blocks."""
    draw, most = random.Random(3), 0
    texts: list[list[int]] = [draw.choices(range(200), k=n) for n in (11, 40, 64)]
    for _ in range(n_request):
        heard = []
        for _ in range(draw.choice([1, 3, 5])):
            text = draw.choice(texts)
            prompt = [
                *text[: draw.randrange(len(text) + 1)],
                *draw.choices(range(200), k=draw.randrange(1, 25)),
            ]
            heard.append(w.rig.submit(prompt[: n_ctx - 30], draw.randrange(1, 25)))
        left = draw.randrange(40)
        w.run(lambda i, jobs=heard, left=left: w.rig.loop.cancel(jobs[0].job) if i == left else None)
        texts = [*texts[-5:], *([*h.request.prompt, *h.tokens] for h in heard)]
        most = max(most, len(w.view.texts))
    return most


@pytest.mark.parametrize(("page_size", "n_page"), [(7, 40), (10, 33)])
def test_a_router_knows_the_cache_after_every_round(page_size: int, n_page: int) -> None:
    w = Watched(fake_rig(3, Liar(3), ctx=100, page_size=page_size, n_page=n_page))
    most = traffic(w, 14, 100)
    assert most > 10 and w.n_batch > 10 and w.n_grown > 100
    w.feed.end()
    assert not w.view.texts and w.view.n_cleared == 1
    w.feed.send_news()
    assert w.view.n_cleared == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen35", "nemotron_latent", "lfm2moe", "gemma4-e", "llama"])
def test_a_router_knows_which_blocks_of_a_model_can_be_continued(name: str) -> None:
    r = rig(
        FIXTURES / f"{name}.gguf", np=3, page_size=16, kv_pool=512, spec_type="none", checkpoint_every=32
    )
    w = Watched(r)
    states = r.loop.cache.states
    states.limits = (states.limits[0] // 3, 0)  # states are dropped while their pages stay
    assert traffic(w, 12, 256) > 5
    table = r.loop.table
    for text in list(w.view.texts.values()):
        cached = w.view.n_cached(text)
        assert cached == len(text) <= table.find([*text, 250]).n_match
        if not table.needs_state:
            assert table.find([*text, 250]).n == cached


def test_a_failure_of_the_feed_ends_events_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Watched(fake_rig(3, page_size=7))
    w.rig.generate([1] * 20, 5)
    monkeypatch.setattr(type(w.rig.loop.table.tree.blocks), "take", lambda self, growing: 1 / 0)
    w.feed.send_news()
    assert w.view.n_cleared == 1 and w.rig.loop.table.tree.blocks is None
    monkeypatch.undo()
    w.rig.generate([2] * 20, 5)
    w.feed.send_news()
    assert not w.view.texts


@pytest.mark.parametrize("end", ["it ends", "it is cancelled", "it fails", "it keeps nothing"])
def test_blocks_of_an_answer_are_known_as_they_fill_and_stay_if_it_is_kept(end: str) -> None:
    w = Watched(fake_rig(3, page_size=7, ctx=200))
    first = w.rig.submit([1] * 20, 60, cache_prompt=end != "it keeps nothing")
    second = w.rig.submit([1] * 20, 60)  # the same text: each block is stored once
    known = []
    for _ in range(25):
        w.rig.loop.step()
        w.feed.send_news()
        w.check()
        known.append(len(w.view.texts))
    assert known == sorted(known) and known[-1] > 20 // 7 + 1, "block by block"
    if end == "it is cancelled":
        w.rig.loop.cancel(first.job)
        w.rig.loop.cancel(second.job)
    elif end == "it fails":
        for job in list(w.rig.loop.jobs.values()):
            w.rig.loop.committer.finish(job, End("error", error=RequestError("a test")))
    w.run()
    w.feed.send_news()
    w.check()
    if end == "it fails":
        assert len(w.view.texts) < known[-1]
    else:
        assert len(w.view.texts) >= known[-1]


# -- over the wire ---------------------------------------------------------------------------------------------------


@pytest.fixture
def publish() -> Iterator[Callable[..., BlockPublisher]]:
    made: list[BlockPublisher] = []

    def make(**settings: object) -> BlockPublisher:
        values = {"kv_events": HERE, "kv_events_replay": HERE} | settings
        made.append(BlockPublisher(EngineSettings(**values), clock=lambda: 2.5))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


def stored(n: int, parent: int | None = None) -> list[BlockChange]:
    return [BlocksStored(array("Q", [2**64 - 1 - n]), parent, array("I", [n, 2**31, 5]), 3)]


def joined(p: BlockPublisher, **options: int) -> BlockReader:
    """A reader that the publisher knows: batches reach it from now on."""
    reader = BlockReader(p.endpoint, p.replay, rank=p.rank, **options)
    while not reader.sub.poll(20):
        p.publish(CLEARED)
    reader.read()
    return reader


@pytest.mark.parametrize("form", ["map", "array"])
def test_messages_are_those_of_vllm(publish: Callable[..., BlockPublisher], form: str) -> None:
    p = publish(kv_events_topic="kv@pod-3@model", kv_events_format=form)
    reader = joined(p)
    p.publish([*stored(1), BlocksRemoved(array("Q", [5, 2**63])), *CLEARED])
    last = p.n_batch - 1
    while not (kept := reader.ask(last)):  # until the publisher's thread has packed it
        time.sleep(0.01)
    ((number, body),) = kept
    top = 2**64 - 2
    events = {
        "map": [
            {
                "type": "BlockStored", "block_hashes": [top], "parent_block_hash": None, "token_ids": [1, 2**31, 5],
                "block_size": 3, "lora_id": None, "medium": "GPU", "lora_name": None,
            },
            {"type": "BlockRemoved", "block_hashes": [5, 2**63], "medium": "GPU"},
            {"type": "AllBlocksCleared"},
        ],
        "array": [
            ["BlockStored", [top], None, [1, 2**31, 5], 3, None, "GPU", None],
            ["BlockRemoved", [5, 2**63], "GPU"],
            ["AllBlocksCleared"],
        ],
    }  # fmt: skip
    assert number == last and msgpack.unpackb(body) == [2.5, events[form], 0]
    p.publish(stored(3))
    while reader.sub.recv_multipart()[1] != (last + 1).to_bytes(8, "big"):
        pass
    assert reader.topics == {"kv@pod-3@model"}
    reader.close()


def test_connections_are_bounded(
    publish: Callable[..., BlockPublisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_events, "MOST_PEERS", 5)
    p = publish()
    for endpoint in (p.endpoint, p.replay):
        where = "127.0.0.1", int(endpoint.rpartition(":")[2])
        with ExitStack() as held:
            idle = [held.enter_context(socket.create_connection(where, timeout=20)) for _ in range(9)]
            for peer in idle[5:]:
                with suppress(ConnectionError):
                    while peer.recv(100):
                        pass
            idle[0].settimeout(0.1)
            with pytest.raises(TimeoutError):
                while idle[0].recv(100):
                    pass
        until = time.monotonic() + 20
        while any(p._peers.values()) and time.monotonic() < until:
            time.sleep(0.01)
        assert not any(p._peers.values()), "those that leave make room"


def test_replays_that_are_not_read_are_bounded(
    publish: Callable[..., BlockPublisher], caplog: pytest.LogCaptureFixture
) -> None:
    p = publish()
    for i in range(20):
        p.publish([BlocksStored(array("Q", [i]), None, array("I", [2**31]) * 200_000, 200_000)])
    reader = BlockReader(p.endpoint, p.replay)
    while len(reader.ask(0)) < 20:
        time.sleep(0.05)
    dealers = []
    for _ in range(block_events.MOST_REPLAYS + 2):
        dealers.append(reader.context.socket(zmq.DEALER))
        dealers[-1].rcvhwm = 1
        dealers[-1].connect(p.replay)
        dealers[-1].send_multipart([b"", bytes(8)])
    until = time.monotonic() + 20
    while not any("is not sent" in m for m in caplog.messages) and time.monotonic() < until:
        time.sleep(0.01)
    assert len(p._replays) == block_events.MOST_REPLAYS
    for dealer in dealers:
        dealer.close(0)
    while not all(last.done for last in p._replays) and time.monotonic() < until + 20:
        time.sleep(0.05)
    assert len(reader.ask(0)) == 20, "those that leave make room"
    reader.close()


def test_a_reader_fills_gaps_from_replays_as_far_as_they_reach(
    publish: Callable[..., BlockPublisher],
) -> None:
    p = publish(kv_events_buffer=10)
    reader = joined(p)
    base = reader.seen[-1] + 1
    for n in range(30):
        p.publish(stored(n))
        if n % 7 == 3:  # lost on their way
            reader.sub.recv_multipart()
            reader.sub.recv_multipart()
        if n % 7 in (0, 5):
            reader.read_to(p.n_batch - 1)
    reader.read_to(p.n_batch - 1)
    assert reader.seen[-30:] == list(range(base, base + 30)) and len(reader.view.texts) == 30
    kept = list(range(base + 20, base + 30))
    assert [n for n, _ in reader.ask(base + 20)] == kept, "ten are kept"
    late = BlockReader(p.endpoint, p.replay)
    late.catch_up()
    assert late.seen == [base + 29] and late.view.n_cleared == 1, "all blocks in place of what is gone"
    assert sorted(late.view.texts) == sorted(reader.view.texts)
    late.close()
    assert reader.ask(base + 30) == []
    for wrong in ([b"", b"1"], [b"x", b"\0" * 8], [b""], [b"", b"\0" * 8, b""]):
        dealer = reader.context.socket(5)
        dealer.connect(p.replay)
        dealer.send_multipart(wrong)
        dealer.close(1000)
    assert len(reader.ask(base + 25)) == 5, "requests that make no sense harm nothing"
    reader.close()


def test_a_reader_that_never_reads_costs_nothing_and_another_hears_all(
    publish: Callable[..., BlockPublisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_events, "READER", 3)
    p = publish(kv_events_buffer=20_000)
    lazy, keen = joined(p, rcvhwm=1), joined(p)
    first = keen.seen[-1] + 1
    tokens = array("I", range(30_000))
    for i in range(300):
        p.publish([BlocksStored(array("Q", [i]), None, tokens, 30_000)])
    keen.read_to(first)
    missed = [n for n, _ in keen.ask(first)]
    assert p.n_dropped == 0 and missed == list(range(first, first + 300)), (
        "every batch was sent, and is kept"
    )
    n_lazy = 0
    while lazy.sub.poll(200):
        lazy.sub.recv_multipart()
        n_lazy += 1
    assert n_lazy < 300, "what the lazy reader had no room for is a gap in its numbers"
    lazy.close()
    keen.close()


def test_a_full_queue_drops_batches_and_their_numbers_are_missing(
    publish: Callable[..., BlockPublisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_events, "QUEUE", 5)
    goes_on, is_held = threading.Event(), threading.Event()
    pack = msgpack.packb

    def held(value: object) -> bytes:
        is_held.set()
        goes_on.wait(20)
        return pack(value)

    p = publish()
    p._pack = held
    p.publish(stored(0))
    assert is_held.wait(20)
    for n in range(1, 13):
        p.publish(stored(n))
    assert (p.n_batch, p.n_dropped) == (13, 7)
    goes_on.set()
    reader = BlockReader(p.endpoint, p.replay)
    while not (found := [n for n, _ in reader.ask(0)]) or found[-1] < 13:
        pass
    assert found == [0, 1, 2, 3, 4, 5, 13], "the last one has all blocks"
    assert (p.n_batch, p.n_dropped) == (14, 7)
    reader.catch_up()
    assert len(reader.view.texts) == 13 and reader.view.n_cleared == 1
    p.publish(stored(13))
    while reader.seen[-1] < 14:
        reader.catch_up()
    assert len(reader.view.texts) == 14 and reader.view.n_cleared == 1
    reader.close()


def test_what_waits_is_sent_before_the_end_and_then_nothing(
    publish: Callable[..., BlockPublisher],
) -> None:
    p = publish()
    reader = joined(p)
    for n in range(5):
        p.publish(stored(n))
    last = p.n_batch - 1
    p.close()
    p.publish(stored(9))
    p.close()
    reader.read_to(last)
    assert len(reader.view.texts) == 5 and p.n_batch == last + 1
    reader.close()
    again = publish(kv_events=p.endpoint, kv_events_replay=p.replay)
    assert again.endpoint == p.endpoint, "its addresses are free"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_events": "5557"}, "--kv-events is '5557'; want an address as tcp://*:5557"),
        ({"kv_events_replay": HERE}, "--kv-events-replay needs --kv-events, the address of the events themselves"),
        ({"kv_events": HERE, "prefix_cache": False}, "--kv-events publishes the prefix cache, which .* turns off"),
        ({"kv_events": "tcp://127.0.0.1:65536"}, "--kv-events is 'tcp://127.0.0.1:65536'; want an address as tcp://*:5557"),
        ({"kv_events": HERE, "kv_events_replay": "tcp://nowhere.invalid:1"}, "--kv-events-replay tcp://nowhere.*; use another"),
        ({"kv_events_buffer": 0}, "--kv-events-buffer is 0; want a whole number from 1 to 1000000"),
    ],
)  # fmt: skip
def test_addresses_that_can_not_be_used_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("*:", r"\*:")):
        BlockPublisher(EngineSettings(**settings))  # type: ignore[arg-type]


def test_an_address_in_use_is_refused(publish: Callable[..., BlockPublisher]) -> None:
    p = publish()
    with pytest.raises(
        ConfigError, match=f"--kv-events {p.endpoint}: Address already in use; use another"
    ):
        publish(kv_events=p.endpoint)


def test_replicas_have_addresses_by_rank_and_say_it() -> None:
    settings = EngineSettings(kv_events=HERE, kv_events_replay=HERE, replicas=3)
    p = BlockPublisher(settings, clock=lambda: 2.5, rank=2)
    reader = joined(p)
    p.publish(CLEARED)
    ((_, body),) = reader.ask(p.n_batch - 1)
    assert msgpack.unpackb(body)[2] == 2
    reader.close()
    p.close()
    assert [of_rank("tcp://*:5557", i) for i in range(3)] == [f"tcp://*:{5557 + i}" for i in range(3)]
    assert of_rank("tcp://[::1]:0", 2) == "tcp://[::1]:0" and of_rank("", 1) == ""
    assert of_rank("ipc:///run/a:5", 1) == "ipc:///run/a:5_dp1"
    assert of_rank("tcp://*:*", 2) == "tcp://*:*"


@pytest.mark.parametrize(
    ("events", "replay", "wanted"),
    [(5557, 5559, "3 ports from 5557 on .* 3 from 5559 .* put them 3 apart"), (65534, 5000, "65535")],
)
def test_ports_of_replicas_do_not_overlap(events: int, replay: int, wanted: str) -> None:
    values = {"kv_events": f"tcp://*:{events}", "kv_events_replay": f"tcp://*:{replay}"}
    EngineSettings(**values)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=wanted):
        EngineSettings(**values, replicas=3)  # type: ignore[arg-type]


def test_paths_that_meet_and_paths_that_are_taken_are_refused(
    tmp_path: Path, publish: Callable[..., BlockPublisher]
) -> None:
    events = f"ipc://{tmp_path}/kv"
    for replay, n in ((events, 1), (f"{events}_dp2", 3)):
        with pytest.raises(ConfigError, match="meet in one path"):
            EngineSettings(kv_events=events, kv_events_replay=replay, replicas=n)
    EngineSettings(kv_events=events, kv_events_replay=f"{events}_dp2", replicas=2)
    kept = tmp_path / "file.txt"
    kept.write_text("precious")
    with pytest.raises(ConfigError, match="is a file, and no socket"):
        publish(kv_events=f"ipc://{kept}")
    assert kept.read_text() == "precious"
    first = publish(kv_events=events)
    with pytest.raises(ConfigError, match="another program listens there"):
        publish(kv_events=events)
    first.close()
    publish(kv_events=events)  # what a program left that has ended is no hindrance


def test_a_killed_replica_s_blocks_are_cleared_and_no_others(tmp_path: Path) -> None:
    settings = EngineSettings(kv_events=HERE, kv_events_replay=HERE, replicas=3, np=3)
    publishers = block_events.publishers_of(settings)
    readers = [joined(p) for p in publishers]
    replicas = Replicas(
        FIXTURES / "qwen35.gguf",
        settings,
        command=(sys.executable, str(CHILD), str(tmp_path)),
        on_blocks=[p.publish for p in publishers],
    )
    try:
        replicas.wait()
        for p, reader in zip(publishers, readers, strict=True):
            p.publish(stored(p.rank))  # as its engine does
            reader.read_to(p.n_batch - 1)
        before, child = readers[1].view.n_cleared, replicas.supervisors[1]._child
        assert child is not None
        os.kill(child.process.pid, signal.SIGKILL)
        readers[1].read()
        assert not readers[1].view.texts and readers[1].view.n_cleared == before + 1
        for reader in readers:
            reader.catch_up()
        assert [len(reader.view.texts) for reader in readers] == [1, 0, 1]
    finally:
        replicas.close()
        for each in (*readers, *publishers):
            each.close()


def test_without_the_packages_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError) as e:
        Engine.from_settings(DEMO, EngineSettings(kv_events=HERE))
    assert str(e.value) == "--kv-events needs two packages: pip install pyzmq msgpack"


def test_a_killed_engine_s_blocks_are_cleared(
    tmp_path: Path, publish: Callable[..., BlockPublisher]
) -> None:
    p = publish()
    reader = joined(p)
    supervisor = Supervisor(
        FIXTURES / "qwen35.gguf",
        EngineSettings(),
        command=(sys.executable, str(CHILD), str(tmp_path)),
        on_blocks=p.publish,
    )
    try:
        supervisor.wait()
        p.publish(stored(1))  # as its engine does
        reader.read_to(p.n_batch - 1)
        assert reader.view.texts
        before, child = reader.view.n_cleared, supervisor._child
        assert child is not None
        os.kill(child.process.pid, signal.SIGKILL)
        reader.read()
        assert not reader.view.texts and reader.view.n_cleared == before + 1
    finally:
        supervisor.close()
        reader.close()


def wait_until(reader: BlockReader, is_so: Callable[[], bool]) -> None:
    """Read until it is so. The engine publishes a round's changes after its other events."""
    for _ in range(4000):
        reader.catch_up()
        if is_so():
            return
        time.sleep(0.005)
    raise AssertionError("it never came")


@pytest.mark.slow
@pytest.mark.parametrize("isolated", [False, True])
def test_a_router_and_an_engine_agree_on_what_is_cached(isolated: bool) -> None:
    values = {"np": 3, "ctx": 300, "kv_pool": 900, "kv_events": HERE, "kv_events_replay": HERE, "warm_up": False}  # fmt: skip
    draw = random.Random(1)
    with Engine.load("demo", isolated=isolated, **values) as engine:  # type: ignore[arg-type]
        (p,) = engine.publishers
        reader = BlockReader(p.endpoint, p.replay)
        texts: list[list[int]] = []
        n_hit = 0
        for i in range(24):
            text = texts.pop(draw.randrange(len(texts))) if texts and draw.random() < 0.8 else []
            prompt = [*(text if len(text) < 230 else ()), *draw.choices(range(300, 900), k=40)]
            known = reader.view.n_cached(prompt[:-1])
            result = engine.generate(prompt, max_tokens=20, temperature=0.0)
            n_hit += known > 0
            assert known <= result.timings.cache_n < known + 32, "within a block"
            text = [*prompt, *result.tokens]
            wait_until(
                reader, lambda text=text: reader.view.n_cached(text) >= (len(text) - 1) // 32 * 32
            )
            texts = [*texts[-4:], text]
            if isolated and i == 12:
                child, n_cleared = engine.core._child, reader.view.n_cleared  # type: ignore[attr-defined]
                os.kill(child.process.pid, signal.SIGKILL)
                wait_until(reader, lambda n=n_cleared: reader.view.n_cleared > n)
                assert not reader.view.texts
        assert n_hit > 8
        assert engine.metrics().kv_event_batches == p.n_batch > 24
        assert engine.metrics().kv_event_batches_dropped == 0
        reader.close()


def wait_for_text(reader: BlockReader, text: Sequence[int]) -> None:
    """Read until all full blocks before its last token are known."""
    wait_until(reader, lambda: reader.view.n_cached(text) >= (len(text) - 1) // 32 * 32)


class Answer:
    """A long answer that is followed as it comes. seen: it has `n` tokens."""

    def __init__(self, engine: Engine, prompt: list[int], n: int) -> None:
        self.tokens: list[int] = []
        self.n, self.seen, self.over = n, threading.Event(), threading.Event()
        request = engine.request(prompt, max_tokens=440, temperature=0.0, ignore_eos=True)
        self.name = engine.submit(request, self.hear)

    def hear(self, event: Event) -> None:
        if isinstance(event, Delta):
            self.tokens.extend(event.tokens)
            if len(self.tokens) >= self.n:
                self.seen.set()
        if isinstance(event, Done):
            self.over.set()


@pytest.mark.slow
@pytest.mark.parametrize("isolated", [False, True])
def test_a_router_knows_an_answer_before_its_end_and_what_it_leaves(isolated: bool) -> None:
    values = {"np": 3, "ctx": 500, "kv_events": HERE, "kv_events_replay": HERE, "warm_up": False}
    draw = random.Random(4)
    with Engine.load("demo", isolated=isolated, **values) as engine:  # type: ignore[arg-type]
        (p,) = engine.publishers
        reader = BlockReader(p.endpoint, p.replay)
        for n in (40, 75, 150):
            prompt = draw.choices(range(300, 900), k=50)
            answer = Answer(engine, prompt, n)
            assert answer.seen.wait(60)
            wait_for_text(reader, [*prompt, *answer.tokens[:n]])
            late = BlockReader(p.endpoint, p.replay)
            wait_for_text(late, [*prompt, *answer.tokens[:n]])  # a router that starts now
            late.close()
            engine.cancel(answer.name)
            assert answer.over.wait(60)
            text = [*prompt, *answer.tokens]
            wait_for_text(reader, text)
            again = engine.generate([*text, 301], max_tokens=2).timings
            assert again.cache_n >= len(text) - 1
        reader.close()


@pytest.mark.slow
def test_each_replica_tells_what_its_own_cache_holds() -> None:
    """Also after it was killed and replaced, and to a reader that has only the replays."""
    values = {"np": 3, "ctx": 500, "replicas": 3, "threads": 1, "warm_up": False, "device": "cpu"}
    values |= {"kv_events": HERE, "kv_events_replay": HERE}
    draw = random.Random(2)
    with Engine.load("demo", isolated=True, **values) as engine:  # type: ignore[arg-type]
        readers = [BlockReader(p.endpoint, p.replay, rank=p.rank) for p in engine.publishers]

        def known(prompt: Sequence[int]) -> list[int]:
            return [reader.view.n_cached(prompt) for reader in readers]

        def ask(prompt: list[int]) -> tuple[list[int], int]:
            """A request's text, and the replica that had it."""
            before, views = [row.requests for row in engine.replicas(counts=False)], known(prompt[:-1])
            result = engine.generate(prompt, max_tokens=20, temperature=0.0)
            rows = engine.replicas(counts=False)
            (i,) = [i for i, row in enumerate(rows) if row.requests > before[i]]
            assert views[i] <= result.timings.cache_n < views[i] + 32, "within a block"
            text = [*prompt, *result.tokens]
            n = (len(text) - 1) // 32 * 32
            wait_until(readers[i], lambda: readers[i].view.n_cached(text) >= n)
            for reader in readers:
                reader.catch_up()
            return text, i

        texts = [ask(draw.choices(range(300, 900), k=70)) for _ in range(6)]
        assert {i for _, i in texts} == {0, 1, 2}, "fewest open requests, then fewest so far"
        text, home = texts[4]
        for _ in range(3):
            text, i = ask([*text, *draw.choices(range(300, 900), k=40)])
            assert i == home, "it knows the text"
            assert [n > 100 for n in known(text)] == [j == home for j in range(3)]
        child = engine.core.supervisors[home]._child  # type: ignore[attr-defined]
        n_cleared = readers[home].view.n_cleared
        os.kill(child.process.pid, signal.SIGKILL)
        wait_until(readers[home], lambda: readers[home].view.n_cleared > n_cleared)
        assert not readers[home].view.texts and all(readers[j].view.texts for j in range(3) if j != home)
        wait_until(readers[0], lambda: [r.state for r in engine.replicas(counts=False)] == ["ok"] * 3)
        while ask(draw.choices(range(300, 900), k=70))[1] != home:
            pass
        p = engine.publishers[home]
        late = BlockReader(p.endpoint, p.replay, rank=home)
        late.catch_up()
        assert sorted(late.view.texts) == sorted(readers[home].view.texts) != []
        for each in (*readers, late):
            each.close()
