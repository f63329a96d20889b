"""Options of programs: the typed lists match the dataclasses, and type checkers and run time find wrong ones."""

from __future__ import annotations

import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from pyspec.config import EngineSettings, LoadOptions
from pyspec.engine import options
from pyspec.engine.api import Engine
from pyspec.engine.options import (
    GenerateOptions,
    GrammarOptions,
    RequestOptions,
    by_settings,
    with_arguments,
)
from pyspec.errors import ConfigError, PyspecError, RequestError
from pyspec.ranges import docs_of
from pyspec.request import Request, SamplingOptions, SamplingParams

FIXTURES = Path(__file__).parents[1] / "fixtures"
OURS = {"prompt", "params", "n_before_turn", "n_system", "n_stable", "timings_per_token", "resumed", "shown", "grammar"} | {
    "client", "group", "think_budget", "prompt_logprobs", "images",
}  # fmt: skip
"""Fields of Request that the engine, the server or another option fills in; build a Request to set them."""


def test_load_options_are_the_settings_that_load_has_no_parameter_for():
    own = inspect.signature(Engine.load).parameters
    described = docs_of(EngineSettings)
    settings = {
        name: hint
        for name, hint in get_type_hints(EngineSettings).items()
        if name not in own and name in described
    }
    assert get_type_hints(LoadOptions) == settings
    inner = {"check_tap_shift", "demoted", "parks"}
    assert {f.name for f in fields(EngineSettings)} - described.keys() == inner


def test_sampling_options_are_the_sampling_parameters():
    given = get_type_hints(SamplingOptions)
    assert given | {"logit_bias": tuple[tuple[int, float], ...]} == get_type_hints(SamplingParams)


def test_request_options_are_the_requests_fields():
    wanted = {name: hint for name, hint in get_type_hints(Request).items() if name not in OURS}
    given = get_type_hints(RequestOptions)
    assert given | {"stop": tuple[str, ...]} == wanted
    assert {*GenerateOptions.__annotations__} == {
        *given, *get_type_hints(SamplingParams), *GrammarOptions.__annotations__, "params", "timeout", "images",
    }  # fmt: skip


PROGRAM = """
import pyspec

engine = pyspec.Engine.load("demo", np={np}, kv_type="f32")
text: str = engine.generate("Hi", {temperature}=1, max_tokens=4).text
tokens: {tokens} = engine.chat([{{"role": "user", "content": "Hi"}}]).tokens
several: list[pyspec.Result] = engine.generate_many(["a", "b"], progress=lambda done, of: None)
for one in engine.generate_many(["a"], return_exceptions=True):
    said: str = str(one) if isinstance(one, pyspec.PyspecError) else one.text
"""
FINE = {"np": "8", "temperature": "temperature", "tokens": "tuple[int, ...]"}
PLANTED = {"np": '"eight"', "temperature": "temprature", "tokens": "list[str]"}


