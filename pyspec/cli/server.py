"""`pyspec server`: load a model and serve it."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pyspec import __version__
from pyspec.cli.chat_options import ChatOptions, chat_options
from pyspec.cli.flags import LlamaCommand, commas, gathered, grouped
from pyspec.cli.options import EngineChoice, Number, apply, engine_options, log_ignored, sampling_options
from pyspec.config import EVENT_FORMATS, MAX_REPLICAS
from pyspec.errors import ConfigError
from pyspec.heap import give_back_memory, unmap_idle_pages
from pyspec.request import EngineInfo, SamplingGiven

if TYPE_CHECKING:
    from pyspec.engine.api import Engine
    from pyspec.server.engine import EngineLike
    from pyspec.server.http.serve import Served
    from pyspec.server.settings import ServerSettings

log = logging.getLogger(__name__)

AUTO_SLOTS = 4
CLOSE_S = 10.0  # for the running round
DAY_S = 86400.0


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


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """The server's own options, under click's option names."""

    host: tuple[str, ...]
    port: int
    reuse_port: bool
    api_prefix: str
    api_key: tuple[str, ...]
    api_key_file: str
    cache_share: bool
    insecure: bool
    ssl_key_file: str
    ssl_cert_file: str
    alias: tuple[str, ...]
    tags: tuple[str, ...]
    metrics: bool
    slots: bool
    props: bool
    ui: bool
    slot_save_path: str
    cors_origin: tuple[str, ...]
    volatile_lines: tuple[re.Pattern[str], ...]
    queue: int
    threads_http: int
    timeout: float
    sse_ping_interval: float
    replicas: int
    in_process: bool
    hang_timeout: float
    kv_events: str
    kv_events_replay: str
    kv_events_topic: str
    kv_events_format: str
    kv_events_buffer: int
    drain_timeout: float
    log_format: str
    log_jsonl: bool
    log_disable: bool
    log_file: str
    verbosity: int

    def settings(
        self,
        sampling: SamplingGiven,
        n_predict: int,
        chat: dict[str, Any],
    ) -> ServerSettings:
        """The server's settings. Raises ConfigError."""
        from pyspec.server.settings import Limits, ServerSettings, keys_of

        ping = self.sse_ping_interval
        return ServerSettings(
            hosts=self.host or ("127.0.0.1",),
            port=self.port,
            reuse_port=self.reuse_port,
            api_prefix=self.api_prefix,
            api_keys=(*self.api_key, *(keys_of(self.api_key_file) if self.api_key_file else ())),
            cache_share=self.cache_share,
            insecure=self.insecure,
            ssl_key_file=self.ssl_key_file,
            ssl_cert_file=self.ssl_cert_file,
            aliases=self.alias,
            tags=self.tags,
            metrics=self.metrics,
            slots=self.slots,
            props=self.props,
            page=self.ui,
            slot_save_path=self.slot_save_path,
            cors_origins=self.cors_origin,
            volatile_lines=self.volatile_lines,
            text_threads=self.threads_http if self.threads_http > 0 else 2,
            **chat,
            sampling=sampling.params,
            sampling_given=sampling.names,
            max_tokens=n_predict,
            limits=Limits(
                drain_s=self.drain_timeout,
                total_s=self.timeout,
                ping_s=ping if ping > 0 else DAY_S,
            ),
        )

    @property
    def form(self) -> str:
        """The format of log lines: "text" or "json"."""
        return "json" if self.log_jsonl else self.log_format


OF_ENGINE = ("queue", "hang_timeout", "replicas", "kv_events", "kv_events_replay", "kv_events_topic", "kv_events_format",
             "kv_events_buffer")  # fmt: skip
"""The server's options that are settings of the engine."""
_listen = grouped("Listening")
_serve = grouped("Serving")
_logs = grouped("Logs")

