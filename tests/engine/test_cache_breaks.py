"""The place where a prompt leaves the prefix cache is reported, and only then: `timings.cache_break_at`."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest
from engine_rig import FIXTURES, Heard, Rig, fake_rig, plain_rig

from pyspec.server.api.answers import timings_dict

PAGE = 16


def ids(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(200), k=n)


@pytest.fixture(params=["paged", "hybrid"])
def r(request: pytest.FixtureRequest) -> Iterator[Rig]:
    if request.param == "paged":
        yield fake_rig(2, ctx=600)
    else:
        yield plain_rig(FIXTURES / "qwen35.gguf", np=2, ctx=600, page_size=PAGE)


def break_at(h: Heard) -> int:
    """As clients see it; -1 where they see nothing."""
    return timings_dict(h.timings).get("cache_break_at", -1)


def test_a_conversation_that_grows_breaks_nowhere(r: Rig) -> None:
    prompt = ids(1, 200)
    for turn in range(3):
        h = r.generate(prompt, 5)
        assert break_at(h) == -1, f"turn {turn}"
        prompt = [*prompt, *h.tokens, *ids(turn + 10, 70)]
    assert h.timings.cache_n == 200 + 2 * 75 - 70 - 1


@pytest.mark.parametrize("at", [40, 3 * PAGE, 150])
def test_a_changed_token_is_told_by_its_place(r: Rig, at: int) -> None:
    prompt = ids(1, 200)
    r.generate(prompt, 5)
    h = r.generate([*prompt[:at], prompt[at] + 1, *prompt[at + 1 :]], 5)
    assert break_at(h) == at and h.timings.cache_n <= at


def test_nothing_is_told_of_an_empty_cache_or_one_that_is_not_asked(r: Rig) -> None:
    assert break_at(r.generate(ids(1, 100), 3)) == -1
    assert break_at(r.generate(ids(2, 100), 3, cache_prompt=False)) == -1


def test_a_request_that_goes_on_in_another_engine_tells_nothing(r: Rig) -> None:
    prompt = ids(1, 100)
    said = r.generate(prompt, 8).tokens
    h = r.generate(prompt, 8, resumed=(said[0] + 1, 5))
    assert h.timings.cache_break_at == -1


def test_the_log_has_the_place_and_no_text_if_it_is_asked_to(caplog: pytest.LogCaptureFixture) -> None:
    r = fake_rig(ctx=600)
    prompt = ids(1, 200)
    r.generate(prompt, 5)
    with caplog.at_level(logging.INFO, "pyspec.engine.loop.admission"):
        r.generate([*prompt[:70], 1, 2, 3], 5)
    told = "prompt tokens are in the cache"
    assert not any(told in message for message in caplog.messages)
    with caplog.at_level(logging.DEBUG, "pyspec.engine.loop.admission"):
        r.generate([*prompt[:90], 1, 2, 3], 5)
    (line,) = [message for message in caplog.messages if f"90 of 93 {told}" in message]
    assert line.endswith("its client's texts leave the prompt at 90") and "'" not in line.replace(
        "client's", ""
    )


def test_what_a_chat_begins_with_has_a_checkpoint_for_the_next_chat() -> None:
    """A second conversation with the same system prompt and tools begins where they end, not at zero."""
    r = plain_rig(FIXTURES / "qwen35.gguf", ctx=600, page_size=PAGE)
    opening = ids(1, 200)
    r.generate([*opening, *ids(2, 150)], 3, n_system=200)
    h = r.generate([*opening, *ids(3, 150)], 3, n_system=200)
    assert h.timings.cache_n == 192, "the page border before it"
    assert break_at(h) == 200
