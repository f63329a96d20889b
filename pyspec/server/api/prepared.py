"""One generation body, checked and converted to engine requests.

`prepare` runs on a text thread: it parses, validates, renders and tokenises, and raises a RequestError that names the
field. It returns plain data and submits nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pyspec.engine.sight import Sighted
from pyspec.errors import RequestError
from pyspec.request import EngineInfo, Request, SamplingParams
from pyspec.server.api import anthropic, responses
from pyspec.server.api.chats import plan_chat, with_tools
from pyspec.server.api.constrained import checked_grammar
from pyspec.server.api.out_of_scope import refuse_elsewhere, refuse_unsupported
from pyspec.server.api.params import (
    draft_limit,
    generation_settings,
    n_choices,
    n_prompt_logprobs,
    sampling_params,
    stop_strings,
    token_limit,
)
from pyspec.server.api.pictures import SentPictures, text_of
from pyspec.server.api.prompts import chat_prompt, infill_ids, prompt_of, split_prompts
from pyspec.server.api.schema import (
    SEED_MAX,
    ChatBody,
    Generate,
    InfillBody,
    NativeBody,
    TextBody,
    validate,
)
from pyspec.server.api.steady import steady, with_lines
from pyspec.server.engine import EngineLike
from pyspec.server.http.body import parse_object
from pyspec.server.media import Media
from pyspec.server.settings import Limits, ServerSettings
from pyspec.text.answer_plan import ALONE
from pyspec.text.left_out import own_tools
from pyspec.text.markup.dialect import AnswerMarkup
from pyspec.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

Kind = Literal["chat", "text", "native", "infill", "messages", "responses"]
# All other kinds are chats
BODIES: dict[Kind, type[Generate]] = {"text": TextBody, "native": NativeBody, "infill": InfillBody}
TO_CHAT: dict[Kind, Callable[[dict[str, Any], Limits], dict[str, Any]]] = {
    "messages": anthropic.to_chat,
    "responses": responses.to_chat,
}
"""APIs whose bodies are converted to chat completions first."""

SWITCHES = ("stream", "return_tokens", "return_progress", "return_pieces", "timings_per_token", "echo")
"""Fields of bodies that a PreparedBody has, too."""
_logged: set[str] = set()
"""Ignored field names that were logged. Bounded, because clients choose the names."""


@dataclass(frozen=True, kw_only=True)
class PreparedBody:
    """One body's requests and the form of its answer. `requests[i]` gives choice i."""

    kind: Kind
    requests: tuple[Request, ...]
    n: int  # choices per prompt
    stream: bool
    include_usage: bool
    return_tokens: bool
    return_progress: bool
    timings_per_token: bool
    ping_s: float
    prompt_texts: tuple[str, ...]  # native, and with echo: the prompt of each generated choice
    repeated: Mapping[str, Any]  # responses only: fields of the body that the answer repeats
    n_moved: int  # lines of the system prompt that were moved to the end
    return_pieces: bool = False  # chunks mark each token as drafted or not
    verbose: bool = False  # the answer includes the prompt and the settings
    n_run: int = 1  # choices generated per prompt: `best_of`, and the best `n` are returned
    echo: bool = False  # the answer starts with the prompt
    tells_prompt: bool = False  # the answer has vLLM's `prompt_logprobs`
    hides_logprobs: bool = False  # logprobs are only used to choose the best answer
    # parser of the answer; one per choice
    markup: AnswerMarkup = field(default_factory=AnswerMarkup)
    calls_functions: bool = False  # the body has `functions`, so the answer has `function_call`

    # Values of `generation_settings` that the body has and a request does not
    of_body: Mapping[str, Any] = field(default_factory=dict)
    eog_ids: tuple[int, ...] = ()
    response_fields: tuple[str, ...] = ()  # native only: fields of the last object; (): all

    def settings_of(self, i: int) -> dict[str, Any]:
        """`generation_settings` of choice i."""
        return generation_settings(self.requests[i], self.of_body, self.eog_ids)

    @property
    def logprobs(self) -> bool:
        return self.requests[0].params.logprobs is not None and not self.hides_logprobs


