"""Request bodies: every supported field, with type and range, checked strictly.

Strict means that "1" is no number and true no count, because lax coercion hides clients' mistakes. 4.0 is an integer, as in JSON
Schema; 4.5 is not. The published OpenAPI document is built from these models. Unsupported fields that would change the text are in
`out_of_scope.py`; all others are ignored, as in OpenAI's and llama.cpp's servers.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    WithJsonSchema,
    create_model,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import PydanticCustomError

from pyspec.errors import RequestError
from pyspec.ranges import INT32, SWITCH, Kind, Real, Whole, printable, rules_of
from pyspec.request import SamplingParams

SEED_MAX = 2**32 - 1


def _bad(message: str) -> PydanticCustomError:
    return PydanticCustomError("value", "{why}", {"why": message})


def to_integer(value: Any) -> Any:
    """A whole number written with a point, as an integer."""
    return int(value) if type(value) is float and value.is_integer() else value


WHOLE = BeforeValidator(to_integer)


def is_id(value: Any) -> bool:
    """True for a plain JSON integer. Python counts bool as int; this does not."""
    return type(value) is int


def _check_piece(value: Any) -> Any:
    """A prompt: text, ids, or a list that mixes both."""
    if isinstance(value, dict):
        data = value.get("multimodal_data", [])
        is_known = value.keys() <= {"prompt_string", "multimodal_data"}
        if not is_known or not isinstance(value.get("prompt_string"), str):
            raise _bad(
                "a prompt object holds prompt_string, a text, and multimodal_data, and nothing else"
            )
        if not isinstance(data, list) or not all(isinstance(item, str) for item in data):
            raise _bad("multimodal_data is a list of images as base64")
    elif isinstance(value, list):
        value = [to_integer(item) for item in value]
        if not all(is_id(item) or isinstance(item, str) for item in value):
            raise _bad("a prompt list holds token ids and strings")
    elif not isinstance(value, str):
        raise _bad("a prompt is a string or a list of token ids and strings")
    return value


def _check_prompt(value: Any) -> Any:
    if isinstance(value, list) and any(isinstance(item, list | dict) for item in value):
        return [_check_piece(item) for item in value]
    return _check_piece(value)


def _check_mixed(value: Any) -> Any:
    if isinstance(value, dict):
        raise _bad("content is a string or a list of token ids and strings")
    return _check_piece(value)


def _check_stop(value: Any) -> Any:
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str) for item in items):
        raise _bad("stop is a string or a list of strings")
    return value


def _check_bias(value: Any) -> Any:
    """`{"id or text": number | false}` or `[[id or text, number | false], ...]`."""
    if isinstance(value, dict):
        pairs = [list(pair) for pair in value.items()]
    elif isinstance(value, list):
        value = [[to_integer(x[0]), *x[1:]] if isinstance(x, list) and x else x for x in value]
        pairs = value
    else:
        raise _bad("logit_bias is an object or a list of [token, bias] pairs")
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise _bad("a logit_bias entry is a pair: [token, bias]")
        token, bias = pair
        if not ((is_id(token) and token >= 0) or isinstance(token, str)):
            raise _bad("a logit_bias token is an id or a string")
        if not (bias is False or (type(bias) in (int, float) and abs(bias) <= 1e6)):
            raise _bad("a logit_bias value is a number between -1e6 and 1e6, or false to ban the token")
    return value


def _check_speculative(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if not isinstance(value, dict):
        raise _bad("speculative is true, false or an object such as {n_max: 4}")
    value = {name: to_integer(each) for name, each in value.items()}
    for name in ("n_max", "k_max"):
        if name in value and not (is_id(value[name]) and -1 <= value[name] <= 1024):
            raise _bad(f"speculative.{name} is an integer between -1 (the default) and 1024")
    if "type" in value and not isinstance(value["type"], str):
        raise _bad("speculative.type is a string")
    return value


def _check_content(value: Any) -> Any:
    """Message content: text, nothing, or a list of parts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _bad("content is a string, null or a list of parts")
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise _bad('a content part is an object with a type, such as {type: "text", text: "..."}')
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise _bad("a text part needs its text")
    return value


class MovedImage(NamedTuple):
    """A picture of another API's body. where: its place there, which errors name; JSON can not hold one of these"""

    url: str
    where: str


def image_url(part: dict[str, Any], where: str) -> MovedImage:
    """The URL of a picture in a part of a message: a string, or `url` of an object; `detail` is ignored. Raises RequestError."""
    given = part.get("image_url")
    if isinstance(given, MovedImage):
        return given
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str):
        raise RequestError(f"{where}.image_url.url: a string is needed")
    return MovedImage(url, where)


def image_part(url: str, where: str) -> dict[str, Any]:
    """A picture as a part of a message of chat completions. where: its place in the body of another API"""
    return {"type": "image_url", "image_url": MovedImage(url, where)}


