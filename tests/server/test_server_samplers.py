"""`samplers` and the fields of samplers, from a body to the engine's parameters."""

from dataclasses import fields

import pytest

from pyspec.errors import RequestError
from pyspec.request import DEFAULT_SAMPLERS, SamplingParams
from pyspec.server.api.params import settings_dict
from pyspec.server.api.samplers import chain_of


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
    assert (params.top_k, params.top_p, params.temperature, params.adaptive_target) == (0, 1.0, 1.0, -1.0)
    assert params.min_p == SamplingParams().min_p


@pytest.mark.parametrize("samplers", [["magic"], "tz", ["infill"], ["top_k", ""]])
def test_an_unknown_sampler_is_refused_by_its_name(samplers):
    with pytest.raises(RequestError, match="samplers"):
        chain_of(samplers)


def test_every_parameter_is_shown_in_the_settings():
    renamed = {"logprobs": "n_probs", "post_sampling": "post_sampling_probs"}
    assert {renamed.get(f.name, f.name) for f in fields(SamplingParams)} <= settings_dict(SamplingParams()).keys()
