"""The arguments of `Engine.load` and of a generation: types, so that type checkers find misspelt names and wrong kinds, and checks.

The fields are those of `EngineSettings`, `Request` and `SamplingParams`, which define legal values and defaults; `config` and `request`
have the types of the first and the last.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from typing import Annotated, Any, TypedDict

from pyspec.config import EngineSettings, LoadOptions, settings_from
from pyspec.constrain.grammar import choice_of
from pyspec.errors import ConfigError, PyspecError, RequestError
from pyspec.ranges import Doc, rules_of, shown
from pyspec.request import Grammar, Request, SamplingOptions, SamplingParams, check_request
from pyspec.vision.picture import Placed

Message = Mapping[str, object]
Prompt = str | Sequence[int] | Sequence[Message] | Request
"""Text, token ids, chat messages, or a request made of one of them."""


class RequestOptions(TypedDict, total=False):
    """How far a generation goes and where it runs: fields of Request."""

    max_tokens: int
    stop: str | Sequence[str]
    cache_prompt: bool
    n_draft_max: int | None
    slot: int
    max_predict_ms: float
    cache_salt: str


class GrammarOptions(TypedDict, total=False):
    """The text's constraint; one of them."""

    # fmt: off
    json_schema: Annotated[Mapping[str, object] | str | bool | None, Doc("a JSON Schema, as an object or as JSON text, that the text follows; {} is any JSON")]
    grammar: Annotated[str | None, Doc("a grammar, llama.cpp's GBNF or lark, that the text matches")]
    regex: Annotated[str | None, Doc("a regular expression that the whole text matches")]
    choices: Annotated[Sequence[str] | None, Doc("a list of texts; the answer is one of them")]
    # fmt: on


class GenerateOptions(SamplingOptions, RequestOptions, GrammarOptions, total=False):
    """All options of a generation. `params` has values for sampling options that are not given; without it the defaults are those that the
    model's file recommends (`engine.info.sampling`)."""

    # fmt: off
    params: Annotated[SamplingParams | None, Doc("a pyspec.SamplingParams: values for the sampling options that are not given")]
    images: Annotated[Sequence[Any] | None, Doc("what the model sees, each as bytes, a path or one of Pillow's images: where a text prompt has <__media__>, or else before it; in chats before the text of the last user message")]
    timeout: Annotated[float | None, Doc("seconds after which the call ends with pyspec.errors.TimedOut, and its request with it: waiting for a slot, the prompt and all rounds count; None: no limit")]
    # fmt: on


MEANT = {
    "max_tokens": "max_completion_tokens max_new_tokens max_output_tokens max_gen_len max_length n_predict num_predict",
    "temperature": "temp",
    "stop": "stop_sequences stop_strings stop_words",
    "repeat_penalty": "repetition_penalty penalty_repeat",
    "frequency_penalty": "penalty_freq",
    "presence_penalty": "penalty_present",
    "typical_p": "typ_p typical",
    "mirostat": "mirostat_mode",
    "logprobs": "top_logprobs n_probs",
    "seed": "random_seed",
    "params": "sampling_params",
    "slot": "id_slot slot_id",
    "timeout": "max_time time_limit deadline timeout_s request_timeout",
    "json_schema": "guided_json format",
    "regex": "guided_regex",
    "choices": "guided_choice",
    "grammar": "guided_grammar",
    "ctx": "n_ctx num_ctx ctx_size context_length context_size max_model_len max_seq_len",
    "np": "n_parallel parallel num_parallel n_slots slots max_num_seqs",
    "threads": "n_threads num_threads num_thread n_threads_batch",
    "batch": "n_batch batch_size max_num_batched_tokens",
    "ubatch": "n_ubatch ubatch_size",
    "kv_type": "type_k cache_type_k kv_cache_dtype",
    "kv_type_v": "type_v cache_type_v",
    "tp": "tensor_parallel_size n_gpu",
    "prefix_cache": "enable_prefix_caching",
    "n_gpu_layers": "gpu_layers num_gpu ngl",
    "override_tensor": "override_tensors tensor_buft_overrides",
    "draft": "draft_model model_draft speculative_model drafter",
    "target": "model model_path path",
    "hf": "repo repo_id hf_repo",
}
"""Names that users of other programs type, by the option or setting that they mean."""
MEANT_BY = {typed: name for name, words in MEANT.items() for typed in words.split()}
SAID_OF = {
    "`Engine.stream` and `Engine.chat_stream` yield the text as it comes": "stream",
    "`Engine.generate_many` runs several prompts": "n best_of num_return_sequences",
    "`Engine.chat` takes it": "messages tools tool_choice parallel_tool_calls tool_call_parser response_format",
    "give it as a message of the role system": "system system_prompt",
    "temperature=0 takes the likeliest tokens": "do_sample",
    "`Engine.use_template` replaces the file's template": "chat_template chat_format",
    "the log of Python's `logging` has the loggers pyspec.*": "verbose",
    "it is not needed: the whole model runs on one device (`device`), in memory that is planned before the load": "gpu_memory_utilization flash_attn use_mmap use_mlock main_gpu tensor_split dtype device_map quantization trust_remote_code",
}
SAID = {typed: said for said, words in SAID_OF.items() for typed in words.split()}
"""What to do instead, by the name that was typed."""