def _any(*forms: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": list(forms)}


def _list(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": form}


def _object(**fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields}


def _like(*forms: dict[str, Any]) -> WithJsonSchema:
    """What a value that a function checks looks like in the published document. A function has words of its own, and is fast for long prompts."""
    return WithJsonSchema(_any(*forms))


_ID, _STR = {"type": "integer", "minimum": 0}, {"type": "string"}
_MIXED = _list(_any(_ID, _STR))
_BIAS = _any({"type": "number", "minimum": -1e6, "maximum": 1e6}, {"const": False})
_PAIR = {"type": "array", "prefixItems": [_any(_ID, _STR), _BIAS], "minItems": 2, "maxItems": 2}
_PART = _any(
    _object(type={"const": "text"}, text=_STR) | {"required": ["type", "text"]},
    _object(type={"const": "image_url"}, image_url=_any(_STR, _object(url=_STR) | {"required": ["url"]}))
    | {"required": ["type", "image_url"]},
)
_WITH_DATA = _object(prompt_string=_STR, multimodal_data=_list(_STR)) | {"required": ["prompt_string"]}
_MOST = {"type": "integer", "minimum": -1, "maximum": 1024}

Prompt = Annotated[
    Any,
    AfterValidator(_check_prompt),
    _like(_STR, _MIXED, _WITH_DATA, _list(_any(_STR, _MIXED, _WITH_DATA))),
]
Mixed = Annotated[Any, AfterValidator(_check_mixed), _like(_STR, _MIXED)]
Stop = Annotated[Any, AfterValidator(_check_stop), _like(_STR, _list(_STR))]
_BIASES = _like({"type": "object", "additionalProperties": _BIAS}, _list(_PAIR))
Bias = Annotated[Any, AfterValidator(_check_bias), _BIASES]
_SPECULATIVE = _like({"type": "boolean"}, _object(n_max=_MOST, k_max=_MOST, type=_STR))
Speculative = Annotated[Any, AfterValidator(_check_speculative), _SPECULATIVE]
Content = Annotated[Any, AfterValidator(_check_content), _like(_STR, _list(_PART))]
Window = Annotated[int, Field(ge=-1, le=INT32), WHOLE]
Count = Annotated[int, Field(ge=0, le=INT32), WHOLE]
Choices = Annotated[int, Field(ge=1, le=1024), WHOLE]


def string_of(value: dict[str, Any], name: str, where: str) -> str:
    """A field of a part of a body. Raises RequestError if it is no string."""
    text = value.get(name)
    if not isinstance(text, str):
        raise RequestError(f"{where}.{name}: a string is needed")
    return text


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


AnyBody = TypeVar("AnyBody", bound=Body)


def _field_of(kind: Kind) -> Any:
    """A field of a body for the legal values of a parameter; None for other kinds than numbers and switches."""
    if isinstance(kind, Whole):
        return Annotated[int, Field(ge=kind.low, le=kind.high), WHOLE]
    if isinstance(kind, Real):
        return Annotated[float, Field(ge=kind.low, le=kind.high)]
    return bool if kind is SWITCH else None


class StreamOptions(Body):
    include_usage: bool | None = None


OTHERWISE = ("seed", "logprobs", "post_sampling")
"""Sampling parameters that bodies spell or bound in another way."""
SAMPLING = {
    rule.name: field
    for rule in rules_of(SamplingParams)
    if rule.name not in OTHERWISE and (field := _field_of(rule.kind)) is not None
}
"""The types of the others that are numbers or switches."""
_SAMPLING: dict[str, Any] = {name: (field | None, None) for name, field in SAMPLING.items()}
Sampling: Any = create_model("Sampling", __base__=Body, **_SAMPLING)


class Generate(Sampling):
    """The common fields of all generation routes. None: not given, so the server's default applies."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Window | None = None
    max_completion_tokens: Window | None = None
    n_predict: Window | None = None
    n: Choices | None = None
    n_cmpl: Choices | None = None
    best_of: Choices | None = None
    prompt_logprobs: Count | None = None
    dry_sequence_breakers: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=64)]], Field(fail_fast=True)] | None
    ) = None
    samplers: (
        Annotated[list[str], Field(max_length=64, fail_fast=True)]
        | Annotated[str, Field(max_length=64)]
        | None
    ) = None
    post_sampling_probs: bool | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1), WHOLE] | None = None
    stop: Stop | None = None
    logit_bias: Bias | None = None
    n_probs: Count | None = None
    cache_prompt: bool | None = None
    id_slot: Window | None = None
    return_tokens: bool | None = None
    return_pieces: bool | None = None
    verbose: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    t_max_predict_ms: Annotated[float, Field(ge=-1, le=INT32)] | None = None
    sse_ping_interval: Annotated[float, Field(ge=-1, le=86400)] | None = None
    response_format: dict[str, Any] | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    grammar: str | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(max_length=1024, fail_fast=True)] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    speculative: Speculative | None = None
    spec_n_max: Annotated[int, Field(ge=-1, le=1024), WHOLE] | None = Field(
        None, alias="speculative.n_max"
    )
    spec_type: str | None = Field(None, alias="speculative.type")


class NativeBody(Generate):
    """`/completion`."""

    prompt: Prompt
    response_fields: (
        Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=256, fail_fast=True)]
        | None
    ) = None


class ExtraText(Body):
    """Extra text that helps to fill a gap."""

    text: str
    filename: str | None = None


class InfillBody(NativeBody):
    """`/infill`: the text before a gap and after it; `prompt` is the given start of the filling."""

    prompt: str = ""
    input_prefix: Mixed
    input_suffix: Mixed
    input_extra: Annotated[list[ExtraText], Field(max_length=1024, fail_fast=True)] | None = None


class TextBody(Generate):
    """`/v1/completions`. With a `suffix` the prompt is the text before a gap, as in `/infill`."""

    prompt: Prompt
    suffix: str | None = None
    logprobs: Count | None = None
    echo: bool | None = None


class AsSent(BaseModel):
    """An object passed to the chat template: unknown keys are kept, all in the order of the client."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    _sent: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, make: ModelWrapValidatorHandler[Self]) -> Self:
        made = make(value)
        made._sent = value if isinstance(value, dict) else {}
        return made

    @property
    def sent(self) -> dict[str, Any]:
        """The object as received."""
        return self._sent


class CalledFunction(AsSent):
    """The called function and its arguments: JSON text, an object, or nothing."""

    name: str | None = None
    arguments: Any = None


class Called(AsSent):
    """A call in a history."""

    id: str | None = None
    type: str | None = None
    function: CalledFunction | None = None


class Message(AsSent):
    """One chat message; unknown keys go to the template unchanged."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[Called], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class ToolFunction(AsSent):
    """A function's description; unknown keys go to the template unchanged."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(AsSent):
    """A tool for the model."""

    type: Literal["function"]
    function: ToolFunction


def tools_field(own: str) -> Any:
    """A list of tools. The published schema also allows types other than `own`, which are left out before validation."""

    def allow(schema: dict[str, Any]) -> None:
        other_type = {"type": "string", "not": {"const": own}}
        foreign = {"type": "object", "properties": {"type": other_type}}
        tools = schema["anyOf"][0]
        tools["items"] = {"anyOf": [tools["items"], foreign | {"required": ["type"]}]}

    return Field(None, json_schema_extra=allow)


class Chat(Body):
    """The fields that the chat template reads."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = tools_field("function")
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    parse_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | Literal["content", "reasoning_content"] | None = None


class ChatBody(Generate, Chat):
    """`/v1/chat/completions`."""

    logprobs: bool | None = None
    top_logprobs: Count | None = None
    reasoning_format: Literal["none", "auto", "deepseek", "deepseek-legacy"] | None = None
    reasoning_budget_tokens: Window | None = None
    thinking_budget_tokens: Window | None = None
    reasoning_budget: Window | None = None
    reasoning_budget_message: Annotated[str, Field(max_length=1000)] | None = None


class TemplateBody(Chat):
    """`/apply-template`."""


class TokenizeBody(Body):
    """`/tokenize`."""

    content: Mixed
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeBody(Body):
    """`/detokenize`."""

    tokens: Annotated[list[Count], Field(fail_fast=True)]


WORDS = {
    "missing": "field required",
    "string_type": "want a string",
    "bool_type": "want true or false",
    "int_type": "want a whole number",
    "int_from_float": "want a whole number",
    "float_type": "want a number",
    "finite_number": "want a finite number",
    "list_type": "want a list",
    "dict_type": "want an object",
    "model_type": "want an object",
    "literal_error": "want {expected}",
    "greater_than_equal": "want at least {ge}",
    "less_than_equal": "want at most {le}",
    "too_short": "want {min_length} entries or more",
    "too_long": "want {max_length} entries or fewer",
    "string_too_short": "want {min_length} characters or more",
    "string_too_long": "want {max_length} characters or fewer",
    "value": "{why}",
}
"""What is wrong with a field, by the kind of error."""
WAY = re.compile(r"str|bool|constrained-str|[a-z-]+\[.*")  # what pydantic calls a form of several
OTHER_TYPE = ("_type", "literal_error")  # ends of the kinds of errors of another form's value
MOST_WHERE = 120  # characters of a field's place: a client may choose them


def validate(model: type[AnyBody], value: dict[str, Any]) -> AnyBody:
    """The body as its model; RequestError with the name of the first wrong field. Of several forms, the one whose type the value has is
    told, or all."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_input=False)
        loc = errors[0]["loc"]
        at = next((i for i, name in enumerate(loc) if i and WAY.fullmatch(str(name))), len(loc))
        forms = [each for each in errors if each["loc"][:at] == loc[:at]]
        near = [e for e in forms if len(e["loc"]) > at + 1 or not e["type"].endswith(OTHER_TYPE)]
        forms = near[:1] or forms
        where = ".".join(map(str, loc[:at] + forms[0]["loc"][at + 1 :]))
        words = ", or ".join(
            WORDS.get(e["type"], "it can not be used").format_map(e.get("ctx", {})) for e in forms
        )
        words = words.replace(", or want ", ", or ")
        raise RequestError(f"{printable(where, MOST_WHERE)}: {words}") from None
