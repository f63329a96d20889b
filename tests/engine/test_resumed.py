"""A request that resumes another engine's tokens continues with that engine's text, and repeats nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from engine_rig import DEMO, DEMO_DRAFT, FIXTURES, GREEDY, Rig, plain_rig, rig
from known_texts import demo_prompts, known_texts

from pyspec.engine.api import Engine, Result, collect
from pyspec.errors import RequestError
from pyspec.request import Delta, Request, SamplingParams
from pyspec.text.stream import TextStream

QWEN35 = FIXTURES / "qwen35.gguf"
SAMPLED = SamplingParams(seed=5, temperature=0.7)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """A fresh engine has an empty prefix cache: pages of the first run must not help the second."""
    with Engine.load(
        DEMO, DEMO_DRAFT, np=2, ctx=512, warm_up=False, kv_type="f32", prefix_cache=False
    ) as e:
        yield e


def request(i: int, **values: object) -> Request:
    """A prompt of the packaged pair with a long answer."""
    prompt, _ = sorted(demo_prompts(), key=lambda row: len(row[1]))[-1 - i]
    return Request(**({"prompt": prompt, "params": GREEDY, "max_tokens": 40} | values))  # type: ignore[arg-type]


def text_of(engine: Engine, tokens: Sequence[int], stop: Sequence[str] = ()) -> str:
    """The text of a listener after these tokens."""
    return TextStream(engine.tokenizer, stop).push(tokens).text


def delivered(engine: Engine, r: Request) -> tuple[Result, tuple[int, ...]]:
    """An answer, and all its tokens: a result lacks those of the stop string."""
    events = list(engine.stream(r))
    return collect(events), tuple(
        t for event in events if isinstance(event, Delta) for t in event.tokens
    )


def check(engine: Engine, whole: Result, r: Request, n: int, said: Sequence[int] = ()) -> Result:
    """Resume after the first `n` tokens of a whole answer; `said`: all of them, if a stop string ended it."""
    tokens = tuple(said or whole.tokens)
    rest, behind = delivered(engine, replace(r, resumed=tokens[:n]))
    assert (*tokens[:n], *behind) == tokens
    assert text_of(engine, tokens[:n], r.stop) + rest.text == whole.text
    assert (rest.finish, rest.stop, rest.n_prompt, rest.n_predicted) == (
        whole.finish, whole.stop, whole.n_prompt, whole.n_predicted,
    )  # fmt: skip
    return rest


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize(
    "params",
    [
        replace(GREEDY, ignore_eos=False),
        SAMPLED,
        replace(SAMPLED, repeat_penalty=1.3, presence_penalty=0.2, repeat_last_n=24),
        replace(SAMPLED, dry_multiplier=0.8, dry_allowed_length=1),
        replace(SAMPLED, ignore_eos=True, logit_bias=((11, -2.0),)),
    ],
    ids=["greedy", "sampled", "penalties", "dry", "bias"],
)
def test_a_resumed_request_goes_on_as_the_first_would_have(
    engine: Engine, params: SamplingParams
) -> None:
    r = request(0, params=params)
    whole = engine.run(r)
    assert len(whole.tokens) > 8, "a text this short says nothing"
    for n in (1, 2, 7, len(whole.tokens) - 1):
        check(engine, whole, r, n)


def test_tokens_and_timings_count_once(engine: Engine) -> None:
    r = request(0)
    whole = engine.run(r)
    rest = check(engine, whole, r, 10)
    assert rest.timings.predicted_n == len(whole.tokens) - 10, "a life's timings are its own"
    assert rest.timings.prompt_n == whole.n_prompt + 10


def test_logprobs_are_those_of_the_same_tokens(engine: Engine) -> None:
    r = request(1, params=replace(GREEDY, logprobs=2))
    whole = engine.run(r)
    rest = check(engine, whole, r, 6)
    assert [p.token for p in rest.logprobs] == list(whole.tokens[6:])
    for a, b in zip(rest.logprobs, whole.logprobs[6:], strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-3)


def test_a_stop_string_may_begin_in_what_is_resumed(engine: Engine) -> None:
    plain = engine.run(request(0))
    tokens = plain.tokens
    for n in range(4, 12):  # every stop string begins in token n - 1 and ends in token n
        before, at, after = (text_of(engine, tokens[:k]) for k in (n - 1, n, n + 1))
        stop = after[len(before) + (len(at) > len(before) + 1) : len(at) + 1]
        if plain.text.find(stop) != len(before) + (len(at) > len(before) + 1):
            continue  # it occurs before, too
        r = request(0, stop=(stop,))
        whole, said = delivered(engine, r)
        assert whole.finish == "stop" and len(said) == n + 1
        check(engine, whole, r, n, said)
        return
    raise AssertionError("the text has no such place")


@pytest.mark.parametrize("how", ["stop", "length"])
def test_a_request_that_had_said_everything_ends_at_once(engine: Engine, how: str) -> None:
    """Its last tokens arrived, its last event did not."""
    plain = engine.run(request(0))
    stop = (plain.text[12:16],) if how == "stop" else ()
    r = request(0, stop=stop, max_tokens=20)
    whole, said = delivered(engine, r)
    assert whole.finish == how
    n_before = engine.metrics().rounds
    rest = check(engine, whole, r, len(said), said)
    assert rest.tokens == () and engine.metrics().rounds == n_before


def test_half_a_character_is_completed(engine: Engine) -> None:
    ids = engine.tokenizer.encode("naïve – 日本語 🙂 text", add_special=False)
    for n in range(1, len(ids)):
        stream = TextStream(engine.tokenizer, ("zzz",))
        stream.push(ids[:n])
        assert text_of(engine, ids[:n], ("zzz",)) + stream.push(ids[n:]).text == text_of(
            engine, ids, ("zzz",)
        )


def test_a_listener_hears_nothing_twice(engine: Engine) -> None:
    r = request(2)
    whole = engine.run(r)
    events = list(engine.run_stream(replace(r, resumed=whole.tokens[:5], timings_per_token=True)))
    told = [t for e in events if isinstance(e, Delta) for t in e.tokens]
    assert told == list(whole.tokens[5:]) and collect(events).n_predicted == len(whole.tokens)


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("kind", ["none", "mtp", "ngram"])
def test_texts_of_recurrent_models_go_on_with_every_drafter(kind: str) -> None:
    drafts = {} if kind == "none" else {"n_draft_max": 3, "n_draft_fixed": True}
    second: Rig = rig(QWEN35, np=3, spec_type=kind, ubatch=16, page_size=16, **drafts)
    heard = []
    for i, (prompt, tokens) in enumerate(known_texts(QWEN35).items()):
        n = (1, 5, 13)[i % 3]
        heard.append((tokens[n:], second.submit(prompt, len(tokens), resumed=tuple(tokens[:n]))))
    second.run()
    for tokens, h in heard:
        assert h.tokens == tokens and h.done.n_predicted == 30
    assert len(heard) > 5


def test_what_is_resumed_is_filed_like_any_prompt() -> None:
    r = plain_rig(QWEN35, page_size=16)
    prompt, tokens = max(known_texts(QWEN35).items(), key=lambda item: len(item[0]))
    r.generate(prompt, len(tokens), resumed=tuple(tokens[:20]))
    again = r.generate([*prompt, *tokens[:25]], 5)
    assert again.tokens == tokens[25:30] and again.timings.cache_n >= len(prompt)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"resumed": (1, 999_999)}, "resumed token 999999 is outside"),
        ({"resumed": (1,) * 41}, "41 tokens are resumed, more than the request may generate"),
        ({"resumed": (1,) * 512, "max_tokens": -1}, "512 tokens are resumed"),
        ({"resumed": (1.5,)}, "resumed"),
    ],
)
def test_what_can_not_be_resumed_is_refused(
    engine: Engine, values: dict[str, object], text: str
) -> None:
    with pytest.raises(RequestError, match=text):
        engine.run(request(0, **values))
