"""Sampling that a file recommends: the default without flags and options of requests, and harmless if it is damaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_rig import FIXTURES
from rewrite import rewrite
from sampling import few

from pyspec.engine.api import Engine
from pyspec.engine.recommended import KEYS, recommended
from pyspec.gguf.fields import Fields
from pyspec.request import DEFAULT_SAMPLERS, SamplingGiven, SamplingParams

PLAIN = SamplingParams()


def said(**values: object) -> SamplingParams:
    return recommended(
        Fields({f"general.sampling.{key}": value for key, value in values.items()}, "m.gguf: ")
    )


def test_every_key_of_llama_cpp_is_read() -> None:
    names = {key: rule.name for key, rule in KEYS.items()}
    numbers = {name: 2 if isinstance(getattr(PLAIN, name), int) else 0.375 for name in names.values()}
    assert said(**{key: numbers[name] for key, name in names.items()}) == replace(PLAIN, **numbers)
    assert len(KEYS) == 11 and said() == PLAIN


@pytest.mark.parametrize(
    ("key", "value", "field", "found"),
    [
        ("temp", 0.6000000238418579, "temperature", 0.6),  # as 32 bits hold it
        ("temp", -1.0, "temperature", 0.0),
        ("temp", 1, "temperature", 1.0),
        ("temp", "0.7", "temperature", 0.7),
        ("top_k", 20.0, "top_k", 20),
        ("top_k", -5, "top_k", 0),
        ("penalty_last_n", -1, "repeat_last_n", -1),
        ("sequence", "top_k;temperature", "samplers", ("top_k", "temperature")),
        ("sequence", "temp; Top-K ;nucleus;top_k", "samplers", ("temperature", "top_k", "top_p")),
        ("sequence", ";".join(DEFAULT_SAMPLERS), "samplers", ()),
    ],
)
def test_values_are_taken_as_llama_cpp_takes_them(
    key: str, value: object, field: str, found: object
) -> None:
    assert said(**{key: value}) == replace(PLAIN, **{field: found})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("temp", value) for value in (float("nan"), float("inf"), 1e9, True, "warm", [0.5], "9" * 999)),
        *(("top_p", value) for value in (-0.5, 1.5, "")),
        *(("mirostat", value) for value in (3, -1)),
        ("penalty_repeat", 0.0),
        ("penalty_last_n", -7),
        ("sequence", "magic;spells"),
        ("sequence", 7),
        ("sequence", ";" * 9999),
    ],
)  # fmt: skip
def test_what_means_nothing_is_told_and_left_out(
    key: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    assert said(**{key: value, "min_p": 0.25}) == replace(PLAIN, min_p=0.25)
    (line,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert line.startswith(f"m.gguf: general.sampling.{key} ") and line.isprintable() and len(line) < 200


def test_flags_go_before_the_file_even_where_they_say_the_usual() -> None:
    file = replace(PLAIN, temperature=0.25, top_k=7)
    given = SamplingGiven(replace(PLAIN, temperature=PLAIN.temperature), frozenset({"temperature"}))
    assert given.over(file) == replace(PLAIN, top_k=7)


@pytest.mark.parametrize("isolated", few([False, True], False))
def test_requests_of_programs_begin_with_what_the_file_recommends(
    isolated: bool, tmp_path: Path
) -> None:
    change = {"general.sampling.temp": 0.5, "general.sampling.top_k": 11, "general.sampling.xtc_threshold": 0.25}  # fmt: skip
    path = rewrite(FIXTURES / "llama.gguf", tmp_path / "m.gguf", change=change)
    recommends = SamplingParams(temperature=0.5, top_k=11, xtc_threshold=0.25)
    with Engine.load(path, None, ctx=64, device="cpu", warm_up=False, isolated=isolated) as engine:
        assert engine.info.sampling == recommends
        assert engine.request([1, 2]).params == recommends
        assert engine.request([1, 2], top_k=3).params == replace(recommends, top_k=3)
        assert engine.request([1, 2], params=None).params == recommends
        assert engine.request([1, 2], params=PLAIN, seed=4).params == replace(PLAIN, seed=4)
