"""Several models behind one real port: paths, states, races, ends. The models are fakes that load in a moment."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import random
import socket
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner
from router_fakes import Background, World, serving
from server_client import refusal
from server_fakes import Script
from waiting import wait_for

from pyspec import progress
from pyspec.cli import main
from pyspec.cli.ps import reread
from pyspec.cli.running import enter, leave
from pyspec.engine.plan.apart import LoadNeed
from pyspec.errors import DoesNotFit, DownloadError, ModelError, RequestError
from pyspec.server.api import routed as routed_module
from pyspec.server.api.routed import keep_alive_of
from pyspec.server.models import router as router_module
from pyspec.server.models import schedule
from pyspec.server.models.router import Download
from pyspec.server.settings import ServerSettings

SLOW = Script(text="abcdefghijklmnopqrstuvwxyz", width=1, round_s=0.1)
"""An answer that lasts 2.6 s."""
MESSAGES = [{"role": "user", "content": "hi"}]


def test_every_api_finds_its_model_by_name_and_alias() -> None:
    world = World({"a": 10, "b": 10}, more={"b": {"aliases": ("bee",)}})
    with serving(world) as c:
        for path, body, of in (
            (
                "/v1/chat/completions",
                {"messages": MESSAGES},
                lambda v: v["choices"][0]["message"]["content"],
            ),
            (
                "/chat/completions",
                {"messages": MESSAGES},
                lambda v: v["choices"][0]["message"]["content"],
            ),
            ("/v1/completions", {"prompt": "a"}, lambda v: v["choices"][0]["text"]),
            ("/completion", {"prompt": "a"}, lambda v: v["content"]),
            (
                "/v1/messages",
                {"messages": MESSAGES, "max_tokens": 60},
                lambda v: v["content"][0]["text"],
            ),
            ("/v1/responses", {"input": "hi"}, lambda v: v["output"][0]["content"][0]["text"]),
        ):
            for name, owner in (("a", "a"), ("b", "b"), ("bee", "b")):
                answer = c.post(path, body | {"model": name})
                assert answer.status_code == 200, (path, answer.text)
                assert f"I am {owner}." in of(answer.json()), path
                assert answer.json()["model"] == owner
        for path, body in (
            ("/tokenize", {"content": "ab"}),
            ("/detokenize", {"tokens": [97]}),
            ("/apply-template", {"messages": MESSAGES}),
            ("/v1/messages/count_tokens", {"messages": MESSAGES}),
            ("/v1/chat/completions/input_tokens", {"messages": MESSAGES}),
        ):
            assert c.post(path, body | {"model": "b"}).status_code == 200, path
            assert c.post(path, body | {"model": "x"}).status_code == 404, path
        assert world.n_load == {"a": 1, "b": 1}


def test_an_unknown_model_names_the_nearest_and_a_missing_one_is_asked_for() -> None:
    with serving(World({"gemma-3": 1, "qwen-3": 1})) as c:
        unknown = c.complete("gema-3")
        assert unknown.status_code == 404
        assert "did you mean gemma-3" in unknown.json()["error"]["message"]
        missing = c.post("/completion", {"prompt": "a"})
        assert missing.status_code == 400
        assert "model name is missing" in missing.json()["error"]["message"]
        anthropic = c.post("/v1/messages", {"model": "nope", "messages": MESSAGES, "max_tokens": 4})
        assert anthropic.status_code == 404 and anthropic.json()["type"] == "error"
        assert "not JSON" in refusal(c.post("/completion", content=b'{"model": '))
        path = c.complete("/etc/passwd")
        assert path.status_code == 404
    with serving(World({"only": 1})) as c:
        assert "only" in c.post("/completion", {"prompt": "a"}).json()["content"]
        assert "only" in c.text("whatever")


def test_rows_tell_states_and_what_a_load_needs() -> None:
    world = World({"a": 30, "b": 10}, more={"a": {"pinned": True}})
    with serving(world) as c:
        row = c.rows()["a"]
        assert row["status"] == {"value": "unloaded", "args": ["-m", "a"]}
        assert row["architecture"] == {"input_modalities": ["text"], "output_modalities": ["text"]}
        assert "meta" not in row and row["pinned"] and row["memory"]["host"] is None
        c.text("a")
        row = c.rows()["a"]
        assert row["status"]["value"] == "loaded" and row["memory"] == {
            "card": 0, "host": 30, "parked": None,
        }  # fmt: skip
        assert row["meta"]["n_ctx"] == 512 and row["n_running"] == 0
        assert c.get("/v1/models/a").json()["id"] == "a"
        assert c.get("/v1/models/x").status_code == 404
        plan = c.get("/models/plan?model=b").json()
        assert plan["fits"] and plan["evicts"] == [] and plan["parks"] == []
        assert plan["memory"] == [
            {"place": "host", "budget": 100, "needs": 10, "before": 30, "after": 40}
        ]
        loaded = c.get("/api/ps").json()["models"]
        assert [one["name"] for one in loaded] == ["a"] and loaded[0]["size"] == 30
        listed = c.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
        assert [one["id"] for one in listed["data"]] == ["a", "b"]


def test_props_slots_and_metrics_are_of_the_server_or_of_a_model_and_wake_nothing() -> None:
    world = World({"a": 1, "b": 1})
    with serving(world, models_max=2) as c:
        props = c.get("/props").json()
        assert props["role"] == "router"
        assert props["max_instances"] == 2
        assert props["models_autoload"] is True
        assert props["build_info"].startswith("b")
        for path in ("/props?model=a", "/slots?model=a", "/metrics?model=a", "/load?model=a"):
            answer = c.get(path)
            assert answer.status_code == 400 and "model is not loaded" in answer.text, path
        assert not world.n_load
        c.text("a")
        assert c.get("/props?model=a").json()["model_alias"] == "a"
        assert len(c.get("/slots?model=a").json()) == 4
        assert c.get("/load?model=a").json() == {"server_load": 0}
        figures = c.get("/metrics").text
        assert 'llamacpp:tokens_predicted_total{model="a"}' in figures
        assert "pyspec_models_loaded 1.0" in figures
        assert 'model="a"' in c.get("/metrics?model=a").text
        assert c.get("/health").json() == {"status": "ok", "models_loading": 0, "models_failed": 0}
        assert c.get("/ready").status_code == 200 and c.get("/version").status_code == 200
        document = c.get("/openapi.json").json()
        assert {"/models/load", "/models/unload", "/models/sse", "/models/plan"} <= document[
            "paths"
        ].keys()
        assert {"get", "post"} <= document["paths"]["/v1/models"].keys() | document["paths"][
            "/models"
        ].keys()


def test_load_and_unload_by_call() -> None:
    world = World({"a": 1, "b": 1}, load_s=0.3)
    with serving(world) as c:
        assert c.post("/models/load", {"model": "a"}).json() == {"success": True}
        assert c.value("a") == "loading"
        assert c.post("/models/load", {"model": "a"}).status_code == 400
        c.wait("a", "loaded")
        assert c.post("/models/load", {"model": "a"}).status_code == 400
        assert c.post("/models/load", {"model": "x"}).status_code == 404
        assert c.post("/models/unload", {"model": "b"}).status_code == 400
        assert c.post("/models/unload", {"model": "a"}).json() == {"success": True}
        c.wait("a", "unloaded")
        assert world.closed == ["a"] and world.held == 0
        c.post("/models/load", {"model": "b"})
        assert c.post("/models/unload", {"model": "b"}).json() == {"success": True}
        c.wait("b", "unloaded")
        assert world.n_load["b"] == 0, "a load ends when its model is unloaded"


def test_all_but_pinned_models_are_unloaded_by_a_star() -> None:
    world = World({"a": 1, "b": 1, "c": 1}, more={"a": {"pinned": True}})
    with serving(world) as c:
        for name in "abc":
            c.text(name)
        assert c.post("/models/unload", {"model": "*"}).status_code == 200
        c.wait("b", "unloaded")
        c.wait("c", "unloaded")
        assert c.value("a") == "loaded"


def test_models_load_at_the_start_and_not_by_request_where_that_is_off() -> None:
    world = World({"a": 1, "b": 1}, more={"a": {"starts": True}})
    with serving(world, models_autoload=False) as c:
        c.wait("a", "loaded")
        assert refusal(c.complete("b")) == "model is not loaded"
        assert "I am b" in c.post("/completion?autoload=true", {"model": "b", "prompt": "a"}).text
        assert c.post("/completion?autoload=false", {"model": "b", "prompt": "a"}).status_code == 200


def test_the_least_recently_used_model_leaves() -> None:
    with serving(World({"a": 1, "b": 1, "c": 1}), models_max=2) as c:
        for name in "abac":
            c.text(name)
        assert {name: row["status"]["value"] for name, row in c.rows().items()} == {
            "a": "loaded", "b": "unloaded", "c": "loaded",
        }  # fmt: skip


def test_memory_decides_which_fit_and_never_too_much_is_held() -> None:
    world = World({"a": 60, "b": 50, "c": 30})
    with serving(world) as c:
        for name in "abcacbabc":
            assert f"I am {name}" in c.text(name)
        assert world.most_held <= 100
        assert {name for name, row in c.rows().items() if row["status"]["value"] == "loaded"} == {
            "b",
            "c",
        }


def test_what_does_not_fit_is_refused_with_the_plan_and_never_tried() -> None:
    world = World({"a": 1, "huge": 10 << 30}, more={"a": {"pinned": True}})
    with serving(world, budget=8 << 30) as c:
        refused = c.post("/models/load", {"model": "huge"})
        assert refused.status_code == 409
        assert "no room" in refused.text and "10.00 GiB" in refused.text and "8.00 GiB" in refused.text
        by_request = c.complete("huge")
        assert by_request.status_code == 500 and "10.00 GiB" in by_request.text
        assert not c.get("/models/plan?model=huge").json()["fits"]
        assert not world.n_load["huge"]
        assert "I am a" in c.text("a")


def test_a_broken_file_beside_good_ones() -> None:
    world = World({"good": 1, "bad": 1}, broken={"bad": ModelError("bad.gguf: it is damaged")})
    with serving(world) as c:
        first = c.complete("bad")
        assert first.status_code == 500 and "it is damaged" in first.text
        status = c.rows()["bad"]["status"]
        assert status["value"] == "unloaded" and status["failed"] and status["exit_code"] == 3
        assert "it is damaged" in status["reason"]
        assert "I am good" in c.text("good")
        assert c.get("/health").json()["models_failed"] == 1
        world.broken.clear()
        time.sleep(schedule.BACKOFF_S[0])
        assert "I am bad" in c.text("bad") and "failed" not in c.rows()["bad"]["status"]


def test_nothing_that_answers_is_killed_for_another() -> None:
    """B came and killed A while A answered (llama.cpp 21678)."""
    world = World({"a": 60, "b": 60}, scripts={"a": SLOW})
    with serving(world) as c:
        alone = c.text("a")
        a = c.asked("a", "n_running")
        b = Background(lambda: c.complete("b"))
        wait_for(lambda: c.rows()["b"]["n_waiting"] == 1 and c.value("b") == "loading")
        assert a.ok().json()["content"] == alone
        assert "I am b" in b.ok().json()["content"]
        assert world.closed == ["a"]


def test_cold_models_that_come_together_are_each_answered() -> None:
    """A model was evicted before the request that loaded it was sent, and one of two waiters hung (llama.cpp 28443, 28698)."""
    world = World({"a": 60, "b": 60, "c": 60})
    with serving(world) as c:
        calls = [Background(lambda name=name: c.complete(name)) for name in "abcabc"]
        for call in calls:
            assert "I am " in call.ok().text
        assert sum(world.n_load.values()) <= 6 and world.most_held <= 100


def test_a_request_to_a_model_that_leaves_waits_for_its_next_load() -> None:
    world = World({"a": 1}, scripts={"a": SLOW})
    with serving(world) as c:
        first = c.asked("a", "n_running")
        c.post("/models/unload", {"model": "a"})
        second = Background(lambda: c.complete("a", n_predict=2))
        whole = first.ok().json()["content"]
        assert whole == SLOW.text
        assert second.ok().status_code == 200 and world.n_load["a"] == 2


def test_an_unload_during_a_stream_ends_it_after_its_time() -> None:
    world = World({"a": 1}, scripts={"a": replace(SLOW, round_s=0.5)}, more={"a": {"stop_s": 0.4}})
    with serving(world) as c, httpx.stream(
        "POST", f"{c.url}/completion", json={"model": "a", "prompt": "a", "stream": True}, timeout=60
    ) as stream:  # fmt: skip
        lines = stream.iter_lines()
        next(lines)
        assert c.post("/models/unload", {"model": "a"}).json() == {"success": True}
        rest = "\n".join(lines)
        assert "the model is unloaded" in rest
        c.wait("a", "unloaded")


def test_a_client_that_leaves_while_it_waits_costs_no_model_its_place() -> None:
    world = World({"a": 60, "b": 60}, scripts={"a": SLOW})
    with serving(world) as c:
        a = c.asked("a", "n_running")
        with pytest.raises(httpx.TimeoutException):
            c.post("/completion", {"model": "b", "prompt": "a"}, timeout=0.3)
        wait_for(lambda: c.rows()["b"]["n_waiting"] == 0)
        a.ok()
        time.sleep(0.5)
        assert c.value("a") == "loaded" and not world.n_load["b"]


def test_a_stream_that_waits_gets_comments_and_then_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspec.server.api.routed.PING_S", 0.1)
    world = World({"a": 1, "bad": 1}, load_s=0.6, broken={"bad": ModelError("it is damaged")})
    with serving(world) as c:
        body = {"model": "a", "messages": MESSAGES, "stream": True}
        answer = c.post("/v1/chat/completions", body)
        assert answer.text.startswith(": waiting for the model\n\n")
        events = [json.loads(x[6:]) for x in answer.text.split("\n\n") if x.startswith("data: {")]
        text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])
        assert text.strip() == ("I am a. " * 4).strip() and answer.text.endswith("data: [DONE]\n\n")
        failed = c.post("/v1/chat/completions", body | {"model": "bad"})
        assert "it is damaged" in failed.text and failed.text.endswith("data: [DONE]\n\n")
        for path, sign in (
            ("/v1/messages", '"type":"api_error"'),
            ("/v1/responses", '"sequence_number":0'),
        ):
            c.post(
                "/models/load", {"model": "bad"}
            )  # at once: requests fail without a load for a second
            failed = c.post(path, body | {"model": "bad", "input": "a", "max_tokens": 4})
            assert "event: error\ndata: {" in failed.text and sign in failed.text
        wait_for(lambda: c.rows()["a"]["n_running"] == 0)


def test_a_queue_that_is_full_says_so() -> None:
    world = World({"a": 60, "b": 60}, scripts={"a": SLOW})
    with serving(world, models_queue=1) as c:
        a = c.asked("a", "n_running")
        b = c.asked("b", "n_waiting")
        full = c.complete("b")
        assert full.status_code == 429 and "Retry-After" in full.headers
        a.ok()
        b.ok()


def test_keep_alive_and_idle_models() -> None:
    world = World({"a": 1, "b": 1}, more={"b": {"idle_s": 1.0}})
    with serving(world) as c:
        c.text("a", keep_alive=0)
        c.wait("a", "unloaded")
        c.text("a", keep_alive="999999999999h")
        assert c.get("/api/ps").json()["models"][0]["expires_at"] > "2027"
        c.text("a", keep_alive="10m")
        c.text("b")
        time.sleep(0.5)
        assert c.value("b") == "loaded"
        c.wait("b", "unloaded")
        assert c.value("a") == "loaded"
        assert c.complete("a", keep_alive="soon").status_code == 400
        c.text("b", keep_alive=-1)
        time.sleep(1.5)
        assert c.value("b") == "loaded"


def test_one_model_sleeps_and_wakes() -> None:
    world = World({"only": 1}, more={"only": {"idle_s": 0.3}})
    with serving(world, alone=True) as c:
        assert not c.get("/props").json()["is_sleeping"] and len(c.get("/slots").json()) == 4
        first = c.text("any name")
        c.wait("only", "sleeping")
        props = c.get("/props").json()
        assert props["is_sleeping"]
        assert props["model_alias"] == "only"
        assert c.get("/health").status_code == 200
        time.sleep(0.3)
        assert c.value("only") == "sleeping", "a look wakes nobody"
        assert c.post("/v1/chat/completions", {"messages": MESSAGES}).status_code == 200
        assert c.text("x") == first and world.n_load["only"] == 2


def test_events_tell_each_change_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspec.server.models.router.QUIET_S", 0.2)
    world = World({"a": 1}, load_s=0.2)
    with serving(world) as c:
        with c.events(lambda event: event["data"]["status"] == "unloaded") as seen:
            c.text("a", keep_alive=0)
        values = [e["data"]["status"] for e in seen]
        assert values[0] == "loading" and values[-1] == "unloaded" and "loaded" in values
        assert seen[-1]["data"]["exit_code"] == 0
        assert all(e["event"] == "model_status" and e["model"] == "a" for e in seen)
        numbers = [e["id"] for e in seen]
        assert numbers == sorted(numbers)
        wait_for(lambda: not c.router._readers)


def test_a_reader_of_events_does_not_hold_up_the_end() -> None:
    with serving(World({"a": 1})) as c:
        reader = Background(lambda: httpx.get(f"{c.url}/models/sse", timeout=30))
        wait_for(lambda: bool(c.router._readers))
        began = time.monotonic()
    assert reader.ok() and time.monotonic() - began < 2.5


def test_a_reader_that_stops_loses_the_oldest_and_blocks_nobody() -> None:
    world = World({"a": 1}, load_s=0.0)
    with serving(world) as c, httpx.stream("GET", f"{c.url}/models/sse", timeout=20):
        wait_for(lambda: bool(c.router._readers))
        for _ in range(300):
            c.router._loop.call_soon_threadsafe(
                c.router.tell, "model_status", "a", {"filler": "x" * 2000}
            )
        assert "I am a" in c.text("a")
        assert all(reader.qsize() <= 256 for reader in c.router._readers)


def test_a_stream_that_outlives_its_client_keeps_its_model() -> None:
    world = World({"a": 60, "b": 60}, scripts={"a": SLOW})
    with serving(world) as c:
        head = {"X-Conversation-Id": "talk"}
        body = {"model": "a", "prompt": "a", "stream": True}
        with httpx.stream("POST", f"{c.url}/completion", json=body, headers=head, timeout=20) as stream:
            next(stream.iter_lines())
        b = Background(lambda: c.complete("b"))
        assert c.rows()["a"]["n_running"] == 1
        kept = c.get("/v1/stream?conv_id=talk").text
        assert '"stop":true' in kept
        b.ok()
        assert world.closed == ["a"]


def test_an_engine_that_has_stopped_for_good_is_loaded_again() -> None:
    world = World({"a": 1})
    with serving(world) as c:
        c.text("a")
        world.engines["a"].word = "stopped"
        assert "I am a" in c.text("a") and world.n_load["a"] == 2


def test_keys_guard_what_changes_models_and_paths() -> None:
    settings = ServerSettings(port=0, api_keys=("secret",))
    world = World({"a": 1}, settings=settings)
    with serving(world) as c:
        none = {"headers": {}}
        assert c.get("/models", **none).status_code == 200
        row = c.get("/models", **none).json()["data"][0]
        assert "path" not in row and "args" not in row["status"] and "path" in c.rows()["a"]
        for method, path, body in (
            ("POST", "/models/load", {"model": "a"}),
            ("POST", "/models/unload", {"model": "a"}),
            ("POST", "/models", {"model": "u/r"}),
            ("DELETE", "/models?model=a", None),
            ("GET", "/models/sse", None),
            ("GET", "/models/plan?model=a", None),
            ("POST", "/completion", {"model": "a", "prompt": "a"}),
        ):
            assert c.call(method, path, body, **none).status_code == 401, path
        foreign = {"headers": c.headers | {"Origin": "https://elsewhere.example"}}
        assert c.post("/models/load", {"model": "a"}, **foreign).status_code == 403
        assert c.get("/models?reload=1", **none).status_code == 401
        assert c.post("/models/load", {"model": "a"}).status_code == 200


def test_a_reload_finds_new_models_and_unloads_those_that_are_gone() -> None:
    world = World({"a": 1, "b": 1})
    with serving(world) as c:
        c.text("a")
        c.text("b")
        del world.needs["a"]
        world.needs["c"] = 1
        assert [row["id"] for row in c.get("/models?reload=1").json()["data"]] == ["b", "c"]
        wait_for(lambda: world.closed == ["a"])
        assert c.complete("a").status_code == 404 and "I am c" in c.text("c")
        assert world.n_load["b"] == 1 and c.value("b") == "loaded"
        wait_for(lambda: "a" not in c.router.table.rows)


def test_a_reload_during_a_plan_is_not_answered_by_the_old_plan() -> None:
    world, held = World({"a": 1, "b": 1}), threading.Event()
    bytes_of, made = {"old": 30, "new": 70}, world.model

    def model(name: str, words: str) -> Any:
        def plan(budget: object) -> LoadNeed:
            held.wait(10)
            return LoadNeed({"host": bytes_of[words]}, 512, "a plan")

        return replace(made(name), plan=plan, words=(words,))

    listed = [model(name, "old") for name in "ab"]
    world.models = lambda: listed  # type: ignore[method-assign]
    with serving(world) as c:
        a, b = Background(lambda: c.complete("a")), Background(lambda: c.get("/models/plan?model=b"))
        wait_for(lambda: len(c.router.stamps) == 2)
        listed[:] = [model("a", "new")]
        assert c.get("/models?reload=1").status_code == 200
        again = c.asked("a", "n_waiting")
        held.set()
        again.ok()
        wait_for(lambda: a.is_over and b.is_over)
        assert a.answer and a.answer.status_code == 503 and b.answer and b.answer.status_code == 404
        assert c.get("/props").json()["memory_used"] == {"host": 70}


def test_files_elsewhere_are_not_deleted_and_nothing_is_downloaded_without_a_hub() -> None:
    with serving(World({"a": 1})) as c:
        assert c.call("DELETE", "/models?model=a").status_code == 400
        assert c.post("/models", {"model": "user/repo"}).status_code == 400


def test_a_wrong_name_changes_nothing_of_a_lone_model() -> None:
    """It answers whatever it is called, but is not deleted or unloaded for another."""
    with serving(World({"a": 1}, more={"a": {"repo": ("u/r", "a.gguf")}})) as c:
        assert "I am a" in c.text("gpt-4")
        for call in (
            ("DELETE", "/models?model=b"),
            *(("POST", f"/models/{do}", {"model": "b"}) for do in ("load", "unload", "park")),
        ):
            assert c.call(*call).status_code == 404, call
        assert c.value("a") == "loaded"


def test_a_hundred_switches_leave_nothing_behind_and_texts_are_those_of_one_model() -> None:
    world = World({"a": 60, "b": 60, "c": 60}, load_s=0.0)
    with serving(world) as c:
        alone = {name: c.text(name) for name in "abc"}
        for name in "abc" * 5:
            assert c.text(name) == alone[name]
        gc.collect()
        before = (
            threading.active_count(),
            len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        )
        for i in range(100):
            name = "abc"[i % 3]
            assert c.text(name) == alone[name]
        gc.collect()
        after = (
            threading.active_count(),
            len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        )
        assert after[0] <= before[0] + 3 and after[1] <= before[1] + 4
        assert sum(world.n_load.values()) >= 100 and world.most_held == 60
        assert not c.router._futures and not c.router._loads


def test_a_load_that_ends_in_its_last_moment_leaves_nothing() -> None:
    world = World({"a": 1}, load_s=0.05)
    with serving(world) as c:
        for i in range(12):
            c.post("/models/load", {"model": "a"})
            time.sleep(0.01 * i)
            c.post("/models/unload", {"model": "a"})
            c.wait("a", "unloaded")
            wait_for(lambda: world.held == 0)
        assert "I am a" in c.text("a") and world.held == 1


def test_budgets_of_cards_follow_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspec.server.models.router.MEASURE_S", 0.0)
    with serving(World({"a": 10})) as c:
        c.text("a")
        c.router._measure = lambda used: {"host": 40 + used["host"]}
        wait_for(lambda: c.get("/props").json()["memory_budget"] == {"host": 50})


def test_the_end_of_the_server_ends_those_that_wait() -> None:
    world = World({"a": 1}, load_s=5.0)
    with serving(world) as c:
        waiting = c.asked("a", "n_waiting")
    wait_for(lambda: waiting.is_over, 10.0)
    assert waiting.answer is None or waiting.answer.status_code == 503


def test_a_plan_that_fails_is_told() -> None:
    world = World({"a": 1})
    model = world.model("a")

    def plan(budget: object) -> object:
        raise DoesNotFit("no head")

    world.models = lambda: [replace(model, plan=plan)]  # type: ignore[method-assign, assignment]
    with serving(world) as c:
        assert "no head" in c.complete("a").text
        assert "no head" in c.post("/models/load", {"model": "a"}).text
        assert "no head" in c.get("/models/plan?model=a").text


@pytest.mark.parametrize("part", ["plan", "load", "serve"])
def test_no_kind_of_failure_leaves_a_request_waiting(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that nobody planned for: each is told, the next request tries again, and other models go on."""
    world, n_closed = World({"a": 1, "b": 1}), []
    models = world.models()

    def fails(*args: object, **more: object) -> Any:
        raise KeyError("planted")

    if part == "serve":
        made = router_module.Service

        def service(engine: Any, *more: Any) -> Any:
            n_closed.append(engine)
            return fails() if engine.info.model_name == "a" else made(engine, *more)

        monkeypatch.setattr(router_module, "Service", service)
    else:
        models[0] = replace(models[0], **{part: fails})
    world.models = lambda: models  # type: ignore[method-assign]
    with serving(world) as c:
        for _ in range(2):
            answer = c.complete("a")
            assert answer.status_code == 500 and "KeyError: 'planted'" in answer.text, answer.text
            assert "I am b." in c.text("b")
            c.router.table.rows["a"].retry = 0.0
        assert c.rows()["a"]["status"]["failed"] is True
        wait_for(lambda: all(e.is_closed for e in n_closed if e.info.model_name == "a"))


