"""Legal values of a request: every field refuses meaningless values, in one line with field, value and range."""

from __future__ import annotations

import math
import pickle
from dataclasses import fields, replace

import pytest

from pyspec.errors import RequestError
from pyspec.ranges import Many, OneOf, Pair, Real, Text, Whole, rules_of, shown
from pyspec.request import Request, SamplingParams, check_request

HOSTILE = (
    -(10**9),
    10**30,
    10**5000,
    1.5,
    math.nan,
    math.inf,
    -math.inf,
    True,
    "x",
    "",
    b"x",
    None,
    [],
    (5,),
    {},
    object(),
)
GOOD = Request(prompt=(1, 2))


@pytest.mark.parametrize("owner", [Request, SamplingParams])
def test_every_field_says_what_it_takes_and_its_default_is_legal(owner: type) -> None:
    assert [rule.name for rule in rules_of(owner)] == [f.name for f in fields(owner)]
    check_request(GOOD)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"max_tokens": 1.5}, "max_tokens is 1.5; want a whole number from -1 to 2147483647"),
        ({"max_tokens": -2}, "max_tokens is -2; want a whole number"),
        ({"max_tokens": True}, "max_tokens is True; want a whole number"),
        ({"stop": (5,)}, r"stop\[0\] is 5; want text"),
        ({"stop": "end"}, "stop is 'end'; want a tuple"),
        ({"slot": 1.5}, "slot is 1.5; want"),
        ({"prompt": (1, "2")}, r"prompt\[1\] is '2'; want a token id"),
        ({"prompt": (1, True)}, r"prompt\[1\] is True; want a token id"),
        ({"prompt": "text"}, "prompt is 'text'; want a tuple of token ids"),
        ({"n_draft_max": -1}, "n_draft_max is -1; want .* or None"),
        ({"params": None}, "params is None; want a SamplingParams"),
        ({"max_predict_ms": math.nan}, "max_predict_ms is nan; want a number from 0"),
        ({"cache_prompt": 1}, "cache_prompt is 1; want one of True, False"),
    ],
)
def test_a_request_with_a_wrong_field_is_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        check_request(replace(GOOD, **changes))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"top_k": "x"}, "top_k is 'x'; want a whole number"),
        ({"top_p": math.nan}, "top_p is nan; want a number from 0 to 1"),
        ({"top_p": 1.01}, "top_p is 1.01; want a number from 0 to 1"),
        ({"repeat_penalty": 0}, "repeat_penalty is 0; want a number from 1e-06 to 100"),
        ({"temperature": -101}, "temperature is -101; want"),
        ({"logprobs": 1.0}, "logprobs is 1.0; want .* or None"),
        ({"logit_bias": ((1, math.inf),)}, r"logit_bias\[0\] is inf; want .* or -inf"),
        ({"logit_bias": (3,)}, r"logit_bias\[0\] is 3; want a pair"),
        ({"dry_sequence_breakers": (b"x",)}, r"dry_sequence_breakers\[0\]"),
        ({"seed": 2**64}, "seed is 18446744073709551616; want"),
    ],
)
def test_sampling_parameters_that_mean_nothing_are_refused(changes: dict[str, object], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        check_request(replace(GOOD, params=replace(SamplingParams(), **changes)))


@pytest.mark.parametrize("owner", [Request, SamplingParams])
def test_a_hostile_value_is_legal_or_refused_in_one_line(owner: type) -> None:
    for rule in rules_of(owner):
        for value in HOSTILE:
            try:
                if owner is Request:
                    check_request(replace(GOOD, **{rule.name: value}))
                else:
                    check_request(replace(GOOD, params=replace(SamplingParams(), **{rule.name: value})))
            except RequestError as e:
                assert str(e).startswith(rule.name)
                assert "want" in str(e)
                assert "\n" not in str(e)
                assert len(str(e)) < 200


def test_a_ban_and_a_list_are_legal() -> None:
    params = SamplingParams(logit_bias=((3, -math.inf), (4, 2)), temperature=0)
    check_request(replace(GOOD, prompt=[1, 2], stop=["x"], params=params))
    assert pickle.loads(pickle.dumps(GOOD)) == GOOD


def test_what_is_no_request_is_refused() -> None:
    with pytest.raises(RequestError, match=r"not a dict"):
        check_request({"prompt": (1,)})  # type: ignore[arg-type]


def test_values_are_shown_short_and_on_one_line() -> None:
    assert shown("a\x1b\n") == r"'a\x1b\n'"
    assert len(shown("x" * 999)) == 40
    assert shown(10**9999) == "a huge number"


def test_kinds_say_what_they_want() -> None:
    assert (
        Whole(0, 9, "0: automatic").flaw(10) == "is 10; want a whole number from 0 to 9 (0: automatic)"
    )
    assert Real(0, 1).flaw(2) == "is 2; want a number from 0 to 1" and not Real(0, 1).flaw(1)
    assert OneOf((16, 32)).flaw(True) == "is True; want one of 16, 32" and not OneOf((16, 32)).flaw(16)
    assert (
        Many(Pair(Whole(0, 1), Text())).flaw([(0, "a"), (2, "b")])
        == "[1] is 2; want a whole number from 0 to 1"
    )


@pytest.mark.parametrize("given", [-0.5, -1, -100])
def test_a_temperature_below_zero_is_greedy(given: float) -> None:
    """As in llama.cpp, from the command line, HTTP and Python alike."""
    params = SamplingParams(temperature=given)
    assert params == SamplingParams(temperature=0.0) and params.greedy
    assert replace(SamplingParams(), temperature=given).temperature == 0.0
    check_request(replace(GOOD, params=params))
