"""Tables of bodies: those that no path takes, whose field is named, and those that are, with what the engine gets of them; samplers, and slots."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
from server_client import App, app_of, refusal
from server_fakes import BOS, FakeEngine

from pyspec.errors import ConfigError, RequestError
from pyspec.request import DEFAULT_SAMPLERS, SamplingParams
from pyspec.server.api.params import chain_of, settings_dict
from pyspec.server.api.schema import NativeBody, validate
from pyspec.server.app import create_app
from pyspec.server.settings import ServerSettings

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
NOT_HERE = "not_supported_error"
# (body, how the message begins, or what is in it behind "..", its kind if it is not an invalid request) by path
# fmt: off
REFUSED: dict[str, list[tuple[Any, ...]]] = {
    "/completion": [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "the prompt is empty"),
        ({"prompt": [258]}, "token 258"),
        ({"prompt": [-1]}, "token -1"),
        ({"prompt": [10**30]}, "token 1000"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": "AA"}}, "prompt: multimodal_data is a list"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": [1]}}, "prompt: multimodal_data is a list"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["AA"]}}, "prompt.multimodal_data.0: this model was loaded without --mmproj", NOT_HERE),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "temperature": False}, "temperature"),
        ({"prompt": "x", "temperature": -101}, "temperature"),
        ({"prompt": "x", "top_k": 1.5}, "top_k"),
        ({"prompt": "x", "top_k": 2**40}, "top_k"),
        ({"prompt": "x", "top_p": 1.01}, "top_p"),
        ({"prompt": "x", "repeat_penalty": 0}, "repeat_penalty"),
        ({"prompt": "x", "n_predict": -2}, "n_predict"),
        ({"prompt": "x", "seed": 2**64}, "seed"),
        ({"prompt": "x", "n": 5}, "n: 5"),
        ({"prompt": "x", "n": 0}, "n:"),
        ({"prompt": "x", "id_slot": 4}, "id_slot"),
        ({"prompt": "x", "stop": [1]}, "stop"),
        ({"prompt": "x", "stop": ["a"] * 257}, "stop"),
        ({"prompt": "x", "stop": ["a" * 256] * 33}, "stop: 8448 bytes"),
        ({"prompt": "x", "stop": "a" * 257}, "stop"),
        ({"prompt": "x", "logit_bias": {"999": 1}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"prompt": "x", "logit_bias": [[1]]}, "logit_bias"),
        ({"prompt": "x", "logit_bias": [[1, True]]}, "logit_bias"),
        ({"prompt": "x", "n_probs": 51}, "n_probs: 51 alternatives; at most 50"),
        ({"prompt": "x", "n_probs": 300, "n_predict": 1000}, "n_probs: 300 alternatives; at most 262"),
        ({"prompt": "x", "n_probs": 1025, "n_predict": 1}, "n_probs: 1025 alternatives; at most 1024"),
        ({"prompt": "x", "response_fields": [1]}, "response_fields"),
        ({"prompt": "x", "speculative": 3}, "speculative"),
        ({"prompt": "x", "speculative": {"n_max": -2}}, "speculative"),
        ({"prompt": "x", "speculative.type": "mtp"}, "speculative.type: 'mtp' is not loaded"),
        ({"prompt": "x", "speculative.type": "ngram,suffix"}, "speculative.type: 'suffix' is not loaded"),
        ({"prompt": "x", "speculative.type": "suffix"}, "speculative.type: 'suffix' is not loaded"),
        ({"prompt": "x", "stream": "yes"}, "stream"),
        ({"prompt": "x", "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"prompt": "x", "dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
        ({"prompt": "x", "echo": True}, "echo is not supported here: only /v1/completions answer with it", NOT_HERE),
        ({"prompt": "x", "prompt_logprobs": 2}, "prompt_logprobs is not supported here", NOT_HERE),
    ],
    "/v1/chat/completions": [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}] * 65537}, "messages: 65537"),
        (CHAT | {"tools": [{"type": "function"}], "tool_choice": "none"}, "tools.0.function"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0: it has neither content"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages.0: it has neither content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages.0.content.0: this model was loaded without --mmproj", NOT_HERE),
        (CHAT | {"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice: there are no tools"),
        (CHAT | {"tools": [{"type": ["function"]}]}, "tools.0.type"),
        (CHAT | {"mcp_servers": [{"name": "x"}]}, "mcp_servers is not supported: MCP is out of scope", NOT_HERE),
        (CHAT | {"lora": [{"id": 0, "scale": 1.0}]}, "lora is not supported: LoRA adapters are out of scope", NOT_HERE),
        (CHAT | {"echo": True}, "echo is not supported here", NOT_HERE),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "bad", "content": "x"}]}, "the chat template refuses"),
        (CHAT | {"top_logprobs": 2}, "top_logprobs"),
        (CHAT | {"logprobs": True, "top_logprobs": 51}, "top_logprobs"),
        (CHAT | {"logprobs": 1}, "logprobs"),
        (CHAT | {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT | {"continue_final_message": True}, "continue_final_message"),
        (CHAT | {"tool_choice": 3}, "tool_choice"),
        (CHAT | {"tool_choice": "required"}, "tool_choice"),
        (CHAT | {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        (CHAT | {"tool_choice": "any"}, "tool_choice"),
        (CHAT | {"chat_template_kwargs": {"enable_thinking": "true"}}, "chat_template_kwargs.enable_thinking"),
        (CHAT | {"reasoning_format": "xml"}, "reasoning_format"),
        (CHAT | {"grammar": "root ::= \"a\"", "json_schema": {}}, "..json_schema is given, too"),
        (CHAT | {"response_format": {"type": "json_object"}, "guided_regex": "a"}, "..response_format is given, too"),
        (CHAT | {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "..is given, too"),
        (CHAT | {"response_format": {"type": "yaml"}}, "response_format.type: 'yaml'"),
        (CHAT | {"response_format": {}}, "response_format.type"),
        (CHAT | {"response_format": {"type": "json_schema", "json_schema": "x"}}, "response_format.json_schema"),
        (CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wombat"}}}}, "..wombat"),
        (CHAT | {"response_format": "json"}, "response_format"),
        (CHAT | {"json_schema": {"not": {}}}, "json_schema: "),
        (CHAT | {"json_schema": [1]}, "json_schema"),
        (CHAT | {"grammar": "root ="}, "grammar: "),
        (CHAT | {"grammar": 3}, "grammar"),
        (CHAT | {"guided_regex": "("}, "guided_regex: "),
        (CHAT | {"guided_choice": [""]}, "guided_choice: "),
        (CHAT | {"guided_choice": "yes"}, "guided_choice"),
        (CHAT | {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        (CHAT | {"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
    ],
    "/v1/completions": [
        ({"prompt": "x", "best_of": 2, "n": 3}, "best_of: 2 answers are fewer"),
        ({"prompt": "x", "best_of": 2, "stream": True}, "best_of: the best answer is known only"),
        ({"prompt": "x", "best_of": 9}, "best_of: 9 choices, but there are 4 slots"),
        ({"prompt": "x", "best_of": 2, "post_sampling_probs": True}, "..leave post_sampling_probs out"),
        ({"prompt": "x", "prompt_logprobs": 51}, "prompt_logprobs: 51 alternatives"),
        ({"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs: "),
        ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "..without stream"),
        ({"prompt": "x", "echo": True, "logprobs": 1, "stream": True}, "..without stream"),
    ],
    "/v1/messages": [
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.source: an image's source is base64 or url"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "..'document'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "..tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "..content.0"),
        (CHAT | {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (CHAT | {"tool_choice": "auto"}, "tool_choice"),
        (CHAT | {"max_tokens": -3}, "max_tokens"),
        (CHAT | {"system": [{"type": "image"}]}, "system.0"),
        (CHAT | {"system": ["text"]}, "system"),
        (CHAT | {"container": "x"}, "container"),
    ],
    "/v1/responses": [
        ({"input": [{"type": "mesage", "content": "x"}]}, "input.0: items of type 'mesage' are not supported", NOT_HERE),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input: the list is empty"),
        ({"input": [{"role": ["user"], "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": {"a": 1}, "content": "x"}]}, "input.0.role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.image_url: a string is needed"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input.0.content.0.file_id is not supported", NOT_HERE),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "..'input_file'", NOT_HERE),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
        ({"input": [{"type": "function_call", "name": "look"}]}, "input.0.arguments"),
        ({"input": []}, "input"),
        ({"input": "hi", "tool_choice": {"type": "web_search"}}, "tool_choice: tools of type 'web_search'", NOT_HERE),
        ({"input": "hi", "tools": [{"type": "function"}]}, "tools.0.name"),
        ({"input": "hi", "tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools"),
        ({"input": "hi", "conversation": "conv_1"}, "conversation", NOT_HERE),
        ({"input": "hi", "background": True}, "background", NOT_HERE),
        ({"input": "hi", "top_logprobs": 3}, "top_logprobs", NOT_HERE),
        ({"input": "hi", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ],
}
# fmt: on


@pytest.mark.parametrize(
    ("path", "body", "words", "kind"),
    [(path, *row, "invalid_request_error")[:4] for path, rows in REFUSED.items() for row in rows],
)
def test_a_refusal_names_the_field(
    app: App, engine: FakeEngine, path: str, body: dict[str, Any], words: str, kind: str
) -> None:
    answer = app.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    said, begun = error["message"], words.removeprefix("..")
    assert said.startswith(begun) if begun == words else begun in said, said
    assert "\n" not in said and error["type"] == kind
    assert not engine.seen


# Fields of the first request, and of its sampling parameters, by body and path
# fmt: off
TAKEN: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "/completion": [
        ({}, {"n_draft_max": None}),
        ({"speculative": True}, {"n_draft_max": None}),
        ({"speculative": False}, {"n_draft_max": 0}),
        ({"speculative": {"n_max": 4}}, {"n_draft_max": 4}),
        ({"speculative": {"type": "none"}}, {"n_draft_max": 0}),
        ({"speculative": {"n_max": -1}}, {"n_draft_max": None}),
        ({"speculative.n_max": 2}, {"n_draft_max": 2}),
        ({"speculative.n_max": -1}, {"n_draft_max": None}),
        ({"speculative.type": "draft-ngram", "speculative.n_max": 0}, {"n_draft_max": 0}),
        ({"speculative.type": "ngram-simple", "speculative.n_max": 3}, {"n_draft_max": 3}),
        *(({"speculative.type": kind}, {}) for kind in ("ngram-simple,suffix", "suffix", "ngram", "auto,suffix")),
        ({"logit_bias": {"97": 2, "b": -1.5}}, {"logit_bias": ((97, 2.0), (98, -1.5))}),
        ({"logit_bias": [[97, 2], ["bb", 1], [99, False]]}, {"logit_bias": ((97, 2.0), (98, 2.0), (99, -inf))}),
        ({"logit_bias": [[257, False]]}, {"logit_bias": ((257, -inf),)}),
        ({"logit_bias": []}, {"logit_bias": ()}),
        ({"n_predict": -1}, {"max_tokens": -1}),
        ({"samplers": ["top_k", "temperature"], "top_p": 0.5, "top_k": -1}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 0.8}),
        ({"ignore_eos": True, "n_predict": 20, "cache_prompt": False, "id_slot": 2}, {"ignore_eos": True, "max_tokens": 20, "cache_prompt": False, "slot": 2}),
        ({"t_max_predict_ms": 50, "temperature": 0}, {"max_predict_ms": 50.0, "greedy": True}),
        ({"dry_multiplier": 1, "dry_sequence_breakers": ["\n"]}, {"dry_multiplier": 1.0, "dry_sequence_breakers": ("\n",)}),
        ({"temperature": -1}, {"temperature": 0.0}),
        ({"seed": 2**40 + 1}, {"seed": 2**40 + 1}),
        ({"seed": -5}, {"seed": 2**32 - 5}),
        ({"seed": 2**32 - 1}, {"seed": -1}),
        ({"n_probs": 1024, "n_predict": 1}, {"logprobs": 1024}),
    ],
    "/v1/chat/completions": [
        *(({name: 5}, {"max_tokens": 5}) for name in ("max_tokens", "max_completion_tokens", "n_predict")),
        ({"response_format": {"type": "text"}}, {"grammar": None}),
        ({"response_format": None, "json_schema": None, "grammar": "", "guided_choice": [], "guided_regex": ""}, {"grammar": None}),
        ({"structured_outputs": {"json": None, "regex": None}}, {"grammar": None}),
    ],
    "/v1/messages": [
        ({"max_tokens": 5, "top_k": 7, "temperature": 0.5, "top_p": 0.25, "seed": 3, "metadata": {"user_id": "u"}}, {"top_k": 7, "temperature": 0.5, "top_p": 0.25, "max_tokens": 5, "seed": 3}),
    ],
}
PROMPTS: list[tuple[Any, list[Sequence[int]]]] = [
    ("ab", [(BOS, 97, 98)]),
    ([97, 98], [(97, 98)]),
    ([97, "b", 99], [(97, 98, 99)]),
    (["a", 98], [(BOS, 97, 98)]),
    (["a", "b"], [(BOS, 97), (BOS, 98)]),
    ([[97], "b", ["a", 98]], [(97,), (BOS, 98), (BOS, 97, 98)]),
    ({"prompt_string": "a"}, [(BOS, 97)]),
]
# fmt: on


@pytest.mark.parametrize(
    ("path", "body", "got"), [(path, *row) for path, rows in TAKEN.items() for row in rows]
)
def test_fields_reach_the_engine(
    app: App, engine: FakeEngine, path: str, body: dict[str, Any], got: dict[str, Any]
) -> None:
    engine.info = replace(engine.info, has_suffixes=True)
    answer = app.post(path, ({"prompt": "x"} if path == "/completion" else CHAT) | body)
    assert answer.status_code == 200, answer.text
    request = engine.seen[0]
    assert {n: getattr(request if hasattr(request, n) else request.params, n) for n in got} == got


@pytest.mark.parametrize(("prompt", "prompts"), PROMPTS)
def test_prompts_come_as_text_ids_and_mixtures(
    app: App, engine: FakeEngine, prompt: Any, prompts: list[Sequence[int]]
) -> None:
    value = app.post("/completion", {"prompt": prompt, "n_predict": 1}).json()
    assert [request.prompt for request in engine.seen] == prompts
    assert isinstance(value, list) == (len(prompts) > 1)


@pytest.mark.parametrize(
    ("samplers", "order"),
    [
        (list(DEFAULT_SAMPLERS), ()),
        (["top_k", "temperature"], ()),
        (["temperature", "top_k"], ("temperature", "top_k")),
        (["temp", "Top-K", "nucleus", "minp"], ("temperature", "top_k", "top_p", "min_p")),
        ("tk", ("temperature", "top_k")),
        ("edskypmxt", ()),
        (["top_k", "adaptive_p", "top_k"], ()),
        ([], ()),
    ],
)
def test_an_order_is_kept_and_the_usual_one_needs_no_saying(samplers, order):
    assert chain_of(samplers)["samplers"] == order


def test_what_a_list_leaves_out_is_off():
    params = SamplingParams(**chain_of(["min_p"]))
    assert (params.top_k, params.top_p, params.temperature, params.adaptive_target) == (
        0,
        1.0,
        1.0,
        -1.0,
    )
    assert params.min_p == SamplingParams().min_p


@pytest.mark.parametrize("samplers", [["magic"], "tz", ["infill"], ["top_k", ""]])
def test_an_unknown_sampler_is_refused_by_its_name(samplers):
    with pytest.raises(RequestError, match="samplers"):
        chain_of(samplers)


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ({"json_schema": 5}, "json_schema: want an object, or true or false, or a string"),
        ({"samplers": 5}, "samplers: want a list, or a string"),
        ({"samplers": ["tz", 5]}, "samplers.1: want a string"),
        ({"samplers": "x" * 65}, "samplers: want 64 characters or fewer"),
        ({"stop": 5}, "stop: stop is a string or a list of strings"),
        ({"prompt": {}}, "prompt: a prompt object holds prompt_string"),
        ({"seed": "5"}, "seed: want a whole number"),
    ],
)
def test_a_value_of_none_of_several_forms_is_told_all_and_one_of_a_form_what_that_wants(field, told):
    with pytest.raises(RequestError, match=re.escape(told)):
        validate(NativeBody, {"prompt": "x"} | field)


def test_every_parameter_is_shown_in_the_settings():
    renamed = {"logprobs": "n_probs", "post_sampling": "post_sampling_probs"}
    assert {renamed.get(f.name, f.name) for f in fields(SamplingParams)} <= settings_dict(
        SamplingParams()
    ).keys()


FILE = SamplingParams(temperature=0.25, top_k=7)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (ServerSettings(), FILE),
        (ServerSettings(sampling=SamplingParams(top_p=0.5)), replace(FILE, top_p=0.5)),
        (ServerSettings(sampling=SamplingParams(top_k=3), sampling_given=frozenset({"top_k"})), replace(FILE, top_k=3)),
        (ServerSettings(sampling_given=frozenset({"temperature"})), SamplingParams(top_k=7)),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "path", ["/completion", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"]
)
def test_what_the_file_recommends_is_the_default_of_every_interface(engine, path, settings, wanted):
    engine.info = replace(engine.info, sampling=FILE)
    app = App(create_app(engine, settings))
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "max_output_tokens": 2}  # fmt: skip
    if "chat" not in path and "messages" not in path:
        del body["messages"]
    if "responses" in path:
        body = {"input": "x", "max_output_tokens": 2}
    assert app.post(path, body).status_code == 200
    assert app.post(path, body | {"top_k": 9}).status_code == 200
    assert [r.params for r in engine.seen] == [wanted, replace(wanted, top_k=9)]
    params = app.get("/props").json()["default_generation_settings"]["params"]
    assert (params["temperature"], params["top_k"]) == (wanted.temperature, wanted.top_k)


@pytest.fixture
def saving(engine: FakeEngine, tmp_path: Path) -> App:
    return app_of(engine, slot_save_path=str(tmp_path))


def test_answers_are_those_of_llama_server(saving: App, engine: FakeEngine, tmp_path: Path) -> None:
    saved = saving.post("/slots/1?action=save", {"filename": "a.bin"}).json()
    assert saved == {
        "id_slot": 1,
        "filename": "a.bin",
        "n_saved": 84,
        "n_written": 4096,
        "timings": {"save_ms": 1.5},
    }
    restored = saving.post("/slots/2?action=restore", {"filename": "a.bin"}).json()
    assert restored == {
        "id_slot": 2, "filename": "a.bin", "n_restored": 84, "n_read": 4096, "timings": {"restore_ms": 1.5},
    }  # fmt: skip
    assert saving.post("/slots/0?action=erase", {}).json() == {"id_slot": 0, "n_erased": 84}
    assert [a.path for a in engine.acted] == [str(tmp_path / "a.bin")] * 2 + [""]


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "a\\b",
        "/etc/passwd",
        "a\0b",
        ".hidden",
        "x.",
        " x",
        "a..b",
        "x" * 201,
        'a"',
        "c:d",
        "\uff0e",
    ],
)
def test_names_that_are_no_plain_file_names_are_refused(
    saving: App, engine: FakeEngine, name: str
) -> None:
    for action in ("save", "restore"):
        assert refusal(saving.post(f"/slots/0?action={action}", {"filename": name})).startswith(
            "filename: "
        )
    assert not engine.acted


def test_what_can_not_be_done_is_said(saving: App, engine: FakeEngine) -> None:
    for path, body, says in [
        ("/slots/x?action=save", {"filename": "a"}, "no number"),
        ("/slots/99999999999?action=save", {"filename": "a"}, "no number"),
        ("/slots/0", {"filename": "a"}, "want save, restore or erase"),
        ("/slots/0?action=eat", {"filename": "a"}, "want save, restore or erase"),
        ("/slots/0?action=save", {}, "filename: field required"),
        ("/slots/0?action=save", {"filename": 5}, "filename: "),
        ("/slots/4?action=save", {"filename": "a"}, "slot 4 does not exist"),
    ]:
        assert says in refusal(saving.post(path, body))
    assert "--slot-save-path" in refusal(app_of(engine).post("/slots/0?action=save", {"filename": "a"}))
    with pytest.raises(ConfigError, match="is no directory; make it first"):
        ServerSettings(slot_save_path="/nowhere/at/all").check()