def test_a_download_that_fails_in_any_way_can_be_tried_again() -> None:
    errors: list[Exception] = [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("planted"),
        MemoryError(),
    ]
    with serving(World({"a": 1})) as c:

        def fetch(name: str) -> None:
            if errors:
                raise errors.pop(0)

        c.router._find = lambda name: Download({}, lambda: fetch(name))
        told: list[dict[str, Any]] = []
        tell = c.router.tell
        c.router.tell = lambda event, name, data: told.append({event: data}) or tell(event, name, data)  # type: ignore[method-assign, func-returns-value]
        for said in ("no space left on device", "RuntimeError: planted", "MemoryError"):
            assert c.post("/models", {"model": "u/r:Q4_K"}).status_code == 200
            wait_for(lambda: not c.router.downloads)
            assert said in str(told[-1]["download_failed"]), told
        assert c.post("/models", {"model": "u/r:Q4_K"}).status_code == 200
        wait_for(lambda: "download_finished" in told[-1])
        c.world.more["a"] = {"aliases": ("b",)}
        c.world.needs["b"] = 1  # the sources have two models of one name meanwhile
        assert c.post("/models", {"model": "u/r:Q4_K"}).status_code == 200
        wait_for(lambda: "both called" in str(told[-1].get("download_failed")))


