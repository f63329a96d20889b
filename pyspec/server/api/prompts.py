"""Sighteds and messages to token ids. Runs on a text thread because tokenising a long prompt takes a while."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyspec.engine.sight import Sighted, placed
from pyspec.errors import NotSupported, RequestError
from pyspec.server.api.pictures import MARKER, SentPictures
from pyspec.server.api.schema import Chat, InfillBody, Message, image_url
from pyspec.server.engine import EngineLike
from pyspec.server.settings import Limits, ServerSettings
from pyspec.text.described_tools import ToolList, has_tools, with_described
from pyspec.text.left_out import NO_IMAGE
from pyspec.text.marks import check_shown
from pyspec.text.markup.dialect import GENERIC, dialect_for, recognised, think_marks
from pyspec.text.markup.reasoning import THINK, ThinkMarks
from pyspec.text.template import ChatTemplate, template_defaults
from pyspec.text.tokenizer import Tokenizer

RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


def split_prompts(prompt: Any, limits: Limits) -> list[Any]:
    """The prompts of a body: a list of strings, or one that contains lists, is several prompts; anything else is one."""
    if not isinstance(prompt, list):
        return [prompt]
    if not prompt:
        raise RequestError("prompt: the list is empty")
    has_lists = any(isinstance(item, list | dict) for item in prompt)
    many = has_lists or all(isinstance(item, str) for item in prompt)
    prompts = prompt if many else [prompt]
    if len(prompts) > limits.prompts:
        raise RequestError(
            f"prompt: {len(prompts)} prompts in one request; at most {limits.prompts} are taken",
        )
    n_image = sum(len(p.get("multimodal_data") or ()) for p in prompts if isinstance(p, dict))
    if n_image > limits.pictures:
        raise RequestError(f"prompt: {n_image} images; at most {limits.pictures} are taken")
    return prompts


def prompt_of(tokenizer: Tokenizer, prompt: Any, pictures: SentPictures) -> Sighted:
    """One prompt of a body. BOS and the like are added only if it starts with text. May be empty: the engine decides."""
    data: list[str] = []
    if isinstance(prompt, dict):
        prompt, data = prompt["prompt_string"], prompt.get("multimodal_data") or []
    if not data:
        return Sighted(tuple(mixed_ids(tokenizer, prompt, add_special=True, parse_special=True)))
    for i, each in enumerate(data):
        pictures.add(each, f"prompt.multimodal_data.{i}")
    texts = prompt.split(MARKER)
    if len(texts) - 1 != len(data):
        raise RequestError(
            f"prompt: {len(data)} images and {len(texts) - 1} markers; want one of /props' media_marker for each"
        )
    return pictures.encoded(tokenizer, texts)


def mixed_ids(
    tokenizer: Tokenizer,
    content: Any,
    *,
    add_special: bool,
    parse_special: bool,
) -> list[int]:
    """Ids of text, or of a list of ids and texts."""
    if isinstance(content, str):
        return list(tokenizer.encode(content, add_special=add_special, parse_special=parse_special))
    ids: list[int] = []
    for i, item in enumerate(content):
        if isinstance(item, str):
            is_first = add_special and i == 0
            ids += tokenizer.encode(item, add_special=is_first, parse_special=parse_special)
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
    """A chat for the template.

    given      what the template takes
    continued  the assistant's message at the end if the answer continues it; it is not passed to the template
    what       the continued field of that message
    """

    template: ChatTemplate
    given: dict[str, Any]
    pictures: SentPictures
    continued: dict[str, Any] | None = None
    what: str = "content"
    think: ThinkMarks = THINK

    def text(self) -> str:
        """The prompt's text, with a marker for each picture."""
        text, marks = self.template.render(**self.given), self.pictures.shown.marks.marks
        check_shown(text, marks)
        for mark in marks:
            text = text.replace(mark, MARKER)
        return text + self._begun(text)

    def prompt(self, tokenizer: Tokenizer) -> Sighted:
        """The prompt's tokens and pictures."""
        begun = self._begun(self.template.render(**self.given)) if self.continued is not None else ""
        rows = self.pictures.rows(tokenizer)
        ids = self.template.encode(tokenizer, **self.given, begun=begun, rows=rows)
        return placed(ids, self.pictures.shown)

    def _begun(self, text: str) -> str:
        """The given start of the answer behind this prompt."""
        return "" if self.continued is None else opening(text, self.continued, self.what, self.think)