def unknown(
    what: str, name: str, known: Iterable[str], others: Iterable[str], elsewhere: str
) -> ConfigError:
    """The error for a name that is no option or no setting, with what was meant. others: names that belong `elsewhere`."""
    known = [*known]
    meant = MEANT_BY.get(name, "")
    if name in SAID:
        hint = SAID[name]
    elif name in others or (meant in others and meant not in known):
        hint = f"{meant or name!r} belongs to {elsewhere}"
    elif meant in known:
        hint = f"here it is '{meant}'"
    else:
        near = get_close_matches(name, known, 1)
        hint = f"did you mean '{near[0]}'?" if near else ""
    return ConfigError(f"no {what} '{name}'" + (hint and f"; {hint}"))


def request_of(
    prompt: tuple[int, ...],
    options: Mapping[str, object],
    recommended: SamplingParams | None = None,
    others: Iterable[str] = (),
    images: tuple[Placed, ...] = (),
) -> Request:
    """Make a request of token ids with `images` and GenerateOptions. Raises ConfigError, RequestError.

    recommended  sampling of a request that gives no `params`
    others       further names that the caller could have typed
    """
    for name in options:
        if name not in GenerateOptions.__annotations__:
            known = (*GenerateOptions.__annotations__, *others)
            loads = [rule.name for rule in rules_of(EngineSettings)]
            raise unknown("option of a generation", name, known, loads, "`Engine.load`")
    params = options.get("params")
    params = (recommended or SamplingParams()) if params is None else params
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"params is {shown(params)}; want a pyspec.SamplingParams")
    sampling: dict[str, Any] = {
        name: value for name, value in options.items() if name in SamplingOptions.__annotations__
    }
    rest: dict[str, Any] = {
        name: value for name, value in options.items() if name in RequestOptions.__annotations__
    }
    if isinstance(stop := rest.get("stop"), str):
        rest["stop"] = (stop,)
    grammar = grammar_of(options)
    params = replace(params, **sampling)
    request = Request(prompt=prompt, params=params, grammar=grammar, images=images, **rest)
    check_request(request)
    return replace(request, stop=tuple(request.stop))


def grammar_of(options: Mapping[str, object]) -> Grammar | None:
    """The given one of GrammarOptions. Raises ConfigError."""
    constraints = {
        name: options[name] for name in GrammarOptions.__annotations__ if options.get(name) is not None
    }
    if len(constraints) > 1:
        raise ConfigError(f"{' and '.join(constraints)} are given; a text keeps to one of them")
    for name, value in constraints.items():
        if name == "json_schema" and isinstance(value, Mapping | bool):
            try:
                return Grammar(kind="json_schema", source=json.dumps(value))
            except (TypeError, ValueError, RecursionError) as e:
                raise ConfigError(f"json_schema is not JSON: {e}") from None
        if name == "choices":
            if isinstance(value, str) or not isinstance(value, Sequence) or not value or not all(value):
                raise ConfigError(f"choices is {shown(value)}; want a list of texts, none of them empty")
            if bad := [text for text in value if not isinstance(text, str)]:
                raise ConfigError(f"choices holds {shown(bad[0])}; want texts")
            return Grammar(kind="lark", source=choice_of(value))
        if not isinstance(value, str):
            raise ConfigError(
                f"{name} is {shown(value)}; want text" + " or an object" * (name == "json_schema")
            )
        kind: Any = {"grammar": "gbnf" if "::=" in value else "lark"}.get(name, name)
        return Grammar(kind=kind, source=value)
    return None


