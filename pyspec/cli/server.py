"""`pyspec server`: load a model and serve it."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from pyspec.cli.choice import ModelChoice
from pyspec.cli.fields import options_of
from pyspec.cli.flags import LlamaCommand, folding, gathered, grouped, option
from pyspec.cli.options import (
    SERVING_OPTIONS,
    EngineChoice,
    amount,
    engine_options,
    log_ignored,
    sampling_options,
)
from pyspec.config import SERVING
from pyspec.errors import ConfigError
from pyspec.heap import give_back_memory, unmap_idle_pages
from pyspec.ranges import rules_of
from pyspec.request import EngineInfo
from pyspec.server.settings import (
    CHATS,
    DAY_S,
    LISTENING,
    Limits,
    RouterSettings,
    ServerSettings,
    keys_of,
)
from pyspec.version import __version__

if TYPE_CHECKING:
    from pyspec.server.engine import EngineLike
    from pyspec.server.http.serve import Served
    from pyspec.server.models.router import Router

# -- chats -----------------------------------------------------------------------------------------------------------
# Options of `pyspec server` for chats: templates, tool calls and reasoning, under llama-server's names.

ON, OFF = dict.fromkeys(("on", "true", "1"), "on"), dict.fromkeys(("off", "false", "0"), "off")
WORDS = ON | OFF | {"auto": "auto"}


class ReasoningWord(click.ParamType):
    """on, off or auto, also in llama-server's other spellings."""

    name = "on|off|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if str(value).lower() not in WORDS:
            self.fail(f"want on, off or auto, got {value!r}", param, ctx)
        return WORDS[str(value).lower()]


def template_text(ctx: click.Context, option: click.Parameter, value: str) -> str:
    """A template given by name or as text."""
    from pyspec.text.named_templates import NAMED

    if value in NAMED:
        return NAMED[value]
    if value and "{{" not in value and "{%" not in value:
        raise click.BadParameter(
            f"{value[:40]!r} is neither a template's text nor one of {', '.join(NAMED)}; "
            "--chat-template-file takes a file"
        )
    return value


def template_values(ctx: click.Context, option: click.Parameter, value: str) -> dict[str, Any]:
    """The template's own values."""
    try:
        values = json.loads(value or "{}")
    except ValueError as error:
        raise click.BadParameter(f"not JSON: {error}") from None
    if not isinstance(values, dict):
        raise click.BadParameter('want a JSON object such as {"enable_thinking": false}')
    return values


_chats = grouped(CHATS)
CHAT_OPTIONS = [
    _chats(
        "--chat-template", llama="CHAT_TEMPLATE", default="", metavar="NAME|TEXT", callback=template_text,
        help="Chat template instead of the model's: a name (chatml, llama3 ...) or its text.",
    ),
    _chats(
        "--chat-template-file", llama="CHAT_TEMPLATE_FILE", default=None, metavar="FILE",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File with a chat template, instead of the model's.",
    ),
    _chats("--chat-template-kwargs", llama="CHAT_TEMPLATE_KWARGS", default="", metavar="JSON", callback=template_values,
           help="Default values for the chat template."),
    *options_of(ServerSettings, {"reasoning": {"type": ReasoningWord()}}, CHATS),
    _chats("--reasoning-effort", llama="REASONING_EFFORT", default="default", metavar="LEVEL",
           help="Effort passed to the template: low, high ..."),
    _chats("--skip-chat-parsing/--no-skip-chat-parsing", llama="SKIP_CHAT_PARSING", default=False,
           help="Leave calls and thoughts in the text."),
]  # fmt: skip


