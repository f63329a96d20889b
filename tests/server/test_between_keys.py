"""Clients with different API keys: their cached texts and slots are apart, unless the server is told otherwise."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server_client import App
from server_fakes import FakeEngine

from pyspec.cli.logs import JsonLines, TextLines
from pyspec.server.app import create_app
from pyspec.server.http.serve import make_server
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


def test_keys_may_save_slots_under_one_name(engine: FakeEngine, tmp_path: Path) -> None:
    paths = []
    for key in ("one", "two"):
        of(engine, key, slot_save_path=str(tmp_path)).post("/slots/1?action=save", {"filename": "x"})
        paths.append(Path(engine.acted[-1].path))
    assert paths[0] != paths[1] and {path.name for path in paths} == {"x"}
    assert all(path.parent.parent == tmp_path and path.parent.is_dir() for path in paths)
    shared = of(engine, "one", slot_save_path=str(tmp_path), cache_share=True)
    shared.post("/slots/1?action=save", {"filename": "x"})
    assert Path(engine.acted[-1].path) == tmp_path / "x"


@pytest.mark.parametrize(
    ("header", "client"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("2001:DB8::7", "2001:db8::7"),
        ("198.51.100.1, 203.0.113.7", "203.0.113.7"),
        ("fe80::1%\x1b[31mred", "fe80::1"),
        ("me\x1b[2J", ""),
        ("key 2c624232cdd221771", ""),
        ("unknown", ""),
    ],
)
def test_a_client_behind_a_proxy_is_an_address_or_nothing(
    engine: FakeEngine, header: str, client: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(create_app(engine, ServerSettings()), ServerSettings())
    server.config.load()
    app = App(server.config.loaded_app)
    caplog.set_level(logging.INFO, "pyspec.access")
    answer = app.post(
        "/v1/chat/completions", CHAT, headers={b"X-Forwarded-For": header.encode("latin-1")}
    )
    assert answer.status_code == 200
    assert engine.seen[-1].client == client
    (line,) = [r for r in caplog.records if r.name == "pyspec.access"]
    assert line.fields["client"] == (client or "-")  # type: ignore[attr-defined]


@pytest.mark.parametrize("form", [TextLines(), JsonLines()])
def test_lines_of_the_log_can_not_be_forged(form: logging.Formatter) -> None:
    text = "bad\x1b[2J\u202e \n12:00:00 I server: forged"
    record = logging.LogRecord("pyspec.server", logging.INFO, "", 0, "a %s", (text,), None)
    record.fields = {"path": text}
    try:
        raise ValueError(text)
    except ValueError:
        record.exc_info = sys.exc_info()
    written = form.format(record)
    assert not {"\x1b", "\u202e", "\x85"} & set(written) and "ValueError" in written
    assert not any(line.startswith("12:00:00 I server: forged") for line in written.splitlines())