def prepare(
    kind: Kind,
    raw: bytes,
    engine: EngineLike,
    settings: ServerSettings,
    media: Media | None = None,
    compiles: bool = True,
) -> PreparedBody:
    """Check a body and build its requests. Raises RequestError, NotSupported; NotCompiled for a new grammar unless `compiles`.

    media  reads pictures; None: the model sees none
    """
    sent = parse_object(raw, settings.limits)
    value, moved = _steady(kind, sent, settings)
    body = _checked(kind, _with_moved(value, moved))
    params = sampling_params(body, engine.tokenizer, settings)
    plan = None
    if isinstance(body, ChatBody):
        plan = plan_chat(engine, body, settings, SentPictures(media), compiles=compiles)
    prompts = [plan.prompt] if plan else _tokenise(body, engine, settings, media)
    n, n_run = n_choices(body, engine.info)
    hides_logprobs = n_run > n and params.logprobs is None
    if hides_logprobs:
        params = replace(params, logprobs=0)
    requests = [
        _request(body, prompt, params, i, engine.info, settings)
        for prompt in prompts
        for i in range(n_run)
    ]
    n_top = n_prompt_logprobs(body, settings.limits)
    more: dict[str, Any] = {}
    if moved:
        others = _tokenise(_checked(kind, value), engine, settings, media)
        more["n_stable"] = _n_common(prompts[0].ids, others[0].ids)
    around = plan.answer.around(plan.begun) if plan else ALONE
    grammar = checked_grammar(body, engine, around, compiles=compiles)
    if plan:
        more |= {"shown": plan.answer.shown, "think_budget": plan.budget}
        grammar = plan.answer.grammar or grammar
    requests = [
        # one choice of a prompt computes its log probabilities for all
        replace(request, grammar=grammar, prompt_logprobs=None if i % n_run else n_top, **more)
        for i, request in enumerate(requests)
    ]
    ping_s = settings.limits.ping_s if body.sse_ping_interval is None else body.sse_ping_interval
    return PreparedBody(
        kind=kind,
        requests=tuple(requests),
        n=n,
        **{name: bool(getattr(body, name, False)) for name in SWITCHES},
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        ping_s=max(ping_s, settings.limits.least_ping_s) if ping_s > 0 else settings.limits.total_s,
        prompt_texts=_texts(body, engine.tokenizer, prompts, n_run, settings),
        verbose=settings.verbose if body.verbose is None else body.verbose,
        n_run=n_run,
        tells_prompt=body.prompt_logprobs is not None,
        hides_logprobs=hides_logprobs,
        calls_functions="functions" in sent and "functions" not in value,
        repeated=responses.repeated(sent) if kind == "responses" else {},
        n_moved=len(moved),
        markup=(markup := plan.answer.markup if plan else AnswerMarkup()),
        of_body=_of_body(body, engine.info, settings, markup),
        eog_ids=engine.info.eog_ids,
        response_fields=tuple(body.response_fields or ()) if isinstance(body, NativeBody) else (),
    )


def _of_body(
    body: Generate,
    info: EngineInfo,
    settings: ServerSettings,
    markup: AnswerMarkup,
) -> dict[str, Any]:
    asked = body.reasoning_format if isinstance(body, ChatBody) else "none"
    return {
        "stream": bool(body.stream),
        "chat_format": markup.calls.name if markup.calls else "Content-only",
        "reasoning_format": asked or settings.reasoning_format,
        "reasoning_in_content": markup.is_shown,
        "speculative.types": info.drafter,
        **({"grammar": body.grammar} if body.grammar else {}),  # as written, before conversion
    }


def count_tokens(
    kind: Kind, raw: bytes, engine: EngineLike, settings: ServerSettings, media: Media | None = None
) -> int:
    """Tokens of the prompt that a chat body renders to. Of pictures only the sizes are read."""
    sent = as_read(kind, parse_object(raw, settings.limits), settings)
    body = _checked(kind, sent, generates=False)
    return sum(len(prompt.ids) for prompt in _tokenise(body, engine, settings, media, counts=True))


def _steady(
    kind: Kind,
    sent: dict[str, Any],
    settings: ServerSettings,
) -> tuple[dict[str, Any], list[str]]:
    """A chat body converted to chat completions (others unchanged), and the lines that were moved out of its system prompt."""
    if kind in BODIES:
        return sent, []
    value = sent
    if kind in TO_CHAT:
        value = TO_CHAT[kind](sent, settings.limits)
        many = (name for name in ("n", "n_cmpl", "best_of") if value.get(name, 1) != 1)
        if name := next(many, ""):
            raise RequestError(
                f"{name}: there is one answer on this path; /v1/chat/completions gives several",
            )
    elif kind == "chat" and isinstance(sent.get("messages"), list):
        value = with_tools(sent)
    if kind not in TO_CHAT and "tools" in value:
        value = value | {"tools": own_tools(value["tools"], "function")}
    if "messages" not in value:
        return value, []
    messages, moved = steady(value["messages"], settings.volatile_lines)
    return value | {"messages": messages}, moved


def _with_moved(value: dict[str, Any], moved: list[str]) -> dict[str, Any]:
    return value | {"messages": with_lines(value["messages"], moved)} if moved else value


