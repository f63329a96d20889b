"""From prompts and messages to token ids. Runs on a text thread: tokenising a long prompt takes a while."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyspec.errors import NotSupported, RequestError
from pyspec.server.api.schema import Chat, Message
from pyspec.server.engine import EngineLike, TemplateLike, TokenizerLike
from pyspec.server.settings import Limits

RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


def split_prompts(prompt: Any, limits: Limits) -> list[Any]:
    """The prompts of a body: a list of strings only, or one that holds lists, is many; all else is one."""
    if not isinstance(prompt, list):
        return [prompt]
    if not prompt:
        raise RequestError("prompt: the list is empty")
    many = any(isinstance(item, list | dict) for item in prompt) or all(isinstance(item, str) for item in prompt)
    prompts = prompt if many else [prompt]
    if len(prompts) > limits.prompts:
        raise RequestError(f"prompt: {len(prompts)} prompts in one request; at most {limits.prompts} are taken")
    return prompts


def prompt_ids(tokenizer: TokenizerLike, prompt: Any) -> list[int]:
    """Ids of one prompt; BOS and the like are added only where it starts with text. May be empty: the engine decides."""
    if isinstance(prompt, dict):
        prompt = prompt["prompt_string"]
    return mixed_ids(tokenizer, prompt, add_special=True, parse_special=True)


def mixed_ids(tokenizer: TokenizerLike, content: Any, *, add_special: bool, parse_special: bool) -> list[int]:
    """Ids of text, or of a list of ids and texts."""
    if isinstance(content, str):
        return list(tokenizer.encode(content, add_special=add_special, parse_special=parse_special))
    ids: list[int] = []
    for i, item in enumerate(content):
        if isinstance(item, str):
            ids += tokenizer.encode(item, add_special=add_special and i == 0, parse_special=parse_special)
        else:
            ids.append(item)
    check_ids(ids, tokenizer.n_vocab)
    return ids


def check_ids(ids: Sequence[int], n_vocab: int) -> None:
    """Raise RequestError on an id the model does not have."""
    for token in ids:
        if not 0 <= token < n_vocab:
            raise RequestError(f"token {token} is outside 0..{n_vocab - 1}")


@dataclass(frozen=True)
class Rendering:
    """What the template is called with."""

    template: TemplateLike
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    kwargs: dict[str, Any]


def rendering(template: TemplateLike | None, body: Chat, limits: Limits) -> Rendering:
    """Check a chat body against the limits and lay it out for the template."""
    if template is None:
        raise NotSupported("this model has no chat template; use /v1/completions")
    if body.continue_final_message:
        raise RequestError("continue_final_message is not supported; end with a user message")
    _check_sizes(body, limits)
    kwargs = dict(body.chat_template_kwargs or {})
    if clash := RESERVED & kwargs.keys():
        raise RequestError(f"chat_template_kwargs: {min(clash)} has a field of its own")
    if body.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    return Rendering(
        template,
        messages=[_plain(message, i, limits) for i, message in enumerate(body.messages)],
        tools=[tool.model_dump() for tool in body.tools or ()] or None,
        add_generation_prompt=body.add_generation_prompt is not False,
        kwargs=kwargs,
    )


def chat_text(template: TemplateLike | None, body: Chat, limits: Limits) -> str:
    """The prompt text of a chat."""
    r = rendering(template, body, limits)
    return r.template.render(r.messages, tools=r.tools, add_generation_prompt=r.add_generation_prompt, kwargs=r.kwargs)


def chat_ids(engine: EngineLike, body: Chat, limits: Limits) -> list[int]:
    """The prompt ids of a chat."""
    r = rendering(engine.template, body, limits)
    return r.template.encode(
        engine.tokenizer,
        r.messages,
        tools=r.tools,
        add_generation_prompt=r.add_generation_prompt,
        kwargs=r.kwargs,
    )


def _check_sizes(body: Chat, limits: Limits) -> None:
    if len(body.messages) > limits.messages:
        raise RequestError(f"messages: {len(body.messages)} of them; at most {limits.messages} are taken")
    if body.tools and len(body.tools) > limits.tools:
        raise RequestError(f"tools: {len(body.tools)} of them; at most {limits.tools} are taken")


def _plain(message: Message, i: int, limits: Limits) -> dict[str, Any]:
    """The message as a template wants it: its text parts joined by line ends, as llama.cpp joins them."""
    plain: dict[str, Any] = {"role": message.role, **(message.model_extra or {})}
    content = message.content
    if isinstance(content, list):
        if len(content) > limits.parts:
            raise RequestError(f"messages.{i}.content: {len(content)} parts; at most {limits.parts} are taken")
        for part in content:
            if part["type"] != "text":
                raise NotSupported(f"messages.{i}.content: parts of type {part['type'][:40]!r} are not supported")
        content = "\n".join(part["text"] for part in content)
    if content is None and not plain.get("tool_calls"):
        content = ""
    return plain | {"content": content}
