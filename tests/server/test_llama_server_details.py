"""Small details of llama-server that its clients rely on: accepted values, and their form in answers."""

from __future__ import annotations

from typing import Any

from server_client import App
from server_fakes import FakeEngine

BODY: dict[str, Any] = {"prompt": "x", "n_predict": 8}
SETTINGS = """seed temperature dynatemp_range dynatemp_exponent top_k top_p min_p top_n_sigma xtc_probability xtc_threshold
typical_p repeat_last_n repeat_penalty presence_penalty frequency_penalty dry_multiplier dry_base dry_allowed_length
dry_penalty_last_n dry_sequence_breakers mirostat mirostat_tau mirostat_eta adaptive_target adaptive_decay stop max_tokens
n_predict n_keep n_discard ignore_eos stream logit_bias n_probs min_keep grammar grammar_lazy grammar_triggers
preserved_tokens chat_format reasoning_format reasoning_in_content samplers speculative.types timings_per_token
post_sampling_probs backend_sampling lora"""


def test_forty_stop_strings_are_taken(app: App, engine: FakeEngine) -> None:
    stops = [f"stop {i}" for i in range(40)]
    assert app.post("/completion", BODY | {"stop": stops}).status_code == 200
    assert engine.seen[-1].stop == tuple(stops)


def test_bans_are_shown_as_null_and_ignored_ends_as_bans(app: App) -> None:
    settings = app.post("/completion", BODY | {"logit_bias": [[5, False], [7, 1.5]]}).json()[
        "generation_settings"
    ]
    assert settings["logit_bias"] == [{"token": 5, "bias": None}, {"token": 7, "bias": 1.5}]
    settings = app.post("/completion", BODY | {"ignore_eos": True}).json()["generation_settings"]
    assert settings["logit_bias"] == [{"token": 257, "bias": None}]


def test_generation_settings_have_all_that_llama_server_shows(app: App) -> None:
    settings = app.post("/completion", BODY | {"grammar": 'root ::= "a"'}).json()["generation_settings"]
    assert set(SETTINGS.split()) <= settings.keys()
    assert settings["grammar"] == 'root ::= "a"'
    assert settings["speculative.types"] == "ngram"
    assert not settings["stream"]


def test_response_fields_pick_what_the_last_object_has(app: App) -> None:
    fields = {
        "response_fields": ["content", "generation_settings/n_predict", "never/heard", "timings/draft_n"]
    }
    value = app.post("/completion", BODY | fields).json()
    assert value.keys() == {"content", "generation_settings/n_predict", "timings/draft_n"}
    assert value["generation_settings/n_predict"] == 8
    *parts, last = app.events("/completion", BODY | fields)
    assert last.keys() == value.keys() and all("tokens" in part for part in parts)


def test_a_streamed_completion_ends_with_its_usage(app: App) -> None:
    *_, last, done = app.events("/v1/completions", {"prompt": "x"})
    usage = last["usage"]
    assert done == "[DONE]"
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 2
    asked = app.events("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}})
    assert [("usage" in event, event["choices"] == []) for event in asked[-3:-1]] == [
        (False, False),
        (True, True),
    ]
    assert asked[-2]["usage"] == usage


def test_parts_of_a_message_that_is_continued_stand_apart(app: App) -> None:
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "ill"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]
    prompt = app.post("/apply-template", {"messages": messages}).json()["prompt"]
    assert "Wh\nill" in prompt and prompt.endswith("Wh\n\nill")
