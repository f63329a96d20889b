"""Chat templates of GGUF files: rendered in a sandbox process, then tokenised so that user text can not become control tokens."""

from __future__ import annotations

import json
import logging
import re
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from pyspec.errors import BadTemplate, RequestError, Unavailable
from pyspec.gguf.fields import Fields, encodable
from pyspec.ranges import printable
from pyspec.text.abilities import HEAD, Abilities, in_parts
from pyspec.text.fitting import fitted, fitted_tools, with_texts
from pyspec.text.marks import Hidden, spliced
from pyspec.text.sandbox_process import STALLED, SandboxProcess
from pyspec.text.tokenizer import Part, Tokenizer

log = logging.getLogger(__name__)

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""For files without a template."""

TIME_S = 2.0
TEMPLATE_CHARS = 1 << 20
MESSAGE_CHARS = 400  # of a template's own message
ANOTHER = "--chat-template takes another one"
MESSAGES = 1 << 16
ADDED_FUNCTIONS = re.compile(r"\+\s*functions\b(?!\s*[.|\[(])")
TRUSTED = ("system", "developer", "assistant")
OWN_FIELDS = ("role", "content")  # fields of a trusted message that may contain control tokens
Message = Mapping[str, object]

# A mark replaces content that contains forged control tokens. It is made of private-use characters around letters of both cases. If a
# template changes the case, escapes or cuts the content, the mark is missing from the text.
_OPEN, _CLOSE = "\ue000", "\ue001"


class _Renderer:
    """A sandbox process with one template."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        self.source, self._tokens = source, {"bos_token": bos_token, "eos_token": eos_token}
        self._box = SandboxProcess("pyspec.text.sandbox", partial(_line, source))

    @property
    def process(self) -> subprocess.Popen[bytes] | None:
        return self._box.process

    def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, object] | None = None,
    ) -> dict[str, str]:
        """Render. {"failed": why} also if the process exceeds its time or memory. Raises Unavailable if it got no CPU time."""
        values: dict[str, object] = {
            **self._tokens,
            **_dates(self.source),
            **_functions(self.source, tools),
            **(kwargs or {}),
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        if tools:  # templates that iterate over tools=None fail
            values["tools"] = list(tools)
        try:
            line = _line(values)
        except (TypeError, ValueError, RecursionError) as e:  # kwargs without a JSON form
            raise RequestError(f"the template's arguments can not be passed on: {e}") from e
        answer = self._box.ask(line, TIME_S)
        if STALLED in answer:
            why = answer[STALLED]
            raise Unavailable(f"the chat template could not be rendered: {why}; try again")
        return answer

    def probe(self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, object]] | None) -> str:
        """The text of a chat; "" if the template refuses it or fails."""
        return self.ask(messages, tools, False).get("text", "")

    def check(self) -> dict[str, str]:
        """Compile the template in the sandbox. Returns the sandbox's answer."""
        return self._box.check(TIME_S)

    def close(self) -> None:
        self._box.close()