def chat_settings(values: dict[str, Any]) -> None:
    """Fold options of chats into `chat_template`, the text of a template that replaces the file's, and fields of ServerSettings."""
    text, path = values["chat_template"], values.pop("chat_template_file")
    if text and path:
        raise click.UsageError("--chat-template and --chat-template-file: give one of them")
    if path is not None:
        try:
            values["chat_template"] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise click.BadParameter(
                f"{path} can not be read: {error}",
                param_hint="--chat-template-file",
            ) from None
    effort = values.pop("reasoning_effort")
    if effort != "default":
        own = values["chat_template_kwargs"]
        values["chat_template_kwargs"] = {"reasoning_effort": effort} | own
    if values.pop("skip_chat_parsing"):
        values["tool_call_parser"] = values["reasoning_format"] = "none"


log = logging.getLogger(__name__)

AUTO_SLOTS = 4
SEVERAL = "several models"  # in `pyspec ps`
CLOSE_S = 10.0  # for the running round


def patterns(
    ctx: click.Context,
    option: click.Parameter,
    texts: tuple[str, ...],
) -> tuple[re.Pattern[str], ...]:
    """Regular expressions; a usage error for an invalid one."""
    try:
        return tuple(re.compile(text) for text in texts)
    except re.error as error:
        raise click.BadParameter(f"{error.pattern!r} is not a regular expression: {error}") from None


_log = partial(option, "Logs")


@dataclass(frozen=True, kw_only=True)
class LogFlags:
    """What is logged and how, and whether the engine runs in this process."""

    # fmt: off
    in_process: Annotated[bool, option(SERVING, "--in-process", is_flag=True, help="Run the engine in this process; a failed engine is then not replaced.")]
    log_format: Annotated[str, _log("--log-format", type=click.Choice(["text", "json"]), default="text", help="Format of log lines.")]
    log_jsonl: Annotated[bool, _log("--log-jsonl/--no-log-jsonl", llama="LOG_JSONL", default=False, help="The same as --log-format json.")]
    log_file: Annotated[str, _log("--log-file", llama="LOG_FILE", default="", metavar="FILE", help="Also log to this file.")]
    log_disable: Annotated[bool, _log("--log-disable", llama="", is_flag=True, help="Log nothing.")]
    verbosity: Annotated[int, _log("-lv", "--verbosity", "--log-verbosity", llama="LOG_VERBOSITY", type=click.IntRange(0, 5), default=3, help="Log level: 0 silent, 2 warnings, 3 also a line per request, 5 everything.")]
    # fmt: on

    @property
    def form(self) -> str:
        """The format of log lines: "text" or "json"."""
        return "json" if self.log_jsonl else self.log_format


_CHANGES: dict[str, dict[str, Any]] = {
    "api_keys": {"envvar": "LLAMA_API_KEY"},
    "text_threads": {"default": -1},
    "host_memory": {"callback": amount, "type": click.STRING, "default": None},
}
"""What an option does beyond its field."""
SERVER_OPTIONS = [
    *options_of(ServerSettings, _CHANGES, LISTENING),
    grouped(LISTENING)(
        "--api-key-file", llama="API_KEY_FILE", default="", metavar="FILE",
        help="File of API keys, one per line; lines that begin with # are comments.",
    ),
    *options_of(ServerSettings, _CHANGES, SERVING),
    grouped(SERVING)(
        "--volatile-lines", multiple=True, metavar="REGEX", callback=patterns,
        help="Move matching lines of system prompts behind the conversation, to keep the prefix cached.",
    ),
    *options_of(Limits, {}),
    *options_of(RouterSettings, _CHANGES),
    *SERVING_OPTIONS,
]  # fmt: skip
RULES = [rule for rule in rules_of(ServerSettings) if rule.flag.words]


def _models(values: dict[str, Any]) -> RouterSettings:
    return RouterSettings(**{rule.name: values.pop(rule.name) for rule in rules_of(RouterSettings)})