def test_a_download_takes_no_models_place_and_its_events_end_with_its_row() -> None:
    with serving(World({"a": 1}), models_max=1) as c:

        def fetch(name: str) -> None:
            for fraction in (0.25, 0.5):
                progress.report(f"{progress.DOWNLOAD} {name}", fraction)
            c.world.needs[name] = 1

        c.router._find = lambda name: Download({name: 1000}, lambda: fetch(name))
        c.text("a")
        with c.events(lambda event: event["event"] == "download_finished") as seen:
            assert c.post("/models", {"model": "u/r:F16"}).json() == {"success": True}
        assert [(event["event"], event["model"]) for event in seen] == [
            ("download_progress", "u/r:F16"), ("download_progress", "u/r:F16"), ("models_reload", "*"),
            ("download_finished", "u/r:F16"),
        ]  # fmt: skip
        bytes_of = [n for event in seen for n in event["data"].get("progress", {}).values()]
        assert bytes_of == [{"done": 250, "total": 1000}, {"done": 500, "total": 1000}]
        assert c.value("u/r:F16") == "unloaded" and c.value("a") == "loaded"


@pytest.mark.parametrize(
    ("call", "erased"),
    [(("POST", "/models/unload", {"model": "u/r:F16"}), []), (("DELETE", "/models?model=u/r:F16"), [("u/r", "")])],
)  # fmt: skip
def test_a_download_is_listed_and_ends_when_it_is_told_to(
    call: tuple[Any, ...], erased: list[Any]
) -> None:
    with serving(World({"a": 1})) as c:
        gone: list[Any] = []

        def fetch() -> None:
            while not progress.is_stopped.get()():
                progress.report(f"{progress.DOWNLOAD} r-F16.gguf", 0.5)
                time.sleep(0.01)
            raise RequestError("it was cancelled")

        c.router._find = lambda name: Download({"r-F16.gguf": 10}, fetch)
        c.router.erase = lambda *what: gone.append(what)  # type: ignore[method-assign]
        assert c.post("/models", {"model": "u/r:F16"}).status_code == 200
        assert c.post("/models", {"model": "u/r:F16"}).status_code == 400
        wait_for(lambda: bool(c.rows()["u/r:F16"]["status"]["progress"]))
        row = c.rows()["u/r:F16"]
        assert row["source"] == "cache" and row["status"] == {
            "value": "downloading",
            "progress": {"r-F16.gguf": {"done": 5, "total": 10}},
        }
        assert c.call(*call).json() == {"success": True} and gone == erased
        assert c.rows().keys() == {"a"} and not c.router._cancelled


