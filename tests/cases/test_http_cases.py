"""Requests over HTTP from public bug reports, sent to `pyspec server` with the demo model. Cases with the same settings share a server."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from case_files import DEMO, HERE, Case, cases_on, read, write_edited

from pyspec.cli import main
from pyspec.engine.api import Engine
from pyspec.server.app import create_app
from pyspec.server.http.serve import Served, make_server
from pyspec.server.settings import ServerSettings


def wanted(case: Case) -> str:
    """A case's server: flags, template and metadata, as text."""
    asked = read(case["input"])
    return json.dumps([asked.get("server") or [], asked.get("template"), asked.get("edit")])


SERVERS: dict[str, list[Case]] = {}
for _case in cases_on("http"):
    SERVERS.setdefault(wanted(_case), []).append(_case)


def flags_of(server: str, folder: Path) -> list[str]:
    flags, template, edit = json.loads(server)
    model = "demo"
    if edit:
        model = str(folder / "edited.gguf")
        write_edited(DEMO, Path(model), edit)
    flags = [str(folder) if flag == "$TMP" else flag for flag in flags]
    flags = flags if "-np" in flags else ["-np", "1", *flags]
    flags += ["--chat-template-file", str(HERE / "inputs" / template)] if template else []
    return [model, "-c", "4096", "--port", "0", "--in-process", "--no-warmup", *flags]


def serve(flags: list[str], use: Callable[[httpx.Client], None], patch: pytest.MonkeyPatch) -> None:
    """The command `pyspec server` in this process, which has torch already; it listens on a real port until `use` returns."""

    def run(
        load: Callable[[], Engine], settings: ServerSettings, ready: object, sockets: list[socket.socket]
    ) -> Served:
        engine, port = load(), sockets[0].getsockname()[1]
        started = threading.Event()
        server = make_server(create_app(engine, settings), settings, started.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": sockets})
        thread.start()
        try:
            assert started.wait(60)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
                use(client)
        finally:
            server.should_exit = True
            thread.join()
        return Served(engine, server.force_exit)

    patch.setattr("pyspec.server.http.serve.run", run)
    patch.setattr("pyspec.cli.logs.set_up", lambda *args: None)  # pytest has its own log handlers
    main(["server", *flags], standalone_mode=False)


def ask(client: httpx.Client, step: dict[str, Any]) -> tuple[int, Any]:
    answer = client.request(step["method"], step["path"], json=step.get("body"))
    if answer.text.startswith(("event:", "data:")):
        lines = [line[5:].strip() for line in answer.text.splitlines() if line.startswith("data:")]
        return answer.status_code, {"events": [json.loads(line) for line in lines if line != "[DONE]"]}
    return answer.status_code, answer.json()


def at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value


def wrong(client: httpx.Client, case: Case) -> str:
    """The flaw of the answer to the case's last step; "" if it has none."""
    for step in read(case["input"])["steps"]:
        status, answer = ask(client, step)
    expect = case["expect"]
    if status not in expect["status"]:
        return f"status {status}: {json.dumps(answer)[:300]}"
    for path, want in expect.get("is", {}).items():
        if (found := at(answer, path)) != want:
            return f"{path} is {found!r}, not {want!r}"
    for path, least in expect.get("at_least", {}).items():
        if (found := at(answer, path)) < least:
            return f"{path} is {found!r}, less than {least!r}"
    if (before := expect.get("json_behind")) is not None:
        text = before + "".join(
            c["delta"].get("content") or ""
            for event in answer["events"]
            for c in event.get("choices", ())
        )
        try:
            json.loads(text)
        except ValueError:
            return f"no JSON: {text!r}"
    return ""


@pytest.mark.parametrize("server", SERVERS, ids=lambda server: SERVERS[server][0]["id"])
def test_requests_are_answered(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults: dict[str, str] = {}

    def ask_all(client: httpx.Client) -> None:
        faults.update({case["id"]: wrong(client, case) for case in SERVERS[server]})

    serve(flags_of(server, tmp_path), ask_all, monkeypatch)
    assert faults and not {name: fault for name, fault in faults.items() if fault}
