"""A text under a grammar is the same with any drafter, number of slots and neighbours; and it matches the grammar."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import jsonschema
import pytest
from draft_fakes import FAKES
from engine_rig import DEMO, DEMO_DRAFT, FIXTURES, GREEDY, Heard, Rig, every_rig, plain_rig, rig, rig_for
from known_texts import demo_prompts, known_texts
from schemas import whole

from pyspec.config import EngineSettings
from pyspec.constrain import constraint
from pyspec.engine.api import Engine, collect
from pyspec.engine.loop.job import Job
from pyspec.engine.process.supervisor import Supervisor
from pyspec.errors import GrammarTooLarge, RequestError
from pyspec.request import Grammar, Request, SamplingParams

QWEN35 = FIXTURES / "qwen35.gguf"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": Grammar(kind="json_schema", source=json.dumps(PERSON)),
    "any": Grammar(kind="json_schema", source="{}"),
    "gbnf": Grammar(kind="gbnf", source='root ::= ("- " [a-z]{1,9} "\\n"){2,4}'),
    "regex": Grammar(kind="regex", source="[a-z ]{8,30}[.]"),
    "after": Grammar(kind="regex", source="(yes|no), [a-z]{1,8}", after=" the"),
}
ENDING = replace(GREEDY, ignore_eos=False)
SAMPLED = SamplingParams(seed=3, temperature=0.9)


def fixed(**settings: object) -> Rig:
    return rig(QWEN35, n_draft_fixed=True, **settings)


MAKERS: dict[str, Callable[..., Rig]] = {
    "mtp": lambda **s: fixed(spec_type="mtp", n_draft_max=4, **s),
    "ngram": lambda **s: fixed(spec_type="ngram", ngram_match=1, **s),
    "suffix": lambda **s: fixed(spec_type="mtp,suffix", n_draft_max=2, suffix_n_max=5, **s),
    "liar": lambda **s: rig_for(QWEN35, FAKES["liar"](5, text=lambda tokens, n: [7] * n), **s),
    "none": lambda **s: rig(QWEN35, spec_type="none", **s),
}


def answers(r: Rig, prompts: list[tuple[int, ...]], params: SamplingParams, n: int = 40) -> list[Heard]:
    """Each prompt under each grammar, and free between them, with staggered joins."""
    heard = []
    for i, prompt in enumerate(prompts):
        for name in GRAMMARS:
            heard.append(
                r.submit(prompt, n, replace(params, seed=params.seed + i), grammar=GRAMMARS[name])
            )
            r.loop.step()
        heard.append(r.submit(prompt, 12, GREEDY))
    r.run()
    return heard


@pytest.fixture
def flown() -> Iterator[None]:
    """Loops fly ahead, and fill masks while they wait, on a CPU, too."""
    with every_rig(lambda r: r.run_ahead(defers=True)):
        yield


@cache
def plain_answers(
    path: Path, prompts: tuple[tuple[int, ...], ...], params: SamplingParams, n: int = 40
) -> list[Heard]:
    """Of one slot, without drafts."""
    return answers(plain_rig(path, ctx=512), list(prompts), params, n)


def parsed(heard: Heard) -> None:
    """A text that ended by itself matches its grammar."""
    if (
        heard.finish in ("eos", "stop")
        and heard.request.grammar is not None
        and heard.request.grammar.kind == "json_schema"
    ):
        jsonschema.validate(json.loads(heard.text), json.loads(heard.request.grammar.source))


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("np", [1, 2, 4, 8])
@pytest.mark.parametrize("params", [ENDING, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["mtp", "ngram", "suffix", "liar", "none"])
def test_a_constrained_text_does_not_depend_on_drafts_or_neighbours(
    kind: str, params: SamplingParams, np: int
) -> None:
    prompts = list(known_texts(QWEN35, 2))
    want = plain_answers(QWEN35, tuple(prompts), params)
    found = answers(MAKERS[kind](np=np, ubatch=40), prompts, params)
    for a, b in zip(want, found, strict=True):
        assert (b.tokens, b.finish, b.text) == (a.tokens, a.finish, a.text)
        parsed(b)
    assert any(h.finish == "stop" for h in found) and {h.finish for h in found} <= {"stop", "eos", "length"}  # fmt: skip


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("np", [1, 4, 8])
@pytest.mark.parametrize("params", [ENDING, SAMPLED], ids=["greedy", "sampled"])
def test_the_packaged_pair_keeps_grammars_with_its_drafter(params: SamplingParams, np: int) -> None:
    prompts = [demo_prompts()[0][0]]
    want = plain_answers(DEMO, tuple(prompts), params, 24)
    found = answers(
        rig(DEMO, np=np, ctx=512, draft_path=DEMO_DRAFT, n_draft_max=5, n_draft_fixed=True),
        prompts,
        params,
        24,
    )
    for a, b in zip(want, found, strict=True):
        assert (b.tokens, b.finish, b.text) == (a.tokens, a.finish, a.text)
        parsed(b)
    assert sum(h.timings.draft_n_accepted for h in found) > 0


@pytest.mark.sampled(1, most=1)
@pytest.mark.parametrize("calm", [0, 32])
@pytest.mark.parametrize("params", [ENDING, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("kind", "np"), [("mtp", 3), ("ngram", 8), ("suffix", 5), ("none", 4)])
def test_who_flies_ahead_beside_a_grammar_says_the_same(
    kind: str,
    np: int,
    params: SamplingParams,
    calm: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constraint, "CALM", calm)
    prompts = list(known_texts(QWEN35, 2))[:1]
    want = plain_answers(QWEN35, tuple(prompts), params)
    request.getfixturevalue("flown")
    found = answers(MAKERS[kind](np=np, ubatch=40), prompts, params)
    assert [(h.tokens, h.finish, h.text) for h in found] == [(h.tokens, h.finish, h.text) for h in want]


@pytest.mark.slow
@pytest.mark.parametrize("np", [1, 4, 8])
def test_the_packaged_pair_flies_ahead_under_grammars(
    np: int, flown: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt for prompt, _ in demo_prompts()[:2]]
    monkeypatch.setattr(constraint, "CALM", 10**6)  # for every request
    want = answers(rig(DEMO, np=1, ctx=512, spec_type="none"), prompts, ENDING)
    monkeypatch.setattr(constraint, "CALM", 0)
    r = rig(DEMO, np=np, ctx=512, draft_path=DEMO_DRAFT, n_draft_max=5, n_draft_fixed=True)
    flights, launch_next = [], r.loop.launch_next
    monkeypatch.setattr(
        r.loop, "launch_next", lambda flight: flights.append(launch_next(flight)) or flights[-1]
    )
    found = answers(r, prompts, ENDING)
    for a, b in zip(want, found, strict=True):
        assert (b.tokens, b.finish, b.text) == (a.tokens, a.finish, a.text)
        parsed(b)
    if (
        np < 8
    ):  # all twelve at once: no request is seated in the middle, and hardly a round is launched ahead
        assert any(f.refused for f in flights if f is not None), (
            "drafts of the device that a grammar does not take"
        )


@pytest.fixture(scope="module")
def small() -> Rig:
    """Two slots, n-grams."""
    return rig(QWEN35, np=2, spec_type="ngram", ngram_match=1, n_draft_fixed=True)


PROMPT = (5, 6, 7)


def under(
    r: Rig, kind: str, source: str, params: SamplingParams = ENDING, n: int = 40, **request: object
) -> Heard:
    return r.generate(PROMPT, n, params, grammar=Grammar(kind=kind, source=source), **request)  # type: ignore[arg-type]


def test_forced_text_is_drafted_where_the_drafter_knows_nothing(small: Rig) -> None:
    words = "the only words that can be said here"
    h = under(small, "lark", f"start: {json.dumps(words)}")
    assert (h.text, h.finish) == (words, "stop")
    plain = under(plain_rig(QWEN35), "lark", f"start: {json.dumps(words)}")
    assert plain.tokens == h.tokens and plain.timings.draft_n == 0
    assert h.timings.draft_n_accepted > 0 and h.timings.n_rounds < plain.timings.n_rounds
    assert under(small, "lark", f"start: {json.dumps(words)}", n_draft_max=0).timings.draft_n == 0


def test_a_drafter_hears_that_a_grammar_refuses_its_drafts() -> None:
    """Else it would be asked for ever: an empty draft looks as if there had been none."""
    r = plain_rig(QWEN35)
    brace = r.tokenizer.encode_inside("}")[0]
    r = rig_for(QWEN35, FAKES["liar"](5, text=lambda tokens, n: [brace - 1] * n), np=1)
    under(r, "regex", "[a-z]{60}", n=60)
    (texts,) = r.loop.controller.texts.grammars.values()
    r.loop.controller.texts.learn()
    assert texts.seen[0] > 0.5 and texts.right[0] == 0.0


def test_a_schema_is_drafted_from_what_texts_under_it_said(small: Rig) -> None:
    source = '[a-z]{3}-"same"-[0-9]{3}-(yes|no)'
    first, second = under(small, "regex", source), under(small, "regex", source)
    assert first.tokens == second.tokens and second.timings.n_rounds < 0.6 * first.timings.n_rounds
    assert first.tokens == under(plain_rig(QWEN35), "regex", source).tokens


def test_a_text_that_ends_where_no_end_is_allowed_ends_with_drafts_as_without(small: Rig) -> None:
    """The last token is no draft: nothing may follow it, and with `ignore_eos` not even an end."""
    source = "[a-c]{4}(ok|no)"
    want = under(plain_rig(QWEN35), "regex", source, GREEDY)
    for _ in range(4):
        h = under(small, "regex", source, GREEDY)
        assert (h.tokens, h.finish, h.error) == (want.tokens, "stop", None)
    assert h.timings.draft_n_accepted > 0


def test_a_dead_end_ends_its_request_with_words_and_nobody_elses(small: Rig) -> None:
    other = small.submit((9, 9), 30)
    h = under(small, "lark", 'start: "go " ("deep" dead)\ndead: dead "x"')
    small.run()
    assert h.error is not None and "grammar" in str(h.error)
    assert len(other.tokens) == 30


def test_a_ban_holds_under_a_grammar_and_one_that_leaves_nothing_ends_the_request(small: Rig) -> None:
    e = small.tokenizer.encode_inside
    free = under(small, "regex", "[ab]{6}")
    banned = tuple(
        (t, float("-inf")) for t in range(small.info.n_vocab) if b"a" in small.tokenizer.token_bytes(t)
    )
    assert under(small, "regex", "[ab]{6}", replace(ENDING, logit_bias=banned)).text == "bbbbbb"
    assert len(free.text) == 6
    dead = under(small, "regex", "a{6}", replace(ENDING, logit_bias=banned))
    assert dead.error is not None and "dead end" in str(dead.error) and e("a")


def test_ignoring_ends_goes_on_as_long_as_the_grammar_can(small: Rig) -> None:
    assert len(under(small, "regex", "[a-z]+", GREEDY, n=20).tokens) == 20
    assert under(small, "regex", "[a-z]{5}", GREEDY).finish == "stop"


def test_a_stop_string_ends_a_constrained_text_before_its_grammar_does(small: Rig) -> None:
    h = under(small, "lark", 'start: "one two three"', stop=("two",))
    assert (h.text, h.finish, h.done.stop_string) == ("one ", "stop", "two")


def test_logprobs_are_the_models_own(small: Rig) -> None:
    h = under(small, "regex", "[ab]{4}", replace(ENDING, logprobs=2))
    assert h.finish == "stop" and h.text and set(h.text) <= set("ab")


@pytest.mark.sampled(most=2)
@pytest.mark.parametrize("params", [ENDING, replace(SAMPLED, top_k=0, top_p=1.0), replace(SAMPLED, top_n_sigma=2.0), replace(SAMPLED, repeat_penalty=1.3),
                                    replace(ENDING, repeat_penalty=1.3)], ids=["greedy", "full", "stepwise", "penalties", "edited"])  # fmt: skip
def test_what_is_resumed_goes_on_in_its_place_of_the_grammar(small: Rig, params: SamplingParams) -> None:
    whole = under(small, "json_schema", json.dumps(PERSON), params)
    assert len(whole.tokens) > 8
    for n in (1, 5, len(whole.tokens) - 1):
        rest = under(small, "json_schema", json.dumps(PERSON), params, resumed=tuple(whole.tokens[:n]))
        assert [*whole.tokens[:n], *rest.tokens] == whole.tokens and rest.finish == whole.finish


@pytest.fixture(scope="module")
def isolated() -> Iterator[Engine]:
    """In a process of its own, which is replaced when it dies."""
    settings = EngineSettings(
        np=4, ctx=512, draft_path=DEMO_DRAFT, warm_up=False, device="cpu", kv_type="f32"
    )
    with Engine.from_settings(DEMO, settings, isolated=True) as engine:
        yield engine


@pytest.mark.slow
def test_a_replaced_engine_goes_on_in_its_place_of_the_grammar(isolated: Engine) -> None:
    r = Request(prompt=demo_prompts()[0][0], params=SAMPLED, max_tokens=60, grammar=GRAMMARS["schema"])
    whole = isolated.run(r)
    assert whole.finish == "stop"
    jsonschema.validate(json.loads(whole.text), PERSON)
    core, events = isolated.core, []
    assert isinstance(core, Supervisor)
    for event in isolated.run_stream(replace(r, timings_per_token=True)):
        events.append(event)
        if len(events) == 3:
            assert core._child is not None
            os.kill(core._child.process.pid, signal.SIGKILL)
    again = collect(events)
    assert isolated.metrics().restarts == 1
    assert (again.tokens, again.text, again.finish) == (whole.tokens, whole.text, whole.finish)


@pytest.mark.slow
def test_a_grammar_that_can_not_be_kept_is_refused_before_it_gets_there(isolated: Engine) -> None:
    with pytest.raises(RequestError, match="the json_schema can not be used"):
        isolated.run(
            Request(prompt=(5, 6), grammar=Grammar(kind="json_schema", source='{"type": "wombat"}'))
        )


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_two_hundred_schemas_with_drafts_give_text_that_each_holds_of(part: int) -> None:
    r = rig(DEMO, np=8, ctx=640, draft_path=DEMO_DRAFT, n_draft_max=5, n_draft_fixed=True)
    prompt, heard = demo_prompts()[0][0], []
    for seed in range(part, 216, 8):
        wanted = whole(random.Random(seed))
        params, source = replace(SAMPLED, seed=seed, temperature=0.5 + seed % 3), json.dumps(wanted)
        with suppress(RequestError):  # refused before its first token
            heard.append(
                (
                    wanted,
                    r.submit(prompt, 560, params, grammar=Grammar(kind="json_schema", source=source)),
                )
            )
    while not r.loop.is_idle:
        r.loop.step()
    assert len(heard) >= 25
    for wanted, h in heard:
        assert h.finish in ("stop", "eos"), f"{h.finish}: {h.text[-100:]!r} of {wanted}"
        jsonschema.Draft202012Validator(wanted).validate(json.loads(h.text))


def test_a_grammar_that_grows_too_large_ends_its_request_and_is_no_error_of_the_server_s(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(700)}}
    r = rig(QWEN35, spec_type="none")
    with caplog.at_level(logging.DEBUG, "pyspec.engine.loop.commit"):
        neighbour = r.submit((5, 6, 7), 12, GREEDY)
        hostile = r.submit(
            (3, 4, 5), 12, GREEDY, grammar=Grammar(kind="json_schema", source=json.dumps(wide))
        )
        r.run()
    assert isinstance(hostile.error, GrammarTooLarge)
    assert neighbour.error is None
    assert len(neighbour.tokens) == 12
    (told,) = [record for record in caplog.records if "failed in slot" in record.getMessage()]
    assert told.levelno == logging.WARNING


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("model", [DEMO, QWEN35], ids=["demo", "recurrent"])
def test_so_does_one_whose_prompt_was_there_to_its_end(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first token is chosen from the cached logits, without a round: a failure there is its own, too."""
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(700)}}
    r, prompt = rig(model, spec_type="none"), (3, 4, 5, 6)
    r.loop.raises_bugs = True  # as in a process of its own, where a bug ends the engine
    started: list[Job] = []
    start = r.loop.committer.start
    monkeypatch.setattr(
        r.loop.committer, "start", lambda job, c: (started.append(job), start(job, c))[1]
    )
    plain = [r.generate(prompt, 6, GREEDY).tokens]
    for _ in range(2):
        hostile = r.submit(
            prompt, 6, GREEDY, grammar=Grammar(kind="json_schema", source=json.dumps(wide))
        )
        neighbour = r.submit(prompt, 6, GREEDY)
        r.run()
        assert isinstance(hostile.error, GrammarTooLarge)
        assert not hostile.tokens
        assert neighbour.error is None
        plain.append(neighbour.tokens)
    assert plain[0] == plain[1] == plain[2] and r.loop.is_idle
    assert started, "the case is about these"
