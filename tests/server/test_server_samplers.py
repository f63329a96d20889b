"""`samplers` and the fields of samplers, from a body to the engine's parameters."""

from dataclasses import fields, replace

import pytest
from server_client import App

from pyspec.errors import RequestError
from pyspec.request import DEFAULT_SAMPLERS, SamplingParams
from pyspec.server.api.params import chain_of, settings_dict
from pyspec.server.app import create_app
from pyspec.server.settings import ServerSettings


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
        (
            ServerSettings(sampling=SamplingParams(top_k=3), sampling_given=frozenset({"top_k"})),
            replace(FILE, top_k=3),
        ),
        (ServerSettings(sampling_given=frozenset({"temperature"})), SamplingParams(top_k=7)),
    ],
)
@pytest.mark.parametrize(
    "path", ["/completion", "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"]
)
def test_what_the_file_recommends_is_the_default_of_every_interface(engine, path, settings, wanted):
    engine.info = replace(engine.info, sampling=FILE)
    app = App(create_app(engine, settings))
    body = {
        "prompt": "x",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 2,
        "max_output_tokens": 2,
    }
    if "chat" not in path and "messages" not in path:
        del body["messages"]
    if "responses" in path:
        body = {"input": "x", "max_output_tokens": 2}
    assert app.post(path, body).status_code == 200
    assert app.post(path, body | {"top_k": 9}).status_code == 200
    assert [r.params for r in engine.seen] == [wanted, replace(wanted, top_k=9)]
    params = app.get("/props").json()["default_generation_settings"]["params"]
    assert (params["temperature"], params["top_k"]) == (wanted.temperature, wanted.top_k)
