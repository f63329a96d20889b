"""Coding agents' requests on the demo model, which is recurrent: from the second turn on the prompt comes from the prefix cache.

A recurrent state can be continued only from a checkpoint, so this is the hard case; attention alone is easier.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from agent_traces import TEMPLATE, TRACES, used
from server_client import App, app_of

from pyspec.engine.api import Engine
from pyspec.server.app import create_app
from pyspec.server.settings import ServerSettings
from pyspec.text.template import ChatTemplate

ROPE_BASE = 1e7  # the demo model's own, as a flag: allows contexts beyond its trained length
DATE = re.compile(r"^Current time:")


class Templated:
    """An engine with another chat template: the demo model's own knows no tools."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.template = ChatTemplate(TEMPLATE)
        self.info = replace(engine.info, chat_template=TEMPLATE)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def load(ctx: int) -> Engine:
    return Engine.load(
        "demo", np=2, ctx=ctx, n_draft_max=2, n_draft_fixed=True, warm_up=False, check_tap_shift=False,
        rope_freq_base=ROPE_BASE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[Templated]:
    with load(2048) as loaded:
        yield Templated(loaded)


def ask(app: App, path: str, body: dict[str, Any]) -> dict[str, Any]:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    response = app.post(path, body | {"temperature": 0, limit: 4}, timeout=300)
    assert response.status_code == 200, response.text
    return response.json()


def counts(app: App, trace: str, scale: float, n: int) -> list[tuple[int, int]]:
    """Tokens of each prompt, and how many of them came from the cache."""
    path, bodies = TRACES[trace]
    return [used(path, ask(app, path, body)) for body in bodies(scale, n)]


@pytest.mark.sampled(most=1)
@pytest.mark.parametrize("trace", ["claude", pytest.param("codex", marks=pytest.mark.slow), "cline"])
def test_what_the_last_prompt_had_comes_from_the_cache(engine: Templated, trace: str) -> None:
    """All tokens except the loss at the end: a checkpoint lies on a page border, and 64 tokens from the next."""
    app = app_of(engine, volatile_lines=(DATE,))
    found = counts(app, trace, 0.03, 3)
    for (n_before, _), (n_prompt, n_cached) in pairwise(found):
        assert n_before - 128 <= n_cached < n_prompt, found
    path, bodies = TRACES[trace]
    last = bodies(0.03, 3)[-1]
    warm, cold = (ask(app, path, last | {"cache_prompt": on}) for on in (True, False))
    assert text(warm) == text(cold) and used(path, cold)[1] == 0 < used(path, warm)[1]


def text(answer: dict[str, Any]) -> object:
    if "choices" in answer:
        return answer["choices"][0]["message"]["content"]
    return answer["content"] if "content" in answer else answer["output"][0]["content"]


def test_a_date_that_is_not_moved_breaks_the_match_and_is_told(engine: Templated) -> None:
    """Nothing behind a changed token is used: there is no exact way to. Where that was is in the answer."""
    app = app_of(engine)
    bodies = TRACES["cline"][1](0.03, 2)
    first, second = (ask(app, "/v1/chat/completions", body) for body in bodies)
    assert second["timings"]["cache_n"] == 0 < second["timings"]["cache_break_at"] < 64
    assert first["timings"].get("cache_break_at", -1) < 64


@pytest.mark.slow
def test_nine_tenths_of_an_agents_prompt_come_from_the_cache() -> None:
    """At full size, from the second turn on."""
    with load(20_000) as loaded:
        app = App(create_app(Templated(loaded), ServerSettings(volatile_lines=(DATE,))))
        found = {trace: counts(app, trace, 1.0, 4) for trace in TRACES}
    for trace, ((first, _), *later) in found.items():
        assert first > 14_000, found
        assert min(n_cached / n_prompt for n_prompt, n_cached in later) >= 0.9, (trace, later)