def test_a_download_of_nothing_is_refused_at_once() -> None:
    def find(name: str) -> Download:
        raise DownloadError(f"{name} cannot be read: there is no such repository")

    with serving(World({"a": 1})) as c:
        c.router._find = find
        answer = c.post("/models", {"model": "u/none"})
        assert answer.status_code == 400 and "no such repository" in answer.text
        assert not c.router.downloads


def test_a_loaded_model_is_unloaded_before_its_files_are_deleted() -> None:
    world = World({"a": 1, "b": 1}, more={"a": {"repo": ("u/r", "a.gguf"), "source": "cache"}})
    with serving(world) as c:
        c.text("a")

        def erase(repo: str, file: str) -> None:
            assert (repo, file) == ("u/r", "a.gguf") and world.closed == ["a"]
            del world.needs["a"]

        c.router.erase = erase  # type: ignore[method-assign]
        row = c.rows()["a"]
        assert (row["source"], row["can_remove"], c.rows()["b"]["can_remove"]) == ("cache", True, False)
        assert c.call("DELETE", "/models?model=a").json() == {"success": True}
        assert c.rows().keys() == {"b"}


TALK = {"X-Conversation-Id": "talk"}


def test_a_stop_cancels_a_stream_whose_model_is_loading() -> None:
    world = World({"a": 1}, load_s=1.0)
    with serving(world) as c:
        assert c.get("/v1/stream?conv_id=talk").status_code == 404, "no model was loaded yet"
        body = {"model": "a", "prompt": "a", "stream": True}
        waits = Background(lambda: c.post("/completion", body, headers=TALK))
        c.wait("a", "loading")
        assert c.get("/v1/stream?conv_id=talk").status_code == 503
        assert c.call("DELETE", "/v1/stream?conv_id=talk").status_code == 204
        wait_for(lambda: waits.is_over)
        assert waits.answer is not None and waits.answer.status_code == 400
        assert "cancelled" in waits.answer.text
        assert c.get("/v1/stream?conv_id=talk").status_code == 404
        c.wait("a", "loaded")
        assert c.rows()["a"]["n_running"] == 0 and not c.router.table.n_waiting


