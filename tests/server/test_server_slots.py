"""`POST /slots/{id}`: llama-server's answers, and names that lead elsewhere are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from server_client import App
from server_fakes import FakeEngine

from pyspec.errors import ConfigError
from pyspec.server.app import create_app
from pyspec.server.settings import ServerSettings


@pytest.fixture
def app(engine: FakeEngine, tmp_path: Path) -> App:
    return App(create_app(engine, ServerSettings(slot_save_path=str(tmp_path))))


def test_answers_are_those_of_llama_server(app: App, engine: FakeEngine, tmp_path: Path) -> None:
    saved = app.post("/slots/1?action=save", {"filename": "a.bin"}).json()
    assert saved == {
        "id_slot": 1,
        "filename": "a.bin",
        "n_saved": 84,
        "n_written": 4096,
        "timings": {"save_ms": 1.5},
    }
    restored = app.post("/slots/2?action=restore", {"filename": "a.bin"}).json()
    assert restored == {
        "id_slot": 2, "filename": "a.bin", "n_restored": 84, "n_read": 4096, "timings": {"restore_ms": 1.5},
    }  # fmt: skip
    assert app.post("/slots/0?action=erase", {}).json() == {"id_slot": 0, "n_erased": 84}
    assert [a.path for a in engine.acted] == [str(tmp_path / "a.bin")] * 2 + [""]


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "a\\b",
        "/etc/passwd",
        "a\0b",
        ".hidden",
        "x.",
        " x",
        "a..b",
        "x" * 201,
        'a"',
        "c:d",
        "\uff0e",
    ],
)
def test_names_that_are_no_plain_file_names_are_refused(app: App, engine: FakeEngine, name: str) -> None:
    for action in ("save", "restore"):
        answer = app.post(f"/slots/0?action={action}", {"filename": name})
        assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("filename: ")
    assert not engine.acted


def test_what_can_not_be_done_is_said(app: App, engine: FakeEngine) -> None:
    for path, body, says in [
        ("/slots/x?action=save", {"filename": "a"}, "no number"),
        ("/slots/99999999999?action=save", {"filename": "a"}, "no number"),
        ("/slots/0", {"filename": "a"}, "want save, restore or erase"),
        ("/slots/0?action=eat", {"filename": "a"}, "want save, restore or erase"),
        ("/slots/0?action=save", {}, "filename: field required"),
        ("/slots/0?action=save", {"filename": 5}, "filename: "),
        ("/slots/4?action=save", {"filename": "a"}, "slot 4 does not exist"),
    ]:
        answer = app.post(path, body)
        assert answer.status_code == 400 and says in answer.json()["error"]["message"]
    off = App(create_app(engine, ServerSettings())).post("/slots/0?action=save", {"filename": "a"})
    assert off.status_code == 400 and "--slot-save-path" in off.json()["error"]["message"]
    with pytest.raises(ConfigError, match="is no directory; make it first"):
        ServerSettings(slot_save_path="/nowhere/at/all").check()