def _settings(values: dict[str, Any]) -> ServerSettings:
    """The server's settings. Raises ConfigError, UsageError."""
    chat_settings(values)
    own = {rule.name: values.pop(rule.name) for rule in RULES}
    limits = {rule.name: values.pop(rule.name) for rule in rules_of(Limits) if rule.flag.words}
    file, sampling = values.pop("api_key_file"), values.pop("sampling")
    own["hosts"] = own["hosts"] or ("127.0.0.1",)
    own["api_keys"] = (*own["api_keys"], *(keys_of(file) if file else ()))
    own["text_threads"] = own["text_threads"] if own["text_threads"] > 0 else 2
    limits["ping_s"] = limits["ping_s"] if limits["ping_s"] > 0 else DAY_S
    return ServerSettings(
        **own,
        chat_template_kwargs=values.pop("chat_template_kwargs"),
        volatile_lines=values.pop("volatile_lines"),
        sampling=sampling.params,
        sampling_given=sampling.names,
        max_tokens=values.pop("n_predict"),
        limits=Limits(**limits),
    )


server_options = folding([*CHAT_OPTIONS, *SERVER_OPTIONS], models=_models, settings=_settings)
"""Add the server's own options; the command receives `settings: ServerSettings` and `models: RouterSettings`."""


def _check_template(source: str) -> None:
    """Raise BadTemplate before a load. "": the file's, which the load reads."""
    if not source:
        return
    from pyspec.text.template import ChatTemplate

    template = ChatTemplate(source, "", "")
    try:
        template.check()
    finally:
        template.close()


@click.command(cls=LlamaCommand)
@engine_options
@sampling_options
@server_options
@click.version_option(__version__, "--version", message="pyspec %(version)s")
@gathered(LogFlags)
@click.pass_context
def server(
    ctx: click.Context,
    engine: EngineChoice,
    settings: ServerSettings,
    models: RouterSettings,
    chat_template: str,
    flags: LogFlags,
) -> object:
    """Serve a model over HTTP: the OpenAI API and llama-server's. Without a model: all of a folder, a preset or the cache.

    llama-server's other flags are accepted if they do not change answers (`pyspec config flags`). Example: pyspec server demo -np 8
    """
    from pyspec.cli.logs import set_up
    from pyspec.cli.router import RowOptions, alone, router_of
    from pyspec.engine.process.ahead import end_ahead, start_ahead

    row = RowOptions(engine, settings, models, chat_template)
    if ctx.obj is RowOptions:  # the options of one of several models
        return row
    verbosity = 0 if flags.log_disable else 5 if ctx.meta.get("pyspec.verbose") else flags.verbosity
    set_up(verbosity, flags.form, flags.log_file)
    log_ignored()
    settings = replace(settings, verbose=verbosity >= 5)
    n_slot = engine.np if engine.np > 0 else AUTO_SLOTS
    engine.check(n_slot)
    if flags.in_process and engine.settings["replicas"] != 1:
        raise ConfigError("--replicas wants engines in processes of their own: leave out --in-process")
    settings.check()
    _check_models(engine.choice, settings, models, flags)
    is_router = not engine.choice.named
    if not is_router:
        engine.choice.check()
    _check_template(chat_template)
    if not is_router:
        engine.choice.locate()  # before anything listens or loads
    if flags.in_process:
        end_ahead()
    else:
        start_ahead()

    def load() -> EngineLike | Router:
        if is_router:
            words = ctx.meta["pyspec.words"]
            return router_of(ctx.command, words, settings, models, engine, AUTO_SLOTS)
        loaded = engine.load(n_slot, isolated=not flags.in_process)
        if chat_template:
            loaded.use_template(chat_template)
        if models.sleep_idle < 0:
            return loaded
        name = (*settings.aliases, loaded.info.model_name)[0]
        return alone(name, row, settings, loaded)

    named = SEVERAL if is_router else (*settings.aliases, engine.choice.named)[0]
    try:
        served = _serve(load, settings, named, is_text=flags.form == "text" and verbosity > 0)
    finally:
        end_ahead()
    _end(served)
    return None


