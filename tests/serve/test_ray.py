"""pyspec in a real Ray Serve on this machine: `make check-ray`."""

from __future__ import annotations

import asyncio
import json
import runpy
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict
from waiting import wait_for

ray = pytest.importorskip("ray")
serve = pytest.importorskip("ray.serve")

from pyspec.errors import ConfigError  # noqa: E402
from pyspec.serve.ray import EngineReplica, PyspecServer, RayArgs, app, scaling, wanted_replicas  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(280)]
N_TOKEN = 200


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    env = {"env_vars": {"PYTHONPATH": ":".join(p for p in sys.path if p)}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=env)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield port
    serve.shutdown()
    ray.shutdown()


def get(port: int, path: str) -> Any:
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60).read().decode()
    return json.loads(text) if text.startswith("{") else text


def posted(port: int, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=200)


def counted(port: int, name: str) -> float:
    lines = get(port, "/metrics").splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


def prompt_of(i: int) -> str:
    return f"{i} {'abcdefgh'[i]} once upon a time there were {i} "


class Streams:
    """Eight streams at once: their texts as they grow, and their errors."""

    def __init__(self, port: int) -> None:
        self.texts, self.errors = [""] * 8, [""] * 8
        self.threads = [threading.Thread(target=self.read, args=(port, i)) for i in range(8)]
        for thread in self.threads:
            thread.start()

    def read(self, port: int, i: int) -> None:
        try:
            body = {"prompt": prompt_of(i), "seed": i, "temperature": 0.8 * (i % 2), "max_tokens": N_TOKEN, "ignore_eos": True}  # fmt: skip
            for line in posted(port, "/v1/completions", stream=True, **body):
                if line.startswith(b"data: {"):
                    part = json.loads(line[6:])
                    if "error" in part:
                        self.errors[i] = str(part["error"])
                    self.texts[i] += "".join(choice["text"] for choice in part.get("choices", ()))
        except (OSError, urllib.error.URLError) as e:
            self.errors[i] = repr(e)

    def all(self) -> list[str]:
        for thread in self.threads:
            thread.join(200)
        assert self.errors == [""] * 8
        return self.texts


