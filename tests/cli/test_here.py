"""`pyspec list` and `pyspec ps`: models on this machine, and running servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner, Result

from pyspec import synth
from pyspec.cli import main, running


def call(*args: str) -> Result:
    return CliRunner().invoke(main, args)


def fill(cache: Path, repo: str, sizes: dict[str, int], part: int = 0) -> None:
    """A repository in a cache as the client library lays it out."""
    folder = cache / ("models--" + repo.replace("/", "--"))
    for name, size in sizes.items():
        path = folder / "snapshots" / "abc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text("abc")
    if part:
        (folder / "blobs").mkdir()
        (folder / "blobs" / "1.incomplete").write_bytes(b"x" * part)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_list_names_targets_drafters_pairs_and_what_is_unfinished(cache: Path):
    fill(cache, "unsloth/Qwen3.6-27B-GGUF", {"Qwen3.6-27B-Q8_0.gguf": 5, "Qwen3.6-27B-UD-Q2_K.gguf": 4})
    fill(cache, "spiritbuun/Qwen3.6-27B-DFlash-GGUF", {"dflash-draft-3.6-q8_0.gguf": 3})
    fill(
        cache,
        "a/b",
        {
            "m-Q4_K_M.gguf": 2,
            "mtp-m-Q4_K_M.gguf": 1,
            "x/n-F16-00001-of-00002.gguf": 2,
            "x/n-F16-00002-of-00002.gguf": 4,
        },
    )
    fill(cache, "c/d", {}, part=7)
    (cache / "models--e--f" / "snapshots" / "1").mkdir(parents=True)
    done = call("list", "--json")
    assert done.exit_code == 0, done.output
    found = {
        (one["type"], one["file"]): (one["bytes"], one["what"], one["pair"])
        for one in json.loads(done.stdout)
    }
    assert found.pop(("demo", "pyspec-demo.gguf"))[1:] == ("target", "pyspec-demo-dflash.gguf")
    assert found == {
        ("qwen3.6-27b", "Qwen3.6-27B-Q8_0.gguf"): (5, "target", "dflash-draft-3.6-q8_0.gguf"),
        ("qwen3.6-27b:Q2_K", "Qwen3.6-27B-UD-Q2_K.gguf"): (4, "target", "dflash-draft-3.6-q8_0.gguf"),
        ("-hfd spiritbuun/Qwen3.6-27B-DFlash-GGUF", "dflash-draft-3.6-q8_0.gguf"): (3, "dflash", ""),
        ("-hf a/b:Q4_K_M", "m-Q4_K_M.gguf"): (2, "target", "mtp-m-Q4_K_M.gguf"),
        ("-hfd a/b", "mtp-m-Q4_K_M.gguf"): (1, "mtp", ""),
        ("-hf a/b:F16", "x/n-F16-00001-of-00002.gguf"): (6, "target", "mtp-m-Q4_K_M.gguf"),
        ("-hf c/d", ""): (7, "unfinished", ""),
    }  # fmt: skip
    text = call("list")
    assert "1 unfinished" in text.stderr and "pyspec-demo-dflash.gguf" in text.stdout


@pytest.mark.parametrize("has_block", [True, False])
def test_list_pairs_a_target_with_an_mtp_sidecar_only_if_it_has_no_block(cache: Path, has_block: bool):
    fill(cache, "a/b", {"m-Q4_K_M.gguf": 2, "mtp-m-Q4_K_M.gguf": 1})
    target = cache / "models--a--b" / "snapshots" / "abc" / "m-Q4_K_M.gguf"
    synth.write("qwen35", target, tiny=True, mtp=has_block)
    found = {one["file"]: one["pair"] for one in json.loads(call("list", "--json").stdout)}
    assert found[target.name] == ("" if has_block else "mtp-m-Q4_K_M.gguf")


def test_a_cache_that_is_not_there_is_no_error(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache / "nowhere"))
    assert [one["type"] for one in json.loads(call("list", "--json").stdout)] == ["demo"]


SLOT = {"is_processing": True, "n_past": 70, "speculative": True, "draft": {"n_draft": 3, "acceptance": 0.62}}  # fmt: skip
SILENT = SLOT | {"draft": {"n_draft": 0, "reason": "too slow"}}
READING = SLOT | {
    "state": "prefill",
    "n_past": 0,
    "n_prompt_tokens": 1597,
    "n_prompt_tokens_processed": 0,
}
IDLE = {"is_processing": False, "speculative": True}


class Fake(BaseHTTPRequestHandler):
    answers: ClassVar[dict[str, tuple[int, Any]]] = {}

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        status, body = self.answers.get(self.path, (404, {}))
        if self.path == "/slots" and self.headers.get("Authorization") == "Bearer secret":
            status, body = 200, [SLOT, SILENT, IDLE]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.fixture
def server() -> Iterator[str]:
    Fake.answers = {"/health": (200, {"status": "ok"}), "/props": (200, {"model_path": "/m.gguf", "total_slots": 3}), "/slots": (401, {})}  # fmt: skip
    http = ThreadingHTTPServer(("127.0.0.1", 0), Fake)
    thread = threading.Thread(target=http.serve_forever, args=(0.02,))
    thread.start()
    yield f"127.0.0.1:{http.server_port}"
    http.shutdown()
    thread.join()
    http.server_close()


def test_ps_shows_slots_drafts_and_reasons(server: str):
    done = call("ps", server, "--api-key", "secret")
    assert done.exit_code == 0 and "2 of 3" in done.stdout
    shown = " ".join(done.stdout.split())
    assert "/m.gguf" in shown and "140" in shown and "3 (62%)" in shown and "too slow" in shown


def test_ps_shows_how_far_prompts_are(server: str):
    """The first part of a long prompt takes seconds in which no token is done."""
    Fake.answers["/slots"] = (
        200,
        [SLOT, READING, READING | {"n_past": 512, "n_prompt_tokens_processed": 512}],
    )
    done = call("ps", server)
    assert done.exit_code == 0 and "3 of 3" in done.stdout
    assert "582, reads prompts: 512 of 3194" in " ".join(done.stdout.split())


def test_ps_says_when_a_key_is_missing_and_when_nobody_answers(server: str):
    done = call("ps", server)
    assert done.exit_code == 0 and "? of 3" in done.stdout and "needs a key: --api-key" in done.stderr
    done = call("ps", "127.0.0.1:9", "--json")
    (one,) = json.loads(done.stdout)
    assert done.exit_code == 1 and one["state"] == "no answer" and "refused" in one["note"]


def test_ps_lists_a_server_that_loads_with_how_far_it_is(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    progress = {"stage": "download m.gguf", "fraction": 0.424}
    Fake.answers = {"/health": (503, {"error": {"message": "Loading model"}, "progress": progress})}
    path = running.enter(f"http://{server}", "qwen3.6-27b:Q4_K_M")
    (one,) = json.loads(call("ps", "--json").stdout)
    assert (one["state"], one["model"], one["progress"]) == ("loading", "qwen3.6-27b:Q4_K_M", progress)
    shown = call("ps")
    assert shown.exit_code == 0 and "loading: download m.gguf, 42 %" in " ".join(shown.stdout.split())
    Fake.answers = {"/health": (503, b"no JSON")}
    assert json.loads(call("ps", "--json").stdout)[0]["state"] == "loading"
    running.leave(path)


def test_a_server_is_in_the_list_before_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from pyspec.errors import ModelError

    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    listed: list[tuple[str, str]] = []

    def run(*args: object) -> None:
        listed.extend((one.url, one.model) for one in running.running())
        raise ModelError("far enough")

    monkeypatch.setattr("pyspec.server.http.serve.run", run)
    for more, name in ((), "demo"), (("-a", "mine"), "mine"):
        done = call("server", "demo", "--port", "0", "--in-process", *more)
        assert done.exit_code == 3 and "far enough" in done.stderr
        url, model = listed.pop()
        assert url.startswith("http://127.0.0.1:") and model == name
    assert list(running.running()) == []


def test_the_room_here_is_the_gpus_or_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from pyspec.cli import free_memory

    tool = tmp_path / "nvidia-smi"
    monkeypatch.setattr(free_memory, "MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:   2048 kB\n")
    for said, wanted in (
        ("NVIDIA H100 80GB, HBM3, 81079", ("NVIDIA H100 80GB, HBM3", 81079 << 20)),
        ("No devices were found", ("the CPU", 2048 << 10)),
        ("", ("the CPU", 2048 << 10)),
    ):
        tool.write_text(f"#!/bin/sh\necho '{said}'\n")
        tool.chmod(0o755)
        monkeypatch.setattr(free_memory, "which", lambda name: str(tool))
        found = free_memory.free_memory()
        assert found is not None and (found.where, found.free) == wanted
    monkeypatch.setattr(free_memory, "which", lambda name: None)
    (tmp_path / "meminfo").unlink()
    assert free_memory.free_memory() is None


def test_models_tells_sizes_and_what_fits_and_what_is_here(cache: Path, monkeypatch: pytest.MonkeyPatch):
    from pyspec.cli.free_memory import FreeMemory

    fill(cache, "unsloth/Qwen3.6-27B-GGUF", {"Qwen3.6-27B-Q4_K_M.gguf": 5})
    fill(cache, "unsloth/Qwen3.5-122B-A10B-GGUF", {"x-UD-Q4_K_XL-00001-of-00001.gguf": 5})
    monkeypatch.setattr("pyspec.cli.free_memory.free_memory", lambda: FreeMemory("a GPU", 24 << 30))
    done = call("models")
    rows = json.loads(call("models", "--json").stdout)
    choices = {one["name"]: one for row in rows for one in row["choices"]}
    assert choices["qwen3.6-27b"]["fits"] == "no" and choices["qwen3.6-27b:Q4_K_M"]["fits"] == "yes"
    assert {name for name, one in choices.items() if one["here"]} == {"demo", "qwen3.6-27b:Q4_K_M", "qwen3.5-122b-a10b"}  # fmt: skip
    assert all(
        one["bytes"] and one["memory"] > one["bytes"]
        for name, one in choices.items()
        if "deepseek" not in name and one["fits"] != "?"  # sizes that are not known
    )
    assert choices["qwen3.6-27b:Q4_K_M"]["bytes"] == pytest.approx(16.3e9, rel=0.01)
    (own,) = (row for line in done.stdout.splitlines() if "qwen3.6-27b" in (row := line.split()))
    assert "no*" in own and "* the largest quantisation of its repository that fits" in done.stdout
    assert "qwen3.6-27b:Q4_K_M" in done.stdout and "24.0 GiB free on a GPU" in done.stdout
    monkeypatch.setattr("pyspec.cli.free_memory.free_memory", lambda: None)
    assert {
        one["fits"] for row in json.loads(call("models", "--json").stdout) for one in row["choices"]
    } == {"?"}


def test_bench_names_the_command_that_compares():
    assert "pyspec bench compare" in " ".join(call("bench", "--help").stdout.split())


def test_ps_of_what_is_no_pyspec(server: str):
    Fake.answers = {"/health": (200, b"hello")}
    done = call("ps", server)
    assert done.exit_code == 1 and "the answer is not JSON" in done.stderr


def test_servers_are_found_by_their_files_and_dead_ones_are_cleared(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    assert "this user has no running server here" in call("ps").stderr
    path = running.enter(f"http://{server}", "m")
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    )
    dead = running.folder() / f"{int(ended.stdout)}.json"
    dead.write_text(json.dumps({"pid": int(ended.stdout), "url": "http://x", "model": "", "began": 0}))
    (running.folder() / "torn.json").write_text("{")
    (one,) = json.loads(call("ps", "--json").stdout)
    assert (one["pid"], one["url"], one["state"]) == (os.getpid(), f"http://{server}", "ok")
    assert path is not None and path.exists() and not dead.exists()
    running.leave(path)
    assert json.loads(call("ps", "--json").stdout) == []
