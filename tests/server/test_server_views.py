"""The routes that show or convert: models, props, slots, metrics, tokens, templates, the OpenAPI document."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from server_client import App, app_of, refusal
from server_fakes import FakeEngine, Script

from pyspec.request import Request


@pytest.fixture
def app(engine: FakeEngine) -> App:
    return app_of(engine, aliases=("house-model",))


def test_models_name_the_alias_and_the_drafter(app: App) -> None:
    value = app.get("/v1/models").json()
    row = value["data"][0]
    assert row["id"] == "house-model" and row["aliases"] == ["fake-1"] and value["object"] == "list"
    assert row["meta"]["n_vocab"] == 258 and row["meta"]["draft"]["type"] == "ngram"
    assert (
        app.get("/v1/models/house-model").json()["id"] == app.get("/models").json()["models"][0]["name"]
    )


def test_props_give_the_limit_of_one_request(app: App) -> None:
    value = app.get("/props").json()
    assert value["default_generation_settings"]["n_ctx"] == 512 and value["total_slots"] == 4
    assert value["default_generation_settings"]["params"]["temperature"] == 0.8
    assert value["bos_token"] == "<s>" and value["model_alias"] == "house-model"


def test_slots_have_no_params_before_their_first_request(app: App) -> None:
    rows = app.get("/slots").json()
    assert [row["id"] for row in rows] == [0, 1, 2, 3]
    assert not any("params" in row or row["is_processing"] for row in rows)
    assert app.get("/slots?fail_on_no_slot=1").status_code == 200


def test_fail_on_no_slot_is_503_when_all_are_busy(engine: FakeEngine) -> None:
    engine.script = Script(prefill_s=30)
    app = app_of(engine)
    ids = [engine.submit(request, lambda event: None) for request in [Request(prompt=(1, 2))] * 4]
    while not all(row["is_processing"] for row in app.get("/slots").json()):
        pass
    assert app.get("/slots?fail_on_no_slot=1").json()["error"]["type"] == "unavailable_error"
    row = app.get("/slots").json()[0]
    assert row["params"]["top_k"] == 40 and row["id_task"] == 0
    for i in ids:
        engine.cancel(i)


def test_views_that_are_switched_off_are_501(engine: FakeEngine) -> None:
    app = app_of(engine, metrics=False, slots=False, props=False)
    for path in ("/metrics", "/slots", "/props"):
        assert app.get(path).status_code == 501
        assert app.get(path).json()["error"]["type"] == "not_supported_error"


def test_metrics_parse_under_all_three_spellings(app: App) -> None:
    response = app.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert response.headers["process-start-time-unix"].isdecimal()
    samples = {
        (s.name, s.labels.get("position")): s.value
        for family in text_string_to_metric_families(response.text)
        for s in family.samples
    }
    for name in (
        "pyspec_draft_tokens_total",
        "llamacpp:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_draft_tokens_total",
    ):
        assert samples[name, None] == 8
    assert samples["vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"] == 2
    assert samples["llamacpp:requests_deferred", None] == 0
    assert samples["pyspec_draft_acceptance_rate", None] == 0.75
    for name in ("prompt_tokens_total", "tokens_predicted_seconds_total", "n_decode_total"):
        assert (f"llamacpp:{name}", None) in samples
    assert "# TYPE llamacpp:n_tokens_max counter\n" in response.text, "as llama-server has it"


def test_metrics_also_come_as_openmetrics(app: App) -> None:
    response = app.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert any(family.name == "pyspec_rounds" for family in parse_openmetrics(response.text))


def test_tokens_and_text_convert_both_ways(app: App) -> None:
    tokens = app.post("/tokenize", {"content": "aé"}).json()["tokens"]
    assert tokens == list("aé".encode())
    assert app.post("/detokenize", {"tokens": tokens}).json() == {"content": "aé"}
    assert app.post("/tokenize", {"content": [256, "a"], "add_special": True}).json() == {
        "tokens": [256, 97]
    }
    assert app.post("/tokenize", {"content": "a", "add_special": True}).json() == {"tokens": [256, 97]}
    assert app.post("/tokenize", {"content": "</s>", "parse_special": False}).json() == {
        "tokens": list(b"</s>")
    }


def test_a_piece_that_is_no_text_is_given_as_bytes(app: App) -> None:
    pieces = app.post("/tokenize", {"content": "aé", "with_pieces": True}).json()["tokens"]
    assert pieces == [
        {"id": 97, "piece": "a"},
        {"id": 0xC3, "piece": [0xC3]},
        {"id": 0xA9, "piece": [0xA9]},
    ]


def test_a_template_is_rendered_with_its_arguments(app: App) -> None:
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
        ],
        "chat_template_kwargs": {"thinking": False},
    }
    assert app.post("/apply-template", body).json() == {
        "prompt": "user: a\nb\nthinking=False\nassistant: "
    }
    value = app.post("/apply-template", body | {"add_generation_prompt": False}).json()
    assert value == {"prompt": "user: a\nb\nthinking=False\n"}


def test_input_tokens_counts_what_a_chat_would_use(app: App, engine: FakeEngine) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    counted = app.post("/v1/chat/completions/input_tokens", body).json()["input_tokens"]
    assert counted == app.post("/v1/chat/completions", body).json()["usage"]["prompt_tokens"]


def test_without_a_template_chats_are_refused_with_the_way_out(app: App, engine: FakeEngine) -> None:
    engine.template = None
    assert "/v1/completions" in refusal(
        app.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    )


def test_ready_gives_the_age_of_the_last_round(app: App) -> None:
    value = app.get("/ready").json()
    assert value["status"] == "ready" and value["step_age_s"] == 0.0 and value["draining"] is False


def test_the_document_lists_every_error_a_body_can_cause(app: App) -> None:
    paths = app.get("/openapi.json").json()["paths"]
    codes = set(paths["/v1/chat/completions"]["post"]["responses"])
    assert {"200", "400", "401", "413", "429", "500", "503"} <= codes and "501" not in codes


def test_the_page_allows_its_own_script_and_nothing_else(app: App) -> None:
    response = app.get("/")
    policy = response.headers["content-security-policy"]
    assert response.headers["content-type"].startswith("text/html") and "default-src 'none'" in policy
    for tag in ("script", "style"):
        inside = re.search(f"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside[1].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "http" not in response.text.replace("https?", "") and "innerHTML" not in response.text
    assert len(response.content) < 150_000