@pytest.mark.parametrize("router", ["", "prefix", "kv"])
def test_no_stream_fails_when_a_replica_is_killed(port: int, router: str) -> None:
    if router == "kv":
        pytest.importorskip("dynamo.llm")
    args = {"model": "demo", "replicas": 2, "np": 8, "cpus": 0, "router": router, "server": {"aliases": ("tiny",)}}  # fmt: skip
    serve.run(app(args | {"engine": {"threads": 1}}), route_prefix="/")
    assert get(port, "/health") == {"status": "ok"}
    assert get(port, "/v1/models")["data"][0]["id"] == "tiny"
    whole = Streams(port).all()
    if router:
        cached = []
        for i, text in enumerate(whole):
            body = {"prompt": prompt_of(i) + text, "max_tokens": 3}
            usage = json.loads(posted(port, "/v1/completions", **body).read())["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert sum(n > 50 for n in cached) >= 7, f"conversations return to their replicas: {cached}"
    streams = Streams(port)
    wait_for(lambda: all(streams.texts), 120)
    engines = [a for a in ray.util.list_named_actors(all_namespaces=True) if "#engine#" in a["name"]]
    assert len(engines) == 2
    busy = [
        a
        for a in engines
        if ray.get(ray.get_actor(a["name"], namespace=a["namespace"]).get_num_ongoing_requests.remote())
    ]
    ray.kill(ray.get_actor(busy[0]["name"], namespace=busy[0]["namespace"]), no_restart=False)
    assert streams.all() == whole and len(set(whole)) == 8
    assert counted(port, "pyspec_engine_restarts_total") >= 1, "a stream has changed its replica"
    assert counted(port, "pyspec_requests_failed_total") == 0
    assert counted(port, "pyspec_requests_done_total") >= 16
    serve.delete("default")


def test_a_client_that_leaves_ends_its_request(port: int) -> None:
    serve.run(app({"model": "demo", "np": 3, "cpus": 0, "engine": {"threads": 1}}), route_prefix="/")
    stream = posted(
        port, "/v1/completions", prompt="Once", max_tokens=1900, ignore_eos=True, stream=True
    )
    stream.readline()
    stream.close()
    wait_for(lambda: counted(port, "pyspec_requests_cancelled_total") == 1, 120)
    with pytest.raises(urllib.error.HTTPError) as refused:
        posted(port, "/v1/completions", prompt="Once", max_tokens="many")
    assert refused.value.code == 400
    serve.delete("default")


def test_more_requests_than_slots_bring_another_replica(port: int) -> None:
    soon = {"upscale_delay_s": 0.0, "metrics_interval_s": 0.2, "look_back_period_s": 1.0}
    args = {"model": "demo", "np": 3, "cpus": 0, "replicas": 1, "max_replicas": 2, "autoscaling": soon}
    serve.run(app(args | {"engine": {"threads": 1}}), route_prefix="/")

    def engines() -> int:
        actors = ray.util.list_named_actors(all_namespaces=True)
        return sum("#engine#" in actor["name"] for actor in actors)

    assert engines() == 1
    is_enough = threading.Event()

    def ask() -> None:
        while not is_enough.is_set():
            posted(port, "/v1/completions", prompt="Once", max_tokens=900, ignore_eos=True).read()

    threads = [threading.Thread(target=ask) for _ in range(7)]
    for thread in threads:
        thread.start()
    wait_for(lambda: engines() == 2, 120)
    is_enough.set()
    for thread in threads:
        thread.join(200)
    assert counted(port, "pyspec_requests_failed_total") == 0
    serve.delete("default")


def config(**more: Any) -> Any:
    loading = SimpleNamespace(model_id="tiny/demo", model_source="demo")
    values = {"engine_kwargs": {"np": 3, "threads": 1}, "deployment_config": {}, "accelerator_type": None, "runtime_env": None}  # fmt: skip
    return SimpleNamespace(model_id="tiny/demo", model_loading_config=loading, **(values | more))


def test_the_class_of_an_llm_config_serves_by_itself(port: int) -> None:
    """As Ray Serve LLM starts it with direct streaming. (Its own LLMConfig wants vLLM or SGLang to be installed.)"""
    deployment = serve.deployment(serve.ingress()(PyspecServer), ray_actor_options={"num_cpus": 0})
    serve.run(deployment.bind(config()), route_prefix="/")
    with posted(
        port,
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Count from 1 to 5."}],
        temperature=0,
    ) as r:
        answer = json.loads(r.read())
    assert answer["choices"][0]["message"]["content"] == "1, 2, 3, 4, 5"
    assert answer["model"] == "tiny/demo"
    assert len(get(port, "/slots" + "?x=1")) and get(port, "/health") == {"status": "ok"}
    serve.delete("default")


STAND_INS = {
    "openai.chat_completion": "ChatCompletionRequest ChatCompletionResponse ChatCompletionStreamResponse",
    "openai.completion": "CompletionRequest CompletionResponse CompletionStreamResponse",
    "pooling.embed": "EmbeddingChatRequest EmbeddingCompletionRequest EmbeddingResponse",
    "pooling.scoring": "ScoreResponse ScoreTextRequest",
    "serve.engine": "ErrorInfo ErrorResponse",
    "serve.tokenize": "DetokenizeRequest DetokenizeResponse TokenizeChatRequest TokenizeCompletionRequest TokenizeResponse",
    "speech_to_text.transcription": "TranscriptionRequest TranscriptionResponse TranscriptionStreamResponse",
}
"""Models of vLLM that Ray Serve LLM imports, by their packages: here each takes any fields."""


def test_the_class_answers_the_ingress_of_ray_serve_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, names in STAND_INS.items():
        parts = f"vllm.entrypoints.{package}.protocol".split(".")
        for n in range(1, len(parts) + 1):
            name = ".".join(parts[:n])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for name in names.split():
            model = type(name, (BaseModel,), {"model_config": ConfigDict(extra="allow")})
            setattr(sys.modules[".".join(parts)], name, model)
    models = pytest.importorskip("ray.llm._internal.serve.core.configs.openai_api_models")
    server = PyspecServer(config())
    info = SimpleNamespace(headers={"X-Request-Id": "mine", "content-length": "999"})

    def answered(method: Any, **body: Any) -> list[Any]:
        async def parts() -> list[Any]:
            return [part async for part in method(BaseModelLike(**body), info)]

        return asyncio.run(parts())

    chat = {"model": "tiny/demo", "messages": [{"role": "user", "content": "Count from 1 to 5."}], "temperature": 0}  # fmt: skip
    (whole,) = answered(server.chat, **chat)
    assert isinstance(whole, models.ChatCompletionResponse)
    assert whole.choices[0]["message"]["content"] == "1, 2, 3, 4, 5"
    events = answered(server.chat, **chat, stream=True)
    assert all(event.startswith("data: ") for event in events) and events[-1].endswith(
        "data: [DONE]\n\n"
    )
    deltas = [
        json.loads(line[6:])
        for event in events
        for line in event.split("\n\n")
        if line.startswith("data: {")
    ]
    text = "".join(c["delta"].get("content") or "" for d in deltas for c in d["choices"])
    assert text == "1, 2, 3, 4, 5"
    (text_whole,) = answered(server.completions, prompt="Once", max_tokens=3)
    assert isinstance(text_whole, models.CompletionResponse)
    (refused,) = answered(server.completions, prompt="Once", max_tokens="many", stream=True)
    assert isinstance(refused, models.ErrorResponse) and refused.error["code"] == 400
    assert "max_tokens" in refused.error["message"]
    server.engine.close()


class BaseModelLike(BaseModel):
    model_config = ConfigDict(extra="allow")


def test_options_of_the_class() -> None:
    plain = PyspecServer.get_deployment_options(config(deployment_config={"num_replicas": 3}))
    assert plain == {"num_replicas": 3, "ray_actor_options": {}}
    more = config(engine_kwargs={"tp": 2}, accelerator_type="H100", runtime_env={"env_vars": {"A": "1"}})
    assert PyspecServer.get_deployment_options(more)["ray_actor_options"] == {
        "num_gpus": 2,
        "runtime_env": {"env_vars": {"A": "1"}},
    }


def test_the_number_of_replicas_follows_their_requests() -> None:
    def context(requests: dict[str, float], waiting: float = 0.0, now: int = 2) -> Any:
        metrics = {"requests": requests, "slots": dict.fromkeys(requests, 5.0)} if requests else {}
        return SimpleNamespace(
            aggregated_metrics=metrics,
            total_queued_requests=waiting,
            target_num_replicas=now,
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=7,
        )

    assert wanted_replicas(context({}))[0] == 2
    assert wanted_replicas(context({"a": 3, "b": 2}))[0] == 1
    assert wanted_replicas(context({"a": 9, "b": 2}, 5))[0] == 4
    assert wanted_replicas(context({"a": 99, "b": 2}))[0] == 7
    assert wanted_replicas(context({"a": 0, "b": 0}))[0] == 1
    options = scaling(1, 3, 5, {})["autoscaling_config"]
    assert (options.min_replicas, options.max_replicas) == (1, 3)
    assert scaling(3, 0, 5, {}) == {"num_replicas": 3}


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="modle"):
        app({"modle": "demo"})
    with pytest.raises(ConfigError, match="no engine setting 'tpp'; did you mean 'tp'"):
        app({"model": "demo", "engine": {"tpp": 2}})
    with pytest.raises(ConfigError, match=r"server: .*'alias'"):
        app({"model": "demo", "server": {"alias": "tiny"}})
    args = RayArgs.model_validate({"model": "demo", "replicas": "2", "np": "8"})
    assert (args.replicas, args.np) == (2, 8), "as from a command line"


