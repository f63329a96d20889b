"""Requests over HTTP from public bug reports, sent to `pyspec server` with the demo model. Cases with the same settings share a server."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from case_files import DEMO, HERE, Case, cases_on, read, write_edited


def wanted(case: Case) -> str:
    """A case's server: flags, template and metadata, as text."""
    asked = read(case["input"])
    return json.dumps([asked.get(name) for name in ("server", "template", "edit")])


SERVERS: dict[str, list[Case]] = {}
for _case in cases_on("http"):
    SERVERS.setdefault(wanted(_case), []).append(_case)


@contextmanager
def serving(server: str, folder: Path) -> Iterator[httpx.Client]:
    flags, template, edit = json.loads(server)
    model = "demo"
    if edit:
        model = str(folder / "edited.gguf")
        write_edited(DEMO, Path(model), edit)
    flags = [str(folder) if flag == "$TMP" else flag for flag in flags or ()]
    flags = flags if "-np" in flags else ["-np", "1", *flags]
    flags += ["--chat-template-file", str(HERE / "inputs" / template)] if template else []
    command = [sys.executable, "-m", "pyspec", "server", model, "-c", "4096", "--port", "0", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("url "):
                break
        else:
            pytest.fail("".join(said))
        threading.Thread(target=process.stderr.read, daemon=True).start()
        with httpx.Client(base_url=said[-1].split()[1], timeout=120) as client:
            while client.get("/health").status_code != 200:
                assert process.poll() is None
                threading.Event().wait(0.1)
            yield client
    finally:
        process.terminate()
        process.wait()


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
def test_requests_are_answered(server: str, tmp_path: Path) -> None:
    with serving(server, tmp_path) as client:
        faults = {case["id"]: fault for case in SERVERS[server] if (fault := wrong(client, case))}
    assert not faults
