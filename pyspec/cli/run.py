"""`pyspec run`: answer one prompt, or chat in the terminal."""

from __future__ import annotations

import json
import os
import sys
from base64 import b64encode
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import click
from click.core import ParameterSource

from pyspec.cli.choice import ModelChoice
from pyspec.cli.flags import LlamaCommand, gathered, option
from pyspec.cli.meter import load_with_meter
from pyspec.cli.options import EngineChoice, begin_log, engine_options, sampling_options
from pyspec.errors import ConfigError, RequestError, Unavailable
from pyspec.request import Delta, Done, Request, SamplingGiven, Timings

if TYPE_CHECKING:
    from pyspec.engine.api import Engine

HELP = "type a message; /clear forgets the conversation, /exit leaves"
IMAGE_HELP = "/image FILE adds an image to the next message"
Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class AnswerOptions:
    """Options that are the same for every message."""

    sampling: SamplingGiven
    n_predict: int
    stop: tuple[str, ...]
    grammar: str | None = None  # as of a request; at most one of the two
    json_schema: str | None = None


def _message(ctx: click.Context, param: click.Parameter, words: tuple[str, ...]) -> str | None:
    """The words after the model, or all words if a flag names the model and no flag has a prompt. Words without quotes are one message."""
    own = ctx.params
    named = [name for name in ("model", "hf_repo") if own.get(name)]
    is_free = named and own.get("name") and all(own.get(n) is None for n in ("prompt", "chat", "file"))
    # of several words the first is no model only if the model was typed, and none had quotes
    is_typed = any(ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in named)
    is_bare = is_typed and len(words) > 1 and not any(" " in word for word in words)
    if is_free and (not words or is_bare):
        words, own["name"] = (own["name"], *words), ""
    return " ".join(words) if words else None