@pytest.mark.parametrize("ping_s", [5.0, 0.1])
def test_a_stream_whose_client_leaves_during_the_load_is_there_when_it_comes_back(
    ping_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also once its answer has begun with comments."""
    monkeypatch.setattr(routed_module, "PING_S", ping_s)
    world = World({"a": 1}, load_s=1.0)
    with serving(world) as c:
        body = json.dumps({"model": "a", "prompt": "a", "stream": True})
        at = httpx.URL(c.url)
        head = (
            f"POST /completion HTTP/1.1\r\nHost: {at.netloc.decode()}\r\nContent-Type: application/json\r\n"
            f"X-Conversation-Id: talk\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection((at.host, at.port)) as client:
            client.sendall(f"{head}{body}".encode())
            wait_for(lambda: c.value("a") == "loading")
            time.sleep(0.3)
        plain = Background(lambda: c.complete("a"))
        assert c.get("/v1/stream?conv_id=talk").status_code == 503
        wait_for(lambda: c.get("/v1/stream?conv_id=talk").status_code == 200)
        kept = c.get("/v1/stream?conv_id=talk&from=0").text
        said = [
            json.loads(line[6:])["content"] for line in kept.splitlines() if line.startswith("data: {")
        ]
        assert "".join(said) == plain.ok().json()["content"]
        rows = c.post("/v1/streams/lookup", {"conversation_ids": ["talk", "other"]}).json()
        assert [row["conversation_id"] for row in rows] == ["talk"]
        wait_for(lambda: c.rows()["a"]["n_running"] == 0)


def test_a_file_that_is_replaced_under_its_model_is_told_until_it_is_loaded_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"old")
    world = World({"a": 1}, rests={"a": {"host": 1}}, more={"a": {"path": str(path)}})
    with serving(world) as c:
        c.text("a")
        assert "stale" not in c.rows()["a"]
        path.write_bytes(b"another one")
        assert c.rows()["a"]["stale"] is True and c.text("a")
        c.park("a")
        assert c.rows()["a"]["stale"] is True
        path.unlink()
        assert c.text("a") and world.n_load["a"] == 1, "what is in memory goes on"
        path.write_bytes(b"a third one")
        c.get("/models?reload=1")
        c.wait("a", "unloaded")
        assert c.text("a") and world.n_load["a"] == 2 and "stale" not in c.rows()["a"]


def test_a_stream_that_is_longer_than_the_idle_time_goes_on() -> None:
    world = World({"a": 1}, scripts={"a": SLOW}, more={"a": {"idle_s": 0.3}})
    with serving(world) as c:
        with httpx.stream(
            "POST", c.url + "/completion", json={"model": "a", "prompt": "a", "stream": True}, timeout=30
        ) as stream:
            events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
        assert "".join(one["content"] for one in events) == SLOW.text
        c.wait("a", "unloaded")


def test_names_are_found_as_clients_write_them() -> None:
    """ollama's tag, a file's ending and capitals, where one model alone is meant; an exact name goes before."""
    names = ["Qwen3", "llama:latest", "ALL", "all", "\u00dcber uns", "a/b:Q4_K"]
    world = World(dict.fromkeys(names, 1), more={"ALL": {"aliases": ("every.gguf",)}})
    with serving(world, models_max=0) as c:
        for said, name in (
            ("qwen3", "Qwen3"), ("Qwen3:latest", "Qwen3"), ("qwen3.GGUF", "Qwen3"), ("llama", "llama:latest"),
            ("ALL", "ALL"), ("all", "all"), ("Every", "ALL"), (" \u00fcber UNS", "\u00dcber uns"), ("A/B:q4_k", "a/b:Q4_K"),
        ):  # fmt: skip
            assert f"I am {name}." in c.text(said), said
        either = c.complete("All")
        assert either.status_code == 404 and "did you mean" in either.text
        assert "did you mean Qwen3" in c.complete("QWEN2").text
        odd = c.post("/completion", content=b'{"model": "\\ud800", "prompt": "a"}')
        assert odd.status_code in (400, 404), odd.text


def test_keep_alive_is_read_as_ollama_reads_it() -> None:
    for said, seconds in (
        (0, 0.0), ("0", 0.0), (-1, -1.0), ("5m", 300.0), ("1h30m", 5400.0), ("300ms", 0.3), (" 2s ", 2.0),
        ("-5m", -300.0), (3153600000, 3153600000.0), (1.5, 1.5), ("24h", 86400.0), (None, None),
    ):  # fmt: skip
        assert keep_alive_of(said) == (seconds if seconds is None else pytest.approx(seconds)), said
    for wrong in ("soon", "5d", "", "m", "5 m", True, [1], {"a": 1}, "5m3", "--1", "1e9", float("inf"), float("nan")):  # fmt: skip
        with pytest.raises(RequestError, match="keep_alive"):
            keep_alive_of(wrong)


@pytest.mark.parametrize("seed", [3, 4])
def test_twenty_clients_of_three_models_with_one_place(seed: int) -> None:
    """Requests, streams, clients that leave, loads, ends and parks in any order: no request gets another model's text, none hangs, and the books
    are empty after it."""
    names = ("a", "b", "c")
    rests = {name: {"host": 20} for name in names} if seed % 2 else {}
    world, wrong = World(dict.fromkeys(names, 60), rests=rests, load_s=0.02), list[object]()
    with serving(world, models_max=1, models_wait=20) as c:
        end = time.monotonic() + 4

        def one(i: int) -> None:
            chance = random.Random(f"{seed} {i}")
            while time.monotonic() < end:
                name, kind = chance.choice(names), chance.random()
                body = {
                    "model": name,
                    "prompt": "a",
                    "keep_alive": chance.choice([None, 0, -1, "5m", 0.1]),
                }
                if kind < 0.6:
                    answer = c.post("/completion", body)
                    fits = answer.status_code != 200 or f"I am {name}." in answer.json()["content"]
                    if not fits or answer.status_code not in (200, 429, 503):
                        wrong.append((name, answer.text))
                elif kind < 0.75:
                    with httpx.stream(
                        "POST", c.url + "/completion", json=body | {"stream": True}
                    ) as lines:
                        for line in lines.iter_lines():
                            if line and chance.random() < 0.2:
                                break
                elif kind < 0.85:
                    with contextlib.suppress(httpx.TimeoutException):
                        httpx.post(c.url + "/completion", json=body, timeout=0.05 * chance.random())
                elif kind < 0.97:
                    c.post(f"/models/{chance.choice(['load', 'unload', 'park'])}", {"model": name})
                else:
                    c.get("/models?reload=1")

        threads = [threading.Thread(target=one, args=(i,)) for i in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads), "a client hangs"
        assert not wrong, wrong[:3]
        table = c.router.table
        wait_for(lambda: not any(row.claims or row.waiting for row in table.rows.values()))
        assert not table._of and not c.router._futures
        assert all(f"I am {name}." in c.text(name) for name in names)


def test_openais_sdk_lists_chats_and_streams() -> None:
    with serving(World({"a": 60, "b": 60}), budget=100) as c:
        client = openai.OpenAI(base_url=f"{c.url}/v1", api_key="none")
        assert [model.id for model in client.models.list()] == ["a", "b"]
        for name in "aba":
            whole = client.chat.completions.create(model=name, messages=MESSAGES)  # type: ignore[arg-type]
            assert f"I am {name}." in (whole.choices[0].message.content or "") and whole.model == name
            parts = client.chat.completions.create(model=name, messages=MESSAGES, stream=True)  # type: ignore[arg-type]
            text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
            assert text == whole.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="no model"):
            client.chat.completions.create(model="nobody", messages=MESSAGES)  # type: ignore[arg-type]


def test_the_terminal_knows_a_server_of_several(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYSPEC_CACHE", str(tmp_path))
    odd = "a\x1b[2J\nb"
    with serving(World({"ours": 1, "theirs": 1, odd: 1}, more={"ours": {"aliases": ("we",)}})) as c:
        path = enter(c.url, "several models")
        try:
            call = CliRunner().invoke
            asked = call(main, ["run", "we", "hello"])
            assert asked.exit_code == 0 and asked.stdout.strip() == ("I am ours. " * 4).strip()
            assert call(main, ["run", "OURS:latest", "hello"]).stdout == asked.stdout
            continued = call(main, ["run", "-m", "ours", "-p", "a", "-n", "3"])
            assert continued.exit_code == 0 and continued.stdout.startswith("I a")
            unknown = call(main, ["run", "nobody", "hello"])
            assert unknown.exit_code == 2
            shown = call(main, ["ps"])
            assert shown.exit_code == 0
            assert "ours: loaded" in shown.stdout
            assert "theirs: unloaded" in shown.stdout
            listed = call(main, ["list"])
            for told in (shown.stdout, listed.stdout):
                assert "\x1b[2J" not in told and "a\ufffd[2J\ufffdb" in told, (
                    "it is no terminal's command"
                )
            assert f"served at {c.url}: ours (loaded), theirs (unloaded)" in listed.stdout
            c.world.needs["new"] = 1
            reread()
            assert "new" in c.rows()
        finally:
            leave(path)


def card_world(**more: Any) -> World:
    """Two models that fit a card of 24 one at a time, and the host, parked."""
    needs = {"a": {"cuda:0": 20, "host": 1}, "b": {"cuda:0": 18, "host": 1}}
    rests = {"a": {"cuda:0": 1, "host": 21}, "b": {"cuda:0": 1, "host": 19}}
    return World(needs, rests=rests, **more)


def test_a_model_that_leaves_is_parked_and_told_so() -> None:
    world = card_world()
    with serving(world, card=24) as c:
        alone = {name: c.text(name) for name in "ab"}
        assert c.value("a") == "sleeping" and c.rows()["a"]["memory"]["parked"] == {
            "cuda:0": 1,
            "host": 21,
        }
        assert c.get("/props?model=a").status_code == 400, "a look wakes nobody"
        plan = c.get("/models/plan?model=a").json()
        assert plan["evicts"] == plan["parks"] == ["b"] and not plan["waits"]
        assert plan["memory"][0] == {
            "place": "cuda:0",
            "budget": 24,
            "needs": 20,
            "before": 19,
            "after": 21,
        }
        for name in "abba" * 5:
            assert c.text(name) == alone[name]
        assert world.n_load == {"a": 1, "b": 1} and not world.closed
        wakes = next(
            x for x in c.get("/metrics").text.splitlines() if x.startswith("pyspec_models_wakes ")
        )
        assert float(wakes.split()[1]) >= 10
        assert c.post("/models/unload", {"model": "*"}).status_code == 200
        wait_for(lambda: c.get("/props").json()["memory_used"] == {"host": 0, "cuda:0": 0})
        assert sorted(world.closed) == ["a", "b"] and not c.router._parked


def test_models_are_parked_by_call_and_for_being_idle() -> None:
    world = card_world(more={"b": {"idle_s": 0.3}}, scripts={"a": SLOW})
    world.needs["c"] = 1
    with serving(world, card=24, models_autoload=True) as c:
        assert c.post("/models/park", {"model": "a"}).status_code == 400, "it is not loaded"
        running = c.asked("a", "n_running")
        assert c.post("/models/park", {"model": "a"}).json() == {"success": True}
        assert running.ok().json()["content"] == SLOW.text
        c.wait("a", "sleeping")
        assert c.post("/models/load", {"model": "a"}).status_code == 200
        c.wait("a", "loaded")
        c.text("c")
        refused = c.post("/models/park", {"model": "c"})
        assert refused.status_code == 400 and "park = 1" in refused.text
        assert c.post("/models/park", {"model": "*"}).status_code == 200
        c.wait("a", "sleeping")
        assert c.value("c") == "loaded"
        c.text("b")
        c.wait("b", "sleeping")
        asleep = c.post("/completion?autoload=false", {"model": "b", "prompt": "a"})
        assert asleep.status_code == 200, "it only sleeps"


@pytest.mark.parametrize("parks", [True, False])
def test_an_engine_that_can_not_park_or_wake_is_loaded_again(parks: bool) -> None:
    world = card_world()
    with serving(world, card=24) as c:
        alone = c.text("a")
        if not parks:
            c.park("a")
        world.engines["a"].fails = True
        if parks:
            c.park("a", "unloaded")
        assert c.text("a") == alone
        assert world.n_load["a"] == 2 and world.closed == ["a"]


def test_an_unload_ends_a_wake() -> None:
    world = card_world()
    with serving(world, card=24) as c:
        c.text("a")
        c.park("a")
        world.engines["a"].moves_s = 5.0
        waiting = Background(lambda: c.complete("a"))
        c.wait("a", "loading")
        c.post("/models/unload", {"model": "a"})
        wait_for(lambda: waiting.is_over)
        assert waiting.answer is not None and waiting.answer.status_code == 503
        wait_for(lambda: world.held == 0)
        assert "I am a" in c.text("a")


def test_two_clients_of_models_that_do_not_fit_together() -> None:
    """A hundred requests of each at odd times, some of which leave, beside unloads and engines that end: all are answered, the books are right."""
    world = card_world(load_s=0.01)
    answers: Counter[int] = Counter()
    with serving(world, card=24, models_wait=20.0) as c:
        alone = {name: c.text(name) for name in "ab"}

        def talk(name: str, seed: int) -> None:
            rng = random.Random(seed)
            with httpx.Client(timeout=30) as http:
                for _ in range(100):
                    time.sleep(rng.choice((0.0, 0.001, 0.007, 0.03)))
                    timeout = 0.015 if rng.random() < 0.15 else 30.0
                    try:
                        body = {"model": name, "prompt": "a"}
                        answer = http.post(f"{c.url}/completion", json=body, timeout=timeout)
                    except httpx.TimeoutException:
                        assert timeout < 1.0
                        answers[0] += 1
                        continue
                    answers[answer.status_code] += 1
                    assert answer.status_code == 503 or answer.json()["content"] == alone[name]

        calls = [Background(lambda name=name, i=i: talk(name, i)) for i, name in enumerate("ab")]  # type: ignore[arg-type, return-value]
        rng = random.Random(3)
        while not all(call.is_over for call in calls):
            time.sleep(rng.uniform(0.02, 0.2))
            name = rng.choice("ab")
            if rng.random() < 0.2:
                c.post("/models/unload", {"model": name})
            elif rng.random() < 0.2 and name in world.engines:
                world.engines[name].word = "stopped"
        assert sum(answers.values()) == 200 and answers[200] > 100
        wait_for(lambda: not c.router.table.n_waiting)
        table = c.router.table
        settled = ("unloaded", "loaded", "parked")
        wait_for(lambda: all(row.state in settled and not row.claims for row in table.rows.values()))
        by_state = {"unloaded": {}, "loaded": world.needs, "parked": world.rests}
        held = [by_state[row.state].get(name, {}) for name, row in table.rows.items()]
        assert table.used() == {p: sum(one.get(p, 0) for one in held) for p in ("host", "cuda:0")}
        assert not c.router._futures and not c.router._loads and not table._of
        c.post("/models/unload", {"model": "*"})
        wait_for(lambda: world.held == 0 and not any(table.used().values()))
        assert not c.router._engines and not c.router._parked and not c.router.services


def test_open_webui_lists_chats_and_asks_for_titles() -> None:
    """What Open WebUI sends to an OpenAI connection: models, a streamed chat with usage, then title, tags and follow-ups at once, perhaps to a second
    model for tasks; with words of its own in the bodies."""
    world = card_world(settings=ServerSettings(port=0, api_keys=("sk-1",)))
    with serving(world, card=24) as c:
        listed = c.get("/v1/models")
        assert [row["id"] for row in listed.json()["data"]] == ["a", "b"] and listed.json()[
            "object"
        ] == "list"
        assert all(row["object"] == "model" and row["owned_by"] for row in listed.json()["data"])
        assert [row["id"] for row in c.get("/models").json()["data"]] == ["a", "b"]
        history = [{"role": "system", "content": "Be kind."}, *MESSAGES]
        for turn, name in enumerate("aba"):
            body = {
                "model": name, "messages": history, "stream": True, "stream_options": {"include_usage": True},
                "temperature": 0.8, "top_k": 40, "repeat_penalty": 1.1, "max_tokens": 100, "keep_alive": "5m", "num_ctx": 4096, "think": False,
                "user": "u-1", "custom_of_a_plugin": {"x": [1]},
            }  # fmt: skip
            text, last = "", {}
            answer = c.post("/v1/chat/completions", body)
            assert answer.status_code == 200, answer.text
            for line in answer.text.splitlines():
                if line.startswith("data: {"):
                    last = json.loads(line[6:])
                    text += "".join(one["delta"].get("content") or "" for one in last["choices"])
            assert f"I am {name}." in text and last["usage"]["completion_tokens"] > 0, turn
            assert answer.text.rstrip().endswith("data: [DONE]")
            history += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
            tasks = [
                {"model": model, "messages": [{"role": "user", "content": f"### Task:\nGenerate {task} as JSON"}], "stream": False, **limit}
                for task, model, limit in (
                    ("a title", name, {"max_completion_tokens": 50}), ("tags", "b", {"max_tokens": 50}), ("follow-ups", "b", {}),
                )
            ]  # fmt: skip
            calls = [
                Background(lambda task=task: c.post("/v1/chat/completions", task)) for task in tasks
            ]
            for task, call in zip(tasks, calls, strict=True):
                said = call.ok().json()
                assert said["model"] == task["model"]
                assert f"I am {task['model']}." in said["choices"][0]["message"]["content"]
        assert world.n_load == {"a": 1, "b": 1}, "switches are wakes"
        assert c.get("/v1/models", headers={}).status_code == 200
        assert (
            c.post("/v1/chat/completions", {"model": "a", "messages": MESSAGES}, headers={}).status_code
            == 401
        )


def test_waiters_of_one_model_give_up_one_other() -> None:
    """Many requests for a model that is not there take one place, so an idle model leaves and the busy one stays."""
    world = World({"a": 1, "b": 1, "c": 1}, scripts={"a": SLOW})
    with serving(world, models_max=2) as c:
        c.text("b")
        busy = c.asked("a", "n_running")
        waiting = [
            Background(lambda: c.post("/tokenize", {"model": "c", "content": "hello"})) for _ in range(3)
        ]
        for call in (busy, *waiting):
            call.ok()
        assert {name: row["status"]["value"] for name, row in c.rows().items()} == {
            "a": "loaded", "b": "unloaded", "c": "loaded",
        }  # fmt: skip
        assert world.n_load["c"] == 1 and world.closed == ["b"]


def test_those_that_wait_are_answered_in_order_of_arrival() -> None:
    world = World({"a": 1, "b": 1, "c": 1}, scripts={"a": SLOW})
    with serving(world, models_max=1) as c:
        busy = c.asked("a", "n_running")
        first = c.asked("b", "n_waiting")
        second = Background(lambda: c.complete("c"))
        for call in (busy, first, second):
            call.ok()
        assert busy.ended < first.ended < second.ended