SERVER_OPTIONS = [
    _listen(
        "--host", multiple=True, callback=commas, metavar="ADDRESS",
        help="Address to listen on, or a path ending in .sock; may be repeated. [127.0.0.1]",
    ),
    _listen("--port", default=8080, type=click.IntRange(0, 65535),
            help="Port; 0 picks a free one."),
    _listen("--reuse-port", is_flag=True, help="Let other servers listen on the same port."),
    _listen("--api-prefix", default="", metavar="/PREFIX", help="Prefix of all paths."),
    _listen(
        "--api-key", multiple=True, envvar="LLAMA_API_KEY", callback=commas, metavar="KEY,...",
        help="API keys; clients must send one of them. May be repeated.",
    ),
    _listen("--api-key-file", default="", metavar="FILE",
            help="File of API keys, one per line; lines that begin with # are comments."),
    _listen("--cache-share", is_flag=True,
            help="Let clients with different API keys share cached texts: one can find out another's."),
    _listen("--insecure", is_flag=True, help="Allow listening beyond this machine without a key."),
    _listen("--ssl-key-file", default="", metavar="FILE", help="TLS: the private key, PEM."),
    _listen("--ssl-cert-file", default="", metavar="FILE", help="TLS: the certificate, PEM."),
    _listen(
        "--cors-origin", "--cors-origins", "cors_origin", multiple=True, callback=commas, metavar="ORIGIN,...",
        help="Origins allowed to call from a browser, besides this machine.",
    ),
    _serve("-a", "--alias", multiple=True, callback=commas, metavar="NAME,...",
           help="The model's names in answers."),
    _serve("--tags", multiple=True, callback=commas, metavar="TAG,...",
           help="Labels of the model in /v1/models."),
    _serve("--metrics/--no-metrics", default=True, help="Serve /metrics."),
    _serve("--slots/--no-slots", default=True, help="Serve /slots."),
    _serve("--props/--no-props", default=True, help="Serve /props."),
    _serve("--ui/--no-ui", "--webui/--no-webui", "ui", default=True,
           help="Serve the web page at /."),
    _serve(
        "--slot-save-path", default="", metavar="DIR", help="Directory of saved slots (POST /slots/ID)."
    ),
    _serve(
        "--volatile-lines", multiple=True, metavar="REGEX", callback=patterns,
        help="Move matching lines of system prompts behind the conversation, to keep the prefix cached.",
    ),
    _serve("--queue", default=0, help="Maximum waiting requests. 0: 4 per slot, at least 16."),
    _serve(
        "--threads-http", default=-1, type=click.IntRange(-1, 256), help="Threads for text. -1: 2."
    ),
    _serve("-to", "--timeout", default=3600.0, type=Number(1, 30 * DAY_S),
           help="Maximum seconds per request."),
    _serve(
        "--sse-ping-interval", default=30.0, type=Number(-1, DAY_S),
        help="Seconds of silence before a stream sends a comment. -1: never.",
    ),
    _serve("--replicas", default=1, type=click.IntRange(1, MAX_REPLICAS),
           help="Engines behind this port, each with its own GPU (--tp GPUs) and -np slots."),
    _serve("--in-process", is_flag=True,
           help="Run the engine in this process; a failed engine is then not replaced."),
    _serve("--hang-timeout", default=0.0,
           help="Replace the engine after a round of this many seconds. 0: chosen by its pace."),
    _serve("--kv-events", default="", metavar="ENDPOINT",
           help="Publish changes of the prefix cache for routers over ZeroMQ, as tcp://*:5557."),
    _serve("--kv-events-replay", default="", metavar="ENDPOINT",
           help="Replay published batches from here, as tcp://*:5558."),
    _serve("--kv-events-topic", default="", metavar="TEXT",
           help="Topic of KV events; llm-d wants kv@ADDRESS:PORT@MODEL."),
    _serve("--kv-events-format", type=click.Choice(EVENT_FORMATS), default="map",
           help="Events as maps, or as arrays for readers made for vLLM before 0.24."),
    _serve("--kv-events-buffer", default=10_000, help="Batches kept for replays."),
    _serve(
        "--drain-timeout", default=30.0, type=Number(0, DAY_S),
        help="Seconds that running requests get at shutdown.",
    ),
    _logs("--log-format", type=click.Choice(["text", "json"]), default="text",
          help="Format of log lines."),
    _logs("--log-jsonl/--no-log-jsonl", default=False, help="The same as --log-format json."),
    _logs("--log-file", default="", metavar="FILE", help="Also log to this file."),
    _logs("--log-disable", is_flag=True, help="Log nothing."),
    _logs(
        "-lv", "--verbosity", "--log-verbosity", "verbosity", type=click.IntRange(0, 5), default=3,
        help="Log level: 0 silent, 2 warnings, 3 also a line per request, 5 everything.",
    ),
]  # fmt: skip


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
@chat_options
@apply(SERVER_OPTIONS)
@click.version_option(__version__, "--version", message="pyspec %(version)s")
@gathered(ServerFlags, "flags")
@click.pass_context
def server(
    ctx: click.Context,
    engine: EngineChoice,
    sampling: SamplingGiven,
    chat: ChatOptions,
    n_predict: int,
    flags: ServerFlags,
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
    settings = replace(flags.settings(sampling, n_predict, chat.settings), verbose=verbosity >= 5)
    own = {name: getattr(flags, name) for name in OF_ENGINE}
    engine = replace(engine, settings={**engine.settings, **own})
    n_slot = engine.np if engine.np > 0 else AUTO_SLOTS
    if flags.in_process and flags.replicas > 1:
        raise ConfigError("--replicas wants engines in processes of their own: leave out --in-process")
    engine.check(n_slot)
    settings.check()
    engine.choice.check()
    _check_template(chat.template)
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
        return _with_template(engine.load(n_slot, isolated=not flags.in_process), chat.template)

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