def ids_of(prompt: Iterable[object], name: str = "prompt") -> tuple[int, ...]:
    """Token ids of any integer type as plain numbers. Raises RequestError."""
    if isinstance(prompt, str | bytes | bytearray | Mapping) or not hasattr(prompt, "__iter__"):
        wanted = "text, token ids or messages" if name == "prompt" else "token ids"
        raise RequestError(f"{name} is {shown(prompt)}; want {wanted}")
    tokens = list(prompt)
    if {*map(type, tokens)} <= {int}:
        return tuple(tokens)  # type: ignore[arg-type]
    return tuple(_id_of(token, f"{name}[{i}]") for i, token in enumerate(tokens))


def _id_of(token: object, name: str) -> int:
    try:
        if not isinstance(token, bool):
            return operator.index(token)  # type: ignore[arg-type]  # reported below
    except TypeError:
        pass
    raise RequestError(f"{name} is {shown(token)}; want a token id")


def check_messages(messages: Sequence[Message]) -> None:
    """Check chat messages as over HTTP; each message needs its content. Raises RequestError."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages is {shown(messages)}; want a list of messages (`generate` takes text)"
        )
    if not messages:
        raise RequestError("messages: the list is empty")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{i}] is {shown(message)}; want a role and content")
        role = message.get("role")
        if not isinstance(role, str) or not 1 <= len(role) <= 64:
            raise RequestError(f"messages[{i}].role is {shown(role)}; want text of 1 to 64 characters")
        if message.get("content") is None and not message.get("tool_calls"):
            raise RequestError(f"messages[{i}] has no content")


def settings_of(values: Mapping[str, object]) -> EngineSettings:
    """Settings from arguments, checked by name. Raises ConfigError."""
    rules = rules_of(EngineSettings)
    for name in values.keys() - {rule.name for rule in rules}:
        known = ("target", "draft", "hf", *LoadOptions.__annotations__, "np", "ctx")
        raise unknown("engine setting", name, known, GenerateOptions.__annotations__, "a generation")
    for rule in rules:
        if rule.name in values and (flaw := rule.flaw(values[rule.name])):
            raise ConfigError(flaw)
    return settings_from(dict(values))


FLAGS = {r.spelt: r.name for r in rules_of(EngineSettings) if r.flag.words} | {
    "-m": "target",
    "-md": "draft",
    "-hf": "hf",
}
"""Flags that messages name, and the equal arguments."""
SPELT = {flag.strip("-").replace("-", "_"): name for flag, name in FLAGS.items() if flag[:2] == "--"}
"""Settings by the long names of their flags, where these are others."""
_FLAG = re.compile(
    r"(?<![\w-])(--?[a-z][\w-]*)(?: (\d[\d.]*\b|full|packed|none|[\w.-]+/[\w.-]+(?::[\w.-]+)?))?"
)


def by_settings(values: Mapping[str, object]) -> dict[str, object]:
    """Arguments of a load under the names of the settings: the long names of flags are taken, too. Raises ConfigError for both."""
    named = {name: SPELT.get(name, name) for name in values}
    for name, setting in named.items():
        if name != setting and setting in values:
            raise ConfigError(f"{name} and {setting} are one setting: leave one out")
    return {named[name]: value for name, value in values.items()}


def with_arguments(message: str) -> str:
    """Translate a command-line message for a program's author: "-np 4" becomes "np=4"."""

    def name(found: re.Match[str]) -> str:
        flag, value = found.groups()
        if flag not in FLAGS:
            return found[0]
        if value is None:
            return FLAGS[flag]
        return f"{FLAGS[flag]}={value if value[0].isdigit() else repr(value)}"

    return _FLAG.sub(name, message)


@contextmanager
def argument_names() -> Iterator[None]:
    """Errors that leave this block name arguments instead of flags."""
    try:
        yield
    except PyspecError as e:
        e.args = (with_arguments(str(e)), *e.args[1:])
        raise
