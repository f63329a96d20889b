"""Progress of a load: reported by the loader, shown by /health, logged from time to time."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from test_server_loading import Start, start  # noqa: F401  (a fixture)

from pyspec.catalog import resolve
from pyspec.config import EngineSettings, settings_from
from pyspec.engine.load.load import load
from pyspec.engine.process.supervisor import Supervisor
from pyspec.progress import listening, report
from pyspec.server.http import door
from pyspec.server.http.door import Door, LoadLog
from pyspec.server.settings import ServerSettings

FIXTURE = Path(__file__).parents[1] / "fixtures" / "qwen3.gguf"


def resolved(name: str) -> tuple[Path, EngineSettings]:
    target, draft = resolve(name)
    return target, settings_from(
        {"np": 1, "ctx": 64, "device": "cpu", "draft_path": draft, "warm_up": False}
    )


SMALL = {"np": 1, "ctx": 64, "device": "cpu", "spec_type": "none"}


def test_a_load_tells_its_stages_in_order_and_weights_by_their_bytes():
    heard: list[tuple[str, float]] = []
    with listening(lambda *said: heard.append(said)):
        load(FIXTURE, settings_from(SMALL))
    stages = list(dict.fromkeys(stage for stage, _ in heard))
    assert stages == ["weights", "drafter", "graphs and warm-up"]
    shares = [part for stage, part in heard if stage == "weights"]
    assert shares == sorted(shares) and shares[-1] == 1 and len(set(shares)) > 5
    n = len(heard)
    report("late", 0.5)
    assert len(heard) == n


def test_what_is_read_of_a_drafter_is_told_as_the_drafter():
    heard: list[tuple[str, float]] = []
    with listening(lambda *said: heard.append(said)):
        load(*resolved("demo"))
    for stage in ("weights", "drafter"):
        shares = [part for told, part in heard if told == stage]
        assert shares == sorted(shares) and len(set(shares)) > 5, stage


@pytest.mark.slow
def test_an_engine_in_its_own_process_tells_them_too(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "pyspec")
    heard: list[str] = []
    with listening(lambda stage, part: heard.append(stage)):
        supervisor = Supervisor(FIXTURE, settings_from(SMALL | {"warm_up": False}))
        try:
            supervisor.wait()
        finally:
            supervisor.close()
    assert {"weights", "drafter"} <= set(heard)
    loaded = [r.fields for r in caplog.records if getattr(r, "fields", {}).get("event") == "loaded"]  # type: ignore[attr-defined]
    assert [fields["stage"] for fields in loaded] == ["weights", "drafter"], "fields of lines come along"


def test_health_shows_the_stage_while_it_loads(start: Start):  # noqa: F811
    start.server[0].door.loading = {"stage": "weights", "fraction": 0.25}
    answer = httpx.get(f"{start.url}/health")
    assert answer.status_code == 503 and answer.json()["progress"] == {
        "stage": "weights",
        "fraction": 0.25,
    }
    assert answer.json()["error"]["message"] == "Loading model"


def test_a_person_who_looks_gets_a_page_that_says_how_far_it_is(start: Start):  # noqa: F811
    at_door = start.server[0].door
    first = httpx.get(f"{start.url}/")
    at_door.loading = {"stage": "download <m>.gguf", "fraction": 0.375}
    page = httpx.get(f"{start.url}/", headers={"Accept": "text/html"})
    for answer in (first, page):
        assert answer.status_code == 503 and answer.headers["content-type"].startswith("text/html")
        assert 'http-equiv="refresh"' in answer.text and "<script" not in answer.text
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "download &lt;m&gt;.gguf: 38 %" in page.text
    assert '<progress max="1" value="0.375">' in page.text
    assert httpx.post(f"{start.url}/").json()["error"]["message"] == "Loading model"
    at_door.settings = replace(at_door.settings, page=False)
    assert httpx.get(f"{start.url}/").json()["error"]["message"] == "Loading model"
    start.go.set()
    assert start.is_ready.wait(20)


def test_a_download_is_told_at_each_tenth_or_every_half_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    now = [0.0]
    monkeypatch.setattr(door.time, "monotonic", lambda: now[0])
    caplog.set_level(logging.INFO, "pyspec.server.http.door")
    at_door = Door(ServerSettings())
    tell = LoadLog(at_door)
    for i in range(251):  # a quarter of the file in 100 s
        now[0] = 0.4 * i
        tell("download m.gguf", i / 1000)
    told = [r.fields["fraction"] for r in caplog.records]  # type: ignore[attr-defined]
    assert told == [0.0, 0.075, 0.1, 0.175, 0.2]
    assert all(r.fields["stage"] == "download m.gguf" for r in caplog.records)  # type: ignore[attr-defined]
    caplog.clear()
    monkeypatch.setattr(door.sys.stderr, "isatty", lambda: True, raising=False)
    tell("download m.gguf", 0.5)
    assert not caplog.records and at_door.loading["fraction"] == 0.5, "a terminal has a bar"


def test_lines_come_now_and_then_with_fields(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    now = [0.0]
    monkeypatch.setattr(door.time, "monotonic", lambda: now[0])
    caplog.set_level(logging.INFO, "pyspec.server.http.door")
    at_door = Door(ServerSettings())
    tell = LoadLog(at_door)
    for i in range(100):
        now[0] = i / 10
        tell("weights", i / 100)
    assert at_door.loading == {"stage": "weights", "fraction": 0.99}
    assert [r.fields for r in caplog.records] == [  # type: ignore[attr-defined]
        {"event": "loading", "stage": "weights", "fraction": 0.2},
        {"event": "loading", "stage": "weights", "fraction": 0.7},
    ]