def test_figures_for_the_autoscaler(tmp_path: Path) -> None:
    replica = EngineReplica("demo", None, {"np": 3, "threads": 1})
    assert replica.record_autoscaling_stats() == {"slots": 3.0, "requests": 0.0, "cache_usage": 0.0}
    replica.check_health()
    replica.engine.close()
    with pytest.raises(RuntimeError, match="stopped"):
        replica.check_health()


def test_a_replica_tells_the_router_where_its_events_are() -> None:
    replica = EngineReplica("demo", None, {"np": 3, "threads": 1})
    assert replica.record_routing_stats() == {}
    replica.engine.close()
    events = {"kv_events": "tcp://127.0.0.1:0", "kv_events_replay": "tcp://127.0.0.1:0"}
    replica = EngineReplica("demo", None, {"np": 3, "threads": 1, "page_size": 16, **events})
    (publisher,), about = replica.engine.publishers, replica.record_routing_stats()["kv_event_metadata"]
    assert (about["block_size"], about["dp_rank"]) == (16, 0)
    for name, address in (("endpoint", publisher.endpoint), ("replay_endpoint", publisher.replay)):
        assert about[name].rpartition(":")[2] == address.rpartition(":")[2]
    replica.engine.close()


def test_the_example_answers(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Last: it ends Ray Serve."""
    example = Path(__file__).parents[2] / "examples" / "ray_serve.py"
    monkeypatch.setattr(sys, "argv", ["ray_serve.py", str(port)])
    runpy.run_path(str(example), run_name="__main__")
    assert "1, 2, 3, 4, 5, 6, 7, 8, 9, 10" in capsys.readouterr().out
