"""Chat templates of GGUF files: rendered in a process of their own, then tokenised with user text kept harmless."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyspec
from pyspec.errors import BadTemplate, RequestError
from pyspec.text.tokenizer import Tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""For files without a template, if the caller wants it."""

TIME_S, START_S = 2.0, 20.0
TEMPLATE_CHARS, ANSWER_BYTES = 1 << 20, 32 << 20
MESSAGES, PARTS = 4096, 64
Message = Mapping[str, object]

_OPEN, _CLOSE = "\ue000", "\ue001"  # private-use marks where content with forged control tokens goes


class _Renderer:
    """One sandbox process with one template in it; replaced when it had to be killed."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, values: Mapping[str, object]) -> dict[str, str]:
        """Render; {"failed": why} also when the process went over its time or died of its memory."""
        line = json.dumps(values).encode() + b"\n"
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                started = self.start()
                if "failed" in started:
                    return started
            return self._exchange(line, TIME_S)

    def start(self) -> dict[str, str]:
        root = str(Path(pyspec.__file__).parents[1])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pyspec.text.sandbox"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path},
        )
        weakref.finalize(self, _kill, self.process)
        return self._exchange(json.dumps(self.source).encode() + b"\n", START_S)

    def _exchange(self, line: bytes, seconds: float) -> dict[str, str]:
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        deadline, out, answer = time.monotonic() + seconds, self.process.stdout.fileno(), bytearray()
        inp = self.process.stdin.fileno()
        os.set_blocking(inp, False)
        while not answer.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or len(answer) > ANSWER_BYTES:
                _kill(self.process)
                return {"failed": f"takes longer than {seconds:g} s"}
            readable, writable, _ = select.select([out], [inp] if line else [], [], left)
            try:
                if writable:
                    line = line[os.write(inp, line) :]
                chunk = os.read(out, 1 << 20) if readable else None
            except BrokenPipeError:
                chunk = b""
            if chunk == b"":
                _kill(self.process)
                return {"failed": "made its sandbox process die (too much memory or too deep a recursion)"}
            answer += chunk or b""
        return json.loads(answer)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    process.wait()


def normalise(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Messages as templates expect them: content as text. RequestError for shapes and sizes we do not take."""
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
    if len(content) > PARTS:
        raise RequestError(f"message {i} has {len(content)} parts; at most {PARTS} are allowed")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise RequestError(f"message {i} has a part of type {kind!r}; only text is supported")
        texts.append(str(part["text"]))
    return "\n".join(texts)  # as llama.cpp joins them


class ChatTemplate:
    """A file's template. Safe to use from several threads; compiling is checked at the first render or `check`."""

    def __init__(
        self, source: str, bos_token: str = "", eos_token: str = "", tool_use: ChatTemplate | None = None
    ) -> None:
        if len(source) > TEMPLATE_CHARS:
            raise BadTemplate(f"the chat template has {len(source)} characters; at most {TEMPLATE_CHARS} are allowed")
        self.source, self.bos_token, self.eos_token, self.tool_use = source, bos_token, eos_token, tool_use
        self._renderer = _Renderer(source)

    @classmethod
    def from_metadata(cls, meta: Mapping[str, object], name: str | None = None) -> ChatTemplate | None:
        """The file's template, or the one called `name`; None if there is none."""
        source = meta.get("tokenizer.chat_template" + (f".{name}" if name else ""))
        if not isinstance(source, str):
            return None
        tokens = meta.get("tokenizer.ggml.tokens")

        def text(which: str) -> str:
            i = meta.get(f"tokenizer.ggml.{which}_token_id")
            return tokens[i] if isinstance(tokens, list) and isinstance(i, int) and 0 <= i < len(tokens) else ""

        tool_use = None if name else cls.from_metadata(meta, "tool_use")
        return cls(source, text("bos"), text("eos"), tool_use)

    def check(self) -> None:
        """Start the sandbox now; BadTemplate if the template does not compile."""
        with self._renderer.lock:
            answer = self._renderer.start()
        if "failed" in answer:
            raise BadTemplate(f"the chat template {answer['failed']}")

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt's text. RequestError if the template refuses the messages or goes over its limits."""
        if tools and self.tool_use is not None:
            return self.tool_use.render(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, kwargs=kwargs
            )
        values: dict[str, object] = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            **(kwargs or {}),
            "messages": normalise(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        if tools:  # a template that iterates tools=None fails
            values["tools"] = list(tools)
        try:
            answer = self._renderer.ask(values)
        except (TypeError, ValueError) as e:  # kwargs that are no JSON
            raise RequestError(f"the template's arguments can not be passed on: {e}") from e
        if "refused" in answer:
            raise RequestError(f"the chat template refuses the messages: {answer['refused']}")
        if "failed" in answer:
            raise RequestError(f"the chat template {answer['failed']}")
        return answer["text"]

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Ids of the rendered prompt, in which the text of users and tools can not become control tokens.

        Only contents that hold the text of a control token are treated apart: the template renders a mark in their place,
        and they are tokenised as plain text. All other prompts take the plain way.
        """
        options = {"tools": tools, "add_generation_prompt": add_generation_prompt, "kwargs": kwargs}
        clean = normalise(messages)
        forged = [
            i for i, m in enumerate(clean) if m["role"] in ("user", "tool") and tokenizer.has_special(str(m["content"]))
        ]
        marked = [{**m, "content": f"{_OPEN}{i}{_CLOSE}"} if i in forged else m for i, m in enumerate(clean)]
        rest = self.render(marked, **options)  # type: ignore[arg-type]
        ids: list[int] = []
        for n, i in enumerate(forged):
            before, mark, rest = rest.partition(f"{_OPEN}{i}{_CLOSE}")
            if not mark:
                raise RequestError(
                    f"message {i} contains the text of a control token, and the chat template hides where it goes"
                )
            ids += tokenizer.encode(before, add_special=n == 0)
            ids += tokenizer.encode(str(clean[i]["content"]), add_special=False, parse_special=False)
        return ids + tokenizer.encode(rest, add_special=not forged)