def opening(text: str, message: dict[str, Any], what: str, think: ThinkMarks = THINK) -> str:
    """The given start of an answer, appended to a prompt that ends where an answer begins: reasoning, then content."""
    thought = str(message.get("reasoning_content") or "")
    if think.is_chain:
        if what == "reasoning_content":
            return think.start + thought
        before = f"{think.start}{thought}{think.end}{think.again}" if thought else ""
        return f"{before}{think.content}{message.get('content') or ''}"
    is_open = text.rstrip().endswith(think.start)
    on_lines = not is_open or text.endswith("\n")  # reasoning has lines of its own
    begun = thought if is_open else ""
    if not is_open and (thought or what == "reasoning_content"):
        begun, is_open = f"{think.start}\n{thought}", True
    if what == "reasoning_content":
        return begun
    if is_open:
        begun += f"\n{think.end}\n\n" if on_lines else think.end
    return begun + str(message["content"])


def rendering(
    engine: EngineLike, body: Chat, settings: ServerSettings, pictures: SentPictures | None = None
) -> Rendering:
    """Check a chat body against the limits and prepare it for the template. pictures: None refuses images"""
    pictures = pictures or SentPictures(None)
    template, limits = engine.template, settings.limits
    if template is None:
        raise NotSupported(
            "this model has no chat template; use /v1/completions, or start the server with --chat-template"
        )
    _check_sizes(body, limits)
    if clash := RESERVED & (body.chat_template_kwargs or {}).keys():
        raise RequestError(f"chat_template_kwargs: {min(clash)} has a field of its own")
    continued = continued_part(body, settings)
    given_messages = body.messages[:-1] if continued else body.messages
    messages = [plain_message(message, i, pictures) for i, message in enumerate(given_messages)]
    begun = _begun(body) if continued else None
    tools: ToolList = [tool.sent for tool in body.tools or ()]
    is_generic = dialect_for(engine.info.chat_template, settings.tool_call_parser) is GENERIC
    is_known = tools and recognised(engine.info.chat_template)
    if has_tools(messages, tools) and (is_generic or is_known):
        may_call = body.tool_choice != "none" and body.parse_tool_calls is not False
        knows_how = not is_generic
        messages, tools = with_described(
            template, lambda: engine.tokenizer, messages, tools, may_call=may_call, knows_how=knows_how
        )
    given = {
        "messages": messages,
        "tools": tools or None,
        "add_generation_prompt": bool(continued) or body.add_generation_prompt is not False,
        "kwargs": template_values(body, engine.info.chat_template, settings),
    }
    think = think_marks(engine.info.chat_template) or THINK
    return Rendering(template, given, pictures, begun, continued, think)


def continued_part(body: Chat, settings: ServerSettings) -> str:
    """The field of the last message that the answer continues: "content", "reasoning_content", or "" for none."""
    asked, last = body.continue_final_message, body.messages[-1]
    if not asked and not (settings.prefill_assistant and last.role == "assistant"):
        return ""
    if asked and body.add_generation_prompt:
        raise RequestError(
            "continue_final_message: it can not be true together with add_generation_prompt",
        )
    if last.role != "assistant":
        raise RequestError("continue_final_message: the last message is not the assistant's")
    if not asked and len(body.messages) > 1 and body.messages[-2].role == "assistant":
        raise RequestError(
            "messages: Cannot have 2 or more assistant messages at the end of the list.",
        )
    if last.tool_calls:
        raise RequestError(
            "messages: an assistant message that contains tool calls can not be continued",
        )
    if isinstance(asked, str):
        return asked
    return "reasoning_content" if last.reasoning_content and not last.content else "content"