_say = partial(option, "Prompt")


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """The prompt and its form: options of `pyspec run`."""

    # fmt: off
    message: Annotated[str | None, partial(click.argument, nargs=-1, metavar="[MESSAGE]", callback=_message)]
    prompt: Annotated[str | None, _say("-p", "--prompt", default=None, help="Text to continue, without a chat template.")]
    chat: Annotated[str | None, _say("--chat", default=None, metavar="MESSAGE", help="A chat message to answer.")]
    file: Annotated[TextIO | None, _say("-f", "--file", type=click.File(encoding="utf-8"), help="File with the text to continue.")]
    images: Annotated[tuple[Path, ...], _say("--image", multiple=True, metavar="FILE", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Image for the message; may be repeated.")] = ()
    system: Annotated[str, _say("-sys", "--system", default="", help="System message of a chat.")]
    stop: Annotated[tuple[str, ...], _say("--stop", multiple=True, help="Stop at this text; may be repeated.")]
    no_conversation: Annotated[bool, _say("-no-cnv", "--no-conversation", is_flag=True, help="Continue piped text, instead of answering it as a message.")]
    grammar: Annotated[str | None, _say("--grammar", default=None, metavar="GBNF", help="Grammar that the text matches.")] = None
    grammar_file: Annotated[TextIO | None, _say("--grammar-file", type=click.File(encoding="utf-8"), help="File with that grammar.")] = None
    json_schema: Annotated[str | None, _say("-j", "--json-schema", default=None, metavar="SCHEMA", help="JSON Schema that the text follows; {} is any JSON.")] = None
    json_schema_file: Annotated[TextIO | None, _say("-jf", "--json-schema-file", type=click.File(encoding="utf-8"), help="File with that schema.")] = None
    as_json: Annotated[bool, _say("--json", is_flag=True, help="Print text, ids, timings and acceptance as JSON.")]
    # fmt: on

    def constraint(self) -> dict[str, str]:
        """What every answer has to match. Raises UsageError for more than one, and for one from stdin if the prompt comes from there."""
        given = {
            "grammar": (self.grammar, self.grammar_file),
            "json_schema": (self.json_schema, self.json_schema_file),
        }
        found = [(name, what) for name, both in given.items() for what in both if what is not None]
        if len(found) > 1:
            raise click.UsageError(
                "--grammar, --grammar-file, --json-schema and --json-schema-file exclude each other"
            )
        has_prompt = self.prompt is not None or self.chat_message is not None
        for name, what in found:
            if _is_stdin(what) and not has_prompt and (self.file is None or _is_stdin(self.file)):
                flag = f"--{name.replace('_', '-')}-file -"
                raise click.UsageError(
                    f"{flag} reads stdin, so the message comes from elsewhere: after the model, or -f FILE"
                )
        return {name: what if isinstance(what, str) else what.read() for name, what in found}

    def is_talk(self) -> bool:
        """True for a chat: a terminal, and no prompt given. Raises UsageError for too many prompts."""
        given = [what for what in (self.prompt, self.chat_message, self.file) if what is not None]
        if len(given) > 1 or (self.message is not None and self.chat is not None):
            raise click.UsageError(
                "-p, --chat, -f and a message after the model exclude each other",
            )
        is_talk = not given and sys.stdin.isatty()
        if self.images and (is_talk or self.prompt is not None or self.file is not None):
            raise click.UsageError("--image goes with a message; in a chat, /image FILE adds one")
        if is_talk and self.as_json:
            raise click.UsageError(
                "--json wants one message or prompt: after the model, -p, -f or stdin",
            )
        return is_talk

    @property
    def chat_message(self) -> str | None:
        """The message of a chat."""
        return self.message if self.chat is None else self.chat

    def text(self) -> str | None:
        """The text to continue; None for a chat or piped input."""
        if self.prompt is not None or self.chat_message is not None or self.file is None:
            return self.prompt
        return self.file.read()

    def piped(self) -> str | None:
        """Text from stdin if no prompt is given otherwise. Raises UsageError if it is empty."""
        if any(what is not None for what in (self.prompt, self.chat_message, self.file)):
            return None
        text = click.open_file("-", encoding="utf-8").read()
        if not text.strip():
            raise click.UsageError(
                "nothing on stdin; give a message after the model, -p TEXT or -f FILE",
            )
        return text


def _is_stdin(what: object) -> bool:
    return getattr(what, "name", "") in ("-", "<stdin>")


@click.command(cls=LlamaCommand)
@engine_options
@sampling_options
@gathered(RunFlags)
@click.pass_context
def run(
    ctx: click.Context,
    engine: EngineChoice,
    sampling: SamplingGiven,
    n_predict: int,
    flags: RunFlags,
) -> None:
    """Answer one prompt, or chat in the terminal.

    Answers one message (after the model, --chat, or piped in), continues a text (-p, -f), or chats if nothing is given on a terminal.

    Example: pyspec run demo "Count from 3 to 9"
    """

    is_talk, constraint = flags.is_talk(), flags.constraint()
    begin_log()
    if (url := served_at(engine.choice)) and not is_talk:
        ask_server(url, engine.choice.model, sampling, n_predict, flags, constraint)
        return
    text = None if is_talk else flags.text()
    piped = None if is_talk else flags.piped()
    ask = AnswerOptions(sampling, n_predict, flags.stop, **constraint)
    with load_with_meter(engine, max(engine.np, 1)) as loaded:
        if is_talk:
            talk(loaded, ask, flags.system)
            return
        if piped is not None and (flags.no_conversation or not has_chat(loaded)):
            text = piped
        message = flags.chat_message if piped is None else piped.strip()
        content = content_of(message or "", flags.images)
        messages = [*_system(flags.system), {"role": "user", "content": content}]
        request = _request(loaded, ask, messages if text is None else text)
        print_answer(loaded, request, flags.as_json)


def served_at(choice: ModelChoice) -> str:
    """The address of this user's server that has a model of this name, if it is neither a file nor in the catalogue; else ""."""
    from pyspec.catalog import lookup
    from pyspec.cli.ps import routers
    from pyspec.hub.names import bare_name

    try:
        if not choice.model or lookup(choice.model):
            return ""
    except ConfigError:
        bare = bare_name(choice.model)
        named = [
            (url, name)
            for url, rows in routers().items()
            for row in rows
            for name in (row["id"], *row["aliases"])
            if bare_name(name) == bare
        ]
        return min(named, key=lambda one: one[1] != choice.model, default=("", ""))[0]
    return ""


def ask_server(
    url: str,
    model: str,
    sampling: SamplingGiven,
    n_predict: int,
    flags: RunFlags,
    constraint: dict[str, str],
) -> None:
    """Let a running server answer, and print the text as it comes. Raises Unavailable with its error."""
    from pyspec.cli.ps import posted

    if flags.as_json:
        raise click.UsageError(f"--json is for models that run here; {model} is served at {url}")
    text, piped = flags.text(), flags.piped()
    body: dict[str, object] = {name: getattr(sampling.params, name) for name in sampling.names}
    body |= {"model": model, "stream": True, "stop": list(flags.stop), **constraint}
    if n_predict >= 0:
        body["max_tokens"] = n_predict
    message = flags.chat_message if piped is None else piped.strip()
    if text is None:
        content = content_of(message or "", flags.images)
        messages = [*_system(flags.system), {"role": "user", "content": content}]
        path, body = "chat/completions", body | {"messages": messages}
    else:
        path, body = "completions", body | {"prompt": text}
    for line in posted(f"{url}/v1/{path}", body):
        data = line.removeprefix("data: ").strip()
        event: dict[str, Any] = json.loads(data) if data.startswith("{") else {"choices": ()}
        if "error" in event:
            raise Unavailable(event["error"]["message"])
        for choice in event["choices"]:
            said = choice.get("text") or choice.get("delta", {}).get("content")
            click.echo(said or "", nl=False)
            sys.stdout.flush()
    click.echo()


def has_chat(engine: Engine) -> bool:
    """True if the model's file has a chat template."""
    return engine.template is not None


def _system(text: str) -> Messages:
    return [{"role": "system", "content": text}] if text else []


def content_of(text: str, images: Sequence[Path]) -> str | list[dict[str, Any]]:
    """The content of a message: images, then text. Raises RequestError for a file that can not be read."""
    parts = []
    for path in images:
        try:
            url = f"data:image/any;base64,{b64encode(path.read_bytes()).decode()}"
        except OSError as e:
            raise RequestError(f"{path} can not be read: {e.strerror}") from e
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return [*parts, {"type": "text", "text": text}] if parts else text


def _request(engine: Engine, ask: AnswerOptions, prompt: str | Messages) -> Request:
    params = ask.sampling.over(engine.info.sampling)
    return engine.request(
        prompt,
        max_tokens=ask.n_predict,
        stop=ask.stop,
        params=params,
        grammar=ask.grammar,
        json_schema=ask.json_schema,
    )


def print_answer(engine: Engine, request: Request, as_json: bool) -> str:
    """Run one request and print it: as it arrives, or as one JSON object at the end. Returns the text."""
    text, tokens, done = list[str](), list[int](), None
    with closing(_events(engine, request)) as events:
        for event in events:
            if isinstance(event, Done):
                done = event
                continue
            text.append(event.text)
            tokens += event.tokens
            if not as_json and event.text:
                click.echo(event.text, nl=False)
                sys.stdout.flush()
    assert done is not None, "a request ended without its last event"
    if as_json:
        click.echo(json.dumps(as_object("".join(text), tokens, done), ensure_ascii=False))
    else:
        click.echo()
        click.echo(summary(done), err=True)
    return "".join(text)


def _events(engine: Engine, request: Request) -> Generator[Delta | Done, None, None]:
    yield from engine.run_stream(request)


def acceptance(t: Timings) -> list[float]:
    """Acceptance rate at position 1, 2, ... among the drafts verified there."""
    pairs = zip_longest(t.accepted_per_pos, t.drafted_per_pos, fillvalue=0)  # one may be shorter
    return [round(a / d, 4) for a, d in pairs if d]


def as_object(text: str, tokens: list[int], done: Done) -> dict[str, object]:
    """The `--json` output."""
    t = done.timings
    return {
        "text": text,
        "tokens": tokens,
        "finish": done.finish,
        "stop": done.stop_string,
        "n_prompt": done.n_prompt,
        "n_predicted": done.n_predicted,
        "timings": {
            "cache_n": t.cache_n,
            "cache_disk_n": t.disk_n,
            "prompt_n": t.prompt_n,
            "prompt_ms": round(t.prompt_ms, 3),
            "prompt_per_second": round(t.prompt_per_second, 2),
            "predicted_n": t.predicted_n,
            "predicted_ms": round(t.predicted_ms, 3),
            "predicted_per_second": round(t.predicted_per_second, 2),
            "draft_n": t.draft_n,
            "draft_n_accepted": t.draft_n_accepted,
            "rounds": t.n_rounds,
            "mean_len": round(t.mean_len, 4),
            "n_draft_used": list(t.n_draft_used),
            "synthetic": t.synthetic,
        },
        "acceptance_per_position": acceptance(t),
    }


def summary(done: Done) -> str:
    """One line about a finished request."""
    t = done.timings
    parts = [f"{done.n_predicted} tokens", f"{t.predicted_per_second:.1f} tokens/s", done.finish]
    if t.draft_n:
        made_up = " (made up)" if t.synthetic else ""
        drafted = f"{t.draft_n_accepted}/{t.draft_n} drafted accepted"
        parts.insert(2, f"{drafted}, {t.mean_len:.2f} tokens a round{made_up}")
    return f"[{', '.join(parts)}]"


def talk(engine: Engine, ask: AnswerOptions, system: str) -> None:
    """Chat until /exit or the end of input. Ctrl-C ends an answer; at the prompt it ends the chat."""
    about = f"{HELP}; {IMAGE_HELP}" if engine.info.sees else HELP
    click.echo(f"{engine.info.model_name}: {about}", err=True)
    messages, images = _system(system), list[Path]()
    while True:
        try:
            message = click.prompt("", prompt_suffix="> ", default="", show_default=False).strip()
        except click.Abort:  # end of input, or Ctrl-C at the prompt
            click.echo()
            return
        if message == "/exit":
            return
        if message == "/clear":
            messages, images = _system(system), []
        elif message.startswith("/image "):
            images += _image(message.removeprefix("/image ").strip())
        elif message.startswith("/"):
            click.echo(about, err=True)
        elif message:
            asked = {"role": "user", "content": content_of(message, images)}
            messages, images = _exchange(engine, ask, [*messages, asked]), []


def _image(name: str) -> list[Path]:
    """The file of an image in a chat; nothing, and a line, if there is none."""
    path = Path(name).expanduser()
    if not path.is_file() or not os.access(path, os.R_OK):
        click.echo(f"Error: there is no file {name} that can be read", err=True)
        return []
    click.echo(f"{path.name} goes with the next message", err=True)
    return [path]


def _exchange(
    engine: Engine,
    ask: AnswerOptions,
    messages: Messages,
) -> Messages:
    """One exchange; returns the conversation after it. A refused message or an interrupted answer is not kept."""
    try:
        message = print_answer(engine, _request(engine, ask, messages), as_json=False)
    except RequestError as e:
        click.echo(f"Error: {e}", err=True)
        return messages[:-1]
    except KeyboardInterrupt:
        click.echo(" [stopped]")
        return messages[:-1]
    return [*messages, {"role": "assistant", "content": message}]