def as_read(kind: Kind, sent: dict[str, Any], settings: ServerSettings) -> dict[str, Any]:
    """A body in the form of chat completions, with the messages that the model sees."""
    return _with_moved(*_steady(kind, sent, settings))


def _n_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Leading tokens that two prompts share."""
    differing = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differing, min(len(a), len(b)))


def _checked(kind: Kind, value: dict[str, Any], *, generates: bool = True) -> Generate:
    """The body as its model, for any API."""
    model = BODIES.get(kind, ChatBody)
    refuse_unsupported(value)
    refuse_elsewhere(kind, value)
    body = validate(model, value)
    if generates:
        _log_ignored(value, model)
    return body


def _request(
    body: Generate,
    prompt: Sighted,
    params: SamplingParams,
    i: int,
    info: EngineInfo,
    settings: ServerSettings,
) -> Request:
    """Choice i of a prompt; with a given seed each choice gets a seed of its own."""
    if i and params.seed >= 0:
        params = replace(params, seed=(params.seed + i) % SEED_MAX)
    slot, n_answer = -1 if body.id_slot is None else body.id_slot, token_limit(body)
    if slot >= info.n_slot:
        raise RequestError(f"id_slot: {slot} is outside 0..{info.n_slot - 1}")
    return Request(
        prompt=prompt.ids,
        images=prompt.images,
        params=params,
        max_tokens=settings.max_tokens if n_answer is None else n_answer,
        stop=stop_strings(body.stop, settings.limits),
        cache_prompt=body.cache_prompt is not False,
        n_draft_max=draft_limit(body, info),
        slot=slot,
        timings_per_token=bool(body.timings_per_token),
        max_predict_ms=max(0.0, float(body.t_max_predict_ms or 0.0)),
    )


def _tokenise(
    body: Generate,
    engine: EngineLike,
    settings: ServerSettings,
    media: Media | None,
    *,
    counts: bool = False,
) -> list[Sighted]:
    if isinstance(body, ChatBody):
        return [chat_prompt(engine, body, settings, SentPictures(media, counts=counts))]
    if isinstance(body, InfillBody):
        return [_gap(body, body, engine, settings)]
    assert isinstance(body, NativeBody | TextBody)
    prompts = split_prompts(body.prompt, settings.limits)
    if isinstance(body, TextBody) and body.suffix:
        return _before_suffix(body, prompts, engine, settings)
    pictures = [SentPictures(media, counts=counts) for _ in prompts]
    return [prompt_of(engine.tokenizer, *each) for each in zip(prompts, pictures, strict=True)]


def _gap(
    gap: InfillBody,
    body: Generate,
    engine: EngineLike,
    settings: ServerSettings,
) -> Sighted:
    n_answer, n_ctx = token_limit(body), engine.info.n_ctx
    n_answer = settings.max_tokens if n_answer is None else n_answer
    ids = infill_ids(engine.tokenizer, gap, n_ctx, n_answer, suffix_first=settings.spm_infill)
    return Sighted(tuple(ids))


def _before_suffix(
    body: TextBody,
    prompts: list[Any],
    engine: EngineLike,
    settings: ServerSettings,
) -> list[Sighted]:
    """`/v1/completions` with a suffix: each prompt is the text before a gap, the suffix is the text after it."""
    if body.echo:
        raise RequestError("suffix: not possible together with echo")
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError("suffix: it needs a prompt that is text or a list of texts")
    ends = [{"input_prefix": prompt, "input_suffix": body.suffix} for prompt in prompts]
    gaps = [validate(InfillBody, each) for each in ends]
    return [_gap(gap, body, engine, settings) for gap in gaps]


def _texts(
    body: Generate,
    tokenizer: Tokenizer,
    prompts: list[Sighted],
    n: int,
    settings: ServerSettings,
) -> tuple[str, ...]:
    """The prompt text of each choice if the answer includes it: as the model reads it, or as given if it is echoed."""
    if isinstance(body, TextBody) and body.echo:
        given = split_prompts(body.prompt, settings.limits)
        texts = [
            p if isinstance(p, str) else text_of(prompt, tokenizer)
            for p, prompt in zip(given, prompts, strict=True)
        ]
    else:
        is_verbose = settings.verbose if body.verbose is None else body.verbose
        wanted = isinstance(body, NativeBody) or is_verbose
        texts = [text_of(prompt, tokenizer) for prompt in prompts] if wanted else []
    return tuple(text for text in texts for _ in range(n))


def _log_ignored(value: dict[str, Any], model: type[Generate]) -> None:
    """Log each ignored field name once, so that a misspelt one can be found."""
    known = {field.alias or name for name, field in model.model_fields.items()}
    for name in value.keys() - known - _logged:
        if len(_logged) < 200:
            _logged.add(name)
            log.info("request field %.60r is not used", name)