def answer_start(body: Chat, settings: ServerSettings) -> str:
    """The given content of the answer; "" if it starts anew or within reasoning."""
    if continued_part(body, settings) != "content":
        return ""
    return str(_begun(body)["content"])


def template_values(body: Chat, template: str, settings: ServerSettings) -> dict[str, Any]:
    """The template's values besides messages and tools: the server's, overridden by the body's."""
    values: dict[str, Any] = {**template_defaults(template), **settings.chat_template_kwargs}
    if settings.reasoning == "off":
        values["enable_thinking"] = False
    values |= body.chat_template_kwargs or {}
    if isinstance(values.get("enable_thinking"), str):
        raise RequestError("chat_template_kwargs.enable_thinking: true or false, not a string")
    effort = body.reasoning_effort
    if effort == "none":
        values.pop("reasoning_effort", None)
        values["enable_thinking"] = False
    elif effort:
        values["reasoning_effort"] = effort
    return values


def chat_text(engine: EngineLike, body: Chat, settings: ServerSettings, pictures: SentPictures) -> str:
    """The prompt text of a chat."""
    return rendering(engine, body, settings, pictures).text()


def chat_prompt(
    engine: EngineLike, body: Chat, settings: ServerSettings, pictures: SentPictures
) -> Sighted:
    """The prompt of a chat."""
    return rendering(engine, body, settings, pictures).prompt(engine.tokenizer)


def _check_sizes(body: Chat, limits: Limits) -> None:
    if len(body.messages) > limits.messages:
        raise RequestError(
            f"messages: {len(body.messages)} of them; at most {limits.messages} are taken",
        )
    if body.tools and len(body.tools) > limits.tools:
        raise RequestError(f"tools: {len(body.tools)} of them; at most {limits.tools} are taken")


def _no_part(kind: str) -> str:
    """The reason to refuse a part of a message."""
    about = next((word for word in ("audio", "video") if word in kind), "")
    if about:
        return f"{about} input ({kind[:40]!r}) is out of scope"
    return f"parts of type {kind[:40]!r} are not supported"


def _begun(body: Chat) -> dict[str, Any]:
    """The message that the answer continues. As in llama-server, a blank line stands between its parts."""
    at, last = len(body.messages) - 1, body.messages[-1]
    if any(part["type"] == "image_url" for part in last.content or () if isinstance(part, dict)):
        raise NotSupported(f"messages.{at}: a message with an image can not be continued")
    return plain_message(last, at, SentPictures(None), between="\n\n")


def plain_message(
    message: Message, i: int, pictures: SentPictures, between: str = "\n"
) -> dict[str, Any]:
    """The message for the template: its text parts joined by line ends, as in llama.cpp, with marks of pictures between them."""
    has_other_parts = message.tool_calls or message.reasoning_content
    if "content" not in message.model_fields_set and not has_other_parts:
        raise RequestError(
            f"messages.{i}: it has neither content nor tool_calls nor reasoning_content",
        )
    content = message.content
    if isinstance(content, list):
        texts = [
            _part(part, f"messages.{i}.content.{at}", message.role, pictures)
            for at, part in enumerate(content)
        ]
        content = pictures.shown.marks.joined(texts, between)
    if content is None and not message.tool_calls:
        content = ""
    called = [_function(call.sent) for call in message.tool_calls or ()]
    calls = {"tool_calls": called} if called else {}
    return message.sent | {"content": content} | calls


