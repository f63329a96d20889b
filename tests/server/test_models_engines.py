"""`pyspec server` with several models and an engine process for each: one that is killed is replaced, and its neighbours notice nothing."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from router_fakes import Background
from served_command import ServedCommand
from waiting import wait_for

from pyspec.engine.api import Engine

log = logging.getLogger(__name__)
ROOT = Path(__file__).parents[1]
FIXTURES = ROOT / "fixtures"
FAKE = """
from pyspec.engine.plan import apart
from pyspec.engine.process import ahead, supervisor
ahead.COMMAND = supervisor.COMMAND = {child!r}
apart.Planner.need = lambda self, path, settings, budget: apart.LoadNeed(
    {{"host": {need}}}, 2048, "a plan", {{"host": {rest}}} if settings.parks else None)
"""


class Served(ServedCommand):
    """With a client of its URL."""

    def __init__(self, before: str, words: Sequence[str]) -> None:
        super().__init__(before, ["--port", "0", *words])
        self.http = httpx.Client(timeout=300, base_url=self.url)

    def complete(self, model: str, **more: object) -> str:
        answer = self.http.post(
            "/completion", json={"model": model, "prompt": [5, 6, 7], "temperature": 0, **more}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["content"]

    def timings(self, model: str, **more: object) -> dict[str, float]:
        body = {"model": model, "prompt": [5, 6, 7] * 9, "temperature": 0, **more}
        return self.http.post("/completion", json=body).json()["timings"]

    def rows(self) -> dict[str, dict]:
        return {row["id"]: row for row in self.http.get("/models").json()["data"]}


@contextmanager
def serving(before: str, *words: str) -> Iterator[Served]:
    served = Served(before, words)
    try:
        yield served
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(20) == 0, "".join(served.log)
    finally:
        served.process.kill()
        served.process.wait()


def preset(folder: Path, text: str) -> str:
    path = folder / "models.ini"
    path.write_text(text)
    return str(path)


def fakes(folder: Path, need: int, rest: int = 1 << 20) -> str:
    child = (sys.executable, str(ROOT / "engine" / "fake_engine_main.py"), str(folder))
    return FAKE.format(child=child, need=need, rest=rest)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_an_engine_that_is_killed_is_replaced_and_its_neighbour_notices_nothing(tmp_path: Path) -> None:
    ini = preset(tmp_path, f"[a]\nmodel = {FIXTURES}/qwen35.gguf\n[b]\nmodel = {FIXTURES}/gemma3.gguf\n")
    with serving(fakes(tmp_path, 1 << 20), "--models-preset", ini) as served:
        before = set(served.children("fake_engine_main"))
        whole = served.complete("a", n_predict=600, seed=4)
        (engine_a,) = sorted(set(served.children("fake_engine_main")) - before)[:1] or sorted(before)[:1]
        neighbour = served.complete("b", n_predict=200, seed=4)
        text, killed = "", False
        body = {
            "model": "a",
            "prompt": [5, 6, 7],
            "temperature": 0,
            "n_predict": 600,
            "seed": 4,
            "stream": True,
        }
        with served.http.stream("POST", "/completion", json=body) as stream:
            for line in stream.iter_lines():
                if not line.startswith("data: "):
                    continue
                text += json.loads(line[6:])["content"]
                if len(text) > 40 and not killed:
                    killed = True
                    for pid in served.children("fake_engine_main"):
                        os.kill(pid, signal.SIGKILL)  # all of them, the spare one, too
        assert text == whole and killed and engine_a
        assert served.complete("b", n_predict=200, seed=4) == neighbour
        rows = {r["id"]: r["status"]["value"] for r in served.http.get("/models").json()["data"]}
        assert rows == {"a": "loaded", "b": "loaded"}


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_switches_leave_no_process_behind(tmp_path: Path) -> None:
    sections = "".join(
        f"[{n}]\nmodel = {FIXTURES}/{f}.gguf\n"
        for n, f in (("a", "qwen35"), ("b", "gemma3"), ("c", "gemma2"))
    )
    ini = preset(tmp_path, sections)
    with serving(
        fakes(tmp_path, 60 << 20), "--models-preset", ini, "--models-host-memory", "100M"
    ) as served:
        alone = {name: served.complete(name, n_predict=30, seed=1) for name in "abc"}
        for i in range(21):
            assert served.complete("abc"[i % 3], n_predict=30, seed=1) == alone["abc"[i % 3]]
        assert (
            len(served.children("fake_engine_main")) <= 3
        )  # the engine, the spare one, and one that ends
        props = served.http.get("/props").json()
        assert props["memory_used"]["host"] <= props["memory_budget"]["host"] == 100 << 20
        refused = served.http.post("/models/load", json={"model": "x"})
        assert refused.status_code == 404
        stopped = served.http.post("/models/unload", json={"model": "*"})
        assert stopped.json() == {"success": True}


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    "state",
    [
        "parked",
        *(
            pytest.param(state, marks=pytest.mark.slow)
            for state in ("loading", "running", "parking", "waking")
        ),
    ],
)
def test_an_engine_that_is_killed_in_any_state_costs_no_request(state: str, tmp_path: Path) -> None:
    ini = preset(
        tmp_path,
        f"[*]\npark = 1\n[a]\nmodel = {FIXTURES}/qwen35.gguf\n[b]\nmodel = {FIXTURES}/gemma3.gguf\n",
    )
    words = ("--models-preset", ini, "--models-host-memory", "100M")
    with serving(fakes(tmp_path, 60 << 20), *words) as served:

        def complete(name: str) -> Background:
            body = {"model": name, "prompt": [5, 6, 7], "n_predict": 300, "seed": 4}
            return Background(lambda: served.http.post("/completion", json=body))

        def value(name: str) -> str:
            rows = served.http.get("/models").json()["data"]
            return next(row["status"]["value"] for row in rows if row["id"] == name)

        def kill() -> None:
            for pid in served.children("fake_engine_main"):
                os.kill(pid, signal.SIGKILL)

        alone = {name: complete(name).ok().json()["content"] for name in "ba"}
        assert value("a") == "loaded" and value("b") == "sleeping"
        if state == "loading":
            served.http.post("/models/unload", json={"model": "*"})
            wait_for(lambda: value("a") == value("b") == "unloaded")
            (tmp_path / "load").write_text("sleep 0.7")
        if state in ("parking", "waking"):
            (tmp_path / state[:4].replace("waki", "wake")).write_text("sleep 1.5")
        if state in ("parking", "parked", "waking"):
            served.http.post("/models/park", json={"model": "a"})
            wait_for(lambda: state == "parking" or value("a") == "sleeping")
        calls = [] if state in ("parking", "parked") else [complete("a")]
        time.sleep(0.3)
        kill()
        for file in ("load", "park", "wake"):
            (tmp_path / file).unlink(missing_ok=True)
        calls += [complete("b"), complete("a"), complete("b")]
        assert [call.ok().json()["content"] for call in calls[-3:]] == [alone[n] for n in "bab"]
        assert all(call.ok().json()["content"] == alone["a"] for call in calls[:-3])
        for name in "abab":
            assert complete(name).ok().json()["content"] == alone[name]
        served.http.post("/models/unload", json={"model": "*"})
        wait_for(lambda: served.http.get("/props").json()["memory_used"] == {"host": 0}, 20.0)
        wait_for(lambda: len(served.children("fake_engine_main")) <= 1)  # the spare one


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("state", ["loading", "parking", "waking"])
def test_a_server_that_is_told_to_end_meanwhile_ends(state: str, tmp_path: Path) -> None:
    """A request that waits is told so, and no process is left."""
    ini = preset(tmp_path, f"[a]\nmodel = {FIXTURES}/qwen35.gguf\npark = 1\n")
    with serving(fakes(tmp_path, 1 << 20), "--models-preset", ini) as served:
        if state == "loading":
            (tmp_path / "load").write_text("sleep 7")
        else:
            served.complete("a", n_predict=3)
            (tmp_path / "park").write_text("sleep 7" if state == "parking" else "")
            (tmp_path / "wake").write_text("sleep 7")
            served.http.post("/models/park", json={"model": "a"})
            if state == "waking":
                wait_for(lambda: served.rows()["a"]["status"]["value"] == "sleeping")
        body = {"model": "a", "prompt": [5], "n_predict": 3}
        call = Background(lambda: served.http.post("/completion", json=body))
        time.sleep(0.7)
        pids = served.children("fake_engine_main")
        began = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        wait_for(lambda: call.is_over)
        assert call.answer is not None and call.answer.status_code == 503, call.answer
        assert served.process.wait(20) == 0
        assert time.monotonic() - began < 12
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.slow
def test_texts_are_those_of_single_models_on_real_engines(tmp_path: Path) -> None:
    """Three real models, two of which fit at once: greedy texts stay what each says alone, and a conversation goes on."""
    files = {"demo": "demo", "g": str(FIXTURES / "gemma3.gguf"), "q": str(FIXTURES / "qwen35.gguf")}
    alone = {}
    for name, file in files.items():
        with Engine.load(file, np=2, ctx=512, device="cpu") as engine:
            alone[name] = engine.generate([5, 6, 7], max_tokens=24, temperature=0).text
    sections = "".join(f"[{name}]\nmodel = {file}\n" for name, file in files.items())
    ini = preset(tmp_path, f"[*]\nnp = 2\nctx-size = 512\ndev = cpu\ncache-ram = 16\n{sections}")
    with serving("", "--models-preset", ini, "--models-host-memory", "700M") as served:
        for name in ("demo", "g", "q", "demo", "q", "g", "demo"):
            assert served.complete(name, n_predict=24) == alone[name]
        rows = {r["id"]: r for r in served.http.get("/models").json()["data"]}
        assert sum(r["status"]["value"] == "loaded" for r in rows.values()) == 2
        assert rows["demo"]["meta"]["draft"]["type"] == "dflash"
        assert rows["demo"]["memory"]["host"] > 300 << 20


@pytest.mark.slow
def test_a_conversation_goes_on_after_each_wake(tmp_path: Path) -> None:
    """Real engines on a CPU: a parked model's process stays, with its weights and with what the conversation has read so far."""
    files = {"demo": "demo", "g": str(FIXTURES / "gemma3.gguf"), "q": str(FIXTURES / "qwen35.gguf")}
    sections = "".join(f"[{name}]\nmodel = {file}\n" for name, file in files.items())
    shared = "[*]\nnp = 7\nctx-size = 517\ndev = cpu\ncache-ram = 16\npark = 1\n"
    ini = preset(tmp_path, shared + sections)
    with serving("", "--models-preset", ini, "--models-host-memory", "4G") as served:
        alone = {name: served.complete(name, n_predict=24) for name in files}
        engines = set(served.children("engine_main"))
        talks = {name: [5, 6, 7] * 9 for name in files}
        for i in range(21):
            name = list(files)[i % 3]
            asked = served.http.post("/models/park", json={"model": name})
            assert asked.json() == {"success": True}, asked.text
            wait_for(lambda name=name: served.rows()[name]["status"]["value"] == "sleeping")
            text = talks[name]
            body = {"model": name, "prompt": text, "temperature": 0, "n_predict": 19, "ignore_eos": True}
            answer = served.http.post("/completion", json=body | {"return_tokens": True}).json()
            known = len(text) - 3 if i >= 3 else 0
            assert answer["timings"]["cache_n"] >= known, "all but what is new, and the last token said"
            talks[name] = [*text, *answer["tokens"], 9, 8]
            assert served.complete(name, n_predict=24) == alone[name]
        assert engines <= set(served.children("engine_main")), "nothing was loaded again"
        parked = served.rows()["demo"]["memory"]
        assert 0 < parked["parked"]["host"] < parked["host"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_folder_of_models_answers_what_llama_servers_router_is_asked(tmp_path: Path) -> None:
    """The questions of its own router tests, in one server: what it is, loads by call, the oldest that leaves, unknown names, files that come and
    go, a request into a model that is just ending."""
    folder = tmp_path / "models"
    folder.mkdir()
    for name in ("gemma2", "gemma3", "qwen35"):
        (folder / f"{name}.gguf").symlink_to(FIXTURES / f"{name}.gguf")
    words = ("--models-dir", str(folder), "--models-max", "2", "--no-models-autoload")
    with serving(fakes(tmp_path, 1 << 20), *words) as served:
        http = served.http
        cached = [row["id"] for row in http.get("/models").json()["data"] if row["id"] not in
                  ("gemma2", "gemma3", "qwen35")]  # fmt: skip
        props = http.get("/props").json()
        assert (props["role"], props["max_instances"], props["models_autoload"]) == ("router", 2, False)
        assert props["build_info"].startswith("b")

        def value(name: str) -> str:
            return served.rows()[name]["status"]["value"]

        def load(name: str) -> None:
            assert http.post("/models/load", json={"model": name}).json()["success"] is True
            wait_for(lambda: value(name) == "loaded")

        body = {"model": "gemma3", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        refused = http.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400 and "error" in refused.json()
        load("gemma3")
        answered = http.post("/v1/chat/completions", json=body)
        assert answered.status_code == 200 and "error" not in answered.json()
        unknown = http.post(
            "/chat/completions", json=body | {"model": "non-existent/model", "stream": True}
        )
        assert unknown.status_code == 404 and "choices" not in unknown.json()
        load("gemma2")
        load("qwen35")
        assert (value("gemma3"), value("gemma2"), value("qwen35")) == ("unloaded", "loaded", "loaded")
        assert http.post("/models/unload", json={"model": "qwen35"}).json()["success"] is True
        late = http.post("/tokenize?autoload=true", json={"model": "qwen35", "content": "hello world"})
        assert late.status_code == 200 and late.json()["tokens"]
        (folder / "gemma2.gguf").unlink()
        (folder / "other.gguf").symlink_to(FIXTURES / "gemma3.gguf")
        listed = [row["id"] for row in http.get("/models?reload=1").json()["data"]]
        assert sorted(set(listed) - set(cached)) == ["gemma3", "other", "qwen35"]
        wait_for(lambda: value("qwen35") == "loaded")
        assert http.request("DELETE", "/models?model=other").status_code == 400, "it is no download"


BOUND_S = 150.0
"""In which a request of the storm has its answer, loads of others before it included."""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize(
    ("engines", "seed"),
    [("fakes", 1), *(pytest.param(kind, n, marks=pytest.mark.slow) for kind, n in (("fakes", 2), ("fakes", 3), ("real", 4)))],
)  # fmt: skip
def test_a_storm_of_events_gives_each_request_its_text_or_an_honest_error(
    engines: str, seed: int, tmp_path: Path
) -> None:
    """Requests, clients that leave, loads, unloads, parks, reloads and engines that are killed, of three models in memory for two."""
    files = {"d": "demo", "g": str(FIXTURES / "gemma3.gguf"), "q": str(FIXTURES / "qwen35.gguf")}
    shared = "[*]\nnp = 2\nctx-size = 512\ndev = cpu\ncache-ram = 16\npark = 1\n"
    ini = preset(
        tmp_path, shared + "".join(f"[{name}]\nmodel = {file}\n" for name, file in files.items())
    )
    is_real = engines == "real"
    before = "" if is_real else fakes(tmp_path, 60 << 20, 4 << 20)
    child, budget, n_predict = (
        ("engine_main", "700M", 24) if is_real else ("fake_engine_main", "130M", 200)
    )
    rng = random.Random(seed)
    with serving(before, "--models-preset", ini, "--models-host-memory", budget) as served:
        ask = {"prompt": [5, 6, 7], "temperature": 0, "n_predict": n_predict, "seed": 4}
        alone = {name: served.complete(name, **ask) for name in files}
        outcomes: list[tuple[str, float]] = []

        def whole(name: str) -> str:
            answer = served.http.post("/completion", json={"model": name, **ask})
            said = answer.json()
            if answer.status_code != 200:
                return f"{answer.status_code} {said['error']['message']}"
            assert said["content"] == alone[name]
            return "text"

        def stream(name: str) -> str:
            text, events = "", []
            body = {"model": name, **ask, "stream": True}
            with served.http.stream("POST", "/completion", json=body) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        events.append(json.loads(line[6:]))
                        text += events[-1].get("content", "")
                    elif line.startswith("{"):
                        events.append(json.loads(line))
            if "error" in events[-1]:
                assert alone[name].startswith(text)
                return f"{events[-1]['error']['code']} {events[-1]['error']['message']}"
            assert text == alone[name] and events[-1]["stop"]
            return "text"

        def leave(name: str) -> str:
            with suppress(httpx.TimeoutException):
                body = {"model": name, **ask, "stream": rng.random() < 0.5}
                httpx.post(f"{served.url}/completion", json=body, timeout=rng.random())
            return "left"

        def request(kind: Callable[[str], str], name: str) -> threading.Thread:
            def work() -> None:
                began = time.monotonic()
                try:
                    outcome = kind(name)
                except Exception as e:  # noqa: BLE001 - a thread's, told below
                    outcome = f"WRONG {type(e).__name__}: {e}"
                outcomes.append((outcome, time.monotonic() - began))

            thread = threading.Thread(target=work, daemon=True)
            thread.start()
            return thread

        def act(path: str, name: str) -> None:
            answer = served.http.post(path, json={"model": name})
            if answer.status_code != 200:
                outcomes.append((f"{answer.status_code} {answer.json()['error']['message']}", 0.0))

        threads: list[threading.Thread] = []
        for _ in range(200):
            name, dice = rng.choice([*files]), rng.random()
            if dice < 0.55:
                kind = whole if dice < 0.25 else stream if dice < 0.43 else leave
                threads.append(request(kind, name))
            elif dice < 0.90:
                paths = (
                    ("load", "unload", "park")
                    if not is_real
                    else ("load", "park", "park", "unload", "load", "park")
                )
                path = paths[int((dice - 0.55) / 0.35 * len(paths))]
                act(f"/models/{path}", "*" if path == "unload" and rng.random() < 0.15 else name)
            elif dice < 0.94:
                assert served.http.get("/models?reload=1").status_code == 200
            elif pids := served.children(child) + served.children("plan.apart"):
                with suppress(ProcessLookupError):
                    os.kill(rng.choice(pids), signal.SIGKILL)
            time.sleep(rng.random() ** 3 * (2.0 if is_real else 0.5))
            while sum(thread.is_alive() for thread in threads) > 20:
                time.sleep(0.05)
        for thread in threads:
            thread.join(BOUND_S)
        assert not any(thread.is_alive() for thread in threads)
        counts = Counter(outcome for outcome, _ in outcomes)
        longest = max(s for _, s in outcomes)
        log.info("%s, seed %d, longest %.1f s: %s", engines, seed, longest, counts.most_common())
        honest = ("text", "left", "400", "503", "500 the engine's process ended while it was loading")
        wrong = [outcome for outcome in counts if not outcome.startswith(honest)]
        assert not wrong, wrong
        assert longest < BOUND_S
        assert counts["text"] > 30
        assert not any("shutting down" in outcome for outcome in counts)
        for name in files:
            assert served.complete(name, **ask) == alone[name]
        served.http.post("/models/unload", json={"model": "*"})
        wait_for(lambda: served.http.get("/props").json()["memory_used"] == {"host": 0}, 20.0)
        wait_for(lambda: len(served.children(child)) <= 1)  # the spare one
