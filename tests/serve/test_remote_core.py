"""Requests whose runs break off: their events, and the errors of those that can not go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pyspec.engine.messages import pack
from pyspec.errors import NotSupported, QueueFull, RequestError, Unavailable
from pyspec.gguf import open_gguf
from pyspec.request import (
    Delta,
    Done,
    EngineInfo,
    Event,
    Failed,
    Request,
    SamplingParams,
    Started,
    Timings,
)
from pyspec.serve import remote_core
from pyspec.serve.remote_core import Call, Packed, RemoteCore
from pyspec.slot_action import SlotAction
from pyspec.text.tokenizer import Tokenizer

FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen35.gguf"
N = 50
INFO = EngineInfo(
    model_name="far", model_path="", arch="far", n_vocab=300, n_ctx=999, n_ctx_train=999, n_slot=3, n_embd=1, n_params=1,
    n_bytes=1, file_type="", device="cpu", drafter="none",
)  # fmt: skip


class TooMany(Exception):
    pass


def token_at(request: Request, i: int) -> int:
    return 33 + (sum(request.prompt) + 7 * i + request.params.seed) % 60


class Fleet:
    """Engines elsewhere. breaks: after so many tokens of a run it breaks off, one number a run; -1: before the first event."""

    def __init__(
        self, tokenizer: Tokenizer, breaks: list[int], how: Callable[[], Event | Exception]
    ) -> None:
        self.tokenizer, self.breaks, self.how = tokenizer, breaks, how
        self.calls: list[Call] = []
        self.n_cancelled = 0
        self.pause_at = -1

    def __call__(self, call: Call) -> FarRun:
        self.calls.append(call)
        return FarRun(self, call, self.breaks.pop(0) if self.breaks else 10**6)


class FarRun:
    def __init__(self, fleet: Fleet, call: Call, n_most: int) -> None:
        self.fleet, self.call, self.n_most = fleet, call, n_most

    def cancel(self) -> None:
        self.fleet.n_cancelled += 1

    async def __aiter__(self) -> AsyncIterator[Packed]:
        request = self.call.request
        if self.n_most >= 0:
            yield [pack(Started("there", 2, len(request.prompt), 0))]
            first = len(request.resumed)
            for i in range(first, min(N, first + self.n_most)):
                if i == self.fleet.pause_at:
                    await asyncio.Event().wait()
                token = token_at(request, i)
                yield [pack(Delta("there", (token,), self.fleet.tokenizer.decode([token])))]
                await asyncio.sleep(0)
            if first + self.n_most >= N:
                yield [
                    pack(Done("there", "length", len(request.prompt), N, Timings(predicted_n=N - first)))
                ]
                return
        if isinstance(what := self.fleet.how(), Exception):
            raise what
        yield [pack(what)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with open_gguf(FIXTURE) as file:
        return Tokenizer.from_metadata(file.metadata)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_core, "PAUSE_S", (0.0,) * 6)


def ended(
    core: RemoteCore, prompt: tuple[int, ...] = (1, 2, 0xD800)
) -> tuple[str, list[Event], threading.Event]:
    events: list[Event] = []
    over = threading.Event()

    def hear(event: Event) -> None:
        events.append(event)
        if isinstance(event, Done | Failed):
            over.set()

    name = core.submit(Request(prompt=prompt, params=SamplingParams(seed=5), max_tokens=N), hear)
    return name, events, over


LOSSES: dict[str, Callable[[], Event | Exception]] = {
    "it dies": lambda: ConnectionError("the other side is gone"),
    "it ends": lambda: Failed("there", Unavailable("the engine was closed")),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_text_goes_on_where_it_broke_off(tokenizer: Tokenizer, loss: str) -> None:
    fleet = Fleet(tokenizer, [-1, 7, 0, 11, -1, 0, 0, 3], LOSSES[loss])
    core = RemoteCore(fleet, INFO, tokenizer)
    name, events, over = ended(core)
    assert over.wait(20) and isinstance(done := events[-1], Done), events[-1]
    request = fleet.calls[0].request
    tokens = [t for e in events if isinstance(e, Delta) for t in e.tokens]
    assert tokens == [token_at(request, i) for i in range(N)]
    assert "".join(e.text for e in events if isinstance(e, Delta)) == tokenizer.decode(tokens)
    assert sum(isinstance(e, Started) for e in events) == 1 and {e.request for e in events} == {name}
    assert (done.n_predicted, done.timings.predicted_n) == (N, N)
    assert [len(call.request.resumed) for call in fleet.calls] == [0, 0, 7, 7, 18, 18, 18, 18, 21]
    assert {call.prompt for call in fleet.calls} == {"\x01\x02\ud800"}
    counts = core.metrics()
    assert (counts.restarts, counts.requests_done, counts.predicted_tokens) == (8, 1, N)
    assert core.close() and not core.alive()


def test_a_request_that_never_gets_further_fails(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, [4] + [0] * 99, LOSSES["it dies"])
    core = RemoteCore(fleet, INFO, tokenizer)
    _, events, over = ended(core)
    assert over.wait(20) and isinstance(last := events[-1], Failed)
    assert isinstance(last.error, Unavailable) and "6 engines were lost" in str(last.error)
    assert len(fleet.calls) == 6 and core.metrics().requests_failed == 1
    assert core.close()


def test_one_that_is_cancelled_or_full_or_closed(tokenizer: Tokenizer) -> None:
    fleet = Fleet(tokenizer, [], LOSSES["it dies"])
    fleet.pause_at = 9
    core = RemoteCore(fleet, INFO, tokenizer, (TooMany,))
    name, events, over = ended(core)
    while sum(isinstance(e, Delta) for e in events) < 9:
        pass
    assert core.metrics().requests_processing == 1
    core.cancel(name)
    assert over.wait(20) and isinstance(done := events[-1], Done)
    assert (done.finish, done.n_predicted, fleet.n_cancelled) == ("cancelled", 9, 1)
    core.cancel(name)
    fleet.breaks, fleet.how = [-1], lambda: TooMany("all are busy")
    _, events, over = ended(core)
    assert over.wait(20) and isinstance(last := events[-1], Failed) and isinstance(last.error, QueueFull)
    _, events, over = ended(core)
    assert core.close() and over.wait(20)
    assert isinstance(last := events[-1], Failed) and "was closed" in str(last.error)
    with pytest.raises(Unavailable):
        ended(core)


def test_slots_have_no_numbers_here(tokenizer: Tokenizer) -> None:
    core = RemoteCore(Fleet(tokenizer, [], LOSSES["it dies"]), INFO, tokenizer)
    request = replace(Request(prompt=(1,)), slot=0)
    with pytest.raises(RequestError, match="can not choose a slot"):
        core.submit(request, lambda event: None)
    answers: list[object] = []
    core.act_on_slot(SlotAction("erase", 0), answers.append)
    assert isinstance(answers[0], NotSupported) and core.slots() == [] == core.replicas()
    assert core.close()
