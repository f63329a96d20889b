"""Every example runs unchanged. One engine serves them all, because they do not show the cost of a load."""

from __future__ import annotations

import json
import runpy
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

import pyspec
from pyspec.server.app import create_app
from pyspec.server.http.serve import bind, make_server
from pyspec.server.settings import ServerSettings

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SAYS = {
    "stream.py": ["tokens in", "drafts accepted"],
    "json_answer.py": ["years old", "well"],
    "tools.py": ["the model calls price({'what': '"],
    "many.py": [f"What is {n} x {n + 1}? " for n in range(2, 10)],
}


class Lent:
    """An engine in a with block that does not close it."""

    def __init__(self, engine: pyspec.Engine) -> None:
        self._engine = engine

    def __enter__(self) -> pyspec.Engine:
        return self._engine

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def engine() -> Iterator[pyspec.Engine]:
    with pyspec.Engine.load("demo", np=4, ctx=512, warm_up=False, device="cpu") as engine:
        yield engine


@pytest.fixture(autouse=True)
def lent(engine: pyspec.Engine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Loads return the one engine, and their parameters are recorded."""
    loads: list[tuple[Any, Any]] = []

    def load(*args: Any, **settings: Any) -> Lent:
        loads.append((args, settings))
        return Lent(engine)

    monkeypatch.setattr(pyspec.Engine, "load", load)
    return loads


def test_all_examples_are_here_and_in_the_list() -> None:
    names = {
        path.name for path in EXAMPLES.iterdir() if path.is_file() and path.suffix in (".py", ".ipynb")
    }
    assert names == {*SAYS, "client.py", "fastapi_app.py", "notebook.ipynb", "ray_serve.py"}
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"({name})" in listed for name in names)


@pytest.mark.parametrize("name", SAYS)
def test_a_program_runs_and_says_what_it_promises(
    name: str, lent: list[tuple[Any, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    said = capsys.readouterr().out
    assert all(text in said for text in SAYS[name]), said
    assert [args for args, _ in lent] == [("demo",)]


def test_the_client_hears_the_same_answer_twice(
    engine: pyspec.Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ServerSettings(port=0)
    sock = bind(settings)
    started = threading.Event()
    server = make_server(create_app(engine, settings), settings, started.set)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        assert started.wait(60)
        monkeypatch.setattr(sys, "argv", ["client.py", f"http://127.0.0.1:{sock.getsockname()[1]}"])
        runpy.run_path(str(EXAMPLES / "client.py"), run_name="__main__")
    finally:
        server.should_exit = True
        thread.join(30)
    whole, streamed = capsys.readouterr().out.splitlines()
    assert whole == streamed != ""


def test_the_application_streams_an_answer(lent: list[tuple[Any, Any]]) -> None:
    app = runpy.run_path(str(EXAMPLES / "fastapi_app.py"))["app"]
    with TestClient(app) as client:
        assert "12" in client.get("/ask", params={"question": "What is 3 x 4?"}).text
        assert client.get("/ask").status_code == 422
    assert lent[0][1] == {"np": 4, "isolated": True}


def test_the_notebook_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        assert cell.get("outputs", []) == [], "a notebook is kept without its outputs"
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    said = capsys.readouterr().out
    assert "12" in said and "drafts accepted" in said