@pytest.mark.slow
def test_a_type_checker_finds_planted_mistakes_and_no_others(tmp_path: Path):
    fine, planted = tmp_path / "fine.py", tmp_path / "planted.py"
    fine.write_text(PROGRAM.format(**FINE))
    planted.write_text(PROGRAM.format(**PLANTED))
    mypy = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file=",
        "--follow-imports=silent",
        "--ignore-missing-imports",
    ]
    done = subprocess.run(
        [*mypy, f"--cache-dir={tmp_path / 'cache'}", str(fine), str(planted)],
        capture_output=True,
        text=True,
    )
    found = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(found) == 3 and all("planted.py" in line for line in found), done.stdout
    for line, word in zip(found, ('"np"', '"temprature"', "list[str]"), strict=True):
        assert word in line


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"np": "eight"}, r"^np is 'eight'; want a whole number from 1 to 256$"),
        ({"ctx": -1}, r"^ctx is -1; want"),
        ({"kv_type": "f64"}, r"^kv_type is 'f64'; want one of"),
        ({"kv_type_v": "q3_0"}, r"^kv_type_v is 'q3_0'; want one of"),
        ({"cpu_activations": "q4"}, r"^cpu_activations is 'q4'; want one of q16, q8"),
        ({"kv_typ": "f16"}, r"^no engine setting 'kv_typ'; did you mean 'kv_type'\?$"),
        ({"n_ctx": 99}, r"^no engine setting 'n_ctx'; here it is 'ctx'$"),
        ({"model_path": "x"}, r"^no engine setting 'model_path'; here it is 'target'$"),
        ({"flash_attn": True}, r"^no engine setting 'flash_attn'; it is not needed: the whole model runs on one"),
        ({"n_gpu_layers": "all"}, r"^n_gpu_layers is 'all'; want a whole number from -1 to"),
        ({"num_gpu": 99}, r"^no engine setting 'num_gpu'; here it is 'n_gpu_layers'$"),
        ({"temp": 0}, r"^no engine setting 'temp'; 'temperature' belongs to a generation$"),
        ({"spec_fixed": "x"}, r"^n_draft_fixed is 'x'; want one of True, False$"),
        ({"spec_fixed": True, "n_draft_fixed": True}, r"^spec_fixed and n_draft_fixed are one setting"),
        ({"draft": "nope"}, r"^draft: 'nope' is neither a file nor in the catalogue .*\. Drafters are auto, none, .*mtp, .*,suffix'"),
        ({"draft": "gone.gguf"}, r"^no file gone\.gguf$"),
        ({"target": None}, r"^no model is named; want a file"),
        ({"hf": "user/repo"}, r"^target and hf exclude each other"),
        ({"target": None, "hf": "user"}, r"^hf wants user/repo\[:quant\], got 'user'$"),
        ({"target": None, "hf": 7}, r"^hf is 7; want"),
        ({"target": "user/repo"}, r"^no file user/repo; for a Hugging Face repository use hf='user/repo'$"),
        ({"batch": 5, "ubatch": 512}, r"^batch is 5; want ubatch \(512\) to"),
        ({"np": 256, "ctx": 1 << 24}, r"^np=256 times ctx=16777216 is \d+ tokens; want at most \d+ \(kv_pool shares fewer\)$"),
        ({"target": "gone.gguf"}, r"^no file gone\.gguf"),
    ],
)  # fmt: skip
def test_a_load_refuses_in_the_words_of_a_program(values: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        Engine.load(**{"target": "demo", **values})


def test_flags_in_messages_become_arguments():
    assert with_arguments("this would fit: -np 3 or -c 2048 or --draft-head full") == (
        "this would fit: np=3 or ctx=2048 or draft_head='full'"
    )
    assert with_arguments("it holds 64 (raise it with -c)") == "it holds 64 (raise it with ctx)"
    assert with_arguments("a-np --unknown 3 -md x") == "a-np --unknown 3 draft x"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -101}, "temperature is -101; want a number from -100 to 100"),
        ({"top_p": 1.5}, "top_p is 1.5; want a number from 0 to 1"),
        ({"max_tokens": "ten"}, "max_tokens is 'ten'"),
        ({"stop": [1]}, r"stop\[0\] is 1; want text"),
        ({"params": {"top_k": 1}}, "want a pyspec.SamplingParams"),
        ({"temprature": 1}, "^no option of a generation 'temprature'; did you mean 'temperature'"),
        ({"max_completion_tokens": 1}, "'max_completion_tokens'; here it is 'max_tokens'$"),
        ({"temp": 1}, "'temp'; here it is 'temperature'$"),
        ({"stream": True}, "'stream'; `Engine.stream` and `Engine.chat_stream` yield the text"),
        ({"tensor_split": 1}, "'tensor_split'; it is not needed"),
        ({"np": 1}, "'np'; 'np' belongs to `Engine.load`$"),
        ({"n": 2}, "'n'; `Engine.generate_many` runs several prompts$"),
        ({"tools": []}, "'tools'; `Engine.chat` takes it$"),
        ({"logit_bias": {"five": 1}}, r"logit_bias\[0\] is 'five'; want a whole number"),
        ({"logit_bias": {5: "x"}}, r"logit_bias\[0\] is 'x'; want a number"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_runs(given: dict, message: str):
    with pytest.raises(PyspecError, match=message):
        options.request_of((1,), given)


def test_every_name_that_is_meant_exists_and_is_typed_for_nothing_else():
    known = {*GenerateOptions.__annotations__, *inspect.signature(Engine.load).parameters}
    known |= LoadOptions.__annotations__.keys()
    assert options.MEANT.keys() <= known
    assert len(options.MEANT_BY) == sum(len(words.split()) for words in options.MEANT.values())
    assert not (options.MEANT_BY.keys() | options.SAID.keys()) & (known | options.SPELT.keys())


def test_settings_are_taken_by_the_long_names_of_their_flags():
    assert by_settings({"spec_fixed": True, "warmup": False, "np": 2}) == {
        "n_draft_fixed": True, "warm_up": False, "np": 2,
    }  # fmt: skip


@pytest.mark.parametrize("spec_type", ["none", "suffix"])
def test_a_setting_of_suffix_drafts_without_any_is_told_in_a_line(
    spec_type: str, caplog: pytest.LogCaptureFixture
):
    values = {"ctx": 64, "device": "cpu", "warm_up": False, "suffix_n_max": 9, "spec_type": spec_type}
    with Engine.load(FIXTURES / "llama.gguf", **values):  # type: ignore[arg-type]
        told = [r.getMessage() for r in caplog.records if "has no effect" in r.getMessage()]
    wanted = "--spec-suffix-n-max has no effect: there are no suffix drafts (--spec-type suffix, or TYPE,suffix)"
    assert told == ([wanted] if spec_type == "none" else [])


def test_a_bias_may_be_a_mapping_as_openais_clients_send_it():
    pairs = ((5, -100), (7, 1.5))
    assert options.request_of((1,), {"logit_bias": {5: -100, "7": 1.5}}).params.logit_bias == pairs
    assert SamplingParams(logit_bias={"5": -100, 7: 1.5}).logit_bias == pairs  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "want a list of messages"),
        ([], "the list is empty"),
        (["Hi"], r"messages\[0\] is 'Hi'"),
        ([{"content": "Hi"}], r"messages\[0\]\.role is None"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], r"messages\[1\] has no content"),
    ],
)
def test_what_is_no_chat_is_refused(messages: list, message: str):
    with pytest.raises(RequestError, match=message):
        options.check_messages(messages)


def test_a_call_of_tools_needs_no_content_and_ids_may_be_of_any_whole_type():
    import numpy

    options.check_messages([{"role": "assistant", "tool_calls": [{}]}])
    assert options.ids_of(numpy.array([1, 2])) == (1, 2)
    assert type(options.ids_of([numpy.int32(3)])[0]) is int
    with pytest.raises(RequestError, match=r"prompt\[1\] is 1\.5; want a token id"):
        options.ids_of([1, 1.5])


@pytest.mark.parametrize("prompt", [None, 5, b"Hi", {"role": "user", "content": "Hi"}])
def test_what_is_no_prompt_is_refused_and_not_read_as_token_ids(prompt: object):
    with pytest.raises(RequestError, match="want text, token ids or messages"):
        options.ids_of(prompt)  # type: ignore[arg-type]


def test_a_truth_value_is_no_token_id():
    with pytest.raises(RequestError, match=r"prompt\[1\] is True; want a token id"):
        options.ids_of([1, True])


def test_an_array_is_a_prompt():
    import numpy

    assert Engine._encode(None, numpy.array([1, 2]), None).ids == (1, 2)  # type: ignore[arg-type]
