"""Manifests for Kubernetes: they parse, name flags and paths that exist, and agree with each other and with what pyspec publishes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from starlette.routing import Route

from pyspec.cli import main
from pyspec.config import EngineSettings

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "server"))
from server_fakes import FakeEngine  # noqa: E402

from pyspec.server.app import create_app  # noqa: E402
from pyspec.server.settings import ServerSettings  # noqa: E402

yaml = pytest.importorskip("yaml")
MANIFESTS = ("kserve", "llmd")
PICKED = {  # metrics that llm-d's picker reads of an engine of type vllm: gauges, and the labels of one
    "vllm:num_requests_waiting",
    "vllm:num_requests_running",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:cache_config_info",
}


def objects(name: str) -> list[dict[str, Any]]:
    text = (ROOT / "deploy" / f"{name}.yaml").read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text))


def pods(name: str) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Every pod's specification, and its volumes."""
    for found in objects(name):
        spec = found.get("spec", {})
        spec = spec.get("template", {}).get("spec", spec)
        for container in spec.get("containers", ()):
            yield container, spec.get("volumes", [])


def given(container: dict[str, Any]) -> dict[str, str]:
    """Values of the server's flags by their names; parsed as the command does, so an unknown flag is an error."""
    command = main.get_command(click.Context(main), "server")
    assert command is not None and container["args"][0] == "server"
    options = {o: p for p in command.params if isinstance(p, click.Option) for o in p.opts}
    unknown = [a for a in container["args"][1:] if a.startswith("-") and a not in options]
    assert not unknown, unknown
    parser = command.make_parser(click.Context(command))
    values, rest, _ = parser.parse_args(list(container["args"][1:]))
    assert not rest, rest
    return values


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_object_has_a_kind_and_a_name(name: str) -> None:
    found = objects(name)
    assert len(found) >= 2 and all({"apiVersion", "kind", "metadata"} <= x.keys() for x in found)
    assert all(re.fullmatch(r"[a-z0-9-]+", x["metadata"]["name"]) for x in found)


@pytest.mark.parametrize("name", MANIFESTS)
def test_flags_paths_ports_and_volumes_exist(name: str) -> None:
    engine = FakeEngine()
    try:
        routes = create_app(engine, ServerSettings()).routes
    finally:
        engine.close()
    paths = {r.path for r in routes if isinstance(r, Route)}
    n = 0
    for container, volumes in pods(name):
        n += 1
        values = given(container)
        ports = {p.get("name", ""): p["containerPort"] for p in container["ports"]}
        assert int(values["port"]) in ports.values()
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            get = container[probe]["httpGet"]
            assert get["path"] in paths, (probe, get)
            assert ports.get(get["port"], get["port"]) == int(values["port"])
        assert container["startupProbe"]["httpGet"]["path"] == "/health"
        mounted = {m["name"] for m in container["volumeMounts"]}
        assert mounted == {v["name"] for v in volumes}
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        keys = "api_key_file" in values
        assert keys != ("--insecure" in container["args"]), "a key, or the word that there is none"
    assert n == 1


def test_kserves_service_uses_the_runtime_and_ends_later_than_the_drain() -> None:
    runtime, service = objects("kserve")
    predictor = service["spec"]["predictor"]
    assert predictor["model"]["runtime"] == runtime["metadata"]["name"]
    formats = {f["name"] for f in runtime["spec"]["supportedModelFormats"]}
    assert predictor["model"]["modelFormat"]["name"] in formats
    assert predictor["terminationGracePeriodSeconds"] > ServerSettings().limits.drain_s
    (container,) = runtime["spec"]["containers"]
    assert given(container)["model"].startswith("/mnt/models/"), "where storageUri is mounted"


def test_llmds_pool_and_picker_agree_with_the_pods() -> None:
    by_kind = {x["kind"]: x for x in objects("llmd")}
    pod = by_kind["Deployment"]["spec"]["template"]
    labels, (container,) = pod["metadata"]["labels"], pod["spec"]["containers"]
    pool, values = by_kind["InferencePool"]["spec"], given(container)
    for selector in (
        by_kind["Deployment"]["spec"]["selector"],
        pool["selector"],
        by_kind["NetworkPolicy"]["spec"]["podSelector"],
    ):
        assert selector["matchLabels"].items() <= labels.items()
    assert [p["number"] for p in pool["targetPorts"]] == [int(values["port"])]
    assert pod["spec"]["terminationGracePeriodSeconds"] > ServerSettings().limits.drain_s
    settings = EngineSettings(
        kv_events=values["kv_events"],
        kv_events_replay=values["kv_events_replay"],
        kv_events_topic=values["kv_events_topic"],
        page_size=int(values["page_size"]),
    )
    admitted = {p["port"] for p in by_kind["NetworkPolicy"]["spec"]["ingress"][0]["ports"]}
    assert admitted == {p["containerPort"] for p in container["ports"]}
    assert {e["name"] for e in container["env"]} == set(
        re.findall(r"\$\((\w+)\)", " ".join(container["args"]))
    )
    configs = {k: yaml.safe_load(v) for k, v in by_kind["ConfigMap"]["data"].items()}
    assert configs.keys() == {"approximate.yaml", "precise.yaml"}
    for config in configs.values():
        assert config["kind"] == "EndpointPickerConfig"
        plugins = {p.get("name", p["type"]) for p in config["plugins"]}
        (profile,) = config["schedulingProfiles"]
        assert {p["pluginRef"] for p in profile["plugins"]} == plugins
    scorer = configs["precise.yaml"]["plugins"][-1]["parameters"]
    events = scorer["kvEventsConfig"]
    assert scorer["tokenProcessorConfig"]["blockSize"] == settings.page_size
    assert settings.kv_events_topic.startswith(events["topicFilter"])
    found = events["podDiscoveryConfig"]
    assert settings.kv_events.endswith(f":{found['socketPort']}")
    assert settings.kv_events_replay.endswith(f":{found['replaySocketPort']}")
    key, _, value = found["podLabelSelector"].partition("=")
    assert labels[key] == value
    alias = values["aliases"]
    name = alias if isinstance(alias, str) else alias[0]
    assert settings.kv_events_topic.split("@")[2] == name, "the picker asks for the model by this name"


def test_metrics_that_llmds_picker_reads_are_there() -> None:
    from prometheus_client.parser import text_string_to_metric_families
    from starlette.testclient import TestClient

    engine = FakeEngine()
    try:
        with TestClient(create_app(engine, ServerSettings()), base_url="http://127.0.0.1") as client:
            text = client.get("/metrics").text
    finally:
        engine.close()
    families = {f.name: f for f in text_string_to_metric_families(text)}
    assert families.keys() >= PICKED
    assert all(families[name].type == "gauge" for name in PICKED)
    (pages,) = families["vllm:cache_config_info"].samples
    assert set(pages.labels) == {"block_size", "num_gpu_blocks"} and pages.value == 1.0
    page = (ROOT / "docs" / "routers.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in PICKED)