def _part(part: dict[str, Any], where: str, role: str, pictures: SentPictures) -> str:
    """The text of a part, or the mark of a picture; a line for a tool's picture if the model sees none."""
    if part["type"] == "text":
        return str(part["text"])
    if part["type"] == "image_url" and (role != "tool" or pictures.media is not None):
        return pictures.add(*image_url(part, where))
    if "image" in part["type"] and role == "tool":
        return NO_IMAGE
    raise NotSupported(f"{where}: {_no_part(part['type'])}")


def _function(call: dict[str, Any]) -> dict[str, Any]:
    """A hosted model's call of a custom tool, as a function call, the only kind that templates have."""
    custom = call.get("custom")
    if call.get("type") != "custom" or not isinstance(custom, dict):
        return call
    arguments = json.dumps({"input": custom.get("input", "")})
    function = {"name": str(custom.get("name", "")), "arguments": arguments}
    others = {key: value for key, value in call.items() if key != "custom"}
    return others | {"type": "function", "function": function}


# -- a gap in a text -------------------------------------------------------------------------------------------------
# Prompts of `/infill`: a text with a gap, marked with the model's own tokens as in llama-server.
#
#     [rep]myproject  [sep]file of an extra text, its text ...  [sep]filename  [pre]prefix, prompt  [suf]suffix  [mid]
#
# Without a mark for files, a line separates extra texts. If the text is too long, the prefix and the extra texts lose the tokens
# farthest from the gap, and the suffix loses its end. Code is text, so it never becomes a control token.

WINDOW = 2048  # tokens around the gap, three quarters of them before it: llama-server's -b
PROJECT, FILE, SNIPPET = "myproject\n", "filename\n", "\n\n--- snippet ---\n\n"


def infill_ids(
    tokenizer: Tokenizer, body: InfillBody, n_ctx: int, n_answer: int, *, suffix_first: bool
) -> list[int]:
    """The prompt's tokens, leaving room in `n_ctx` for `n_answer` tokens (-1: unknown)."""
    fim = tokenizer.fim
    names = (("prefix", fim.pre), ("suffix", fim.suf), ("middle", fim.mid))
    missing = [name for name, mark in names if mark is None]
    if missing or fim.pre is None or fim.suf is None or fim.mid is None:
        raise NotSupported(
            f"Infill is not supported by this model: it has no token for {', '.join(missing)}",
        )
    prompt = _plain(tokenizer, body.prompt)
    before = mixed_ids(tokenizer, body.input_prefix, add_special=False, parse_special=False)
    behind = mixed_ids(tokenizer, body.input_suffix, add_special=False, parse_special=False)
    # of the up to four added tokens, `window // 4 - 2` covers two
    room = max(0, n_ctx - max(0, n_answer) - 2)
    window = min(WINDOW, room)
    before = before[len(before) - min(len(before), 3 * (window // 4)) :]
    behind = behind[: max(0, window // 4 - 2 - len(prompt))]
    parts = [[fim.pre, *before, *prompt], [fim.suf, *behind]]
    first, second = reversed(parts) if suffix_first else parts
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    gap = [*bos, *first, *second, fim.mid]
    left = n_ctx - max(min(WINDOW, n_ctx // 2), len(gap)) - 2 * max(0, n_answer)
    extra = _extra(tokenizer, body)
    return extra[len(extra) - max(0, min(len(extra), left)) :] + gap


def _extra(tokenizer: Tokenizer, body: InfillBody) -> list[int]:
    """Extra texts, each after its file's name."""
    fim = tokenizer.fim
    ids = [] if fim.rep is None else [fim.rep, *_plain(tokenizer, PROJECT)]
    for item in body.input_extra or ():
        mark = _plain(tokenizer, f"{item.filename or 'tmp'}\n")
        name = [] if fim.sep is None else [fim.sep, *mark]
        ids += (name or _plain(tokenizer, SNIPPET)) + _plain(tokenizer, item.text)
    return ids if fim.sep is None else [*ids, fim.sep, *_plain(tokenizer, FILE)]


def _plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special=False, parse_special=False)) if text else []