def _serve(
    load: Callable[[], EngineLike | Router], settings: ServerSettings, named: str, *, is_text: bool
) -> Served:
    """Listen, load and serve; `pyspec ps` finds the server meanwhile. named: its model while it loads"""
    from pyspec.cli.running import enter, leave
    from pyspec.server.http.listen import listen, url_of
    from pyspec.server.models.router import Router

    entered: list[Path | None] = []

    def ready(loaded: EngineLike | Router, urls: list[str]) -> None:
        fields: dict[str, object] = {"event": "ready", "url": urls[0], "urls": urls}
        if isinstance(loaded, Router) and not loaded.alone:
            from pyspec.cli.router import describe

            said, lines, name = f"{len(loaded.names)} models", describe(loaded, urls), SEVERAL
            fields |= {"models": loaded.names}
        else:
            engine = loaded.engine if isinstance(loaded, Router) else loaded
            said = name = settings.aliases[0] if settings.aliases else engine.info.model_name
            lines = banner(engine.info, urls)
            fields |= {"model": name, "slots": engine.info.n_slot}
        entered.append(enter(urls[0], name))
        log.info("serving %s at %s", said, urls[0], extra={"fields": fields})
        if name != SEVERAL and engine.info.chat_template:
            log.info("%s", dialect_reason(engine.info.chat_template, settings.tool_call_parser))
        for line in lines if is_text else ():
            click.echo(line, err=True)
        give_back_memory()  # of the vocabulary's reading
        unmap_idle_pages()

    try:
        sockets = listen(settings)  # report a used port before the slow imports
        from pyspec.server.http.serve import run
        from pyspec.text.markup.dialect import dialect_reason

        entered.extend(enter(url_of(sock, settings), named) for sock in sockets[:1])
        return run(load, settings, ready, sockets)
    finally:
        for path in entered:
            leave(path)


def _check_models(
    choice: ModelChoice, settings: ServerSettings, models: RouterSettings, flags: LogFlags
) -> None:
    """Raise ConfigError for options of several models beside one, or the other way round."""
    if choice.named:
        if sources := [
            f
            for f, v in (("--models-dir", models.models_dir), ("--models-preset", models.models_preset))
            if v
        ]:
            raise ConfigError(
                f"{sources[0]} serves several models, and {choice.named} is one: leave out one of them"
            )
        if models.sleep_idle >= 0 and flags.in_process:
            raise ConfigError(
                "--sleep-idle-seconds wants an engine in a process of its own: leave out --in-process"
            )
        return
    choice.check_unnamed()
    if settings.aliases:
        raise ConfigError(
            "--alias names one model: give the model, or `alias` in its section of --models-preset"
        )
    if flags.in_process:
        raise ConfigError("--in-process serves one model: name it")


def _end(served: Served) -> None:
    """Close the engine. A process whose GPU hangs, or that is stopped while it loads, does not end by itself."""
    loaded = served.engine
    if loaded is None or not loaded.close(0.0 if served.is_hurried else CLOSE_S):  # type: ignore[union-attr]  # `load` returns an Engine or a Router
        logging.shutdown()
        os._exit(0 if loaded is None else 1)


def banner(info: EngineInfo, urls: list[str]) -> list[str]:
    """A few lines about the model and the server, printed when requests are accepted."""
    lines = [
        f"model    {info.model_name} ({info.arch}, {info.n_params / 1e9:.3g} B parameters, "
        f"{info.n_bytes / 1e9:.3g} GB)",
        f"device   {info.device}",
        f"draft    {info.draft_note}",
        f"slots    {info.n_slot}, {info.room} tokens each"
        + (", all of them together (--kv-pool)" if info.room < info.n_ctx else ""),
        f"url      {urls[0]}  (OpenAI API at {urls[0]}/v1)",
        *(f"         {url}" for url in urls[1:]),
    ]
    if info.synthetic_len:
        lines.insert(
            3,
            f"WARNING  acceptance is simulated ({info.synthetic_len:g} tokens a round): the text is not the model's",
        )
    return lines