def normalise(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates expect them, with content as text. RequestError for unsupported shapes and sizes."""
    if len(messages) > MESSAGES:
        raise RequestError(f"{len(messages)} messages; at most {MESSAGES} are allowed")
    out = []
    for i, m in enumerate(messages):
        if not isinstance(m.get("role"), str):
            raise RequestError(f"message {i} has no role")
        out.append({**m, "content": _content(i, m.get("content"))})
    return out


def _content(i: int, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"the content of message {i} is neither text nor a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if isinstance(part, Mapping) and kind == "text" else None
        if not isinstance(text, str):
            raise RequestError(f"message {i} has a part of type {kind!r}; only text is supported")
        texts.append(text)
    return "\n".join(texts)  # as llama.cpp joins them


class ChatTemplate:
    """A file's template. Safe to use from several threads; compiling is checked at the first render or `check`."""

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        tool_use: ChatTemplate | None = None,
        broken: str = "",
    ) -> None:
        """broken: the reason that nothing can be rendered, if it is known already."""
        if len(source) > TEMPLATE_CHARS:
            broken = f"has {len(source)} characters; at most {TEMPLATE_CHARS} are allowed"
        self.source = source
        self.bos_token, self.eos_token = bos_token, eos_token
        self.tool_use, self.broken = tool_use, broken
        self._renderer = _Renderer(source, bos_token, eos_token)
        self._able = Abilities(source, self._renderer.probe)

    @classmethod
    def from_metadata(cls, meta: Mapping[str, object]) -> ChatTemplate | None:
        """The file's template, with its template for tools; None if it has none, or a value that is no text, as in llama.cpp. A broken
        template fails chats, but not the load."""
        fields = Fields(meta, error=BadTemplate)
        key, own = "tokenizer.chat_template", ".tool_use"
        own_text = meta.get(key)
        if not isinstance(own_text, str):
            if key in fields:
                log.warning("%s", fields.bad(key, "is no text: it is not used"))
            return None
        if not own_text.strip():
            return None
        has_tokens = "tokenizer.ggml.tokens" in fields
        tokens = fields.strings("tokenizer.ggml.tokens") if has_tokens else []

        def token(which: str) -> str:
            i = fields.integer(f"tokenizer.ggml.{which}_token_id", -1)
            return encodable(tokens[i]) if 0 <= i < len(tokens) else ""

        def made(name: str, tool_use: ChatTemplate | None) -> ChatTemplate:
            try:
                source, broken = fields.text(name), ""
            except BadTemplate as e:
                source, broken = "", f"can not be read: {e}"
            return cls(source, token("bos"), token("eos"), tool_use, broken)

        return made(key, made(key + own, None) if isinstance(meta.get(key + own), str) else None)

    def able(self, *, tools: bool = False) -> Abilities:
        """The abilities of the template for chats with tools, or without."""
        return self.tool_use.able(tools=True) if tools and self.tool_use is not None else self._able

    def check(self) -> None:
        """Start the sandbox now; BadTemplate if the template does not compile."""
        answer = {"failed": self.broken} if self.broken else self._renderer.check()
        if "failed" in answer:
            raise BadTemplate(f"the chat template {printable(answer['failed'], MESSAGE_CHARS)}")
        if self.tool_use is not None:
            self.tool_use.check()

    def warm(self) -> None:
        """Start the sandbox now. A broken template costs the chats, not the model."""
        try:
            self.check()
        except BadTemplate as e:
            log.warning("%s; chats will be refused", e)

    def close(self) -> None:
        """End the sandboxes. A later chat starts them again."""
        self._renderer.close()
        if self.tool_use is not None:
            self.tool_use.close()

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt's text. RequestError if the template refuses the messages or goes over its limits."""
        own = self._for(tools)
        return own._text(own._fitted(messages), own._fitted_tools(tools), add_generation_prompt, kwargs)

    def _for(self, tools: Sequence[Mapping[str, object]] | None) -> ChatTemplate:
        """The template of chats with these tools."""
        return self.tool_use if tools and self.tool_use is not None else self

    def _fitted(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Messages in this template's form, with content as text."""
        chat = normalise(messages)
        if self.broken:
            raise RequestError(f"the chat template {self.broken}; {ANOTHER}")
        try:
            return fitted(chat, self._able)
        except (TypeError, ValueError, RecursionError) as e:
            raise RequestError(f"a message can not be passed to the chat template: {e}") from e

    def _fitted_tools(self, tools: Sequence[Mapping[str, object]] | None) -> list[dict[str, Any]] | None:
        return fitted_tools(tools, self._able) if tools else None

    def _text(
        self,
        chat: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, object] | None,
    ) -> str:
        """The text of a fitted chat. If a chat without a user message fails, it is tried again with an empty one."""
        if self._able.takes_parts_only:
            chat = in_parts(chat)
        answer = self._renderer.ask(chat, tools, add_generation_prompt, kwargs)
        if "text" not in answer and not any(m["role"] == "user" for m in chat):
            at = next((i for i, m in enumerate(chat) if m["role"] not in HEAD), len(chat))
            asked = [*chat[:at], {"role": "user", "content": ""}, *chat[at:]]
            second = self._renderer.ask(asked, tools, add_generation_prompt, kwargs)
            answer = second if "text" in second else answer
        if "refused" in answer:
            message = printable(answer["refused"], MESSAGE_CHARS)
            raise RequestError(f"the chat template refuses the messages: {message}; {ANOTHER}")
        if "failed" in answer:
            why = printable(answer["failed"], MESSAGE_CHARS)
            raise RequestError(f"the chat template {why}; {ANOTHER}")
        text = with_texts(answer["text"], self._able)
        return encodable(text)  # a template can write half a surrogate pair

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, object] | None = None,
        begun: str = "",
        rows: Mapping[str, list[int]] | None = None,
    ) -> list[int]:
        """Token ids of the rendered prompt. Text of users and tools can not become control tokens. `begun` is the part of the answer
        that exists already; it follows the prompt. `rows` are ids of pictures by their marks, which stand in contents.

        A content that contains a control token's text, or a part of one at an end, is tokenised as plain text: the template renders
        a mark in its place. In tools, calls and the template's own values, marks replace only the control tokens' texts. All other
        prompts are tokenised whole.
        """
        own = self._for(tools)
        clean, shown = own._fitted(messages), own._fitted_tools(tools)
        forged = [i for i, m in enumerate(clean) if _forged(tokenizer, i, m)]
        hidden = Hidden(tokenizer)
        for message in clean:
            if message["role"] in TRUSTED:
                others = {k: v for k, v in message.items() if k not in OWN_FIELDS}
                message.update({key: hidden.hide(value) for key, value in others.items()})
        shown = hidden.hide(shown) if shown else shown
        kwargs = hidden.hide(dict(kwargs)) if kwargs else kwargs
        nonce = secrets.token_hex(8)  # random, so that no content can contain a mark
        marks = {f"{_OPEN}aB{nonce}x{i}{_CLOSE}": i for i in forged}
        contents = {i: str(clean[i]["content"]) for i in forged}
        for mark, i in marks.items():
            clean[i]["content"] = _around(contents[i], mark)
        text = own._text(clean, shown, add_generation_prompt, kwargs) + begun
        if not forged and not hidden.texts:
            return (
                tokenizer.encode_parts(spliced([(text, True)], rows)) if rows else tokenizer.encode(text)
            )
        pieces = re.split("(" + "|".join([*marks, *hidden.texts]) + ")", text)
        if gone := [i for mark, i in marks.items() if mark not in pieces]:
            raise RequestError(
                f"message {gone[0]} contains the text of a control token, and the chat template hides where it goes"
            )
        hidden.check(pieces)
        plain = {mark: contents[i].strip() for mark, i in marks.items()} | hidden.texts
        parts: list[Part] = [(plain[p], False) if p in plain else (p, True) for p in pieces]
        return tokenizer.encode_parts(spliced(parts, rows or {}))


