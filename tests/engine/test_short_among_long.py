"""A short prompt does not wait until long ones are read: it gets rows first, and a slot if all are taken by prompts."""

from __future__ import annotations

import random
import time

import pytest
from engine_rig import FIXTURES, GREEDY, Rig, beyond, plain_rig, rig

from pyspec.engine.loop.admission import MOST_SUSPENDED, PATIENCE_S
from pyspec.request import Delta, Progress, SamplingParams, Started

MODELS = {"llama": FIXTURES / "llama.gguf", "hybrid": FIXTURES / "qwen35.gguf", "deepseek4": FIXTURES / "deepseek4.gguf"}  # fmt: skip


def ids(seed: int, n: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=n)


def long_rig(np: int) -> Rig:
    own = beyond(MODELS["llama"])
    return rig(MODELS["llama"], np=np, ctx=2200, ubatch=64, page_size=16, spec_type="none", **own)


def rounds_until(r, heard) -> int:
    for n in range(1, 400):
        r.loop.step()
        if heard.tokens:
            return n
    raise AssertionError("no token")


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        pytest.param("hybrid", marks=pytest.mark.slow),
        pytest.param("deepseek4", marks=pytest.mark.slow),
    ],
)
def test_a_short_prompt_passes_long_ones_and_no_text_changes(kind: str) -> None:
    own = {"ctx": 2200, **beyond(MODELS[kind])}
    sizes = {"np": 2, "ubatch": 64, "page_size": 16, "spec_type": "none"}
    r, cold = rig(MODELS[kind], **sizes, **own), plain_rig(MODELS[kind], **own)
    long = [r.submit(ids(i, 1500 + i), 4, client="a") for i in range(6)]
    r.steps(3)
    assert all(slot.busy for slot in r.loop.table.slots)
    short = r.submit(ids(99, 40), 6, client="b")
    assert rounds_until(r, short) <= 3, "an idle engine takes one round"
    r.run(2000)
    assert short.tokens == cold.generate(ids(99, 40), 6, GREEDY).tokens
    assert sum(h.job.n_suspended for h in long) == 1
    for i, h in enumerate(long):
        assert h.tokens == cold.generate(ids(i, 1500 + i), 4, GREEDY).tokens
        assert sum(isinstance(e, Started) for e in h.events) == 1
        assert h.timings.cache_n == 0 and h.timings.prompt_n == 1500 + i, (
            "what it read itself is not cached"
        )


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    r = long_rig(np=2)
    long = r.submit(ids(1, 1800), 2)
    for i in range(120):
        if len(r.loop.queue) < 4:
            r.submit(ids(100 + i, 60), 1)
        r.loop.step()
        if long.over:
            break
    assert long.over, "a quarter of the rows are the oldest's"


def test_a_prompt_that_may_not_be_cached_is_not_asked_to_make_room() -> None:
    r = long_rig(np=1)
    long = r.submit(ids(1, 1500), 2, cache_prompt=False)
    r.loop.step()
    short = r.submit(ids(2, 10), 2)
    r.run()
    assert long.job.n_suspended == 0 and short.over and long.over


def hurried(r: Rig) -> Rig:
    """Its requests have waited for long as soon as they come."""
    r.loop.admission.clock = lambda: time.perf_counter() + PATIENCE_S
    return r


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spec", ["none", "ngram"])
# Without a state beside the pages, and with one
@pytest.mark.parametrize("kind", ["llama", "hybrid", pytest.param("deepseek4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_text_that_was_given_more_than_a_short_one_asks_for_makes_room_and_does_not_change(
    kind: str, spec: str, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, seed=5, ignore_eos=True, repeat_penalty=1.1)
    sizes = {"np": 2, "ctx": 160, "ubatch": 64, "page_size": 16, "spec_type": spec}
    r, cold = hurried(rig(MODELS[kind], **sizes)), plain_rig(MODELS[kind], ctx=160)
    long = [r.submit(ids(i, 30 + i), 61, params, client="a", stop=("\x00no",)) for i in range(5)]
    r.steps(25)
    short = r.submit(ids(99, 9), 7, client="a")
    assert rounds_until(r, short) <= 3, "from the same client as those that wait, too"
    r.run(9000)
    for i, h in enumerate(long):
        assert h.tokens == cold.generate(ids(i, 30 + i), 61, params).tokens
        assert sum(isinstance(e, Started) for e in h.events) == 1
        assert h.timings.prompt_n + h.timings.cache_n == 30 + i and h.timings.predicted_n == 61
        progress = [k for k, e in enumerate(h.events) if isinstance(e, Progress)]
        assert max(progress) < next(k for k, e in enumerate(h.events) if isinstance(e, Delta))
    assert sum(h.job.n_suspended for h in long) == 1, (
        "each makes one wait, and those that ask as much make none"
    )


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize(
    "fixed", [{"cache_prompt": False}, {"max_predict_ms": 60_000}, {"slot": 0}, {"prompt_logprobs": 1}]
)
def test_what_can_not_go_on_elsewhere_keeps_its_slot(fixed: dict[str, object]) -> None:
    r = hurried(rig(MODELS["llama"], np=1, ctx=200, page_size=16, spec_type="none"))
    long, short = r.submit(ids(1, 20), 60, **fixed), None
    r.steps(40)
    short = r.submit(ids(2, 10), 2)
    r.run()
    assert long.job.n_suspended == 0 and short.over and long.over


def test_short_ones_that_keep_coming_do_not_starve_a_text() -> None:
    r = hurried(rig(MODELS["llama"], np=1, ctx=600, page_size=16, spec_type="none"))
    long = r.submit(ids(1, 20), 400)
    for i in range(3000):
        if not len(r.loop.queue):
            r.submit(ids(100 + i, 5), 3)
        r.loop.step()
        if long.over:
            break
    assert long.over and long.job.n_suspended == MOST_SUSPENDED


def test_a_short_one_waits_a_little_before_others_make_room() -> None:
    r = rig(MODELS["llama"], np=1, ctx=200, page_size=16, spec_type="none")
    now = [time.perf_counter()]
    r.loop.admission.clock = lambda: now[0]
    long = r.submit(ids(1, 20), 150)
    r.steps(40)
    short = r.submit(ids(2, 10), 2)
    r.steps(40)
    assert not short.tokens and long.job.n_suspended == 0
    now[0] = time.perf_counter() + PATIENCE_S
    assert rounds_until(r, short) <= 2


def test_a_suspended_request_that_is_cancelled_counts_what_it_took() -> None:
    r = long_rig(1)
    long = r.submit(ids(1, 1500), 400, client="a")
    r.steps(3)
    short = r.submit(ids(99, 40), 60, client="b")
    assert rounds_until(r, short) <= 3 and long.job.n_suspended == 1
    took = long.job.work
    assert 0 < took < 1000 < long.job.charged
    r.loop.cancel(long.job)
    r.loop.step()
    assert long.finish == "cancelled" and r.loop.queue._given["a"] == long.job.charged == took
