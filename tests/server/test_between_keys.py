"""Clients with different API keys: their cached texts and slots are apart, unless the server is told otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server_client import App
from server_fakes import FakeEngine

from pyspec.server.app import create_app
from pyspec.server.settings import ServerSettings

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def of(engine: FakeEngine, key: str, **settings: Any) -> App:
    values = {"api_keys": ("one", "two")} | settings
    return App(create_app(engine, ServerSettings(**values)), {"Authorization": f"Bearer {key}"})


def salts(engine: FakeEngine, **settings: Any) -> list[str]:
    for key in ("one", "two", "one"):
        assert of(engine, key, **settings).post("/v1/chat/completions", CHAT).status_code == 200
    return [request.cache_salt for request in engine.seen]


def test_each_key_has_cached_texts_of_its_own(engine: FakeEngine) -> None:
    one, two, again = salts(engine)
    assert one and two and one != two and one == again
    assert not any(secret in salt for secret in ("one", "two") for salt in (one, two))


@pytest.mark.parametrize(
    "settings",
    [{"cache_share": True}, {"api_keys": ("one",)}, {"api_keys": ()}, {"api_keys": ("one", "one")}],
)
def test_without_several_keys_or_with_the_flag_all_share_them(
    engine: FakeEngine, settings: dict[str, Any]
) -> None:
    app = of(engine, "one", **settings)
    assert app.post("/v1/chat/completions", CHAT).status_code == 200
    assert [request.cache_salt for request in engine.seen] == [""]


def test_slots_of_another_key_are_shown_as_busy_only(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (mine, *_), rows = salts(engine), engine.slots()
    busy = [
        replace(row, is_processing=True, request="r7", n_prompt=100, n_decoded=7, cache_salt=salt)
        for row, salt in zip(rows, (mine, "another", ""), strict=False)
    ]
    monkeypatch.setattr(engine, "slots", lambda: busy)
    own, other, nobody = of(engine, "one").get("/slots").json()
    assert own["request"] == nobody["request"] == "r7" and own["n_prompt_tokens"] == 100
    assert other["is_processing"] and not other["request"] and not other["n_prompt_tokens"]
    assert other["next_token"][0]["n_decoded"] == 0
    of(engine, "one", slot_save_path=str(tmp_path)).post("/slots/1?action=erase", {})
    assert engine.acted[-1].cache_salt == engine.acted[-1].client == mine