def template_defaults(source: str) -> dict[str, object]:
    """Default arguments of a template, as in llama-server: models that can think do, unless a request or a flag disables it."""
    return {"enable_thinking": True} if "enable_thinking" in source else {}


def _dates(source: str) -> dict[str, object]:
    """Today's date under the names in templates of Llama 3 and Firefunction, as in llama.cpp; empty for other templates."""
    now = datetime.now()
    known = {"date_string": "%d %b %Y", "datetime": "%b %d %Y %H:%M:%S GMT"}
    return {name: now.strftime(form) for name, form in known.items() if name in source}


def _functions(source: str, tools: Sequence[Mapping[str, object]] | None) -> dict[str, object]:
    """Tools as the text that Firefunction's template adds to its own; empty for other templates."""
    if not ADDED_FUNCTIONS.search(source):
        return {}
    return {"functions": json.dumps(list(tools), indent=2) if tools else ""}


def _around(content: str, mark: str) -> str:
    """Put the mark in place of the content, but keep the spaces around it: the template may trim them."""
    text = content.strip()
    at = content.index(text)
    return content[:at] + mark + content[at + len(text) :]


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _json(value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as e:
        raise RequestError(f"a message can not be passed to the chat template: {e}") from e


def _forged(tokenizer: Tokenizer, i: int, message: Message) -> bool:
    """True if the content of an untrusted message contains a control token's text. RequestError if another field does."""
    if tokenizer.has_special(str(message["role"])):
        raise RequestError(f"the role of message {i} contains the text of a control token")
    if message["role"] in TRUSTED:
        return False
    rest = {key: value for key, value in message.items() if key != "content"}
    if tokenizer.has_special(_json(rest)):
        what = "contains the text of a control token; only its content may"
        raise RequestError(f"a field of message {i} {what}")
    content = str(message["content"])
    return tokenizer.has_special(content) or tokenizer.borders_special(content)
