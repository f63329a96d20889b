"""The Python interface at work: many requests, some of which fail; a full queue; asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from engine_rig import DEMO, FIXTURES, GREEDY

from pyspec.engine.api import Engine, Result
from pyspec.errors import PromptTooLong, PyspecError, QueueFull, RequestError
from pyspec.request import Delta, Done, Request

NP, QUEUE = 2, 1


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    path = FIXTURES / "qwen35.gguf"
    with Engine.load(
        path, "mtp", np=NP, ctx=128, warm_up=False, check_tap_shift=False, queue=QUEUE
    ) as e:
        yield e


def test_one_that_fails_leaves_the_results_of_the_others(engine: Engine) -> None:
    prompts = [[i % 50, 7] for i in range(200)]
    prompts[77] = [1] * 500
    seen: list[tuple[int, int]] = []
    found = engine.generate_many(
        prompts,
        params=GREEDY,
        max_tokens=1,
        return_exceptions=True,
        progress=lambda done, of: seen.append((done, of)),
    )
    assert [i for i, r in enumerate(found) if not isinstance(r, Result)] == [77]
    assert isinstance(found[77], PromptTooLong) and str(found[77]).endswith(
        "(ctx raises it up to the length that the model was trained for)"
    )
    assert seen == [(i + 1, 200) for i in range(200)]
    again = found[3]
    assert isinstance(again, Result)
    assert again.tokens == engine.generate([3, 7], params=GREEDY, max_tokens=1).tokens


def test_the_first_failure_is_raised_if_nobody_wants_exceptions(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"token 99999 is outside"):
        engine.generate_many([[1], [99999], [2]], params=GREEDY, max_tokens=2)


def test_a_prompt_that_is_none_fails_alone(engine: Engine) -> None:
    found = engine.generate_many([[1], [1.5]], max_tokens=1, return_exceptions=True)  # type: ignore[list-item]
    assert isinstance(found[0], Result) and isinstance(found[1], RequestError)
    with pytest.raises(RequestError, match=r"prompt\[0\] is 1\.5"):
        engine.generate_many([[1.5]])  # type: ignore[list-item]


def test_asyncio_requests_wait_for_room_in_the_queue(engine: Engine) -> None:
    async def ask() -> list[Result]:
        return await asyncio.gather(
            *(engine.agenerate([i], params=GREEDY, max_tokens=3) for i in range(12))
        )

    for _ in range(2):  # a second event loop has its own queue
        assert [r.n_predicted for r in asyncio.run(ask())] == [3] * 12
    with pytest.raises(QueueFull):  # submit itself does not wait
        for _ in range(9):
            engine.submit(Request(prompt=(1,), params=GREEDY, max_tokens=100), lambda event: None)


def test_a_cancelled_asyncio_request_leaves_no_door_shut(engine: Engine) -> None:
    async def ask() -> Result:
        first = [
            asyncio.ensure_future(engine.agenerate([i], params=GREEDY, max_tokens=60)) for i in range(8)
        ]
        await asyncio.sleep(0.02)
        for task in first:
            task.cancel()
        await asyncio.gather(*first, return_exceptions=True)
        return await engine.agenerate([1], params=GREEDY, max_tokens=2)

    assert asyncio.run(ask()).n_predicted == 2


def test_chat_streams_and_decoding_agree(engine: Engine) -> None:
    result = engine.generate([5, 6], params=GREEDY, max_tokens=8)
    assert engine.decode(result.tokens) == result.text
    events = list(engine.stream([5, 6], params=GREEDY, max_tokens=8))
    assert isinstance(events[-1], Done)
    assert "".join(e.text for e in events if isinstance(e, Delta)) == result.text
    ids = engine.encode("Hello")
    assert engine.decode(ids) == "Hello"


def test_a_chat_is_the_same_through_asyncio_and_needs_messages() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with Engine.load(DEMO, None, np=NP, ctx=128, warm_up=False) as engine:
        _chat_both_ways(engine, messages)


def _chat_both_ways(engine: Engine, messages: list[dict[str, str]]) -> None:
    want = engine.chat(messages, params=GREEDY, max_tokens=4)
    assert asyncio.run(engine.achat(messages, params=GREEDY, max_tokens=4)).tokens == want.tokens
    with pytest.raises(PyspecError, match="has no content"):
        engine.chat([{"role": "user"}])
    with pytest.raises(RequestError, match="want a list of messages"):
        asyncio.run(engine.achat("Hi"))  # type: ignore[arg-type]
