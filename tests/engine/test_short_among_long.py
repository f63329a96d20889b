"""A short prompt does not wait until long ones are read: it gets rows first, and a slot if all are taken by prompts."""

from __future__ import annotations

import random

import pytest
from engine_rig import FIXTURES, GREEDY, plain_rig, rig

from pyspec.request import Started

MODELS = {
    "llama": FIXTURES / "llama.gguf",
    "hybrid": FIXTURES / "qwen35.gguf",
    "deepseek4": FIXTURES / "deepseek4.gguf",
}


def ids(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=n)


def rounds_until(r, heard) -> int:
    for n in range(1, 400):
        r.loop.step()
        if heard.tokens:
            return n
    raise AssertionError("no token")


@pytest.mark.parametrize(
    "kind", ["llama", pytest.param("hybrid", marks=pytest.mark.slow), pytest.param("deepseek4", marks=pytest.mark.slow)]
)
def test_a_short_prompt_passes_long_ones_and_no_text_changes(kind: str) -> None:
    sizes = {"np": 2, "ctx": 2200, "ubatch": 64, "page_size": 16, "spec_type": "none"}
    r, cold = rig(MODELS[kind], **sizes), plain_rig(MODELS[kind], ctx=2200)
    long = [r.submit(ids(i, 1500 + i), 4, client="a") for i in range(6)]
    for _ in range(3):
        r.loop.step()
    assert all(slot.busy for slot in r.loop.table.slots)
    short = r.submit(ids(99, 40), 6, client="b")
    assert rounds_until(r, short) <= 3, "an idle engine takes one round"
    r.run(2000)
    assert short.tokens == cold.generate(ids(99, 40), 6, GREEDY).tokens
    assert sum(h.job.n_suspended for h in long) == 1
    for i, h in enumerate(long):
        assert h.tokens == cold.generate(ids(i, 1500 + i), 4, GREEDY).tokens
        assert sum(isinstance(e, Started) for e in h.events) == 1
        assert h.timings.cache_n == 0 and h.timings.prompt_n == 1500 + i, "what it read itself is not cached"


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    r = rig(MODELS["llama"], np=2, ctx=2200, ubatch=64, page_size=16, spec_type="none")
    long = r.submit(ids(1, 1800), 2)
    for i in range(120):
        if len(r.loop.queue) < 4:
            r.submit(ids(100 + i, 60), 1)
        r.loop.step()
        if long.over:
            break
    assert long.over, "a quarter of the rows are the oldest's"


def test_a_prompt_that_may_not_be_cached_is_not_asked_to_make_room() -> None:
    r = rig(MODELS["llama"], np=1, ctx=2200, ubatch=64, page_size=16, spec_type="none")
    long = r.submit(ids(1, 1500), 2, cache_prompt=False)
    r.loop.step()
    short = r.submit(ids(2, 10), 2)
    r.run()
    assert long.job.n_suspended == 0 and short.over and long.over
