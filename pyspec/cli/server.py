"""`pyspec server`: load a model and serve it."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from pyspec.cli.chat_options import CHAT_OPTIONS, chat_settings
from pyspec.cli.fields import options_of
from pyspec.cli.flags import LlamaCommand, gathered, grouped, option
from pyspec.cli.options import (
    SERVING_OPTIONS,
    EngineChoice,
    F,
    apply,
    engine_options,
    folding,
    log_ignored,
    sampling_options,
)
from pyspec.config import SERVING
from pyspec.errors import ConfigError
from pyspec.heap import give_back_memory, unmap_idle_pages
from pyspec.ranges import rules_of
from pyspec.request import EngineInfo
from pyspec.server.settings import DAY_S, LISTENING, Limits, ServerSettings, keys_of
from pyspec.version import __version__

if TYPE_CHECKING:
    from pyspec.engine.api import Engine
    from pyspec.server.engine import EngineLike
    from pyspec.server.http.serve import Served

log = logging.getLogger(__name__)

AUTO_SLOTS = 4
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
        raise click.BadParameter(
            f"{error.pattern!r} is not a regular expression: {error}",
            ctx,
            option,
        ) from None


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
    *SERVING_OPTIONS,
]  # fmt: skip
RULES = [rule for rule in rules_of(ServerSettings) if rule.flag.words]


def server_options(function: F) -> F:
    """Add the server's own options; the command receives `settings: ServerSettings`."""

    def fold(values: dict[str, Any]) -> None:
        values["settings"] = _settings(values)

    return apply([*CHAT_OPTIONS, *SERVER_OPTIONS])(folding(function, fold))


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


def _with_template(engine: Engine, source: str) -> Engine:
    """The engine with this chat template. "": the file's."""
    if source:
        engine.use_template(source)
    return engine


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
    chat_template: str,
    flags: LogFlags,
) -> None:
    """Serve a model over HTTP: the OpenAI API and llama-server's.

    llama-server's other flags are accepted if they do not change answers (`pyspec config flags`). Example: pyspec server demo -np 8
    """
    from pyspec.cli.logs import set_up
    from pyspec.cli.running import enter, leave
    from pyspec.engine.process.ahead import end_ahead, start_ahead
    from pyspec.server.http.listen import listen, url_of
    from pyspec.text.markup.dialect import dialect_reason

    verbosity = 0 if flags.log_disable else 5 if ctx.meta.get("pyspec.verbose") else flags.verbosity
    set_up(verbosity, flags.form, flags.log_file)
    log_ignored()
    settings = replace(settings, verbose=verbosity >= 5)
    n_slot = engine.np if engine.np > 0 else AUTO_SLOTS
    engine.check(n_slot)
    if flags.in_process and engine.settings["replicas"] != 1:
        raise ConfigError("--replicas wants engines in processes of their own: leave out --in-process")
    settings.check()
    engine.choice.check()
    _check_template(chat_template)
    engine.choice.locate()  # before anything listens or loads
    if flags.in_process:
        end_ahead()
    else:
        start_ahead()

    entered: list[Path | None] = []

    def ready(loaded: EngineLike, urls: list[str]) -> None:
        name = settings.aliases[0] if settings.aliases else loaded.info.model_name
        entered.append(enter(urls[0], name))
        n_slot = loaded.info.n_slot
        fields = {"event": "ready", "url": urls[0], "urls": urls, "model": name, "slots": n_slot}
        log.info("serving %s at %s", name, urls[0], extra={"fields": fields})
        if loaded.info.chat_template:
            log.info("%s", dialect_reason(loaded.info.chat_template, settings.tool_call_parser))
        for line in banner(loaded.info, urls) if flags.form == "text" and verbosity else ():
            click.echo(line, err=True)
        give_back_memory()  # of the vocabulary's reading
        unmap_idle_pages()

    def load() -> EngineLike:
        return _with_template(engine.load(n_slot, isolated=not flags.in_process), chat_template)

    try:
        sockets = listen(settings)  # report a used port before the slow imports
        from pyspec.server.http.serve import run

        named = (*settings.aliases, engine.choice.named)[0]
        entered.extend(enter(url_of(sock, settings), named) for sock in sockets[:1])
        served = run(load, settings, ready, sockets)
    finally:
        end_ahead()
        for path in entered:
            leave(path)
    _end(served)


def _end(served: Served) -> None:
    """Close the engine. A process whose GPU hangs, or that is stopped while it loads, does not end by itself."""
    loaded = served.engine
    if loaded is None or not loaded.close(0.0 if served.is_hurried else CLOSE_S):  # type: ignore[attr-defined]  # `load` returns an Engine
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
